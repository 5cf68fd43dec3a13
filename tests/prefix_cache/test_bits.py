"""With a prefix cache or without one: the same bits, whatever was asked before, evicted, failed or shared a forward pass."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jev.model import row_pool, weights
from jev.model.forward import forward
from jev.model.ops.numpy import NumpyOps
from jev.model.ops.numpy_cache import NumpyCache
from jev.model.sequences import ID, Sequences
from jev.prefix_cache.passes import forward_pass
from jev_kernels.pool import CHUNK
from tests import models

C = models.config("plain", layer_types=(models.L, models.F, models.L))
TENSORS = models.tensors(C, 5)
LENGTH = 512


class Worker:
    """The NumPy backend over a tiny model, with a cache of so many places or none."""

    def __init__(self, pages: int = 0, snapshots: int = 0):
        self.cache = NumpyCache(C, pages, snapshots) if pages else None
        if self.cache:
            for memory in (self.cache.keys, self.cache.states, self.cache.inputs):
                memory[:] = np.nan                       # whatever is read before it was written spoils everything
        self.ops = NumpyOps(C, "bf16", LENGTH, cache=self.cache)
        self.model = weights.load(TENSORS, C, self.ops)
        self.rows = self.resumed = 0

    def hidden(self, sequences: Sequences, fail: str | None = None) -> np.ndarray:
        if self.cache is None:
            return forward(self.ops, self.model, row_pool.build(sequences))
        with forward_pass(self.cache, sequences) as made:
            pool = row_pool.build(sequences, made.plan)
            out = forward(self.ops, self.model, pool)
            if fail == "raise":
                raise RuntimeError("the device is gone")
            made.done(np.full_like(out, np.nan) if fail == "nan" else out)
        assert pool.n_rows <= sequences.rows, "more rows than without a cache"
        self.rows, self.resumed = pool.n_rows, int(made.plan.tokens.max(initial=0))
        return out


def request(state: np.ndarray, *tails: np.ndarray) -> Sequences:
    """A request's sequences: its state, and what follows it in each candidate."""
    sequences = [np.concatenate([state, tail]).astype(np.int32) for tail in tails]
    return Sequences.front_coded([0] * len(sequences), [s.astype(ID).tobytes() for s in sequences], 4 * len(state))


def tokens(seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, C.vocab_size, n).astype(np.int32)


PLAIN = Worker()


@pytest.mark.parametrize("length", [128, 150, 191, 192, 300])
def test_a_second_question_computes_what_is_new(length):
    worker, state = Worker(16, 8), tokens(1, length)
    first, second = request(state, tokens(2, 9)), request(state, tokens(3, 20), tokens(4, 7))
    assert (worker.hidden(first) == PLAIN.hidden(first)).all() and worker.resumed == 0
    assert (worker.hidden(second) == PLAIN.hidden(second)).all()
    assert worker.resumed == length // CHUNK * CHUNK
    assert worker.rows == second.rows - worker.resumed


def test_a_growing_transcript_computes_what_has_grown():
    worker, state = Worker(32, 16), tokens(1, 460)
    for end in range(140, 460, 45):
        asked = request(state[:end], tokens(end, 12), tokens(end + 1, 15))
        assert (worker.hidden(asked) == PLAIN.hidden(asked)).all()
        assert end == 140 or worker.resumed == (end - 45) // CHUNK * CHUNK


@pytest.mark.parametrize("fail", ["raise", "nan"])
def test_what_a_failed_forward_wrote_is_never_read(fail):
    worker, state = Worker(16, 8), tokens(1, 200)
    asked = request(state, tokens(2, 9))
    try:
        worker.hidden(asked, fail)
    except RuntimeError:
        assert fail == "raise"
    assert worker.cache.tree.pages_in_use == worker.cache.tree.snapshots_in_use == 0
    assert (worker.hidden(asked) == PLAIN.hidden(asked)).all() and worker.resumed == 0


@st.composite
def requests(draw):
    """One request over one of a few states, or a beginning of it, with one to four candidates."""
    state = tokens(draw(st.integers(0, 2)), LENGTH - 80)[:draw(st.sampled_from([3, 64, 127, 128, 140, 192, 250, 333]))]
    if draw(st.booleans()):                              # a fork inside the state
        state = np.concatenate([state, tokens(draw(st.integers(7, 8)), draw(st.integers(1, 90)))])
    tails = draw(st.lists(st.tuples(st.integers(10, 12), st.integers(1, 70)), min_size=1, max_size=4))
    return request(state, *(tokens(seed, n) for seed, n in tails))


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(st.lists(requests(), min_size=1, max_size=3), st.sampled_from([None, None, None, "raise", "nan"])),
                min_size=1, max_size=8),
       st.sampled_from([(64, 32), (9, 4), (3, 1)]))
