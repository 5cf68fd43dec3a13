"""Who is computed when: bounded admission, forwards shared between requests, fairness, and an orderly end.

A request takes a *place* (``admit``) before anything costly is done for it and keeps it until it is answered or gone.
Its token sequences then wait as one piece of *work*. One forward runs at a time, composed of all waiting work:

  - a forward holds at most ``max_rows`` token rows, counted as if requests shared none (an upper bound);
  - the first in line takes at least one sequence, and everyone takes what fits in an equal share of the rows; rows left
    over go to whoever is first in line. Work that is not finished goes to the end of the line. So a request larger
    than a forward is split, advances, and delays a small one by a forward or so, never by its whole length;
  - scores land at their sequence's index: order inside a request never changes, and neither does a bit (a score does
    not depend on the company of its rows).

A forward that fails fails the requests in it, all of them and nobody else. They are not tried again one by one: what
ran out of memory together might pass alone, but a client that is told of a failure can decide that for itself,
whereas a hidden second run doubles the load just when the device is in trouble. A score that is not finite fails
only the request that it belongs to.

There is no inference thread: the thread of the request that is first in line *leads*, that is, it composes and runs the
next forward, for itself and the others. While one request is there at a time no other thread has to wake up, before the
forward or after it, and the answer leaves from a processor that has just been busy: on an idle machine that saves about
half a millisecond.

Clients that hang up free their place: ``cancelled`` is asked before each forward and whenever the queue is full.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from jev.model.row_pool import shared_prefix

logger = logging.getLogger("jev.scheduler")

Infer = Callable[[list[np.ndarray]], np.ndarray]

FULL_RETRY_SECONDS = 1
SHUTDOWN_RETRY_SECONDS = 5


class Refused(Exception):
    """No place for this request now; ``retry_after`` is in seconds."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFull(Refused):
    """Every place is taken."""


class ShuttingDown(Refused):
    """The worker finishes what it has and takes nothing more."""


class Cancelled(Exception):
    """The client is gone; nobody waits for the answer."""


class InferenceError(RuntimeError):
    """The forward pass of this request failed or gave a score that is not finite. The cause is in the log."""


@dataclass(eq=False)
class Place:
    """A request's seat in the worker, from admission to answer."""

    cancelled: Callable[[], bool] | None
    taken: bool = True

    def gone(self) -> bool:
        return self.cancelled is not None and self.cancelled()


@dataclass(eq=False)
class Work:
    """The sequences of one admitted request.

    ``costs[i]`` bounds the rows of sequences ``0..i-1`` computed in one forward (int64 [n + 1]); ``rows`` is the exact
    number for all of them.
    """

    place: Place
    sequences: Sequence[np.ndarray]
    rows: int
    costs: np.ndarray
    scores: np.ndarray
    next: int = 0
    seconds: float = 0.0
    forwards: int = 0
    error: Exception | None = None
    ended: bool = False
    turn: threading.Event = field(default_factory=threading.Event)      # it has ended, or it is to lead

    def reach(self, start: int, end: int, rows: int) -> tuple[int, int]:
        """How far a forward that has taken ``start..end`` gets with ``rows`` more: (new end, rows it costs)."""
        if start == end:
            whole = max(self.rows, len(self.sequences))
            if start == 0 and whole <= rows:
                return len(self.sequences), whole
            first = len(self.sequences[start])
            if first > rows:
                return end, 0
            base = self.costs[start + 1] - first     # rows of what precedes, which this forward does not hold
        else:
            base = self.costs[end]
        new = int(np.searchsorted(self.costs, base + rows, side="right")) - 1
        return new, int(self.costs[new] - base)


@dataclass(frozen=True)
class Result:
    """scores: float32, one for each sequence in order; seconds: wall time of the forwards that computed them."""

    scores: np.ndarray
    seconds: float
    forwards: int


@dataclass
class Part:
    """Sequences ``start..end`` of a work in one forward."""

    work: Work
    start: int
    end: int


def row_costs(sequences: Sequence[np.ndarray]) -> np.ndarray:
    """Bound of the trie rows of ``sequences[:i]`` for every i, int64 [n + 1], from neighbours' common prefixes.

    Each sequence counts as one row at least, so that duplicates cannot make a forward of unlimited width.
    """
    own = [0, *map(len, sequences[:1])]
    for before, this in zip(sequences, sequences[1:]):
        own.append(max(1, len(this) - shared_prefix(before, this)))
    return np.cumsum(own, dtype=np.int64)


