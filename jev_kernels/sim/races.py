"""Races on shared and on device memory, found in the simulator by what happens before what.

The simulator runs one thread at a time, so a missing barrier may go unnoticed in every schedule that it tries. Here each
access is compared with earlier ones of the same bytes: two by different actors, one of them a write, must be ordered by
synchronization, or a GPU may do them in either order. Order is what PTX promises:

    barriers of a block or cluster (votes among them), named barriers, bar.warp.sync
                     everything before, of all members, comes before what follows in each
    mbarriers        an arrival releases what its thread has done and seen, bytes that complete release the copy alone; a
                     wait acquires what went into the phase that it waited for. Used only after their initialisation
    flags            words of device memory: a store or an addition with release semantics, a load with acquire semantics
    cp.async, bulk copies and boxes of TMA
                     write by themselves from their issue on: seen by who waits for them or for the mbarrier that they arrive
                     at. Boxes stored by TMA are read from their issue to the wait for their group
    wgmma            reads shared memory from its issue, which is the whole warp's, to the wait that covers it
    launches         what one has written is there for the next, or, under programmatic dependent launch, behind pdl_wait,
                     and for threads that are behind one of these (by a barrier, a flag, a copy that it has issued)
    proxies          what ordinary instructions and cp.async have written (the generic proxy) is there for bulk copies, TMA
                     and wgmma (the async proxy) when a proxy fence for that memory lies between, on either side

Shuffles, ballots and matrix instructions exchange registers and order nothing. Not followed: arrays indexed NumPy's way,
threads that have left, all but the last of several readers of device memory.

    simulator.RACES = True        # for the launches that follow; an access then takes some 20 us more

Source: Flanagan and Freund, FastTrack: Efficient and Precise Dynamic Race Detection, PLDI 2009 (the idea); PTX ISA, memory
consistency model.
"""
from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

CELL = 2                                     # bytes: accesses of the same cell are of the same place
IN_FLIGHT = np.uint16(0xFFFF)                # of a read by hardware: later than any release
SEEN, IN_SHARED, IN_GLOBAL = range(3)        # rows of a clock: by ordinary accesses; by the async proxy, in either memory


class Race(RuntimeError):
    """Two accesses of the same bytes that nothing orders."""


class Clock:
    """What an actor has seen: ``own`` [3, actors], up to which release of each actor of its cluster; ``others`` the same of
    other clusters; and of the launches before number ``launch`` everything."""

    __slots__ = ("cluster", "own", "others", "launch")

    def __init__(self, cluster: int, own: np.ndarray, launch: int):
        self.cluster, self.own, self.others, self.launch = cluster, own, {}, launch

    def copy(self) -> Clock:
        made = Clock(self.cluster, self.own.copy(), self.launch)
        made.others = dict(self.others)
        return made

    def join(self, other: Clock) -> None:
        """What the other has seen has been seen."""
        self.launch = max(self.launch, other.launch)
        for cluster, own in ((other.cluster, other.own), *other.others.items()):
            if cluster == self.cluster:
                np.maximum(self.own, own, out=self.own)
            else:
                mine = self.others.get(cluster)
                self.others[cluster] = own.copy() if mine is None else np.maximum(mine, own)

    def fence(self, memory: int) -> None:
        """What has been seen is there for the async proxy, too, in this memory (``IN_SHARED`` or ``IN_GLOBAL``)."""
        np.maximum(self.own[memory], self.own[SEEN], out=self.own[memory])
        for cluster, own in self.others.items():
            own = own.copy()
            np.maximum(own[memory], own[SEEN], out=own[memory])
            self.others[cluster] = own


