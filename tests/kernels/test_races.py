"""The simulator's race detector on small kernels with and without what orders them, and kernels that it finds in order."""
from __future__ import annotations

import functools

import numpy as np
import pytest
from numba import cuda, types

from jev_kernels import ptx
from jev_kernels.attention import hopper as hopper_attention
from jev_kernels.gdn import flags as hopper_gdn_flags, prepare as hopper_gdn_prepare, scan as hopper_gdn_scan
from jev_kernels.ptx import u64
from jev_kernels.ptx.flags import await_flag, raise_flag
from jev_kernels.runtime import tensor_maps
from jev_kernels.runtime.launch import Kernel
from jev_kernels.sim import flags, simulator
from jev_kernels.sim.races import Race, Races
from tests.kernels import test_attention, test_gdn


@pytest.fixture(autouse=True)
def detector(monkeypatch):
    monkeypatch.setattr(simulator, "RACES", True)


def found(function, threads=64, smem=4096, grid=1, cluster=1, pdl=False) -> bool:
    """Whether a kernel without parameters has a race."""
    try:
        Kernel(function, types.void(u64), threads, smem, cluster)(0, grid, np.zeros(64, np.float32).ctypes.data, pdl=pdl)
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


@pytest.mark.parametrize("fenced", ["by the writer", "by the reader", "in the other memory", "not"])
@pytest.mark.parametrize("by", ["st.shared", "cp.async"])
def test_proxies_in_shared_memory(by, fenced, schedule):
    """What a TMA store reads was written by ordinary instructions: a fence lies between, before or after the barrier."""
    y, source = np.zeros((8, 64), np.uint16), np.zeros(4, np.float32)
    simulator.register(source)
    y_map = tensor_maps.matrix(simulator.register(y), 8, 64, 64, 8)
    fence = ptx.fence_global if fenced == "in the other memory" else ptx.fence_async

    def kernel(_):
        at, tid = (base() + 1023) & ~1023, cuda.threadIdx.x
        if tid == 32:
            if by == "cp.async":
                ptx.cp16(at, source.ctypes.data, 16)
                ptx.cp_wait_all()
            else:
                ptx.sts(at, np.float32(1))
            if fenced in ("by the writer", "in the other memory"):
                fence()
        cuda.syncthreads()
        if tid == 0:
            if fenced == "by the reader":
                fence()
            ptx.tma_store_if(1, y_map, 0, 0, at)
            ptx.tma_stores_done()
    assert found(kernel) == (fenced in ("not", "in the other memory"))


