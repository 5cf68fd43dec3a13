"""Admission, composition of forwards, fairness, failures and the end, without a model."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from jev.model.row_pool import count_rows
from jev.model.sequences import Sequences
from jev.scheduler import (
    MIB,
    Cancelled,
    InferenceError,
    Inferred,
    Place,
    QueueFull,
    RequestTooLarge,
    Scheduler,
    ShuttingDown,
    Work,
    compose,
)
from tests.fakes import eventually


def tokens(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def family(seed: int, count: int, prefix: int = 20, tail: int = 3) -> list[np.ndarray]:
    """``count`` sequences that share ``prefix`` tokens, which no other seed has."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 1000, prefix)
    return [np.concatenate([[seed], shared, [2000 + i], rng.integers(0, 1000, tail)]).astype(np.int32)
            for i in range(count)]


def work(sequences: list[np.ndarray], next: int = 0) -> Work:
    return Work(Place(None), Sequences.of(sequences), np.empty(len(sequences), np.float32), next)


def rows_of(parts) -> int:
    return count_rows([s for p in parts for s in p.work.sequences.part(p.start, p.end)])


def score(sequences: list[np.ndarray]) -> np.ndarray:
    return np.array([s.sum() for s in sequences], np.float32)


def plain(scores):
    """An ``infer`` that resumes nothing, of a function that gives scores."""
    def infer(sequences):
        return Inferred(scores(sequences), np.zeros(len(sequences), np.intp))
    infer.scores = scores
    return infer


class Gated:
    """An ``infer`` that records its forwards and waits for a gate."""

    def __init__(self, gate: bool = False) -> None:
        self.gate, self.forwards, self.failure = threading.Event(), [], None
        if not gate:
            self.gate.set()

    def __call__(self, sequences: list[np.ndarray]) -> np.ndarray:
        self.forwards.append([tuple(s) for s in sequences])
        assert self.gate.wait(30)
        if self.failure is not None:
            raise self.failure
        return score(sequences)


@pytest.fixture
def start():
    """start(infer, max_rows, capacity, after_failure, max_bytes) -> Scheduler, closed at the end."""
    made = []

    def start(infer, max_rows=1000, capacity=16, after_failure=lambda: None, max_bytes=1 << 30):
        made.append(Scheduler(plain(infer), max_rows, capacity, after_failure, max_bytes))
        return made[-1]
    yield start
    for scheduler in made:
        if isinstance(getattr(scheduler._infer, "scores", None), Gated):
            scheduler._infer.scores.gate.set()
        scheduler.close(timeout=10)
        assert scheduler._leader is None and not scheduler._running


def submit(scheduler: Scheduler, sequences: list[np.ndarray], cancelled=None, nbytes: int = 0):
    with scheduler.admit(cancelled) as place:
        return scheduler.run(place, Sequences.of(sequences), nbytes)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(64) as pool:
        yield pool


@pytest.fixture
def occupied(start, pool):
    """occupied(first, **options) -> (scheduler, its Gated, the future of ``first``, whose forward waits at the gate)."""
    def occupied(first=family(0, 1), **options):
        infer = Gated(gate=True)
        scheduler = start(infer, **options)
        running = pool.submit(submit, scheduler, first)
        eventually(lambda: len(infer.forwards) == 1)
        return scheduler, infer, running
    return occupied


@pytest.fixture
def in_line(pool):
    """in_line(scheduler, sequences, cancelled) -> the future of a request that waits behind the forward that runs.

    ahead: how many wait already, and will then.
    """
    def in_line(scheduler, sequences, cancelled=None, nbytes=0, ahead=None):
        ahead = len(scheduler._waiting) if ahead is None else ahead
        future = pool.submit(submit, scheduler, sequences, cancelled, nbytes)
        eventually(lambda: len(scheduler._waiting) == ahead + 1)
        return future
    return in_line


# ---------------------------------------------------------------------------------------------------------------------
# Composition


sequence_sets = st.lists(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=8), min_size=1, max_size=6)


