"""What agents and readers of one document ask, over the demo checkpoint in NumPy: how many rows the prefix cache saves."""
from __future__ import annotations

import json

import numpy as np
import pytest

from jev.checkpoint.demo import write_demo_checkpoint
from jev.checkpoint.opening import open_export
from jev.contract import parse_request
from jev.engine import Engine
from jev.model.backbone import Computed
from jev.model.numpy_backbone import NumpyBackbone
from jev.model.ops.numpy_cache import NumpyCache
from jev.processor import Processor
from jev.settings import Settings


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "export"
    write_demo_checkpoint(folder)
    return open_export(folder)


@pytest.fixture
def ask(export, monkeypatch):
    """ask(state, question) -> (rows of the request, rows computed): the whole path but for the arithmetic, of which rows are
    the measure."""
    backbone = NumpyBackbone(export, cache=NumpyCache(export.config, pages=300, snapshots=50))
    processor = Processor.of(export)
    monkeypatch.setattr(backbone, "_forward", lambda pool: np.zeros((len(pool.last_rows), 1), np.uint16))

    def ask(state: str, question: str) -> tuple[int, int]:
        body = {"state": state, "questions": {"q": {"type": "noul", "instructions": question}}}
        sequences = processor.encode(parse_request(json.dumps(body).encode(), export.model_names))
        found: Computed = backbone.hidden(sequences)
        assert found.rows + int(found.resumed.max()) == sequences.rows
        return sequences.rows, found.rows
    return ask


def text(seed: int, words: int) -> str:
    rng = np.random.default_rng(seed)
    return " ".join(f"{word:x}" for word in rng.integers(0, 4096, words))


def ratio(asked: list[tuple[int, int]]) -> float:
    rows, computed = np.sum(asked, axis=0)
    return computed / rows


def test_agents_compute_a_quarter_of_their_rows(ask):
    """Transcripts that grow by turns in 20 steps, two questions a step."""
    transcripts = [text(seed, 800) for seed in range(4)]
    ends = np.linspace(0.1, 1, 20)
    assert ratio([ask(whole[:int(end * len(whole))], f"Is it {question}?")
                  for end in ends for whole in transcripts for question in ("done", "safe")]) <= 0.25


def test_readers_of_a_document_compute_a_seventh_of_their_rows(ask):
    """Twenty questions about each of some documents, shuffled."""
    asked = [(document, question) for document in range(4) for question in range(20)]
    order = np.random.default_rng(0).permutation(len(asked))
    documents = [text(9 + seed, 800) for seed in range(4)]
    assert ratio([ask(documents[asked[i][0]], f"Does it say {asked[i][1]}?") for i in order]) <= 0.15


def test_an_answer_says_how_many_of_its_rows_were_cached(export):
    """And is the answer of a worker without a cache."""
    body = json.dumps({"state": text(1, 60), "questions": {"q": {"type": "noul", "instructions": "Is it?"}}}).encode()
    engines = [Engine(export, NumpyBackbone(export, cache=cache), Settings())
               for cache in (None, NumpyCache(export.config, pages=20, snapshots=4))]
    (plain, _), (first, second) = ([engine.answer(body) for _ in range(2)] for engine in engines)
    assert plain["answers"] == first["answers"] == second["answers"] and plain["usage"] == second["usage"]
    rows, cached = (second["metadata"]["prefix_cache"][name] for name in ("rows", "cached"))
    assert first["metadata"]["prefix_cache"]["cached"] == plain["metadata"]["prefix_cache"]["cached"] == 0
    assert cached % 64 == 0 and rows - 128 < cached < rows == first["metadata"]["prefix_cache"]["rows"]
    for engine in engines:
        engine.close()
