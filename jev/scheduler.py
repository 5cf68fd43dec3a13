"""Who is computed when: bounded admission, forwards shared between requests, fairness, and an orderly end.

A request takes a *place* (``admit``) before anything costly is done for it and keeps it until it is answered or gone.
Its token sequences then wait as one piece of *work*. Places are limited, and so is the memory that all of them hold
together, counted when a place is taken and again when its work is known. One forward runs at a time, composed of all
waiting work:

  - a forward holds at most ``max_rows`` token rows, counted as if requests shared none (an upper bound);
  - the first in line takes at least one sequence, and everyone takes what fits in an equal share of the rows; rows left
    over go to whoever is first in line. Work that is not finished goes to the end of the line. So a request larger
    than a forward is split, advances, and delays a small one by a forward or so, never by its whole length. It is cut
    in lexicographic order, in which what shares a prefix stands together;
  - rows are those that will be computed: a prefix that is kept from earlier requests, and that all sequences of a work
    share, does not count. It is looked up anew for every forward, and may be gone a moment later: then the backend splits
    what does not fit. Requests that wait together and begin alike need not wait for each other to find the beginning
    kept: one forward computes it once for all of them (``jev.model.row_pool``), sooner than a second forward could resume
    it;
  - scores land at their sequence's index: order inside a request never changes, and neither does a bit (a score does
    not depend on the company of its rows).

A forward that fails fails the requests in it, all of them and nobody else. They are not tried again one by one: what
ran out of memory together might pass alone, but a client that is told of a failure can decide that for itself,
whereas a hidden second run doubles the load just when the device is in trouble.

A score that is not finite fails only the request that it belongs to. A NaN in the rows of one request can spread to
another's in the same forward (behind a mask it is multiplied by 0, which leaves a NaN), and the score does not tell
whose it was. So a request with such a score is computed once more, alone; if the score still is not finite, it is its
own, and the request fails.

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
from typing import Any, NamedTuple

import numpy as np

from jev.errors import JevError
from jev.model.sequences import Sequences

logger = logging.getLogger("jev.scheduler")


class Inferred(NamedTuple):
    """scores: float32 [n] in the order given. resumed: intp [n], in lexicographic order, tokens that were not computed."""
    scores: np.ndarray
    resumed: np.ndarray


Infer = Callable[[Sequences], Inferred]

FULL_RETRY_SECONDS = 1
SHUTDOWN_RETRY_SECONDS = 5
MIB = 1 << 20


class Refused(Exception):
    """No place for this request now; ``retry_after`` is in seconds."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFull(Refused):
    """Every place is taken, or the memory for all of them together."""


class RequestTooLarge(Exception):
    """This request alone needs more memory than all that wait may hold."""


class ShuttingDown(Refused):
    """The worker finishes what it has and takes nothing more."""


class Cancelled(Exception):
    """The client is gone; nobody waits for the answer."""


class InferenceError(JevError, RuntimeError):
    """The forward pass of this request failed or gave a score that is not finite. The cause is in the log."""


@dataclass(eq=False)
class Place:
    """A request's seat in the worker, from admission to answer. nbytes: memory that it is counted with."""

    cancelled: Callable[[], bool] | None
    nbytes: int = 0
    taken: bool = True

    def gone(self) -> bool:
        return self.cancelled is not None and self.cancelled()


@dataclass(eq=False)
class Work:
    """The sequences of one admitted request, and the scores of those before ``next`` in lexicographic order.

    scores: float32 [n] in the order the sequences were given. alone: a score was not finite, and the next forward is for
    this work only. cached: rows that were not computed. resumable: tells how many tokens of a sequence would not be now.
    """

    place: Place
    sequences: Sequences
    scores: np.ndarray
    next: int = 0
    alone: bool = False
    seconds: float = 0.0
    forwards: int = 0
    cached: int = 0
    resumable: Callable[[np.ndarray], int] = lambda ids: 0
    error: Exception | None = None
    ended: bool = False
    turn: threading.Event = field(default_factory=threading.Event)      # it has ended, or it is to lead

    def _resumed_by_all(self) -> int:
        """Rows that no sequence needs, because a prefix that all of them share is kept."""
        if self.next:
            return 0
        tokens = self.resumable(self.sequences.at_rank(0))
        return tokens if tokens and (len(self.sequences) == 1 or tokens <= self.sequences.shared[1:].min()) else 0

    def reach(self, start: int, end: int, rows: int) -> tuple[int, int]:
        """How far a forward that has taken ``start..end`` gets with ``rows`` more: (new end, rows it costs)."""
        if start == end:
            whole = max(self.sequences.rows - self._resumed_by_all(), len(self.sequences))
            if start == 0 and whole <= rows:
                return len(self.sequences), whole
            first = self.sequences.lengths[start]
            if first > rows:
                return end, 0
        bounds = self.sequences.bounds
        # Less the rows of what precedes, which this forward does not hold.
        base = bounds[start + 1] - first if start == end else bounds[end]
        new = int(np.searchsorted(bounds, base + rows, side="right")) - 1
        return new, int(bounds[new] - base)