class Races:
    """The accesses of one cluster's threads. Threads by number over its blocks, addresses in a block's shared window.

    Actor t is thread t, ``threads + t`` its asynchronous copies, ``2 threads + w`` the products of warp w. An actor counts
    its releases.
    """

    def __init__(self, threads: int, nbytes: int, blocks: int = 1, device: DeviceMemory | None = None):
        actors, self.block_cells = 2 * threads + -(-threads // 32), nbytes // CELL
        cells = self.block_cells * blocks
        self.threads, self.block_threads = threads, threads // blocks
        self.device = device or DeviceMemory()
        cluster = next(self.device.clusters)
        self.clock = [Clock(cluster, np.zeros((3, actors), np.uint16), self.device.known) for _ in range(actors)]
        for actor, clock in enumerate(self.clock):
            clock.own[SEEN, actor] = 1                              # an actor's own time starts at 1
        self.writer = np.full(cells, -1, np.int16)
        self.written = np.zeros(cells, np.uint16)                   # when, in the writer's time
        self.proxied = np.zeros(cells, bool)                        # whether by the async proxy
        self.readers = np.zeros(0, np.intp)                         # actors that have read ...
        self.columns: dict[int, int] = {}
        self.read = np.zeros((cells, 64), np.uint16)                # ... a column each: when they last did, in their time
        self.in_flight: dict[int, list[np.ndarray]] = {}

    def access(self, thread: int, address: int, nbytes: int, write: bool) -> None:
        """An ordinary access of the thread's own block. Raises Race unless what conflicts with it came before."""
        cells = self.cells(thread // self.block_threads, address, nbytes)
        clock = self.clock[thread]
        if write:
            self._write(thread, cells, clock, False)
            return
        self._after_writes(thread, cells, clock.own[[SEEN, SEEN]], "reads")
        column = self._column(thread)
        mine = self.read[cells, column]
        np.maximum(mine, clock.own[SEEN, thread], out=mine)

    def use_barrier(self, thread: int, address: int, block: int | None = None) -> None:
        """Raise Race unless the initialisation of an mbarrier came before. block: another's of the cluster."""
        cells = self.cells(thread // self.block_threads if block is None else block, address, 8)
        self._after_writes(thread, cells, self.clock[thread].own[[SEEN, SEEN]], "uses as an mbarrier")

    def cells(self, block: int, address: int, nbytes: int) -> slice:
        start = block * self.block_cells
        return slice(start + address // CELL, start - (-(address + nbytes) // CELL))

    # ---------------------------------------------------------------- asynchronous accesses
    def copy(self, thread: int, address: int, nbytes: int, proxied: bool = True, block: int | None = None) -> None:
        """A copy by hardware that this thread issues now. proxied: through the async proxy. block: into another's shared
        memory. Raises Race."""
        actor = self.threads + thread
        self.clock[actor].join(self.clock[thread])
        block = thread // self.block_threads if block is None else block
        self._write(actor, self.cells(block, address, nbytes), self.clock[actor], proxied)

    def copied(self, thread: int, proxied: bool = True) -> Clock:
        """A clock with this thread's copies so far, and nothing else: for who waits for them."""
        actor = self.threads + thread
        clock = self.clock[actor]
        out = Clock(clock.cluster, np.zeros_like(clock.own), clock.launch)      # launches that have ended have for all
        out.own[:3 if proxied else 1, actor] = clock.own[SEEN, actor]
        self._tick(actor)
        return out

    def products(self, warp: int) -> int:
        """The actor that a warp's wgmma are."""
        return 2 * self.threads + warp

    def begin_reads(self, actor: int, threads: list[int], cells: np.ndarray, does: str = "has wgmma read") -> None:
        """A group of reads of these cells by hardware begins, issued by these threads together. Raises Race."""
        seen = np.minimum.reduce([self.clock[t].own for t in threads])
        self._after_writes(threads[0], cells, seen[[SEEN, IN_SHARED]], does)
        self.in_flight.setdefault(actor, []).append(cells)
        column = self._column(actor)
        self.read[cells, column] = IN_FLIGHT

    def end_reads(self, actor: int, threads: list[int], left: int) -> None:
        """All but the ``left`` latest groups have read, and these threads know."""
        groups, column, now = self.in_flight.get(actor, []), self._column(actor), self.clock[actor].own[SEEN, actor]
        while len(groups) > left:
            self.read[groups.pop(0), column] = now
        for cells in groups:
            self.read[cells, column] = IN_FLIGHT
        for thread in threads:
            self.clock[thread].own[:, actor] = now
        self._tick(actor)

    # ---------------------------------------------------------------- order
    def release(self, thread: int) -> Clock:
        """A clock with what this thread has done and seen."""
        out = self.clock[thread].copy()
        self._tick(thread)
        return out

    def acquire(self, actor: int, clock: Clock | None) -> None:
        """What is in the clock comes before what this actor does next."""
        if clock is not None:
            self.clock[actor].join(clock)

    def fence(self, thread: int, memory: int) -> None:
        """A proxy fence: what the thread has done and seen is there for the async proxy in this memory."""
        self.clock[thread].fence(memory)
        self._tick(thread)

    def meet(self, threads: list[int]) -> None:
        """A barrier of these threads."""
        clocks = [self.clock[thread] for thread in threads]
        together = clocks[0].copy()
        together.own = np.maximum.reduce([clock.own for clock in clocks])
        for clock in clocks[1:]:
            if clock.others or clock.launch != together.launch:
                together.join(clock)
        for thread, clock in zip(threads, clocks):
            clock.own[:], clock.others, clock.launch = together.own, dict(together.others), together.launch
            self._tick(thread)

    # ---------------------------------------------------------------- device memory
    def access_device(self, thread: int, memory: tuple[int, int], address: int, nbytes: int, write: bool,
                      copy: bool = False) -> None:
        """An access of device memory, by the thread or by a copy that it issues. memory: the array's first and last byte.
        Raises Race."""
        actor = self.threads + thread if copy else thread
        if copy:
            self.clock[actor].join(self.clock[thread])
        clock = self.clock[actor]
        self.device.access(clock, Access(self.device.launch, clock.cluster, actor, int(clock.own[SEEN, actor]), copy),
                           memory, address, nbytes, write, self._name(actor))

    def raise_flag(self, thread: int, address: int) -> None:
        """A store or an addition with release semantics."""
        self.device.raise_flag(address, self.release(thread))

    def see_flag(self, thread: int, address: int) -> None:
        """A load with acquire semantics."""
        self.acquire(thread, self.device.flags.get(address))

    # ---------------------------------------------------------------- what it rests on
    def _column(self, actor: int) -> int:
        if actor not in self.columns:
            self.columns[actor] = len(self.readers)
            self.readers = np.append(self.readers, actor)
            if len(self.readers) > self.read.shape[1]:
                self.read = np.concatenate([self.read, np.zeros_like(self.read)], 1)
        return self.columns[actor]

    def _tick(self, actor):
        self.clock[actor].own[SEEN, actor] += 1
        if self.clock[actor].own[SEEN, actor] == IN_FLIGHT:
            raise OverflowError("more releases than the race detector counts")

    def _after_writes(self, actor, cells, seen, does):
        """seen: [2, actors], what of the async proxy's writes and of others' this access may rely on."""
        writers = self.writer[cells]
        early = (writers >= 0) & (self.written[cells] > np.where(self.proxied[cells], seen[0, writers], seen[1, writers]))
        if early.any():
            writer = writers[early.argmax()]
            fenced = self.written[cells][early.argmax()] <= seen[0, writer]
            raise Race(f"{self._name(actor)} {does} shared memory that {self._name(writer)} "
                       + ("has written without a proxy fence since" if fenced else "may be writing"))

    def _write(self, actor, cells, clock, proxied):
        self._after_writes(actor, cells, clock.own[[SEEN, IN_SHARED if proxied else SEEN]], "writes")
        readers = self.readers
        early = self.read[cells, :len(readers)] > clock.own[SEEN, readers]
        if early.any():
            at, other = np.argwhere(early)[0]
            raise Race(f"{self._name(actor)} writes shared memory at {CELL * (cells.start + at)} while "
                       f"{self._name(readers[other])} may read it")
        self.writer[cells], self.written[cells], self.proxied[cells] = actor, clock.own[SEEN, actor], proxied
        self.read[cells, :len(readers)] = 0

    def _name(self, actor):
        if actor < self.threads:
            return f"thread {actor}"
        return f"a copy of thread {actor - self.threads}" if actor < 2 * self.threads else (
            f"a product of warp {actor - 2 * self.threads}")


class Access(NamedTuple):
    """Who has accessed device memory, and when in its time."""
    launch: int
    cluster: int
    actor: int
    time: int
    proxied: bool


class DeviceMemory:
    """Accesses of device memory and flags there, over the clusters of a launch and over launches that overlap."""

    def __init__(self):
        self.launch, self.known, self.trigger = 0, 0, 0
        self.clusters = itertools.count()
        self.flags: dict[int, Clock] = {}
        self.accesses, self.numbers = [None], {}                    # an access's number is its place
        self.memory: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}     # numbers of the last write and read

    def begin(self, early: bool) -> None:
        """A launch. early: with programmatic dependent launch, as soon as the launch before allows."""
        self.launch += 1
        self.known = self.trigger if early else self.launch         # launches before this one are seen by its threads
        self.trigger = self.launch + 1                              # ... and by those of the next, if that is early
        if not early:                                               # all that was is over
            self.flags.clear()
            self.memory.clear()
            self.accesses, self.numbers = [None], {}

    def access(self, clock: Clock, access: Access, memory, address, nbytes, write, name) -> None:
        if memory not in self.memory:
            cells = (memory[1] - memory[0]) // CELL + 1
            self.memory[memory] = np.zeros(cells, np.int32), np.zeros(cells, np.int32)
        cells = slice((address - memory[0]) // CELL, -(-(address + nbytes - memory[0]) // CELL))
        written, read = self.memory[memory]
        for numbers, does in ((written[cells], "writes"), (read[cells], "reads"))[:1 + write]:
            for number in set(numbers.tolist()):
                other = self.accesses[number]
                if other is not None and not self._seen(clock, other, access.proxied and does == "writes"):
                    earlier = "" if other.launch == self.launch else ", an earlier launch"
                    raise Race(f"{name} {'writes' if write else 'reads'} device memory at {address:#x} that actor {other.actor} of "
                               f"cluster {other.cluster} {does}{earlier}")
        number = self.numbers.get(access)
        if number is None:
            number = self.numbers[access] = len(self.accesses)
            self.accesses.append(access)
        (written if write else read)[cells] = number

    @staticmethod
    def _seen(clock: Clock, other: Access, by_proxy: bool) -> bool:
        if other.launch < clock.launch:
            return True
        own = clock.own if other.cluster == clock.cluster else clock.others.get(other.cluster)
        row = IN_GLOBAL if by_proxy and not other.proxied else SEEN
        return own is not None and other.time <= own[row, other.actor]

    def raise_flag(self, address: int, clock: Clock) -> None:
        before = self.flags.get(address)
        if before is None:
            self.flags[address] = clock
        else:
            before.join(clock)


def joined(a: Clock | None, b: Clock) -> Clock:
    """The clock with what is in either; ``a`` is used up."""
    if a is None:
        return b
    a.join(b)
    return a