def compose(waiting: Sequence[Work], max_rows: int) -> list[Part]:
    """The next forward: parts of the waiting works, first in line first, of at most ``max_rows`` rows together."""
    room = max_rows
    share = max(1, max_rows // len(waiting))
    parts = []
    for work in waiting:
        part = Part(work, work.next, work.next)
        part.end, cost = work.reach(part.start, part.end, min(share, room))
        if not parts and part.end == part.start:      # the first in line must get on, however long its sequence is
            part.end, cost = part.start + 1, len(work.sequences[part.start])
        room -= cost
        parts.append(part)
    for part in parts:
        if part.end < len(part.work.sequences):
            part.end, cost = part.work.reach(part.start, part.end, room)
            room -= cost
    return [part for part in parts if part.end > part.start]


class Scheduler:
    """Runs ``infer`` (sequences -> float32 scores, blocking) for the requests of many threads, one call at a time.

    max_rows: rows of a forward. capacity: places. after_failure: called once a forward has failed, or given a score that
    is not finite, before the next one; requests of other threads have been told by then.
    """

    def __init__(self, infer: Infer, max_rows: int, capacity: int, after_failure: Callable[[], None] = lambda: None):
        self.max_rows = max_rows
        self.capacity = capacity
        self._infer = infer
        self._after_failure = after_failure
        self._changed = threading.Condition()          # guards everything below
        self._waiting: deque[Work] = deque()
        self._running = False                          # a forward, or what follows one that failed ...
        self._since = 0.0                              # ... since this moment of time.monotonic()
        self._leader: Work | None = None               # was told to run the next one; first in line until it does
        self._places = 0
        self._draining = False
        self._closed = False

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def admitted(self) -> int:
        """Requests that hold a place."""
        return self._places

    @property
    def busy_seconds(self) -> float:
        """How long the forward that runs now has been running; 0 when none is."""
        return time.monotonic() - self._since if self._running else 0.0

    @contextmanager
    def admit(self, cancelled: Callable[[], bool] | None = None) -> Iterator[Place]:
        """A place for the duration of the block. Raises QueueFull or ShuttingDown."""
        with self._changed:
            if self._draining:
                raise ShuttingDown("the worker is shutting down", SHUTDOWN_RETRY_SECONDS)
            if self._places >= self.capacity:
                self._sweep()
            if self._places >= self.capacity:
                raise QueueFull(f"all {self.capacity} places are taken", FULL_RETRY_SECONDS)
            self._places += 1
        place = Place(cancelled)
        try:
            yield place
        finally:
            with self._changed:
                self._leave(place)

    def run(self, place: Place, sequences: Sequence[np.ndarray], rows: int) -> Result:
        """Score ``sequences`` (int32 [length] each, ``rows`` trie rows in all). Blocks; raises Cancelled,
        InferenceError, or ValueError for a sequence longer than a forward."""
        longest = max(map(len, sequences))
        if longest > self.max_rows:
            raise ValueError(f"a sequence of {longest} tokens does not fit in a forward of {self.max_rows} rows")
        work = Work(place, sequences, rows, row_costs(sequences), np.empty(len(sequences), np.float32))
        with self._changed:
            if self._closed:
                raise ShuttingDown("the worker has shut down", SHUTDOWN_RETRY_SECONDS)
            if place.gone():
                raise Cancelled
            self._waiting.append(work)
            self._appoint()
        try:
            while not work.ended:
                work.turn.wait()
                self._lead(work)
        except BaseException:                           # an interrupt, or after_failure's: nobody is behind this work now
            with self._changed:
                if work in self._waiting:
                    self._give_up(work, Cancelled())
                elif not work.ended:                    # a part of it is in another thread's forward
                    self._end(work, Cancelled())
            raise
        if work.error is not None:
            raise work.error
        return Result(work.scores, work.seconds, work.forwards)

    def drain(self) -> None:
        """Admit nothing more; what was admitted goes on."""
        with self._changed:
            self._draining = True

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Wait until nobody holds a place; False when ``timeout`` seconds were not enough."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._places, timeout)

    def close(self, timeout: float | None = None) -> None:
        """Drain, fail what still waits with ShuttingDown, and wait ``timeout`` seconds for a running forward's end."""
        with self._changed:
            self._draining = self._closed = True
            for work in list(self._waiting):
                self._give_up(work, ShuttingDown("the worker is shutting down", SHUTDOWN_RETRY_SECONDS))
            self._changed.wait_for(lambda: not self._running, timeout)

    # Called with the lock held -------------------------------------------------------------------------------------

    def _leave(self, place: Place) -> None:
        if place.taken:
            place.taken = False
            self._places -= 1
            self._changed.notify_all()

    def _appoint(self) -> None:
        """The first in line is to lead, unless a forward runs or somebody is about to run one."""
        if not self._running and self._leader is None and self._waiting:
            self._leader = self._waiting[0]
            self._leader.turn.set()

    def _give_up(self, work: Work, error: Exception) -> None:
        """End a work that waits."""
        self._waiting.remove(work)
        self._end(work, error)
        if work is self._leader:
            self._leader = None
            self._appoint()

    def _end(self, work: Work, error: Exception | None = None) -> None:
        work.error, work.ended = error, True
        work.turn.set()

    def _sweep(self) -> None:
        """Let go of waiting works whose client is gone."""
        for work in [work for work in self._waiting if work.place.gone()]:
            self._leave(work.place)
            self._give_up(work, Cancelled())

    # A request's thread --------------------------------------------------------------------------------------------

    def _lead(self, work: Work) -> None:
        """Run one forward, if it is ``work``'s turn to."""
        with self._changed:
            work.turn.clear()
            if not work.ended:
                self._sweep()
            if work.ended:
                return
            self._since = time.monotonic()
            self._leader, self._running = None, True
        parts: list[Part] = []
        try:
            with self._changed:
                parts = compose(self._waiting, self.max_rows)
                for part in parts:                      # until the forward is over they are in nobody's way
                    self._waiting.remove(part.work)
            self._forward(parts)
        finally:
            with self._changed:
                for part in parts:                      # whatever went wrong, nobody waits for ever
                    if not part.work.ended and part.work not in self._waiting:
                        self._end(part.work, InferenceError("model inference failed"))
                self._running = False
                self._appoint()
                self._changed.notify_all()

    def _forward(self, parts: list[Part]) -> None:
        started = time.perf_counter()
        failure, interrupted, scores, bad = None, False, None, 0
        try:
            sequences = [s for part in parts for s in part.work.sequences[part.start:part.end]]
            scores = self._infer(sequences)
            if len(scores) != len(sequences):
                raise RuntimeError(f"{len(scores)} scores for {len(sequences)} sequences")
        except BaseException as error:                  # whatever it is, requests wait and must be told
            failure = error
            # The main thread is interrupted by what a signal's handler raises: no fault of the forward.
            interrupted = not isinstance(error, Exception) and threading.current_thread() is threading.main_thread()
            if not interrupted:
                logger.error("a forward of %d sequences of %d requests failed: %s: %s",
                             sum(part.end - part.start for part in parts), len(parts), type(error).__name__, error,
                             exc_info=error)
        seconds = time.perf_counter() - started
        with self._changed:
            at = 0
            for part in parts:
                work, n = part.work, part.end - part.start
                if work.ended:                          # its thread was interrupted
                    at += n
                    continue
                if failure is not None:
                    self._end(work, InferenceError("model inference failed"))
                    continue
                work.scores[part.start:part.end] = scores[at:at + n]
                at += n
                work.seconds += seconds
                work.forwards += 1
                work.next = part.end
                if not np.isfinite(work.scores[part.start:part.end]).all():
                    bad += 1
                    self._end(work, InferenceError("model inference failed"))
                elif work.next == len(work.sequences):
                    self._end(work)
                elif self._closed:
                    self._end(work, ShuttingDown("the worker is shutting down", SHUTDOWN_RETRY_SECONDS))
                else:
                    self._waiting.append(work)
        if interrupted:
            raise failure
        if bad:
            logger.error("a forward gave scores that are not finite, to %d of %d requests", bad, len(parts))
        if failure is not None or bad:
            self._after_failure()