@dataclass(frozen=True)
class Result:
    """scores: float32, one for each sequence in order; seconds: wall time of the forwards that computed them.
    cached: token rows that were not computed, being kept from earlier forwards."""

    scores: np.ndarray
    seconds: float
    forwards: int
    cached: int = 0


@dataclass
class Part:
    """Sequences ``start..end`` of a work, in lexicographic order, in one forward."""

    work: Work
    start: int
    end: int


def compose(waiting: Sequence[Work], max_rows: int) -> list[Part]:
    """The next forward: parts of the waiting works, first in line first, of at most ``max_rows`` rows together.

    One that is to be computed alone is, when it is first in line; until then nobody else is in front of it.
    """
    room = max_rows
    if waiting[0].alone:
        waiting = [waiting[0]]
    first = waiting[0]
    if len(waiting) == 1 and not first.next and first.sequences.bounds[-1] <= max_rows:    # the GPU waits: no look-ups
        return [Part(first, 0, len(first.sequences))]
    share = max(1, max_rows // len(waiting))
    parts: list[Part] = []
    for work in waiting:
        part = Part(work, work.next, work.next)
        part.end, cost = work.reach(part.start, part.end, min(share, room))
        if not parts and part.end == part.start:      # the first in line must get on, however long its sequence is
            resumed = work.resumable(work.sequences.at_rank(part.start))
            part.end, cost = part.start + 1, int(work.sequences.lengths[part.start]) - resumed
        room -= cost
        parts.append(part)
    for part in parts:
        if part.end < len(part.work.sequences):
            part.end, cost = part.work.reach(part.start, part.end, room)
            room -= cost
    return [part for part in parts if part.end > part.start]


def _distinct(sequences: Sequences, part: Part, resumed: np.ndarray) -> int:
    """Of ``resumed`` tokens of a part's sequences, in lexicographic order, those that no sequence before has: rows, each
    counted once, and none that an earlier part of the work has computed."""
    return int(np.maximum(resumed - sequences.shared[part.start:part.end], 0).sum())


class Scheduler:
    """Runs ``infer`` (sequences -> float32 scores, blocking) for the requests of many threads, one call at a time.

    max_rows: rows of a forward. capacity: places. after_failure: called once a forward has failed, or given a request
    that was alone in it a score that is not finite, before the next one; requests of other threads have been told by
    then. max_bytes: memory that all places together may hold.
    """

    def __init__(self, infer: Infer, max_rows: int, capacity: int, after_failure: Callable[[], None] = lambda: None,
                 max_bytes: int = 1 << 30, resumable: Callable[[np.ndarray], int] = lambda ids: 0):
        self.max_rows = max_rows
        self.capacity = capacity
        self.max_bytes = max_bytes
        self._infer = infer
        self._resumable = resumable
        self._after_failure = after_failure
        self._changed = threading.Condition()          # guards everything below
        self._waiting: deque[Work] = deque()
        self._running = False                          # a forward, or what follows one that failed ...
        self._since = 0.0                              # ... since this moment of time.monotonic()
        self._leader: Work | None = None               # was told to run the next one; first in line until it does
        self._places = 0
        self._nbytes = 0                               # what all places hold
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

    @property
    def nbytes(self) -> int:
        """Memory that all places hold."""
        return self._nbytes

    @contextmanager
    def admit(self, cancelled: Callable[[], bool] | None = None, nbytes: int = 0) -> Iterator[Place]:
        """A place for the duration of the block, with ``nbytes`` of memory. Raises QueueFull, RequestTooLarge or
        ShuttingDown."""
        with self._changed:
            if self._draining:
                raise ShuttingDown("the worker is shutting down", SHUTDOWN_RETRY_SECONDS)
            if self._places >= self.capacity:
                self._sweep()
            if self._places >= self.capacity:
                raise QueueFull(f"all {self.capacity} places are taken", FULL_RETRY_SECONDS)
            place = Place(cancelled)
            self._hold(place, nbytes)
            self._places += 1
        try:
            yield place
        finally:
            with self._changed:
                self._leave(place)

    def run(self, place: Place, sequences: Sequences, nbytes: int = 0) -> Result:
        """Score ``sequences``, whose request holds ``nbytes`` of memory besides them. Blocks; raises Cancelled,
        InferenceError, QueueFull or RequestTooLarge for its memory, or ValueError for a sequence longer than a forward."""
        if sequences.longest > self.max_rows:
            raise ValueError(f"a sequence of {sequences.longest} tokens does not fit in a forward of {self.max_rows} rows")
        work = Work(place, sequences, np.empty(len(sequences), np.float32), resumable=self._resumable)
        with self._changed:
            if self._closed:
                raise ShuttingDown("the worker has shut down", SHUTDOWN_RETRY_SECONDS)
            if place.gone():
                raise Cancelled
            self._hold(place, sequences.nbytes + work.scores.nbytes + nbytes)
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
        return Result(work.scores, work.seconds, work.forwards, work.cached)

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
            self._nbytes -= place.nbytes
            self._changed.notify_all()

    def _hold(self, place: Place, nbytes: int) -> None:
        """Count ``place`` with ``nbytes`` from now on. Raises QueueFull or RequestTooLarge, and then nothing changes."""
        if nbytes > self.max_bytes:
            raise RequestTooLarge(f"the request needs {nbytes / MIB:.1f} MiB of memory while it waits; all that wait may hold "
                                  f"{self.max_bytes / MIB:.1f} MiB")
        if self._nbytes - place.nbytes + nbytes > self.max_bytes:
            self._sweep()
        if (others := self._nbytes - place.nbytes) + nbytes > self.max_bytes:
            raise QueueFull(f"the requests that wait hold {others / MIB:.1f} of {self.max_bytes / MIB:.1f} MiB; this one needs "
                            f"{nbytes / MIB:.1f} MiB", FULL_RETRY_SECONDS)
        self._nbytes += nbytes - place.nbytes
        place.nbytes = nbytes

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
        failure: BaseException | None = None
        scores: Any = None                              # float32, one for each sequence
        resumed: Any = None                             # intp, one for each sequence in the order given
        interrupted, bad = False, 0
        try:
            sequences = Sequences.join([part.work.sequences.part(part.start, part.end) for part in parts])
            scores, found = self._infer(sequences)
            resumed = np.empty(len(sequences), np.intp)
            resumed[sequences.order] = found
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
            at, again = 0, []
            for part in parts:
                work, n = part.work, part.end - part.start
                if work.ended:                          # its thread was interrupted
                    at += n
                    continue
                if failure is not None:
                    self._end(work, InferenceError("model inference failed"))
                    continue
                found, places = scores[at:at + n], slice(at, at + n)
                at += n
                work.seconds += seconds
                work.forwards += 1
                finite = bool(np.isfinite(found).all())
                if not finite and len(parts) > 1 and not self._closed:
                    work.alone = True
                    again.append(work)
                    continue
                work.scores[work.sequences.order[part.start:part.end]] = found
                work.cached += _distinct(work.sequences, part, resumed[places])
                work.next, work.alone = part.end, False
                if not finite:
                    bad += 1
                    self._end(work, InferenceError("model inference failed"))
                elif work.next == len(work.sequences):
                    self._end(work)
                elif self._closed:
                    self._end(work, ShuttingDown("the worker is shutting down", SHUTDOWN_RETRY_SECONDS))
                else:
                    self._waiting.append(work)
            self._waiting.extendleft(reversed(again))
        if again:
            logger.warning("a forward of %d requests gave %d of them scores that are not finite; each is computed once more "
                           "alone", len(parts), len(again))
        if interrupted and failure is not None:
            raise failure
        if bad:
            logger.error("a forward gave scores that are not finite, to %d of %d requests", bad, len(parts))
        if failure is not None or bad:
            self._after_failure()
