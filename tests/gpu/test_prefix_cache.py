"""The prefix cache on a GPU: the bits of a worker without one, whatever was asked before; nothing lost under pressure."""
from __future__ import annotations

import numpy as np
import pytest

from jev.model.sequences import ID, Sequences
from jev_kernels.pool import CHUNK
from tests.gpu.test_backbone import QUICK, SMALL
from tools.bench_forward import synthetic_backbone

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def plain():
    made = synthetic_backbone(SMALL, **QUICK)
    yield made
    made.close()


def cached(places: int, **options):
    """A backbone whose cache has about so many snapshots, and pages for them."""
    made = synthetic_backbone(SMALL, cache_gb=1.0, **QUICK, **options)
    tree = made.cache.tree
    tree.n_snapshots, tree.n_pages = min(tree.n_snapshots, places), min(tree.n_pages, 6 * places)
    tree.clear()
    return made


def request(state: np.ndarray, tails: list[np.ndarray]) -> Sequences:
    sequences = [np.concatenate([state, tail]).astype(np.int32) for tail in tails]
    return Sequences.front_coded([0] * len(sequences), [s.astype(ID).tobytes() for s in sequences], 4 * len(state))


class Trace:
    """Requests as agents make them: transcripts that grow, fork, come back, and some that nobody has seen."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.states = [self.tokens(n) for n in (130, 200, 520)]

    def tokens(self, n: int) -> np.ndarray:
        return self.rng.integers(0, SMALL.vocab_size, n).astype(np.int32)

    def state(self) -> np.ndarray:
        state = self.states[self.rng.integers(len(self.states))]
        kind = self.rng.random()
        if kind < 0.4:                                           # grows
            state = np.concatenate([state, self.tokens(int(self.rng.integers(1, 120)))])[:900]
        elif kind < 0.6:                                         # forks
            state = np.concatenate([state[:int(self.rng.integers(1, len(state)))], self.tokens(40)])
        elif kind < 0.7:
            state = self.tokens(int(self.rng.integers(1, 400)))
        self.states.append(state)
        self.states = self.states[-8:]
        return state

    def request(self) -> Sequences:
        return request(self.state(), [self.tokens(int(self.rng.integers(1, 80))) for _ in range(int(self.rng.integers(1, 6)))])


@pytest.mark.parametrize("graph", [True, False])
def test_a_thousand_requests_in_random_traces_with_evictions(plain, graph):
    """Alone and together, over caches with room for many prefixes and for few."""
    for places, requests in ((64, 300), (6, 500), (1, 200)) if graph else ((6, 100),):
        made, trace = cached(places, graph=graph), Trace(places)
        resumed = total = 0
        while total < requests:
            together = Sequences.join([trace.request() for _ in range(int(trace.rng.integers(1, 5)))])
            total += len(together)
            found = made.hidden(together)
            expected = plain.hidden(together)
            assert (found.hidden == expected.hidden).all(), (places, total)
            assert found.rows <= expected.rows
            resumed += int((found.resumed > 0).sum())
        assert resumed > total // (10 if places > 1 else 50)       # that it happens; how often is the trace's matter
        assert places == 64 or made.cache.tree.counters.evictions
        made.close()


def test_a_long_document_is_read_once(plain):
    made, trace = cached(8), Trace(0)
    document = trace.tokens(3000)
    first = made.hidden(request(document, [trace.tokens(20)]))
    asked = request(document, [trace.tokens(int(n)) for n in trace.rng.integers(1, 60, 64)])
    found = made.hidden(asked)
    assert first.rows == 3020 and (found.resumed == 3000 // CHUNK * CHUNK).all()
    assert found.rows == asked.rows - 3000 // CHUNK * CHUNK
    assert (found.hidden == plain.hidden(asked).hidden).all()
    made.close()


def test_after_a_failure_nothing_is_resumed(plain, monkeypatch):
    made, trace = cached(8), Trace(1)
    asked = request(trace.tokens(300), [trace.tokens(9)])
    made.hidden(asked)
    assert made.resumable(asked.at_rank(0)) == 256
    other = request(trace.tokens(300), [trace.tokens(9)])

    def fails(self, pool, use_graph):
        raise RuntimeError("CUDA: CUDA_ERROR_LAUNCH_FAILED")
    with monkeypatch.context() as patch:
        patch.setattr("jev.model.cuda_backbone.BucketRunner.run", fails)
        with pytest.raises(RuntimeError, match="LAUNCH_FAILED"):
            made.hidden(other)
    assert made.resumable(asked.at_rank(0)) == made.resumable(other.at_rank(0)) == 0
    assert (made.hidden(asked).hidden == plain.hidden(asked).hidden).all()
    made.close()
