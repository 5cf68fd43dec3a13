"""A CUDA simulator for Numba kernels in which warps, shared addresses and asynchronous copies work.

Numba's own simulator has no warp instructions, polls its threads and knows arrays but not addresses. ``launch``
replaces its scheduler and keeps the rest. Clusters (of one block, if a kernel has none) run one after another; the CUDA
threads of a cluster are Python threads of which one runs at a time, until it must wait for others. So a run is
deterministic, a warp-wide instruction is a hand-over (about 10 us a lane) rather than a poll, and when nothing can run any
more the launch fails and says who waits for what.

It is stricter than a GPU where that finds mistakes:
  - shared and local memory start as 0xFF bytes (NaN); shared arrays live in one window, aligned to 16 bytes only;
  - global addresses are real host addresses, and must lie in an array given to ``launch`` or ``register``;
  - accesses must be aligned to their size; lanes of a warp must meet at the same instruction;
  - ``SCHEDULE = "backward"`` runs threads in the opposite order: results must not change;
  - in a cluster the addresses of a block's shared memory carry its rank in their upper bits;
  - ``RACES = True`` raises where nothing orders two accesses of shared or of device memory (``sim.races``).

Integer casts wrap as on a GPU (``i32(2**31)`` is negative), but arithmetic between Python integers does not: keep
intermediate values in range.
"""
from __future__ import annotations

import collections
import contextlib
import ctypes
import sys
import threading
import weakref

import numpy as np
from numba.cuda import types
from numba.cuda.np import numpy_support
from numba.cuda.simulator import kernel as numba_simulator
from numba.cuda.simulator.kernelapi import Dim3, FakeCUDAModule

from jev_kernels.sim.races import DeviceMemory, Races

SCHEDULE = "forward"
RACES = False
SHARED_BYTES = 227 * 1024                # what a Hopper block may have
SHARED_BASE = 1024 + 16                  # first shared address: on a GPU only 16-byte alignment is promised
WARP = 32
RANK_BIT = 24                            # of a shared address: the block's rank in its cluster
DEVICE = DeviceMemory()                  # for the race detector


def _wrapping_cast(self, value):
    """Numba's integer types called on a value, with the wrap-around that they have on a GPU."""
    bits = int(value) & ((1 << self.bitwidth) - 1)
    if self.signed and bits >> (self.bitwidth - 1):
        bits -= 1 << self.bitwidth
    return getattr(np, self.name)(bits)


types.Integer.cast_python_value = _wrapping_cast


# ---------------------------------------------------------------- the scheduler
class _Abort(BaseException):
    """Another thread of the block has failed."""


class _Thread(threading.Thread):
    """One CUDA thread. ``baton`` is the permission to run; ``number`` counts over the cluster."""

    def __init__(self, block, index, thread_id):
        super().__init__(target=self._main, daemon=True)
        self.block, self.thread_id, self.number = block, thread_id, block.rank * block.size + thread_id
        self.blockIdx, self.threadIdx = block.index, Dim3(*index)
        self.baton = threading.Lock()
        self.baton.acquire()
        self.waits_for = self.result = None
        self.copies, self.groups = [], collections.deque()         # cp.async: open group, committed groups
        self.stores = collections.deque()                          # boxes that TMA stores

    def _main(self):
        self.baton.acquire()
        cluster = self.block.cluster
        if cluster.error is None:
            try:
                with np.errstate(all="ignore"):
                    cluster.function(*cluster.args)
                if self.stores:
                    raise RuntimeError("a thread leaves while boxes that it stores are read from shared memory")
            except _Abort:
                pass
            except BaseException as error:       # noqa: BLE001  it is raised again by the launch
                cluster.fail(error, self)
        cluster.exit(self)