@pytest.mark.parametrize("resumable, ends", [(0, [1, 0, 0]), (50, [1, 1, 0]), (90, [1, 1, 1]), (99, [1, 1, 1])])
def test_rows_that_are_kept_from_earlier_requests_do_not_count(resumable, ends):
    """Three prompts of 100 tokens in forwards of 120 rows: as many as are computed in so many rows."""
    works = [replace(work([np.full(100, i)]), resumable=lambda ids: resumable) for i in range(3)]
    parts = compose(works, 120)
    assert [sum(p.end - p.start for p in parts if p.work is each) for each in works] == ends


def test_only_what_all_sequences_share_is_taken_off():
    """Ten options over 40 tokens: a prefix that is longer than that, and known of the first option alone, is not."""
    shared = work([np.append(np.zeros(40, int), [i] * 10) for i in range(1, 11)])
    assert shared.sequences.rows == 140
    for resumable, whole in ((0, False), (40, True), (45, False)):
        assert (replace(shared, resumable=lambda ids: resumable).reach(0, 0, 100) == (10, 100)) == whole


def test_cached_rows_are_counted_once_and_never_beyond_the_requests_rows(start):
    """Two forwards for one request, of which the second resumes what the first has computed."""
    scheduler = start(score, max_rows=70)
    options = [np.append(np.zeros(40, int), [i] * 10) for i in range(1, 6)]

    def resuming(forwards, known):
        def infer(sequences):
            forwards.append(len(sequences))
            return Inferred(score(sequences), np.full(len(sequences), 32 if len(forwards) > 1 or known else 0, np.intp))
        return infer
    for known, cached in ((False, 0), (True, 32)):
        forwards = []
        scheduler._infer = resuming(forwards, known)
        result = submit(scheduler, options)
        assert len(forwards) == result.forwards > 1 and result.cached == cached


@settings(max_examples=200, deadline=None)
@given(sequence_sets, st.integers(12, 60))
def test_forwards_keep_to_the_budget_and_get_everyone_through(sets, max_rows):
    works = [work([tokens(*ids) for ids in sequences]) for sequences in sets]
    waiting, done, forwards = list(works), {id(w): [] for w in works}, 0
    while waiting:
        parts = compose(waiting, max_rows)
        assert parts[0].work is waiting[0] and all(p.end > p.start for p in parts)
        assert rows_of(parts) <= max_rows and sum(p.end - p.start for p in parts) <= max_rows
        for p in parts:
            assert p.start == p.work.next
            done[id(p.work)] += range(p.start, p.end)
            p.work.next = p.end
        served = {id(p.work) for p in parts}
        rest = [w for w in waiting if id(w) not in served]
        waiting = rest + [p.work for p in parts if p.work.next < len(p.work.sequences)]
        forwards += 1
    for w in works:
        assert done[id(w)] == list(range(len(w.sequences)))
    assert forwards <= sum(len(w.sequences) for w in works)


def test_a_request_that_fits_is_never_split():
    parts = compose([work(family(1, 50))], max_rows=21 + 50 * 4)
    assert [(p.start, p.end) for p in parts] == [(0, 50)]


def test_a_request_is_cut_where_its_prompts_share_least():
    # a, b, a', b': neighbours share one token as they are given, and 31 in lexicographic order.
    a, b = [1] + [2] * 30, [1] + [3] * 30
    split = work([tokens(*a, 4), tokens(*b, 4), tokens(*a, 5), tokens(*b, 5)])
    assert split.sequences.rows == 65
    part, = compose([split], max_rows=40)
    assert (part.end, rows_of([part])) == (2, 33)
    assert split.sequences.order[part.start:part.end].tolist() == [0, 2]


def test_small_requests_ride_along_with_a_large_one():
    large, small = work(family(1, 500)), [work(family(i, 2)) for i in range(2, 8)]
    parts = compose([large, *small], max_rows=600)
    assert [p.end for p in parts[1:]] == [2] * 6                    # all of the small ones
    assert 0 < parts[0].end < 500                                   # and as much of the large one as fits
    assert 590 <= rows_of(parts) <= 600


def test_duplicates_do_not_make_a_forward_of_unlimited_width():
    same = work([tokens(1, 2, 3)] * 5000)
    assert compose([same], max_rows=100)[0].end <= 100


# ---------------------------------------------------------------------------------------------------------------------
# Running


