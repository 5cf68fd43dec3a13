"""Many clients at once on the demo checkpoint: nothing is lost, and no bit depends on the company."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from http.client import HTTPConnection

import pytest

from jev.model.backends import open_backbone
from jev.server import Server
from tests.fakes import FakeBackbone, body, choice, demo_export, post, request, serving

CLIENTS, REQUESTS = 64, 50


def content(answer: dict) -> str:
    """All of a response but the time it took and what was known of its prompts, as JSON: floats with every bit."""
    metadata = answer["metadata"]
    return json.dumps({**answer, "metadata": {**metadata, "inference_seconds": 0,
                                              "prefix_cache": {**metadata["prefix_cache"], "cached": 0}}})


def ask_alone(server: Server, requests: list[bytes]) -> list[str]:
    connection = connect(server)
    answers = []
    for data in requests:
        status, answer, _ = post(connection, data)
        assert status == 200, answer
        answers.append(content(answer))
    connection.close()
    return answers


def connect(server: Server) -> HTTPConnection:
    host, port = server.url.removeprefix("http://").split(":")
    return HTTPConnection(host, int(port), timeout=250)


def crowd(server: Server, requests: list[bytes], alone: list[str], rare: int = 0) -> None:
    """CLIENTS clients at once send REQUESTS of ``requests`` each; every answer must be the one it got alone.

    Of the last ``rare`` requests one is sent once in a hundred times: the expensive ones.
    """
    wrong: list[tuple] = []
    answered = [0] * CLIENTS

    def client(number: int) -> None:
        rng = random.Random(number)
        connection = connect(server)
        for _ in range(REQUESTS):
            usual = len(requests) - rare
            which = usual + rng.randrange(rare) if rare and rng.random() < 0.01 else rng.randrange(usual)
            status, answer, _ = post(connection, requests[which])
            if status != 200 or content(answer) != alone[which]:
                wrong.append((number, which, status))
            answered[number] += 1
        connection.close()
    together(client, CLIENTS)
    assert answered == [REQUESTS] * CLIENTS and not wrong
    assert server.engine.pending == 0


def together(run: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=run, args=[number]) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    return demo_export(tmp_path_factory.mktemp("export"))


def test_64_clients_of_50_requests_each_lose_nothing(export):
    """With a backbone that costs nothing: 60 requests of all kinds and sizes, some larger than a forward."""
    questions = [{"type": "noul", "instructions": "Is it?"}, choice(3), choice(40, "And which?"),
                 {"type": "score", "instructions": "How?", "criteria": ["no", {"so": "so"}, "yes"]}]
    requests = [body(request(state=f"State {i % 7}", **{f"q{j}": questions[(i + j) % 4] for j in range(1 + i % 3)}))
                for i in range(60)]
    small = replace(export, manifest=replace(export.manifest, max_length=256))
    backbone = FakeBackbone()
    with serving(small, backbone, batch_rows=1500) as server:
        crowd(server, requests, ask_alone(server, requests))
    assert max(rows for _, rows in backbone.forwards) <= 1500
    assert len(backbone.forwards) < CLIENTS * REQUESTS                 # requests did share forwards


def test_64_clients_of_50_requests_each_get_the_bits_they_would_get_alone(export):
    """With the real backbone in NumPy, at some two milliseconds a row: so few rows, of which many are shared.

    Two of the prompts are longer than the chunks of 64 and the blocks of 128 rows in which layers work: where in a
    forward they come to lie must not matter, nor that the longer state begins like the shorter one.
    """
    requests = [body({"state": "a", "questions": {"q": question}}) for question in (
        {"type": "noul", "instructions": "b?"}, {"type": "noul", "instructions": "Is it so?"},
        {"type": "choice", "instructions": "c?", "criteria": {"d": None, "e": None}},
        {"type": "score", "instructions": "c?", "criteria": ["d", "not d at all"]})]
    requests.append(body({"state": "f", "questions": {"q": {"type": "noul", "instructions": "b?"}}}))
    requests += [body({"state": "7 " * words, "questions": {"q": choice(2, "c?")}}) for words in (35, 70)]
    with serving(export, open_backbone(export, "numpy", log=lambda line: None)) as server:
        alone = ask_alone(server, requests)
        tokens = [json.loads(answer)["usage"]["input_tokens"] // 2 for answer in alone[-2:]]
        assert 64 < tokens[0] < 128 < tokens[1]
        crowd(server, requests, alone, rare=2)


def test_a_mix_of_sizes_split_between_forwards(export):
    """Requests larger than a forward beside small ones: the same bits as in forwards that hold everything."""
    small = replace(export, manifest=replace(export.manifest, max_length=80))
    requests = [body({"state": "ab"[i], "questions": {"q": choice(6, "c?")}}) for i in range(2)]
    requests += [body({"state": "a", "questions": {"q": {"type": "noul", "instructions": f"{i}?"}}}) for i in range(3)]
    answers: dict[tuple, str] = {}
    for rows in (None, 80):
        with serving(small, open_backbone(small, "numpy", log=lambda line: None), batch_rows=rows) as server:
            def client(number: int) -> None:
                status, answer, _ = post(connect(server), requests[number])
                answers[rows, number] = content(answer) if status == 200 else str(status)
            together(client, len(requests))
    for number in range(len(requests)):
        assert answers[None, number] == answers[80, number] and '"answers"' in answers[80, number]
