"""Many clients at once on the demo checkpoint: nothing is lost, and no bit depends on the company."""

from __future__ import annotations

import json
import random
import threading
from http.client import HTTPConnection

import pytest

from jev.backbone import open_backbone
from tests.fakes import body, demo_export, post, serving

CLIENTS, REQUESTS = 64, 50


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    export = demo_export(tmp_path_factory.mktemp("export"))
    with serving(export, open_backbone(export, "numpy", log=lambda line: None)) as server:
        yield server


def small_requests() -> list[bytes]:
    """Thirty requests, few rows each: all kinds, several states, one to three questions."""
    made = []
    for i in range(30):
        questions = {
            "n": {"type": "noul", "instructions": f"{i}?"},
            "c": {"type": "choice", "instructions": "Which?", "criteria": {"a": None, "b": None, f"{i}": None}},
            "s": {"type": "score", "instructions": "How?", "criteria": ["no", "yes"]}}
        chosen = list(questions)[i % 3:][:1 + i % 2]
        made.append(body({"state": "abc"[i % 3], "questions": {id: questions[id] for id in chosen}}))
    return made


def content(answer: dict) -> str:
    """All of a response but the time it took, as JSON: floats with every bit."""
    return json.dumps({**answer, "metadata": {**answer["metadata"], "inference_seconds": 0}})


def test_64_clients_of_50_requests_each_get_what_they_would_get_alone(server):
    requests = small_requests()
    host, port = server.url.removeprefix("http://").split(":")
    connection = HTTPConnection(host, int(port), timeout=60)
    alone = []
    for data in requests:
        status, answer, _ = post(connection, data)
        assert status == 200
        alone.append(content(answer))
    connection.close()

    wrong, answered = [], [0] * CLIENTS

    def client(number: int) -> None:
        rng = random.Random(number)
        connection = HTTPConnection(host, int(port), timeout=240)
        for _ in range(REQUESTS):
            which = rng.randrange(len(requests))
            status, answer, _ = post(connection, requests[which])
            if status != 200 or content(answer) != alone[which]:
                wrong.append((number, which, status))
            answered[number] += 1
        connection.close()
    threads = [threading.Thread(target=client, args=[number]) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answered == [REQUESTS] * CLIENTS and not wrong
    assert server.engine.pending == 0


def test_a_mix_of_sizes_split_between_forwards(tmp_path_factory):
    """Requests larger than a forward beside small ones: the same bits as in forwards that hold everything."""
    from dataclasses import replace
    export = demo_export(tmp_path_factory.mktemp("export"))
    export = replace(export, manifest=replace(export.manifest, max_length=192))
    wide = [body({"state": "abc"[i] * 3, "questions": {"c": {
        "type": "choice", "instructions": "Which?", "criteria": {f"option {j}": None for j in range(60)}}}})
        for i in range(3)]
    data = wide + small_requests()[:9]
    answers = {}
    for rows in (None, 192):
        with serving(export, open_backbone(export, "numpy", log=lambda line: None), batch_rows=rows) as server:
            host, port = server.url.removeprefix("http://").split(":")

            def ask(i: int) -> None:
                connection = HTTPConnection(host, int(port), timeout=120)
                answers[rows, i] = post(connection, data[i])
                connection.close()
            threads = [threading.Thread(target=ask, args=[i]) for i in range(len(data))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    for i in range(len(data)):
        assert answers[None, i][0] == answers[192, i][0] == 200
        assert content(answers[None, i][1]) == content(answers[192, i][1])