def test_scores_come_back_in_order_from_one_forward_at_a_time(start, pool):
    running = threading.Lock()

    def infer(sequences):
        assert running.acquire(blocking=False), "two forwards at once"
        try:
            return score(sequences)
        finally:
            running.release()
    scheduler = start(infer, max_rows=200)
    requests = [family(i, 1 + i % 40) for i in range(100)]
    admitted = threading.Semaphore(16)

    def ask(sequences):
        with admitted:
            return submit(scheduler, sequences)
    for sequences, result in zip(requests, pool.map(ask, requests)):
        assert result.scores.tolist() == score(sequences).tolist() and result.scores.dtype == np.float32
    assert scheduler.admitted == 0


def test_requests_that_wait_together_share_a_forward(occupied, in_line):
    scheduler, infer, first = occupied()
    others = [in_line(scheduler, family(i, 3)) for i in range(1, 9)]
    infer.gate.set()
    assert [len(f.result(10).scores) for f in [first, *others]] == [1] + [3] * 8
    assert [len(forward) for forward in infer.forwards] == [1, 24]


def test_a_large_request_does_not_starve_small_ones(occupied, in_line):
    scheduler, infer, large = occupied(family(1, 400), max_rows=100)          # some 20 forwards alone
    small = [in_line(scheduler, family(i, 1)) for i in range(2, 6)]
    infer.gate.set()
    for future in small:
        future.result(10)
    positions = [next(n for n, f in enumerate(infer.forwards) if any(s[0] == i for s in f)) for i in range(2, 6)]
    assert max(positions) <= 3, positions
    assert large.result(10).scores.tolist() == score(family(1, 400)).tolist()
    assert large.result().forwards > 10


def test_small_ones_without_end_do_not_starve_a_large_request(start, pool):
    scheduler = start(Gated(), max_rows=60, capacity=32)
    stop = threading.Event()

    def stream(seed):
        while not stop.is_set():
            submit(scheduler, family(seed, 1))
    streams = [pool.submit(stream, i) for i in range(2, 10)]
    try:
        result = pool.submit(submit, scheduler, family(1, 100)).result(30)
    finally:
        stop.set()
    assert result.scores.tolist() == score(family(1, 100)).tolist()
    for future in streams:
        future.result(10)


def test_a_sequence_longer_than_a_forward_is_refused(start):
    with pytest.raises(ValueError, match="does not fit"):
        submit(start(Gated(), max_rows=10), [tokens(*range(11))])


# ---------------------------------------------------------------------------------------------------------------------
# Admission


def test_full_queue_and_places_returned(start, pool):
    infer = Gated(gate=True)
    scheduler = start(infer, capacity=3)
    futures = [pool.submit(submit, scheduler, family(i, 1)) for i in range(3)]
    eventually(lambda: scheduler.admitted == 3)
    with pytest.raises(QueueFull) as refused:
        submit(scheduler, family(9, 1))
    assert refused.value.retry_after >= 1
    infer.gate.set()
    for future in futures:
        future.result(10)
    assert submit(scheduler, family(9, 1)).scores.size == 1
    assert scheduler.admitted == 0


def test_a_client_that_hangs_up_frees_its_place(occupied, in_line, pool):
    scheduler, infer, running = occupied(capacity=3)
    gone = threading.Event()
    leaving = in_line(scheduler, family(1, 1), gone.is_set)
    staying = in_line(scheduler, family(2, 1), lambda: False)
    with pytest.raises(QueueFull):
        submit(scheduler, family(3, 1))
    gone.set()
    newcomer = pool.submit(submit, scheduler, family(3, 1))         # gets the place while the forward still runs
    with pytest.raises(Cancelled):
        leaving.result(10)
    eventually(lambda: len(scheduler._waiting) == 2)
    infer.gate.set()
    for future in (running, staying, newcomer):
        future.result(10)
    assert not any(s[0] == 1 for forward in infer.forwards for s in forward)    # and was never computed
    assert scheduler.admitted == 0


def test_a_request_that_is_gone_before_it_waits(start):
    with pytest.raises(Cancelled):
        submit(start(Gated()), family(1, 1), lambda: True)