def test_random_traces_give_the_bits_of_a_worker_without_a_cache(trace, room):
    worker = Worker(*room)
    for together, fail in trace:
        joined = Sequences.join(together)
        try:
            found = worker.hidden(joined, fail)
        except RuntimeError:
            continue
        assert (found == PLAIN.hidden(joined)).all()


class Trace:
    """Requests as agents and people make them, over states of up to 200 tokens: transcripts that grow, fork and come back, one
    question with other options, the same once more, and what nobody has asked before."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.states = [self.tokens(n) for n in (70, 130, 192)]
        self.asked = [request(self.states[0], self.tokens(4))]

    def tokens(self, n: int) -> np.ndarray:
        return self.rng.integers(0, C.vocab_size, n).astype(np.int32)

    def state(self) -> np.ndarray:
        state = self.states[self.rng.integers(len(self.states))]
        kind, at = self.rng.random(), int(self.rng.integers(1, len(state) + 1))
        if kind < 0.3:
            state = np.concatenate([state, self.tokens(int(self.rng.integers(1, 70)))])[:200]
        elif kind < 0.5:
            state = np.concatenate([state[:at], self.tokens(int(self.rng.integers(1, 70)))])[:200]
        elif kind < 0.6:
            state = state[:at // CHUNK * CHUNK or at]             # ends at a boundary
        elif kind < 0.65:
            state = self.tokens(int(self.rng.integers(1, 150)))
        self.states = [*self.states, state][-6:]
        return state

    def request(self) -> Sequences:
        if self.rng.random() < 0.1:
            return self.asked[self.rng.integers(len(self.asked))]
        question = self.tokens(int(self.rng.choice([0, 5, 40])))
        lengths = self.rng.choice([1, 2, 9, 25, 64, 65], int(self.rng.choice([1, 1, 2, 4])))
        options = [np.concatenate([question, self.tokens(int(n))]) for n in lengths]
        if self.rng.random() < 0.2:
            options.append(options[0])
        self.asked = [*self.asked, request(self.state(), *options)][-5:]
        return self.asked[-1]

    def forward(self) -> tuple[int, Sequences]:
        """One forward pass: (requests in it, their sequences, or a range of them)."""
        together = [self.request() for _ in range(int(self.rng.integers(1, 7)))]
        joined = Sequences.join(together)
        if self.rng.random() < 0.3 and len(joined) > 1:
            start = int(self.rng.integers(len(joined)))
            joined = joined.part(start, int(self.rng.integers(start, len(joined))) + 1)
        return len(together), joined


@pytest.mark.parametrize("room, most_resumed, most_kept, most_lookups", [
    ((64, 32), 42, 24, 256), ((9, 4), 42, 24, 256), ((3, 1), 42, 24, 256), ((64, 32), 2, 2, 256), ((64, 32), 3, 24, 2)])
def test_a_thousand_requests(monkeypatch, room, most_resumed, most_kept, most_lookups):
    """With room for much and little, and with few prefixes and snapshots a forward pass: 210 requests each."""
    monkeypatch.setattr("jev.prefix_cache.plan.LEAST_TOKENS", CHUNK)
    monkeypatch.setattr("jev.prefix_cache.plan.MOST_LOOKUPS", most_lookups)
    monkeypatch.setattr("jev.prefix_cache.passes.MOST_RESUMED", most_resumed)
    monkeypatch.setattr("jev.prefix_cache.passes.MOST_KEPT", most_kept)
    worker, trace, requests, computed, rows = Worker(*room), Trace(sum(room) + most_resumed), 0, 0, 0
    while requests < 210:
        n, sequences = trace.forward()
        assert (worker.hidden(sequences) == PLAIN.hidden(sequences)).all(), requests
        requests, computed, rows = requests + n, computed + worker.rows, rows + sequences.rows
    assert computed < (0.95 if room == (64, 32) else 0.98) * rows
    assert room == (64, 32) or worker.cache.tree.counters.evictions > 10
