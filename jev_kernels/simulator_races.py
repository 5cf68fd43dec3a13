"""Races on shared memory, found in the simulator by what happens before what.

The simulator runs one thread at a time, so a missing barrier may go unnoticed in every schedule that it tries. Here each
access is compared with earlier ones of the same bytes: two of different threads, one of them a write, must be ordered by
synchronization, or a GPU may do them in either order. Order is what PTX promises, no more:

    barriers of a block, named barriers, bar.warp.sync     everything before, of all members, comes before what follows
    mbarriers        an arrival (or bytes that complete) releases; a wait acquires what that phase's arrivals released
    cp.async         writes from its issue to the wait or arrival that guarantees it
    wgmma            reads shared memory from its issue to the wait that covers it

Shuffles, votes and matrix instructions exchange registers and order nothing. What is seen: accesses by address
(``jev_kernels.ptx``) and wgmma's operands; NumPy-style shared arrays are not. Thread t counts its releases; a vector clock
[t, other] says up to which release of the others t has seen their doings.

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
    """The accesses of one block's threads. Threads by number, addresses in the shared window."""

    def __init__(self, threads: int, nbytes: int):
        cells = nbytes // CELL
        self.clock = np.eye(threads, dtype=np.uint16)               # [t, other]; a thread's own time starts at 1
        self.writer = np.full(cells, -1, np.int16)
        self.written = np.zeros(cells, np.uint16)                   # when, in the writer's time
        self.read = np.zeros((threads, cells), np.uint16)           # when each thread last did, in its time
        self.in_flight: list[list[np.ndarray]] = [[] for _ in range(threads)]

    def access(self, thread: int, address: int, nbytes: int, write: bool) -> None:
        """Raise Race unless what conflicts with this access came before it."""
        cells = slice(address // CELL, -(-(address + nbytes) // CELL))
        seen = self.clock[thread]
        self._after_writes(thread, seen, cells, "writes" if write else "reads")
        if not write:
            self.read[thread, cells] = seen[thread]
            return
        early = self.read[:, cells] > seen[:, None]
        if early.any():
            other, at = np.argwhere(early)[0]
            raise Race(f"thread {thread} writes shared memory at {CELL * (cells.start + at)} while thread {other} may read it")
        self.writer[cells], self.written[cells] = thread, seen[thread]
        self.read[:, cells] = 0

    def _after_writes(self, thread, seen, cells, does):
        writers = self.writer[cells]
        early = (writers >= 0) & (self.written[cells] > seen[writers])
        if early.any():
            other = writers[early.argmax()]
            raise Race(f"thread {thread} {does} shared memory that thread {other} may be writing")

    def begin_reads(self, thread: int, cells: np.ndarray) -> None:
        """A group of asynchronous reads of these cells begins."""
        self._after_writes(thread, self.clock[thread], cells, "has wgmma read")
        self.in_flight[thread].append(cells)
        self.read[thread, cells] = IN_FLIGHT

    def end_reads(self, thread: int, left: int) -> None:
        """All but the ``left`` latest groups have read."""
        groups = self.in_flight[thread]
        while len(groups) > left:
            self.read[thread, groups.pop(0)] = self.clock[thread, thread]
        for cells in groups:
            self.read[thread, cells] = IN_FLIGHT

    def release(self, thread: int, into: np.ndarray | None) -> np.ndarray:
        """What this thread has done and seen goes into a barrier's clock, made if there is none; then its time goes on."""
        mine = self.clock[thread]
        into = mine.copy() if into is None else np.maximum(into, mine)
        mine[thread] += 1
        if mine[thread] == IN_FLIGHT:
            raise OverflowError("more releases than the race detector counts")
        return into

    def acquire(self, thread: int, clock: np.ndarray | None) -> None:
        """What went into the clock comes before what this thread does next."""
        if clock is not None:
            np.maximum(self.clock[thread], clock, out=self.clock[thread])

    def meet(self, threads: list[int]) -> None:
        """A barrier of these threads."""
        clock = None
        for thread in threads:
            clock = self.release(thread, clock)
        for thread in threads:
            self.acquire(thread, clock)