def test_all_that_wait_have_a_budget_of_memory(start, pool, in_line):
    infer = Gated(gate=True)
    scheduler = start(infer, max_bytes=10_000)
    with pytest.raises(RequestTooLarge, match="needs 1.0 MiB of memory while it waits; all that wait may hold 0.0 MiB"):
        submit(scheduler, family(0, 1), nbytes=MIB)
    assert (scheduler.admitted, scheduler.nbytes) == (0, 0)
    running = pool.submit(submit, scheduler, family(0, 1), nbytes=2000)
    eventually(lambda: len(infer.forwards) == 1)
    gone = threading.Event()
    leaving = in_line(scheduler, family(1, 1), gone.is_set, nbytes=5000)
    assert 7000 < scheduler.nbytes < 8000
    with pytest.raises(QueueFull, match="the requests that wait hold 0.0 of 0.0 MiB") as refused:
        submit(scheduler, family(2, 1), nbytes=3000)
    assert refused.value.retry_after >= 1
    with pytest.raises(QueueFull):
        with scheduler.admit(nbytes=3000):                           # the body alone
            pass
    assert 7000 < scheduler.nbytes < 8000 and scheduler.admitted == 2
    gone.set()
    newcomer = in_line(scheduler, family(3, 1), nbytes=6000, ahead=0)     # in the memory of the one that left
    with pytest.raises(Cancelled):
        leaving.result(10)
    infer.gate.set()
    assert running.result(10) and newcomer.result(10)
    assert (scheduler.admitted, scheduler.nbytes) == (0, 0)


def test_the_memory_of_a_request_is_that_of_its_parts():
    few, many = (Sequences.of([np.r_[np.arange(1000), i, i] for i in range(n)]) for n in (1, 1001))
    assert many.total > 1_000_000 and many.nbytes < few.nbytes + 1000 * 72


def test_an_error_before_the_forward_returns_the_place(start):
    scheduler = start(Gated(), capacity=1)
    for _ in range(3):
        with pytest.raises(KeyError):
            with scheduler.admit():
                raise KeyError
    assert scheduler.admitted == 0


# ---------------------------------------------------------------------------------------------------------------------
# Failure and the end


@pytest.mark.parametrize("failure", [RuntimeError("out of memory"), MemoryError(), SystemExit(3)])
def test_a_failed_forward_fails_its_requests_only(occupied, caplog, failure):
    probes = []
    scheduler, infer, first = occupied(after_failure=lambda: probes.append(len(infer.forwards)))
    infer.failure = failure
    infer.gate.set()
    with pytest.raises(InferenceError, match="model inference failed"):
        first.result(10)
    infer.failure = None
    assert submit(scheduler, family(1, 2)).scores.tolist() == score(family(1, 2)).tolist()
    assert len(infer.forwards) == 2 and probes == [1]
    assert type(failure).__name__ in caplog.text


def test_a_score_that_is_not_finite_fails_its_request_only(start, pool):
    entered, gate = threading.Event(), threading.Event()

    def infer(sequences):
        entered.set()
        assert gate.wait(30)
        return np.array([np.nan if s[0] == 2 else 1.0 for s in sequences], np.float32)
    scheduler = start(infer)
    first = pool.submit(submit, scheduler, family(0, 1))
    assert entered.wait(10)
    good, bad = (pool.submit(submit, scheduler, family(i, 3)) for i in (1, 2))
    eventually(lambda: len(scheduler._waiting) == 2)
    gate.set()
    assert first.result(10).scores.tolist() == [1.0]
    assert good.result(10).scores.tolist() == [1.0] * 3
    with pytest.raises(InferenceError):
        bad.result(10)


class Spreading(Gated):
    """A NaN of one sequence is everybody's in its forward. ``bad`` says whose it is."""

    def __init__(self, bad) -> None:
        super().__init__(gate=True)
        self.bad = bad

    def __call__(self, sequences):
        scores = super().__call__(sequences)
        return np.full_like(scores, np.nan) if any(map(self.bad, sequences)) else scores


