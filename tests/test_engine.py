"""The engine over a fake backbone: responses, sharing, failures, readiness."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

import jev.engine
from jev.checkpoint.manifest import MANIFEST_FILE
from jev.contract import parse_request
from jev.engine import WARM_UP, ContractError, Engine, InferenceError, QueueFull, RequestTooLarge, ShuttingDown
from jev.model.backbone import BackendError, BackendLost
from jev.model.numpy_backbone import NumpyBackbone
from jev.model.row_pool import count_rows
from jev.settings import Settings
from jev_kernels import bf16
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


def test_a_lost_backend_is_not_asked_again_and_its_owner_is_told(start):
    backbone, told = FakeBackbone(), []
    engine = start(backbone)
    engine.on_lost = lambda: told.append(engine.lost)
    failure = BackendLost("the GPU is lost to this process")
    backbone.fail = lambda sequences: failure
    with pytest.raises(InferenceError, match="^model inference failed$"):
        engine.answer(body(THREE))
    eventually(lambda: told == [failure])
    assert len(backbone.forwards) == 2 and engine.health()["status"] == "failing"


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


class Held(NumpyBackbone):
    """The real one, whose forwards wait for a gate."""

    def __init__(self, export) -> None:
        super().__init__(export)
        self.gate, self.forwards = threading.Event(), []
        self.gate.set()

    def hidden(self, sequences):
        self.forwards.append(len(sequences))
        assert self.gate.wait(30)
        return super().hidden(sequences)


def test_an_embedding_of_nan_fails_the_prompt_that_has_it_and_not_its_neighbour(start, export):
    """They share the first tokens; those are computed with the tokens behind them, of the prompt that sorts first."""
    backbone = Held(export)
    engine = start(backbone)
    bodies = [body(request(state=state)) for state in ("The parcel is late.", "It rains.")]
    prompts = [engine.processor.encode(parse_request(b, []))[0] for b in bodies]
    (bad, bad_body), (good, good_body) = sorted(zip(map(tuple, prompts), bodies))
    alone = engine.answer(good_body)["answers"]
    backbone.model.embed[next(token for token in bad if token not in {*good, *engine._warm_up[0]})] = np.nan
    shared = bf16.to_float32(backbone.hidden([np.array(bad), np.array(good)])[0])
    assert np.isnan(shared).all(), "a NaN that does not spread shows nothing"

    backbone.forwards.clear()
    backbone.gate.clear()
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(engine.answer, good_body)
        eventually(lambda: len(backbone.forwards) == 1)
        beside = pool.submit(engine.answer, good_body)
        eventually(lambda: len(engine.scheduler._waiting) == 1)
        poisoned = pool.submit(engine.answer, bad_body)
        eventually(lambda: len(engine.scheduler._waiting) == 2)
        backbone.gate.set()
        assert first.result(30)["answers"] == beside.result(30)["answers"] == alone
        with pytest.raises(InferenceError):
            poisoned.result(30)
    eventually(lambda: engine.ready)
    assert backbone.forwards == [1, 2, 1, 1, 1]                      # the last is the probe after a failure


def test_large_bodies_are_prepared_one_at_a_time_and_fit_into_the_budget(start, monkeypatch):
    """What is too large alone is told both figures, and what finds no room is told to come back."""
    monkeypatch.setattr(jev.engine, "LARGE_BODY", 1000)
    backbone = FakeBackbone()
    engine = start(backbone, queue_mb=16)
    encode, inside = engine.processor.encode, threading.Semaphore(1)

    def alone(parsed):
        assert inside.acquire(blocking=False), "two at once"
        try:
            return encode(parsed)
        finally:
            inside.release()
    monkeypatch.setattr(engine.processor, "encode", alone)
    large = body(request(state="x" * 100, pick=choice(100), **{"x" * 190_000: choice(1)}))
    backbone.gate.clear()
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(engine.answer, large) for _ in range(2)]
        eventually(lambda: engine.scheduler.nbytes > 10 << 20)
        with pytest.raises(QueueFull) as refused:
            engine.answer(large)
        backbone.gate.set()
        assert re.search(r"hold 1\d\.\d of 16\.0 MiB; this one needs 7\.\d MiB", str(refused.value))
        assert [future.result(10)["metadata"]["candidate_sequences"] for future in waiting] == [101, 101]
    eventually(lambda: engine.scheduler.nbytes == 0)
    with pytest.raises(RequestTooLarge, match="needs 3[0-9].[0-9] MiB of memory .* may hold 16.0 MiB"):
        engine.answer(body(request(**{"x" * 800_000: choice(1)})))
    assert engine.pending == 0


@pytest.mark.parametrize("criteria", [[""] * 10, [[]] * 10, [{}] * 10, [[{"": {}}] * 50] * 2, [[{"": []}] * 50] * 2,
                                      {str(i): None for i in range(255)}, {"": None}])
def test_what_is_kept_of_a_body_is_what_it_is_counted_with(criteria):
    kind = "score" if isinstance(criteria, list) else "choice"
    questions = {str(i): {"type": kind, "instructions": "", "criteria": criteria} for i in range(100)}
    data = json.dumps({"state": "", "questions": questions}, separators=(",", ":")).encode()
    parse_request(data, [])
    tracemalloc.start()
    try:
        parsed = parse_request(data, [])
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held <= jev.engine.PARSED * len(data) and parsed.questions


def test_a_broken_backend_is_noticed_at_start(export):
    backbone = FakeBackbone()
    backbone.fail = lambda sequences: BackendError("no kernel image")
    with pytest.raises(InferenceError):
        Engine(export, backbone, Settings())
    assert backbone.closed


def test_prompts_must_fit_in_a_forward(export):
    with pytest.raises(BackendError, match="lower --max-length$"):
        Engine(export, FakeBackbone(max_rows=4095), Settings(batch_rows=4000))
    with pytest.raises(BackendError, match="lower --max-length or raise --batch-rows$"):
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


def test_what_is_served_is_known_from_the_start(tmp_path):
    """Neither a folder that is gone nor one that is touched changes it."""
    export = demo_export(tmp_path)
    engine = Engine(export, FakeBackbone(), Settings())
    try:
        before = engine.models()
        os.utime(export.path / MANIFEST_FILE, (0, 0))
        assert engine.models() == before
        shutil.rmtree(export.path)
        assert engine.models() == before
    finally:
        engine.close()


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
