"""mbarriers in plain Python, for the simulator: they count arrivals and bytes, and carry the race detector's clocks."""
from __future__ import annotations

import threading

from jev_kernels.sim.races import joined
from jev_kernels.sim.simulator import WRITES, shared_bytes, split_shared


class Barrier:
    """An mbarrier for ``count`` arrivals a phase."""

    def __init__(self, count):
        self.count = self.pending = count
        self.bytes = self.phase = 0
        self.released = self.complete = None                     # clocks of the race detector: this phase's, the last one's

    def update(self, arrivals, nbytes, clock):
        """clock: what arrives with it, for the race detector; None where there is none."""
        if clock is not None:
            self.released = joined(self.released, clock)
        self.pending -= arrivals
        self.bytes += nbytes
        if self.pending < 0:
            raise RuntimeError("more arrivals at an mbarrier than it was made for")
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count
            self.released, self.complete = None, self.released


def barrier_at(address) -> Barrier:
    """The mbarrier at a shared address, of any block of the cluster."""
    me, (rank, at) = threading.current_thread(), split_shared(address)
    block = me.block.cluster.blocks[rank]
    if not block.live:
        raise RuntimeError(f"an mbarrier of block {rank} of the cluster is used when the block has left")
    if at not in block.barriers:
        raise RuntimeError(f"mbarrier at {at} was not initialised")
    if me.block.races:
        me.block.races.use_barrier(me.number, at, rank)
    return block.barriers[at]


def arrive(barrier, nbytes=0):
    """This thread's arrival, which announces so many bytes."""
    me = threading.current_thread()
    barrier_at(barrier).update(1, int(nbytes), me.block.races and me.block.races.release(me.number))


def complete_bytes(barrier, nbytes):
    """A copy that this thread has issued is complete."""
    me = threading.current_thread()
    barrier_at(barrier).update(0, -int(nbytes), me.block.races and me.block.races.copied(me.number))


def mbar_init(barrier, count):
    shared_bytes(barrier, 8, use=WRITES)
    threading.current_thread().block.barriers[split_shared(barrier)[1]] = Barrier(int(count))


def mbar_wait(barrier, parity):
    """Wait until the phase of this parity is complete."""
    b, me = barrier_at(barrier), threading.current_thread()
    clock = None

    def complete():
        nonlocal clock
        clock = b.complete                      # of this phase: when the thread runs again, the next may be over, too
        return b.phase % 2 != int(parity) % 2
    me.block.wait(me, complete, f"mbarrier at {int(barrier)}, parity {int(parity)}")
    if me.block.races:
        me.block.races.acquire(me.number, clock)