def test_a_nan_does_not_visit_its_neighbours(start, pool, in_line, caplog):
    """Those whose scores are not finite are computed once more alone, in their order, before those behind them."""
    probes = []
    infer = Spreading(lambda s: s[0] == 2)
    scheduler = start(infer, after_failure=lambda: probes.append(len(infer.forwards)))
    first = pool.submit(submit, scheduler, family(0, 1))
    eventually(lambda: len(infer.forwards) == 1)
    before, bad, after = (in_line(scheduler, family(i, 3)) for i in (1, 2, 3))
    infer.gate.set()
    assert first.result(10).forwards == 1
    for future, seed in ((before, 1), (after, 3)):
        assert future.result(10).scores.tolist() == score(family(seed, 3)).tolist() and future.result().forwards == 2
    with pytest.raises(InferenceError):
        bad.result(10)
    assert [{s[0] for s in forward} for forward in infer.forwards] == [{0}, {1, 2, 3}, {1}, {2}, {3}]
    assert probes == [4] and scheduler.admitted == 0                  # only what failed in the end
    assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]


def test_a_passing_nan_fails_nobody(start, pool, in_line):
    infer = Spreading(lambda s: len(infer.forwards) == 2)
    scheduler = start(infer)
    futures = [pool.submit(submit, scheduler, family(0, 1))]
    eventually(lambda: len(infer.forwards) == 1)
    futures += [in_line(scheduler, family(i, 2)) for i in (1, 2)]
    infer.gate.set()
    expected = [score(family(i, n)).tolist() for i, n in ((0, 1), (1, 2), (2, 2))]
    assert [f.result(10).scores.tolist() for f in futures] == expected
    assert len(infer.forwards) == 4


def test_a_large_request_beside_a_nan_goes_on_where_it_was(start, pool, in_line):
    infer = Spreading(lambda s: s[0] == 2)
    scheduler = start(infer, max_rows=60)
    first = pool.submit(submit, scheduler, family(0, 1))
    eventually(lambda: len(infer.forwards) == 1)
    large, bad = (in_line(scheduler, family(i, n)) for i, n in ((1, 40), (2, 1)))
    infer.gate.set()
    assert first.result(10) and large.result(10).scores.tolist() == score(family(1, 40)).tolist()
    with pytest.raises(InferenceError):
        bad.result(10)
    computed = [s for forward in infer.forwards[2:] for s in forward if s[0] == 1]
    assert len(computed) == len(set(computed)) == 40                # after the shared forward each just once


def test_nothing_is_logged_with_the_lock_held(start, pool):
    """Whoever wants a place would wait for the log too."""
    entered, gate, logged = threading.Event(), threading.Event(), []

    def infer(sequences):
        entered.set()
        assert gate.wait(30)
        if sequences[0][0] == 0:
            raise RuntimeError("broken")
        return np.array([np.nan if s[0] == 2 else 1.0 for s in sequences], np.float32)
    scheduler = start(infer)

    class Watch(logging.Handler):
        def emit(self, record):
            logged.append((record.getMessage(), scheduler._changed._is_owned()))
    watch = Watch()
    logging.getLogger("jev.scheduler").addHandler(watch)
    try:
        requests = [pool.submit(submit, scheduler, family(0, 1))]       # fails
        assert entered.wait(10)
        requests += [pool.submit(submit, scheduler, family(i, 3)) for i in (1, 2)]      # one is not finite, once more
        eventually(lambda: len(scheduler._waiting) == 2)
        gate.set()
        for request in requests:
            request.exception(10)
    finally:
        logging.getLogger("jev.scheduler").removeHandler(watch)
    assert len(logged) == 3 and not any(held for _, held in logged), logged


def test_the_rest_of_a_split_request_is_dropped_once_a_part_failed(start, pool):
    calls = []

    def infer(sequences):
        calls.append(len(sequences))
        raise RuntimeError("broken")
    scheduler = start(infer, max_rows=60)
    with pytest.raises(InferenceError):
        submit(scheduler, family(1, 100))
    assert len(calls) == 1 and scheduler.admitted == 0


def test_the_main_thread_can_be_interrupted_while_it_leads(start, pool, caplog):
    def infer(sequences):
        raise KeyboardInterrupt
    scheduler = start(infer)
    with pytest.raises(KeyboardInterrupt):
        submit(scheduler, family(0, 1))
    assert scheduler.admitted == 0 and not caplog.records
    scheduler._infer = plain(score)
    assert pool.submit(submit, scheduler, family(1, 2)).result(10).scores.size == 2


