"""Races on shared memory, found in the simulator by what happens before what.

The simulator runs one thread at a time, so a missing barrier may go unnoticed in every schedule that it tries. Here each
access is compared with earlier ones of the same bytes: two of different threads, one of them a write, must be ordered by
synchronization, or a GPU may do them in either order. Order is what PTX promises:

    barriers of a block (votes among them), named barriers, bar.warp.sync
                     everything before, of all members, comes before what follows in each
    mbarriers        an arrival releases what its thread has done and seen, bytes that complete release the copy alone; a
                     wait acquires what went into the phase that it waited for. Used only after their initialisation
    cp.async, bulk copies and boxes of TMA
                     write by themselves from their issue on: seen by who waits for them or for the mbarrier that they arrive at
    wgmma            reads shared memory from its issue to the wait that covers it. In the delta rule each thread's own wait
                     counts; in attention a warp's first lane stands for it (both instructions are the whole warp's)

Shuffles, ballots and matrix instructions exchange registers and order nothing. Not followed: proxy fences, device memory,
clusters, NumPy-style shared arrays (``cuda.shared.array`` indexed), threads that have left.

    simulator.RACES = True        # for the launches that follow; an access then takes some 10 us more

Source: Flanagan and Freund, FastTrack: Efficient and Precise Dynamic Race Detection, PLDI 2009 (the idea).
"""
from __future__ import annotations

import numpy as np

CELL = 2                                     # bytes that are told apart
IN_FLIGHT = np.uint16(0xFFFF)                # of a read by wgmma: later than any release


class Race(RuntimeError):
    """Two accesses of shared memory that nothing orders."""


class Races:
    """The accesses of one block's threads. Threads by number, addresses in the shared window.

    Actor t is thread t, actor ``threads + t`` its asynchronous copies. An actor counts its releases; the vector clock
    ``clock[a, other]`` says up to which release of the others actor a has seen their doings.
    """

    def __init__(self, threads: int, nbytes: int):
        cells = nbytes // CELL
        self.threads = threads
        self.clock = np.eye(2 * threads, dtype=np.uint16)           # an actor's own time starts at 1
        self.writer = np.full(cells, -1, np.int16)
        self.written = np.zeros(cells, np.uint16)                   # when, in the writer's time
        self.read = np.zeros((threads, cells), np.uint16)           # when each thread last did, in its time
        self.in_flight: list[list[np.ndarray]] = [[] for _ in range(threads)]

    def access(self, thread: int, address: int, nbytes: int, write: bool) -> None:
        """An ordinary access. Raises Race unless what conflicts with it came before."""
        cells = _cells(address, nbytes)
        if write:
            self._write(thread, cells)
            return
        self._after_writes(thread, cells, "reads")
        mine = self.read[thread, cells]
        np.maximum(mine, self.clock[thread, thread], out=mine)      # one of wgmma may be in flight there

    def use_barrier(self, thread: int, address: int) -> None:
        """Raise Race unless the initialisation of an mbarrier came before."""
        self._after_writes(thread, _cells(address, 8), "uses as an mbarrier")

    # ---------------------------------------------------------------- asynchronous accesses
    def copy(self, thread: int, address: int, nbytes: int) -> None:
        """A copy by hardware that this thread issues now. Raises Race."""
        actor = self.threads + thread
        self.acquire(actor, self.clock[thread])
        self._write(actor, _cells(address, nbytes))

    def copied(self, thread: int) -> np.ndarray:
        """A clock with this thread's copies so far, and nothing else: for who waits for them."""
        actor, out = self.threads + thread, np.zeros(2 * self.threads, np.uint16)
        out[actor] = self.clock[actor, actor]
        self._tick(actor)
        return out

    def begin_reads(self, thread: int, cells: np.ndarray) -> None:
        """A group of asynchronous reads of these cells begins. Raises Race."""
        self._after_writes(thread, cells, "has wgmma read")
        self.in_flight[thread].append(cells)
        self.read[thread, cells] = IN_FLIGHT

    def end_reads(self, thread: int, left: int) -> None:
        """All but the ``left`` latest groups have read."""
        groups = self.in_flight[thread]
        while len(groups) > left:
            self.read[thread, groups.pop(0)] = self.clock[thread, thread]
        for cells in groups:
            self.read[thread, cells] = IN_FLIGHT

    # ---------------------------------------------------------------- order
    def release(self, thread: int) -> np.ndarray:
        """A clock with what this thread has done and seen."""
        out = self.clock[thread].copy()
        self._tick(thread)
        return out

    def acquire(self, actor: int, clock: np.ndarray | None) -> None:
        """What is in the clock comes before what this actor does next."""
        if clock is not None:
            np.maximum(self.clock[actor], clock, out=self.clock[actor])

    def meet(self, threads: list[int]) -> None:
        """A barrier of these threads."""
        clock = np.maximum.reduce([self.release(thread) for thread in threads])
        for thread in threads:
            self.acquire(thread, clock)

    def _tick(self, actor):
        self.clock[actor, actor] += 1
        if self.clock[actor, actor] == IN_FLIGHT:
            raise OverflowError("more releases than the race detector counts")

    def _after_writes(self, actor, cells, does):
        writers = self.writer[cells]
        early = (writers >= 0) & (self.written[cells] > self.clock[actor, writers])
        if early.any():
            raise Race(f"{self._name(actor)} {does} shared memory that {self._name(writers[early.argmax()])} may be writing")

    def _write(self, actor, cells):
        self._after_writes(actor, cells, "writes")
        early = self.read[:, cells] > self.clock[actor, :self.threads, None]
        if early.any():
            other, at = np.argwhere(early)[0]
            raise Race(f"{self._name(actor)} writes shared memory at {CELL * (cells.start + at)} while {self._name(other)} may "
                       "read it")
        self.writer[cells], self.written[cells] = actor, self.clock[actor, actor]
        self.read[:, cells] = 0

    def _name(self, actor):
        return f"thread {actor}" if actor < self.threads else f"a copy of thread {actor - self.threads}"


def joined(a: np.ndarray | None, b: np.ndarray) -> np.ndarray:
    """The clock with what is in either."""
    return b if a is None else np.maximum(a, b)


def _cells(address: int, nbytes: int) -> slice:
    return slice(address // CELL, -(-(address + nbytes) // CELL))
