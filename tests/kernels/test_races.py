"""The simulator's race detector on small kernels with and without what orders them, and kernels that it finds in order."""
from __future__ import annotations

import numpy as np
import pytest
from numba import cuda, types

from jev_kernels import ptx
from jev_kernels.attention import hopper as hopper_attention
from jev_kernels.gdn import scan as hopper_gdn_scan
from jev_kernels.ptx import u64
from jev_kernels.runtime.launch import Kernel
from jev_kernels.sim import simulator
from jev_kernels.sim.races import Race, Races
from tests.kernels import test_attention, test_gdn


@pytest.fixture(autouse=True)
def detector(monkeypatch):
    monkeypatch.setattr(simulator, "RACES", True)


def found(function, threads=64, smem=4096) -> bool:
    """Whether a kernel without parameters has a race."""
    try:
        Kernel(function, types.void(u64), threads, smem)(0, 1, np.zeros(64, np.float32).ctypes.data)
    except Race:
        return True
    return False


def base():
    return ptx.smem_addr(cuda.shared.array(0, types.uint8))


def with_barriers(*arrivals):
    """Start of a kernel: (shared address, thread, addresses of mbarriers for so many arrivals, initialised)."""
    at, tid = base(), cuda.threadIdx.x
    barriers = [at + 2048 + 8 * n for n in range(len(arrivals))]
    if tid == 0:
        for barrier, count in zip(barriers, arrivals):
            ptx.mbar_init(barrier, count)
    cuda.syncthreads()
    return at, tid, *barriers


@pytest.mark.parametrize("ordered", [True, False])
def test_block_barrier(ordered, schedule):
    def kernel(_):
        at, tid = base(), cuda.threadIdx.x
        ptx.sts(at + 4 * tid, np.float32(tid))
        if ordered:
            cuda.syncthreads()
        ptx.lds(at + 4 * (63 - tid))
    assert found(kernel) != ordered


@pytest.mark.parametrize("ordered", [True, False])
def test_written_again(ordered, schedule):
    def kernel(_):
        at, tid = base(), cuda.threadIdx.x
        ptx.sts(at + 4 * tid, np.float32(tid))
        cuda.syncthreads()
        ptx.lds(at + 4 * (63 - tid))
        if ordered:
            ptx.named_sync(1, 64)
        ptx.sts(at + 4 * tid, np.float32(0))
    assert found(kernel) != ordered


@pytest.mark.parametrize("by", ["syncwarp", "shuffle"])
def test_a_shuffle_orders_nothing(by, schedule):
    def kernel(_):
        at, tid = base(), cuda.threadIdx.x
        ptx.sts(at + 4 * tid, np.float32(tid))
        if by == "syncwarp":
            cuda.syncwarp()
        else:
            ptx.shfl_xor(np.float32(0), 1)
        ptx.lds(at + 4 * (31 - tid))
    assert found(kernel, 32) == (by == "shuffle")


@pytest.mark.parametrize("wrong", [None, "no syncwarp", "freed before it is read", "full before the copy's end"])
def test_ring(wrong, schedule):
    """A warp fills one slot again and again by cp.async, another reads it and its first lane says so: as our kernels do."""
    source = np.arange(4 * 32 * 4, dtype=np.float32)

    def kernel(_):
        at, tid, full, empty = with_barriers(32, 1)
        for n in range(4):
            if tid >= 32:
                ptx.mbar_wait(empty, (n & 1) ^ 1)
                ptx.cp16(at + 16 * (tid - 32), source.ctypes.data + 16 * (32 * n + tid - 32), 16)
                if wrong == "full before the copy's end":
                    ptx.mbar_arrive(full)
                    ptx.cp_wait_all()
                else:
                    ptx.cp_arrive(full)
            else:
                ptx.mbar_wait(full, n & 1)
                if tid == 0 and wrong == "freed before it is read":
                    ptx.mbar_arrive(empty)
                ptx.lds4(at + 16 * (31 - tid))
                if wrong != "no syncwarp":
                    cuda.syncwarp()
                if tid == 0 and wrong != "freed before it is read":
                    ptx.mbar_arrive(empty)
    simulator.register(source)
    assert found(kernel) == (wrong is not None)


@pytest.mark.parametrize("waited", ["for the mbarrier", "for a barrier of the block", "for nothing"])
@pytest.mark.parametrize("by", ["bulk", "cp.async"])
def test_copies_are_seen_by_who_waits_for_them(by, waited, schedule):
    """Not by who meets the thread that issued them."""
    source = np.arange(64, dtype=np.float32)

    def kernel(_):
        at, tid, full = with_barriers(1)
        if tid == 0:
            if by == "bulk":
                ptx.mbar_expect(full, 128)
                ptx.bulk(at, source.ctypes.data, 128, full)
            else:
                ptx.cp16(at, source.ctypes.data, 16)
                ptx.cp_arrive(full)
        if waited == "for the mbarrier":
            ptx.mbar_wait(full, 0)
        elif waited == "for a barrier of the block":
            cuda.syncthreads()
        if tid == 0 or waited != "for nothing":
            ptx.lds(at)
    simulator.register(source)
    assert found(kernel) == (waited != "for the mbarrier")