def test_whoever_was_to_lead_may_leave(occupied, in_line):
    """The next in line is gone just when it is appointed: the one behind it leads."""
    scheduler, infer, running = occupied(max_rows=30)
    gone = threading.Event()
    leaving = in_line(scheduler, family(1, 1), gone.is_set)
    staying = in_line(scheduler, family(2, 1))
    gone.set()
    infer.gate.set()
    assert staying.result(10).scores.size == 1 and running.result(10)
    with pytest.raises(Cancelled):
        leaving.result(10)
    assert scheduler._leader is None and scheduler.admitted == 0 and not scheduler._running


def test_nothing_runs_beside_what_follows_a_failure(occupied, in_line, pool):
    """A request alone has a score that is not finite, and a large one, in line again, leaves meanwhile."""
    probing, probed = threading.Event(), threading.Event()

    def after_failure():
        probing.set()
        assert probed.wait(30)
    scheduler, infer, busy = occupied(max_rows=60, capacity=4, after_failure=after_failure)
    gone = threading.Event()
    large = in_line(scheduler, family(1, 40), gone.is_set)
    bad = in_line(scheduler, family(2, 1))
    scheduler._infer = plain(lambda sequences: np.array([np.nan if s[0] == 2 else 1.0 for s in sequences], np.float32))
    infer.gate.set()
    assert busy.result(10) and probing.wait(10)
    assert [work.next for work in scheduler._waiting] != [0]         # the large one, some of it computed
    scheduler._infer = plain(infer)
    others = [pool.submit(submit, scheduler, family(i, 1)) for i in (3, 4)]
    eventually(lambda: scheduler.admitted == 4)
    gone.set()
    late = pool.submit(submit, scheduler, family(5, 1))              # finds the queue full: the one that left is let go
    eventually(lambda: len(scheduler._waiting) == 3)
    assert len(infer.forwards) == 1 and scheduler._leader is None
    probed.set()
    with pytest.raises(InferenceError):
        bad.result(10)
    for future in (*others, late):
        assert future.result(10).scores.size == 1
    with pytest.raises(Cancelled):
        large.result(10)


def test_a_failure_around_the_forward_tells_everybody(occupied, in_line, monkeypatch, caplog):
    """A wrong number of scores, or no memory to compose: an error for those concerned, and the next forward runs."""
    scheduler, infer, busy = occupied()
    others = [in_line(scheduler, family(i, 2)) for i in range(1, 4)]
    scheduler._infer = plain(lambda sequences: np.ones(1, np.float32))
    infer.gate.set()
    assert busy.result(10)
    for future in others:
        with pytest.raises(InferenceError):
            future.result(10)
    assert "1 scores for 6 sequences" in caplog.text
    with monkeypatch.context() as patch:
        patch.setattr("jev.scheduler.compose", lambda waiting, rows: (_ for _ in ()).throw(MemoryError()))
        with pytest.raises(MemoryError):
            submit(scheduler, family(1, 1))
    scheduler._infer = plain(score)
    assert submit(scheduler, family(1, 1)).scores.size == 1
    assert scheduler.admitted == 0 and scheduler.busy_seconds == 0


def test_drain_answers_what_was_admitted(start, pool):
    infer = Gated(gate=True)
    scheduler = start(infer)
    futures = [pool.submit(submit, scheduler, family(i, 2)) for i in range(4)]
    eventually(lambda: scheduler.admitted == 4)
    scheduler.drain()
    with pytest.raises(ShuttingDown) as refused:
        submit(scheduler, family(9, 1))
    assert refused.value.retry_after >= 1 and not scheduler.wait_idle(0.05)
    infer.gate.set()
    for future in futures:
        future.result(10)
    assert scheduler.wait_idle(10)


def test_close_fails_what_still_waits(occupied, in_line, pool):
    scheduler, infer, running = occupied()
    waiting = in_line(scheduler, family(1, 1))
    closer = pool.submit(scheduler.close, 10)
    with pytest.raises(ShuttingDown):
        waiting.result(10)
    infer.gate.set()
    assert running.result(10).scores.size == 1
    closer.result(10)