class _Block:
    """What the threads of a block share: memory, barriers, meetings."""

    def __init__(self, cluster, rank, index, block_dim):
        self.cluster, self.rank, self.index, self.size = cluster, rank, Dim3(*index), int(np.prod(block_dim))
        self.window = _aligned_bytes(SHARED_BYTES)
        self.window[:] = 0xFF
        self.window_address = self.window.ctypes.data
        self.used, self.statics = 0, {}
        self.barriers, self.meetings = {}, {}
        x, y, _ = block_dim
        self.threads = [_Thread(self, (i % x, i // x % y, i // (x * y)), i) for i in range(self.size)]
        self.live = self.size

    @property
    def races(self):
        return self.cluster.races

    def wait(self, me, condition, what):
        self.cluster.wait(me, condition, what)

    def meet(self, me, key, count, value, compute, what):
        """Wait until ``count`` threads have come to ``key``; compute(list of (thread, value)) gives each its result."""
        return self.cluster.meet(self.meetings, me, key, count, value, compute, what)


class _Cluster:
    """The blocks that run together, and the scheduler of their threads."""

    def __init__(self, function, args, indices, block_dim):
        self.function, self.args = function, args
        self.races = Races(int(np.prod(block_dim)) * len(indices), SHARED_BYTES, len(indices), DEVICE) if RACES else None
        self.blocks = [_Block(self, rank, index, block_dim) for rank, index in enumerate(indices)]
        self.threads = [thread for block in self.blocks for thread in block.threads]
        self.live, self.meetings = len(self.threads), {}
        self.error, self.finished = None, threading.Lock()

    def run(self):
        """Run every thread to its end; raises what the first failing thread raised."""
        self.ready = collections.deque(self.threads if SCHEDULE == "forward" else reversed(self.threads))
        self.waiting = []                                       # (thread, condition)
        self.finished.acquire()
        for t in self.threads:
            t.start()
        self._next().baton.release()
        self.finished.acquire()
        for t in self.threads:
            t.join()
        if self.error is not None:
            raise self.error

    def _next(self):
        if not self.ready:
            still = []
            for thread, condition in self.waiting:
                (self.ready if condition() else still).append((thread, condition))
            self.ready = collections.deque(thread for thread, _ in self.ready)
            self.waiting = still
        return self.ready.popleft() if self.ready else None

    def switch(self, me):
        """Let others run until ``me`` is made ready again."""
        thread = self._next()
        if thread is None:
            self._deadlock(me)
            raise _Abort
        if thread is not me:
            thread.baton.release()
            me.baton.acquire()
        if self.error is not None:
            raise _Abort
        me.waits_for = None

    def wait(self, me, condition, what):
        """Let others run until the condition holds."""
        if not condition():
            me.waits_for = what
            self.waiting.append((me, condition))
            self.switch(me)

    def meet(self, meetings, me, key, count, value, compute, what):
        """See ``_Block.meet``; ``meetings``: those of the block or of the cluster."""
        members = meetings.setdefault(key, [])
        members.append((me, value))
        if len(members) < count:
            me.waits_for = what
            self.switch(me)
        else:
            self._close(meetings, key, compute, me)
        return me.result

    def _close(self, meetings, key, compute, last):
        members = meetings.pop(key)
        if self.races:
            kind = key if isinstance(key, str) else key[0]
            if kind in ("syncthreads", "cluster", "vote", "named") or kind == "warp" and members[0][1][0] == "syncwarp":
                self.races.meet([thread.number for thread, _ in members])
        results = compute(members) if compute else [None] * len(members)
        for (thread, _), result in zip(members, results):
            thread.result = result
        self.ready.extend(thread for thread, _ in members if thread is not last)

    def fail(self, error, thread):
        if self.error is None:
            at = f"thread {tuple(thread.threadIdx)} of block {tuple(thread.blockIdx)}"
            if hasattr(error, "add_note"):
                error.add_note(at)
            self.error = error

    def _deadlock(self, thread):
        waits = collections.Counter(t.waits_for for t in self.threads if t.waits_for)
        self.fail(RuntimeError("deadlock: " + "; ".join(f"{n} threads wait for {w}" for w, n in waits.items())), thread)

    def _let_all_go(self):
        for t in self.threads:
            if t.baton.locked():
                t.baton.release()

    def exit(self, me):
        self.live -= 1
        me.block.live -= 1
        if self.error is not None:
            self._let_all_go()
        if not self.live:
            self.finished.release()
            return
        if self.error is None:
            for meetings, key, live in ((me.block.meetings, "syncthreads", me.block.live),
                                        (self.meetings, "cluster", self.live)):
                if live and len(meetings.get(key, ())) == live:             # threads that have left do not count
                    self._close(meetings, key, None, None)
            thread = self._next()
            if thread is not None:
                thread.baton.release()
            else:
                self._deadlock(me)
                self._let_all_go()


def _aligned_bytes(n: int) -> np.ndarray:
    raw = np.empty(n + 1024, np.uint8)
    start = -raw.ctypes.data % 1024
    return raw[start:start + n]


class _Shared:
    """cuda.shared: arrays in the block's window. A static one is known by its line, as in Numba's simulator."""

    def __init__(self, dynamic):
        self.dynamic = dynamic

    def array(self, shape, dtype, alignment=None):
        block = threading.current_thread().block
        dtype = numpy_support.as_dtype(dtype) if isinstance(dtype, types.Type) else np.dtype(dtype)
        frame = sys._getframe(1)
        key = "dynamic" if shape == 0 else (frame.f_code.co_filename, frame.f_lineno)
        if key not in block.statics:
            size = self.dynamic if shape == 0 else int(np.prod(shape)) * dtype.itemsize
            block.statics[key] = (block.used, size)
            block.used += -(-size // 16) * 16
            if block.used > SHARED_BYTES - SHARED_BASE:
                raise ValueError(f"{block.used} bytes of shared memory do not fit into {SHARED_BYTES - SHARED_BASE}")
        start, size = block.statics[key]
        if shape == 0:
            size -= size % dtype.itemsize
        flat = block.window[SHARED_BASE + start:SHARED_BASE + start + size].view(dtype)
        return flat if shape == 0 else flat.reshape(shape)


class _Local:
    def array(self, shape, dtype, alignment=None):
        dtype = numpy_support.as_dtype(dtype) if isinstance(dtype, types.Type) else np.dtype(dtype)
        out = np.empty(shape, dtype)
        out.view(np.uint8)[...] = 0xFF
        return out


class _Cuda(FakeCUDAModule):
    """What ``cuda`` means inside a kernel."""

    def __init__(self, grid_dim, block_dim, dynamic):
        super().__init__(grid_dim, block_dim, 0)
        self._shared, self._local = _Shared(dynamic), _Local()

    def syncthreads(self):
        me = threading.current_thread()
        me.block.meet(me, "syncthreads", me.block.live, None, None, "syncthreads")

    def _vote(self, value, over):
        me = threading.current_thread()
        result = [None]

        def compute(members):
            result[0] = int(over([bool(v) for _, v in members]))
            return result * len(members)
        return me.block.meet(me, "vote", me.block.live, value, compute, "a vote of the block")

    def syncthreads_count(self, value):
        return self._vote(value, sum)

    def syncthreads_and(self, value):
        return self._vote(value, all)

    def syncthreads_or(self, value):
        return self._vote(value, any)

    def syncwarp(self, mask=0xFFFFFFFF):
        collective("syncwarp", None, lambda values: values)

    # Numba's own spellings
    def shfl_sync(self, mask, value, lane):
        return shuffle("shfl", value, lane, lambda me, n: n % WARP)

    def shfl_xor_sync(self, mask, value, lane):
        return shuffle("shfl_xor", value, lane, lambda me, n: me ^ n)

    def shfl_up_sync(self, mask, value, lane):
        return shuffle("shfl_up", value, lane, lambda me, n: me - n if me >= n else me)

    def shfl_down_sync(self, mask, value, lane):
        return shuffle("shfl_down", value, lane, lambda me, n: me + n if me + n < WARP else me)

    def ballot_sync(self, mask, predicate):
        return ballot(predicate)

    def all_sync(self, mask, predicate):
        return ballot(predicate) == 0xFFFFFFFF

    def any_sync(self, mask, predicate):
        return ballot(predicate) != 0


_device_functions = []


def device_function(function):
    """Decorates a function that kernels call."""
    _device_functions.append(function)
    return function


def launch(function, grid, threads, smem: int, args, cluster: int = 1, early: bool = False) -> None:
    """Run a kernel. grid, threads: three dimensions; smem: bytes of dynamic shared memory; args: arrays or scalars.

    cluster: blocks of a cluster along x. early: with programmatic dependent launch: the run is the same, but the race
    detector has only ``pdl_wait`` order it behind the launch before.
    """
    args = [getattr(a, "_ary", a) for a in args]
    for a in args:
        if isinstance(a, np.ndarray):
            register(a)
    if grid[0] % cluster:
        raise ValueError(f"a grid of {grid[0]} blocks is not made of clusters of {cluster}")
    if RACES:
        DEVICE.begin(early)
    fake = _Cuda(grid, threads, smem)
    with contextlib.ExitStack() as stack:
        stack.enter_context(numba_simulator._push_kernel_context(fake))
        for f in {id(f.__globals__): f for f in (function, *_device_functions)}.values():
            stack.enter_context(numba_simulator.swapped_cuda_module(f, fake))
        for z, y, x in np.ndindex(grid[2], grid[1], grid[0] // cluster):
            _Cluster(function, args, [(x * cluster + rank, y, z) for rank in range(cluster)], threads).run()


# ---------------------------------------------------------------- memory
_memory: dict[int, tuple] = {}           # address of an allocation: (bytes, weak reference to its owner)


def register(array) -> int:
    """Make an array's memory accessible by address; returns the address of its first element."""
    array = getattr(array, "_item", array)
    array = getattr(array, "_ary", array)
    address = array.__array_interface__["data"][0]
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    low, high = np.lib.array_utils.byte_bounds(owner) if owner.size else (address, address)
    before = _memory.get(low)
    if before is None or before[0] != high or before[1]() is not owner:
        DEVICE.memory.pop((low, high), None)               # what the race detector knows is of an array that is gone
    _memory[low] = (high, weakref.ref(owner))
    return address


def check_global(address, size, use=None, alignment=None) -> None:
    """Raise unless an access of ``size`` bytes is aligned and inside a registered array.

    use: READS or WRITES of this thread, or COPIED_FROM, COPIED_TO of a bulk copy that it issues, for the race detector;
    None: it does not learn of it.
    """
    if address % (alignment or size):
        raise ValueError(f"global access of {size} bytes at a misaligned address {address:#x}")
    for low, (high, owner) in list(_memory.items()):
        if owner() is None:
            del _memory[low]
        elif low <= address and address + size <= high:
            me = threading.current_thread()
            races = use and getattr(me, "block", None) and me.block.races
            if races:
                races.access_device(me.number, (low, high), address, size, use in (WRITES, COPIED_TO),
                                    use in (COPIED_FROM, COPIED_TO))
            return
    raise IndexError(f"global access of {size} bytes at {address:#x}: in no array given to launch or address()")


def load_global(address, dtype, n=1, use="reads") -> np.ndarray:
    """n values at an address of global memory."""
    address = int(address)
    size = n * np.dtype(dtype).itemsize
    check_global(address, size, use)
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype)


# What an access is, for the race detector. COPIES: hardware writes shared memory for a copy that is issued now, through the
# async proxy or, FILLS (cp.async), not.
READS, WRITES, COPIES, FILLS = "reads", "writes", "copies", "fills"
COPIED_FROM, COPIED_TO = "copied from", "copied to"


def split_shared(address) -> tuple[int, int]:
    """(rank of the block, address in its shared window)."""
    return int(address) >> RANK_BIT, int(address) & (1 << RANK_BIT) - 1


def shared_bytes(address, size, alignment=None, use=None, lane=None) -> np.ndarray:
    """The bytes at an address of a block's shared window: of the thread's own, or, for COPIES, of any in the cluster.

    use: READS, WRITES, COPIES or FILLS, for the race detector; None: it does not learn of it. lane: of this thread's warp,
    which uses them; by default this thread.
    """
    me = threading.current_thread()
    rank, address = split_shared(address)
    if rank != me.block.rank and use != COPIES:
        raise IndexError(f"shared access to block {rank} of the cluster from block {me.block.rank}")
    block = me.block.cluster.blocks[rank]
    if address % (alignment or size):
        raise ValueError(f"shared access of {size} bytes at a misaligned address {address}")
    if not SHARED_BASE <= address <= SHARED_BASE + block.used - size:
        raise IndexError(f"shared access of {size} bytes at {address}: outside the block's shared arrays")
    if me.block.races and use:
        thread = me.number if lane is None else me.number // WARP * WARP + lane
        if use in (COPIES, FILLS):
            me.block.races.copy(thread, address, size, use == COPIES, rank)
        else:
            me.block.races.access(thread, address, size, use == WRITES)
    return block.window[address:address + size]


# ---------------------------------------------------------------- warps
def collective(name, value, compute):
    """This lane's entry of compute(values of the 32 lanes), when all have come to an instruction of this name."""
    me = threading.current_thread()
    warp = me.thread_id // WARP

    def together(members):
        names = {n for _, (n, _) in members}
        if len(names) > 1:
            raise RuntimeError(f"lanes of warp {warp} are at different instructions: {', '.join(sorted(names))}")
        values = [None] * WARP
        for thread, (_, v) in members:
            values[thread.thread_id % WARP] = v
        results = compute(values)
        return [results[thread.thread_id % WARP] for thread, _ in members]
    return me.block.meet(me, ("warp", warp), WARP, (name, value), together, f"{name} in warp {warp}")


def shuffle(name, value, lane, source):
    """Lane l gets the value of lane source(l, lane)."""
    def compute(values):
        return [values[source(me, int(n))][0] for me, (_, n) in enumerate(values)]
    return collective(name, (value, lane), compute)


def ballot(predicate):
    """Bit l of the result: whether lane l's predicate is not zero."""
    return collective("ballot", bool(predicate),
                       lambda values: [np.uint32(sum(int(v) << lane for lane, v in enumerate(values)))] * WARP)
