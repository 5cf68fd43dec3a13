"""The engine over a fake backbone: responses, sharing, failures, readiness."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

import jev.engine
from jev.contract import parse_request
from jev.engine import WARM_UP, ContractError, Engine, InferenceError, ShuttingDown
from jev.model.backbone import BackendError
from jev.model.row_pool import count_rows
from jev.settings import Settings
from tests.fakes import FakeBackbone, body, choice, demo_export, eventually, request


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    return demo_export(tmp_path_factory.mktemp("export"))


@pytest.fixture
def start(export):
    """start(backbone, **settings) -> Engine, closed at the end."""
    made = []

    def start(backbone=None, export=export, **settings):
        made.append(Engine(export, backbone or FakeBackbone(), Settings(**settings)))
        return made[-1]
    yield start
    for engine in made:
        engine.backbone.gate.set()
        engine.close()


THREE = request(
    lane={"type": "choice", "instructions": "Which?", "criteria": {"air": "Fast.", "road": None}},
    damaged={"type": "noul", "instructions": "Is it damaged?"},
    care={"type": "score", "instructions": "How careful?", "criteria": ["Any.", "Some.", "Great."]})


def test_a_response_is_what_the_contract_shows(start):
    engine = start()
    response = engine.answer(body(THREE))
    assert list(response) == ["model", "answers", "usage", "metadata"]
    assert list(response["answers"]) == ["lane", "damaged", "care"]
    assert [a["type"] for a in response["answers"].values()] == ["choice", "noul", "score"]
    metadata = response["metadata"]
    assert metadata["method"] == "numba_merged_lora_decision_head"
    assert (metadata["temperature"], metadata["max_length"], metadata["candidate_sequences"]) == (2.5, 4096, 6)
    assert metadata["prefix_cache"]["enabled"] is True and metadata["prefix_cache"]["mode"] == "request_rows"
    assert metadata["prefix_cache"]["cached"] == 0
    assert 0 < metadata["inference_seconds"] < 5
    assert metadata["demo"] is True and "not decisions" in metadata["notice"]
    assert response["usage"]["output_tokens"] == 0
    # Every candidate's prompt counts in full; rows are what is computed.
    assert engine.backbone.forwards[-1] == (6, metadata["prefix_cache"]["rows"])
    assert response["usage"]["input_tokens"] > metadata["prefix_cache"]["rows"]
    json.dumps(response, allow_nan=False)


def test_an_inference_has_run_before_it_is_ready(start):
    engine = start()
    assert engine.ready and len(engine.backbone.forwards) == 1
    assert engine.health() == {"status": "ready", "model": "open-jev-demo", "demo": True,
                               "notice": engine.health()["notice"]}


def test_scores_do_not_depend_on_order_or_company(start):
    engine = start()
    questions = {f"q{i}": choice(1 + i % 5, f"Question {i}?") for i in range(12)}
    alone = {id: engine.answer(body(request(**{id: q})))["answers"][id] for id, q in questions.items()}
    together = engine.answer(body(request(**questions)))["answers"]
    backwards = engine.answer(body(request(**dict(reversed(questions.items())))))["answers"]
    assert alone == together == backwards
    assert list(backwards) == list(reversed(together))


def test_a_request_larger_than_a_forward_is_split_with_the_same_answers(start, export):
    wide = request(pick=choice(200), other=choice(100, "And which?"))
    whole = start().answer(body(wide))
    small = replace(export, manifest=replace(export.manifest, max_length=128))
    engine = start(export=small, batch_rows=256)
    split = engine.answer(body(wide))
    assert split["answers"] == whole["answers"] and split["usage"] == whole["usage"]
    assert len(engine.backbone.forwards) > 5
    assert max(rows for _, rows in engine.backbone.forwards) <= 256
    assert sum(n for n, _ in engine.backbone.forwards[1:]) == 300


def test_requests_that_wait_together_share_a_forward(start):
    backbone = FakeBackbone()
    engine = start(backbone)
    alone = [engine.answer(body(request(state=f"State {i}", pick=choice(3)))) for i in range(8)]
    backbone.gate.clear()
    backbone.forwards.clear()
    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(engine.answer, body(request()))
        eventually(lambda: len(backbone.forwards) == 1)
        others = [pool.submit(engine.answer, body(request(state=f"State {i}", pick=choice(3)))) for i in range(8)]
        eventually(lambda: len(engine.scheduler._waiting) == 8)
        backbone.gate.set()
        first.result(10)
        for future, expected in zip(others, alone):
            shared = future.result(10)
            assert shared["answers"] == expected["answers"]
            assert shared["metadata"]["prefix_cache"] == expected["metadata"]["prefix_cache"]
    assert [n for n, _ in backbone.forwards] == [1, 24]


def test_refusals_come_before_inference_and_return_the_place(start):
    engine = start(queue=1)
    too_long = request(state="word " * 20000)
    for bad in (b"{", b"[]", body({"state": 1}), body(too_long)):
        with pytest.raises(ContractError) as refused:
            engine.answer(bad)
        assert refused.value.errors[0]["loc"][0] == "body"
    assert refused.value.errors[0]["type"] == "prompt_too_long"
    assert len(engine.backbone.forwards) == 1 and engine.pending == 0


@pytest.mark.parametrize("failure", [BackendError("CUDA error 700"), MemoryError("out of memory")])
def test_a_backend_failure_fails_one_request_and_the_next_works(start, failure):
    backbone = FakeBackbone()
    engine = start(backbone)
    expected = engine.answer(body(THREE))
    failures = [failure]
    backbone.fail = lambda sequences: failures.pop() if failures else None
    with pytest.raises(InferenceError, match="^model inference failed$"):
        engine.answer(body(THREE))
    assert engine.answer(body(THREE))["answers"] == expected["answers"]
    assert engine.ready


def test_a_backend_that_stays_broken_is_not_ready_until_it_works_again(start):
    backbone = FakeBackbone()
    engine = start(backbone)
    backbone.fail = lambda sequences: BackendError("the device is gone")
    with pytest.raises(InferenceError):
        engine.answer(body(THREE))
    eventually(lambda: not engine.ready)
    assert engine.health()["status"] == "failing"
    backbone.fail = lambda sequences: None
    engine.answer(body(THREE))
    assert engine.health()["status"] == "ready"


def test_a_forward_that_hangs_shows_in_health(start, monkeypatch):
    backbone = FakeBackbone()
    engine = start(backbone)
    backbone.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(engine.answer, body(request()))
        eventually(lambda: engine.scheduler.busy_seconds > 0)
        assert engine.health()["status"] == "ready"
        monkeypatch.setitem(jev.engine.STUCK_SECONDS, "numpy", 0.0)
        assert engine.health()["status"] == "failing"
        backbone.gate.set()
        assert asked.result(10)["answers"]
    eventually(lambda: engine.scheduler.busy_seconds == 0)


def test_nan_fails_its_request_only(start):
    backbone = FakeBackbone()
    engine = start(backbone)
    good, bad = body(THREE), body(request(state="poison"))
    poisoned = engine.processor.encode(parse_request(bad, []))[0]
    backbone.poison = lambda sequence: np.array_equal(sequence, poisoned)
    backbone.gate.clear()
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(engine.answer, good)
        eventually(lambda: len(backbone.forwards) == 2)
        futures = [pool.submit(engine.answer, b) for b in (good, bad)]
        eventually(lambda: len(engine.scheduler._waiting) == 2)
        backbone.gate.set()
        assert futures[0].result(10)["answers"] == first.result(10)["answers"]
        with pytest.raises(InferenceError):
            futures[1].result(10)
    eventually(lambda: engine.ready)


def test_a_broken_backend_is_noticed_at_start(export):
    backbone = FakeBackbone()
    backbone.fail = lambda sequences: BackendError("no kernel image")
    with pytest.raises(InferenceError):
        Engine(export, backbone, Settings())
    assert backbone.closed


def test_prompts_must_fit_in_a_forward(export):
    with pytest.raises(BackendError, match="lower OPEN_JEV_MAX_LENGTH$"):
        Engine(export, FakeBackbone(max_rows=4095), Settings(batch_rows=4000))
    with pytest.raises(BackendError, match="lower OPEN_JEV_MAX_LENGTH or raise OPEN_JEV_BATCH_ROWS$"):
        Engine(export, FakeBackbone(), Settings(batch_rows=4095))


@pytest.mark.parametrize("length", [1, 40])
def test_a_limit_below_the_warm_up_does_not_keep_the_worker_from_starting(start, export, length):
    engine = start(export=replace(export, manifest=replace(export.manifest, max_length=length)))
    assert engine.ready and engine.backbone.forwards == [(1, length)]
    with pytest.raises(ContractError, match="the limit is"):
        engine.answer(body(request()))


def test_the_warm_up_is_tokenized_like_any_request(start, export):
    engine = start()
    sequence, = engine.processor.encode(parse_request(WARM_UP, export.model_names))
    assert np.array_equal(engine._warm_up[0], sequence)


def test_models(start):
    models = start().models()
    assert models["aliases"] == ["jev-latest", "open-jev"]
    entry = models["models"][0]
    assert list(entry) == ["id", "name", "description", "release_date"]
    assert entry["id"] == entry["name"] == "open-jev-demo" and "not decisions" in entry["description"]
    assert len(entry["release_date"]) == 10


def test_drain_and_close(start):
    engine = start()
    engine.drain()
    with pytest.raises(ShuttingDown):
        engine.answer(body(THREE))
    assert engine.health()["status"] == "draining"
    engine.close()
    assert engine.backbone.closed


def test_rows_are_the_nodes_of_the_requests_own_trie(start):
    engine = start()
    response = engine.answer(body(request(pick=choice(50))))
    parsed = parse_request(body(request(pick=choice(50))), [])
    sequences = engine.processor.encode(parsed)
    assert response["metadata"]["prefix_cache"]["rows"] == count_rows(sequences)
    assert response["usage"]["input_tokens"] == sum(map(len, sequences))