@pytest.mark.parametrize("by", ["the copy's end", "an arrival"])
def test_a_copy_publishes_itself_alone(by, schedule):
    """What its thread has stored needs an arrival of the thread."""
    source = np.arange(64, dtype=np.float32)

    def kernel(_):
        at, tid, full = with_barriers(2)
        if tid == 0:
            ptx.mbar_arrive(full)
            ptx.sts(at + 64, np.float32(1))
            if by == "an arrival":
                ptx.mbar_arrive(full)
            else:
                ptx.cp16(at, source.ctypes.data, 16)
                ptx.cp_arrive(full)
        if tid == 32:
            ptx.mbar_wait(full, 0)
            ptx.lds(at + 64)
    simulator.register(source)
    assert found(kernel) == (by == "the copy's end")


def test_a_wait_is_for_its_own_phase(schedule):
    """Thread 32 waits for the first phase; that the second may be over when it runs again tells it nothing."""
    def kernel(_):
        at, tid, bar = with_barriers(1)
        if tid == 1:
            ptx.mbar_arrive(bar)
        if tid == 0:
            ptx.mbar_wait(bar, 0)
            ptx.sts(at, np.float32(1))
            ptx.mbar_arrive(bar)
        if tid == 32:
            ptx.mbar_wait(bar, 0)
            ptx.lds(at)
    assert found(kernel)


def test_ldmatrix_reads_for_its_lanes(schedule):
    def kernel(_):
        at, tid = base(), cuda.threadIdx.x
        ptx.sts(at + 16 * tid, np.float32(tid))
        ptx.ldsm(at + 16 * (31 - tid))
    assert found(kernel, 32)


def test_reads_of_wgmma():
    """They last until the wait for their group, whatever else reads the same."""
    cells = np.arange(8)
    for wait, ordinary in ((False, False), (False, True), (True, True)):
        races = Races(64, 64)
        product = races.products(0)
        races.begin_reads(product, [0], cells)
        races.begin_reads(product, [0], cells + 8)
        if ordinary:
            races.access(0, 0, 16, write=False)
        if wait:
            races.end_reads(product, [0], 1)
        races.meet([0, 33])
        if wait:
            races.access(33, 0, 16, write=True)
        for address in (0, 16)[wait:]:
            with pytest.raises(Race, match="thread 33 writes"):
                races.access(33, address, 16, write=True)
    races = Races(64, 64)
    races.access(33, 0, 16, write=True)
    with pytest.raises(Race, match="wgmma"):
        races.begin_reads(product, [0], cells)


def test_delta_rule_of_one_sequence():
    """More chunks than the ring has stages."""
    p = test_gdn.Problem([np.arange(4 * 64 + 1)])
    assert test_gdn.error(p.run(True)[0], p.expected()) <= 2.5e-3


def test_delta_rule_of_a_tree():
    """Runs of several items in one block, one after another, from stored states."""
    p = test_gdn.Problem(test_gdn.TREE)
    assert test_gdn.error(p.run(True)[0], p.expected()) <= 2.5e-3


def test_found_in_the_delta_rule(monkeypatch):
    """A stage that is freed before wgmma has read it."""
    monkeypatch.setattr(hopper_gdn_scan, "wait_s", lambda *arrays: None)
    with pytest.raises(Race, match="may read it"):
        test_gdn.Problem([np.arange(4 * 64 + 1)]).run(True)


@pytest.mark.parametrize("heads, kv_heads, length", [(6, 1, 107), (1, 1, 320)])
def test_attention_by_its_tiles(heads, kv_heads, length):
    """Heads one after another in one block; and more key tiles than there are slots for.

    With these lengths one warpgroup at most writes zeros behind the end of the last V tile. Where both do, each before it
    reads them, nothing orders these writes, and nothing has to: they are the same.
    """
    p = test_attention.Problem(test_attention.tokens(length), heads, kv_heads)
    assert p.error(p.run("hopper", ctas=1)) < 2.7e-3


def test_found_in_attention(monkeypatch):
    """Warps of a warpgroup that do not wait for the zeros that the others write behind the end of V."""
    monkeypatch.setattr(hopper_attention, "named_sync", lambda *barrier: None)
    with pytest.raises(Race, match="has wgmma read"):
        test_attention.Problem(test_attention.tokens(107), 6, 1).run("hopper", ctas=1)