@pytest.mark.parametrize("wrong", [None, "no fence", "no flag", "raised too early", "another barrier"])
def test_flags_between_clusters(wrong, schedule):
    """A block stores, raises a flag; the next one awaits it, tells its other warp, and that copies in bulk."""
    memory = np.zeros(64, np.float32)
    data, flag = simulator.register(memory), simulator.register(memory) + 128

    def kernel(_):
        at, tid, full = with_barriers(1)
        if cuda.blockIdx.x == 0:
            if tid == 5:
                if wrong == "raised too early":
                    raise_flag(flag)
                ptx.stg4(data, *[np.float32(1)] * 4)
                if wrong != "no fence":
                    ptx.fence_global()
                if wrong != "raised too early":
                    raise_flag(flag)
        else:
            if tid == 5 and wrong != "no flag":
                await_flag(flag, 1)
            ptx.named_sync(1 + (tid // 32 if wrong == "another barrier" else 0), 32 if wrong == "another barrier" else 64)
            if tid == 32:
                ptx.mbar_expect(full, 16)
                ptx.bulk(at, data, 16, full)
                ptx.mbar_wait(full, 0)
    assert found(kernel, grid=2) == (wrong is not None)


@pytest.mark.parametrize("waits", ["both", "the writer", "nobody"])
@pytest.mark.parametrize("trigger", ["before the wait", "behind it"])
def test_launches_that_overlap(waits, trigger, schedule):
    """Three in a row, two of them early: the third reads what the first has written."""
    memory = np.zeros(64, np.float32)
    at = simulator.register(memory)

    def store(_):
        ptx.pdl_launch()
        if cuda.threadIdx.x == 0:
            ptx.stg(at, np.float32(1))

    def pass_on(_):
        if trigger == "before the wait":
            ptx.pdl_launch()
        if waits != "nobody":
            ptx.pdl_wait()
        if trigger == "behind it":
            ptx.pdl_launch()

    def load(_):
        if waits == "both":
            ptx.pdl_wait()
        ptx.ldg(at)

    races = [found(function, pdl=pdl) for function, pdl in ((store, False), (pass_on, True), (load, True))]
    assert races == [False, False, not (waits == "both" or waits == "the writer" and trigger == "behind it")]


@pytest.mark.parametrize("wrong", [None, "no barrier", "not awaited", "left"])
def test_blocks_of_a_cluster(wrong, schedule):
    """A box for both, read by both; a block arrives at the other's barrier, which must still be there."""
    x = np.arange(8 * 64, dtype=np.uint16).reshape(8, 64)
    x_map = tensor_maps.matrix(simulator.register(x), 8, 64, 64, 8)

    def kernel(_):
        at, tid, full, read = with_barriers(1, 1)
        at = (at + 1023) & ~1023
        if wrong != "no barrier":
            ptx.cluster_sync()
        if tid == 0:
            ptx.mbar_expect(full, 1024)
            if ptx.cta_rank() == 1:
                ptx.tma_multicast(at, x_map, 0, 0, full, 3, 0)
        if tid == 32:
            if wrong != "not awaited":
                ptx.mbar_wait(full, 0)
            ptx.lds(at)
            if wrong != "left" or ptx.cta_rank() == 0:
                ptx.mbar_arrive_at(read, 1 - ptx.cta_rank())
                ptx.mbar_wait(read, 0)
    if wrong in ("left", "no barrier"):
        with pytest.raises((RuntimeError, IndexError), match="left|deadlock|initialised|outside|mbarrier"):
            found(kernel, grid=2, cluster=2)
            raise Race("an mbarrier, in other words")
    else:
        assert found(kernel, grid=2, cluster=2) == (wrong is not None)


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


def early(monkeypatch):
    """The delta rule's kernels under programmatic dependent launch."""
    monkeypatch.setattr(test_gdn.gdn, "gated_delta_rule", functools.partial(test_gdn.gdn.gated_delta_rule, pdl=True))


def test_delta_rule_of_one_sequence(monkeypatch):
    """More chunks than the ring has stages, followed one by one: the scan does not wait for the first kernel's end."""
    early(monkeypatch)
    p = test_gdn.Problem([np.arange(4 * 64 + 1)])
    assert test_gdn.error(p.run(True)[0], p.expected()) <= 2.5e-3


def test_delta_rule_of_a_tree(monkeypatch):
    """Runs of several items in one block, one after another, from stored states."""
    early(monkeypatch)
    p = test_gdn.Problem(test_gdn.TREE)
    assert test_gdn.error(p.run(True)[0], p.expected()) <= 2.5e-3


def nothing(*_):
    pass


ONE, ALONE = [np.arange(3 * 64 + 1)], [np.arange(64 + 1)]
BRANCH = [np.arange(65), np.r_[np.arange(64), 500]]
DELTA_RULE_FAULTS = {
    "a stage freed before wgmma has read it": (
        "may read it|overwritten", ONE, hopper_gdn_scan, "wait_s", nothing),
    "no proxy fence between cp.async and wgmma": ("without a proxy fence", ALONE, hopper_gdn_scan, "fence_async", nothing),
    "no proxy fence between a chunk's workspace and the copy of it": (
        "device memory", ALONE, hopper_gdn_prepare, "fence_global", nothing, hopper_gdn_flags, "fence_global", nothing),
    "progress raised without a release": (
        "device memory", ALONE, hopper_gdn_prepare, "raise_flag", lambda at: flags.store(at, 1)),
    "no wait for the kernel before": ("device memory", BRANCH, hopper_gdn_scan, "pdl_wait", nothing),
    "no proxy fence between a state and the copy of it": (
        "device memory", BRANCH, hopper_gdn_scan, "fence_global", nothing),
    "a state counted without a release": (
        "device memory", BRANCH, hopper_gdn_scan, "count_up", lambda at: flags.add(at)),
    "a state not awaited": ("device memory", BRANCH, hopper_gdn_scan, "await_flag", nothing),
}


@pytest.mark.parametrize("fault", DELTA_RULE_FAULTS)
def test_found_in_the_delta_rule(fault, monkeypatch):
    early(monkeypatch)
    monkeypatch.setattr(test_gdn.gdn, "multiprocessors", lambda: 4)
    message, sequences, *names = DELTA_RULE_FAULTS[fault]
    for module, name, replacement in zip(*[iter(names)] * 3):
        monkeypatch.setattr(module, name, replacement)
    with pytest.raises(RuntimeError, match=message):
        test_gdn.Problem(sequences).run(True)


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
