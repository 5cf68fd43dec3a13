"""The names of ``jev_kernels.ptx`` in plain Python, and a CUDA simulator in which warps, shared addresses and copies work.

Numba's simulator has no warp instructions, polls its threads and knows arrays but not addresses. ``launch`` replaces its
scheduler and keeps the rest. Blocks run one after another; the CUDA threads of a block are Python threads of which one
runs at a time, until it must wait for others. So a run is deterministic, a warp-wide instruction is a hand-over (about
10 us a lane) rather than a poll, and when nothing can run any more the launch fails and says who waits for what.

It is stricter than a GPU where that finds mistakes:
  - shared and local memory start as 0xFF bytes (NaN), a block's shared arrays live in one window, 16-byte aligned only;
  - global addresses are real host addresses, and must lie in an array given to ``launch``, ``gmem_addr`` or ``address``;
  - accesses must be aligned to their size; lanes of a warp must meet at the same instruction;
  - cp.async delivers at the wait that guarantees it, not before;
  - ``SCHEDULE = "backward"`` runs threads in the opposite order: results must not change.

Integer casts wrap as on a GPU (``i32(2**31)`` is negative), but arithmetic between Python integers does not: keep
intermediate values in range. Tensor maps, wgmma and clusters are not simulated: such kernels say NotImplementedError.

Source: the PTX ISA manual, for the layout of fragments.
"""
from __future__ import annotations

import collections
import contextlib
import ctypes
import sys
import threading
import weakref

import numpy as np
from numba import cuda
from numba.cuda import types
from numba.cuda.np import numpy_support
from numba.cuda.simulator import kernel as numba_simulator
from numba.cuda.simulator.kernelapi import Dim3, FakeCUDAModule

f32, i32, u16, u32, i64, u64, void = (
    types.float32, types.int32, types.uint16, types.uint32, types.int64, types.uint64, types.void)

SCHEDULE = "forward"
SHARED_BYTES = 227 * 1024                # what a Hopper block may have
SHARED_BASE = 1024 + 16                  # first shared address: on a GPU only 16-byte alignment is promised
WARP = 32


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
    """One CUDA thread. ``baton`` is the permission to run."""

    def __init__(self, block, index, thread_id):
        super().__init__(target=self._main, daemon=True)
        self.block, self.thread_id = block, thread_id
        self.blockIdx, self.threadIdx = block.index, Dim3(*index)
        self.baton = threading.Lock()
        self.baton.acquire()
        self.waits_for = self.result = None
        self.copies, self.groups = [], collections.deque()         # cp.async: open group, committed groups

    def _main(self):
        self.baton.acquire()
        block = self.block
        if block.error is None:
            try:
                with np.errstate(all="ignore"):
                    block.function(*block.args)
            except _Abort:
                pass
            except BaseException as error:       # noqa: BLE001  it is raised again by the launch
                block.fail(error, self)
        block.exit()


class _Block:
    def __init__(self, function, args, index, block_dim):
        self.function, self.args, self.index, self.block_dim = function, args, Dim3(*index), block_dim
        self.window = _aligned_bytes(SHARED_BYTES)
        self.window[:] = 0xFF
        self.window_address = self.window.ctypes.data
        self.used, self.statics = 0, {}
        self.barriers, self.meetings = {}, {}
        self.error, self.finished = None, threading.Lock()

    def run(self):
        """Run every thread to its end; raises what the first failing thread raised."""
        x, y, z = self.block_dim
        self.threads = [_Thread(self, (i % x, i // x % y, i // (x * y)), i) for i in range(x * y * z)]
        self.live = len(self.threads)
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
            waits = collections.Counter(t.waits_for for t in self.threads if t.waits_for)
            self.fail(RuntimeError("deadlock: " + "; ".join(f"{n} threads wait for {w}" for w, n in waits.items())), me)
            raise _Abort
        if thread is not me:
            thread.baton.release()
            me.baton.acquire()
        if self.error is not None:
            raise _Abort
        me.waits_for = None

    def wait(self, me, condition, what):
        if not condition():
            me.waits_for = what
            self.waiting.append((me, condition))
            self.switch(me)

    def meet(self, me, key, count, value, compute, what):
        """Wait until ``count`` threads have come to ``key``; compute(list of (thread, value)) gives each its result."""
        members = self.meetings.setdefault(key, [])
        members.append((me, value))
        if len(members) < count:
            me.waits_for = what
            self.switch(me)
        else:
            self._close(key, compute, me)
        return me.result

    def _close(self, key, compute, last):
        members = self.meetings.pop(key)
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

    def exit(self):
        self.live -= 1
        if self.error is not None:
            for t in self.threads:
                if t.baton.locked():
                    t.baton.release()
        if not self.live:
            self.finished.release()
            return
        if self.error is None:
            if len(self.meetings.get("syncthreads", ())) == self.live:     # threads that have left do not count
                self._close("syncthreads", None, None)
            thread = self._next()
            if thread is not None:
                thread.baton.release()
            else:
                waits = collections.Counter(t.waits_for for t in self.threads if t.waits_for)
                error = RuntimeError("deadlock: " + "; ".join(f"{n} threads wait for {w}" for w, n in waits.items()))
                self.fail(error, threading.current_thread())
                for t in self.threads:
                    if t.baton.locked():
                        t.baton.release()


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
        _collective("syncwarp", None, lambda values: values)

    def shfl_sync(self, mask, value, lane):
        return _shuffle("shfl", value, lane, lambda me, n: n % WARP)

    def shfl_xor_sync(self, mask, value, lane):
        return _shuffle("shfl_xor", value, lane, lambda me, n: me ^ n)

    def shfl_up_sync(self, mask, value, lane):
        return _shuffle("shfl_up", value, lane, lambda me, n: me - n if me >= n else me)

    def shfl_down_sync(self, mask, value, lane):
        return _shuffle("shfl_down", value, lane, lambda me, n: me + n if me + n < WARP else me)

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


def launch(function, grid, threads, smem: int, args) -> None:
    """Run a kernel: grid and threads are three dimensions, smem bytes of dynamic shared memory, args arrays or scalars."""
    args = [getattr(a, "_ary", a) for a in args]
    for a in args:
        if isinstance(a, np.ndarray):
            register(a)
    fake = _Cuda(grid, threads, smem)
    with contextlib.ExitStack() as stack:
        stack.enter_context(numba_simulator._push_kernel_context(fake))
        for f in {id(f.__globals__): f for f in (function, *_device_functions)}.values():
            stack.enter_context(numba_simulator.swapped_cuda_module(f, fake))
        for z, y, x in np.ndindex(grid[2], grid[1], grid[0]):
            _Block(function, args, (x, y, z), threads).run()


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
    _memory[low] = (high, weakref.ref(owner))
    return address


def _check_global(address, size):
    if address % size:
        raise ValueError(f"global access of {size} bytes at a misaligned address {address:#x}")
    for low, (high, owner) in list(_memory.items()):
        if owner() is None:
            del _memory[low]
        elif low <= address and address + size <= high:
            return
    raise IndexError(f"global access of {size} bytes at {address:#x}: in no array that was given to launch or address()")


def _load_global(address, dtype, n=1):
    address = int(address)
    size = n * np.dtype(dtype).itemsize
    _check_global(address, size)
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype)


def _shared_bytes(address, size, alignment=None):
    address = int(address)
    window = threading.current_thread().block.window
    if address % (alignment or size):
        raise ValueError(f"shared access of {size} bytes at a misaligned address {address}")
    if not SHARED_BASE <= address <= SHARED_BASE + threading.current_thread().block.used - size:
        raise IndexError(f"shared access of {size} bytes at {address}: outside the block's shared arrays")
    return window[address:address + size]


def smem_addr(array) -> np.int32:
    """Address in the shared window of a shared array's first element."""
    return np.int32(array.ctypes.data - threading.current_thread().block.window_address)


def gmem_addr(array) -> np.uint64:
    """Address of a global array's first element."""
    return np.uint64(register(array))


def _lds(dtype, n=1):
    size = n * np.dtype(dtype).itemsize
    if n == 1:
        return lambda address: _shared_bytes(address, size).view(dtype)[0]
    return lambda address: tuple(_shared_bytes(address, size).view(dtype))


def _sts(address, values, dtype):
    values = np.array(values, dtype).reshape(-1)
    _shared_bytes(address, values.nbytes).view(dtype)[:] = values


def _ldg(dtype, n=1):
    if n == 1:
        return lambda address: _load_global(address, dtype)[0]
    return lambda address: tuple(_load_global(address, dtype, n).copy())


def _stg(address, values, dtype):
    values = np.array(values, dtype).reshape(-1)
    _check_global(int(address), values.nbytes)
    ctypes.memmove(int(address), values.ctypes.data, values.nbytes)


lds, lds_i32, lds2, lds4 = _lds(np.float32), _lds(np.int32), _lds(np.float32, 2), _lds(np.float32, 4)
ldg, ldg_i32, ldg2, ldg_u32x4 = _ldg(np.float32), _ldg(np.int32), _ldg(np.float32, 2), _ldg(np.uint32, 4)


ldg_u16, ldg_u32x4_once, ldc_u32x4 = _ldg(np.uint16), ldg_u32x4, ldg_u32x4


def ldg_bf16(address): return low(_load_global(address, np.uint16)[0])
def sts(address, x): _sts(address, x, np.float32)
def sts2(address, x, y): _sts(address, (x, y), np.float32)
def sts_u32(address, x): _sts(address, int(x) & 0xFFFFFFFF, np.uint32)
def sts_lo16(address, x): _sts(address, int(x) & 0xFFFF, np.uint16)
def stg(address, x): _stg(address, x, np.float32)
def stg2(address, x, y): _stg(address, (x, y), np.float32)
def stg_u32(address, x): _stg(address, int(x) & 0xFFFFFFFF, np.uint32)
def stg_u32x4(address, x): _stg(address, [int(v) & 0xFFFFFFFF for v in x], np.uint32)
def ldg_u16_if(address, n): return ldg_u16(address) if int(n) > 0 else np.uint16(0)
def stg_u16_if(address, x, n): return stg_u16(address, x) if int(n) > 0 else None
def stg_u16(address, x): _stg(address, int(x) & 0xFFFF, np.uint16)
def prefetch_l2(address): pass
def evict_first(): return np.uint64(0)
def evict_last(): return np.uint64(0)


# ---------------------------------------------------------------- cp.async and mbarriers
def cp16(dst, src, size):
    """16 bytes into shared memory, of which ``size`` (0 or 16) are read and the rest zeros. Arrives at the wait."""
    if int(size):
        _check_global(int(src), 16)
    if int(dst) % 16:
        raise ValueError(f"cp.async of 16 bytes to a misaligned shared address {int(dst)}")
    threading.current_thread().copies.append((int(dst), int(src), int(size)))


def cp_commit():
    me = threading.current_thread()
    me.groups.append(me.copies)
    me.copies = []


def _deliver(copies):
    for dst, src, size in copies:
        to = _shared_bytes(dst, 16)
        to[:] = 0
        if size:
            to[:size] = np.frombuffer((ctypes.c_uint8 * size).from_address(src), np.uint8)


def _cp_wait(pending):
    groups = threading.current_thread().groups
    while len(groups) > pending:
        _deliver(groups.popleft())


def cp_wait0(): _cp_wait(0)
def cp_wait1(): _cp_wait(1)


def cp_wait_all():
    cp_commit()
    _cp_wait(0)


def cp_arrive(barrier):
    """The thread's earlier cp.async count as one arrival when they are complete."""
    cp_wait_all()
    _arrive(barrier, 0)


class _Barrier:
    def __init__(self, count):
        self.count = self.pending = count
        self.bytes = self.phase = 0

    def update(self, arrivals, nbytes):
        self.pending -= arrivals
        self.bytes += nbytes
        if self.pending < 0:
            raise RuntimeError("more arrivals at an mbarrier than it was made for")
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count


def _barrier(address) -> _Barrier:
    barriers = threading.current_thread().block.barriers
    if int(address) not in barriers:
        raise RuntimeError(f"mbarrier at {int(address)} was not initialised")
    return barriers[int(address)]


def _arrive(barrier, nbytes):
    _barrier(barrier).update(1, nbytes)


def mbar_init(barrier, count):
    _shared_bytes(barrier, 8)
    threading.current_thread().block.barriers[int(barrier)] = _Barrier(int(count))


def mbar_fence(): pass
def mbar_expect(barrier, nbytes): _arrive(barrier, int(nbytes))
def mbar_arrive(barrier): _arrive(barrier, 0)


def mbar_arrive_lane0(barrier, lane):
    if int(lane) == 0:
        _arrive(barrier, 0)


def mbar_wait(barrier, parity):
    """Wait until the phase of this parity is complete."""
    b, me = _barrier(barrier), threading.current_thread()
    me.block.wait(me, lambda: b.phase % 2 != int(parity) % 2, f"mbarrier at {int(barrier)}, parity {int(parity)}")


def bulk(dst, src, nbytes, barrier):
    """A contiguous copy into shared memory; its bytes complete on the barrier."""
    to = _shared_bytes(dst, int(nbytes), 16)
    if int(src) % 16 or int(nbytes) % 16:
        raise ValueError("bulk copies go by 16 bytes from 16-byte aligned addresses")
    _check_global(int(src), 1)
    _check_global(int(src) + int(nbytes) - 1, 1)
    to[:] = np.frombuffer((ctypes.c_uint8 * int(nbytes)).from_address(int(src)), np.uint8)
    _barrier(barrier).update(0, -int(nbytes))


def fence_async(): pass
def cta_rank(): return np.int32(0)
def cluster_sync(): numba_simulator._get_kernel_context().syncthreads()
def pdl_launch(): pass
def pdl_wait(): pass
def more_registers(): pass
def fewer_registers(): pass


def named_sync(barrier, threads):
    me = threading.current_thread()
    me.block.meet(me, ("named", int(barrier)), int(threads), None, None, f"named barrier {int(barrier)}")


def _absent(name):
    def instruction(*args):
        raise NotImplementedError(f"{name} is not simulated: Hopper kernels run on a GPU only")
    instruction.__name__ = name
    return instruction


def ptx(name, ret, args, text, constraints, pure=False, sim=None, since=(0, 0)):
    """The simulation of an instruction made elsewhere: ``sim``, a Python function, or one that raises."""
    return sim or _absent(name)


prefetch_tensormap, tma_load, tma_multicast, tma_prefetch, tma_store, tma_store_wait, mbar_arrive_at, mbar_arrive_pair = (
    _absent(n) for n in ("prefetch_tensormap", "tma_load", "tma_multicast", "tma_prefetch", "tma_store", "tma_store_wait",
                         "mbar_arrive_at", "mbar_arrive_pair"))


# ---------------------------------------------------------------- warps
def _collective(name, value, compute):
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


def _shuffle(name, value, lane, source):
    def compute(values):
        return [values[source(me, int(n))][0] for me, (_, n) in enumerate(values)]
    return _collective(name, (value, lane), compute)


def uniform(x): return _collective("uniform", x, lambda values: [values[0]] * WARP)
def pick(x, lane): return _shuffle("pick", x, lane, lambda me, n: n % WARP)
def shfl_xor(x, mask): return _shuffle("shfl_xor", np.float32(x), mask, lambda me, n: me ^ n)
def shfl_idx(x, lane): return _shuffle("shfl_idx", np.float32(x), lane, lambda me, n: n % WARP)
def shfl_up(x, n): return _shuffle("shfl_up", np.float32(x), n, lambda me, n: me - n if me >= n else me)
def shfl_down(x, n): return _shuffle("shfl_down", np.float32(x), n, lambda me, n: me + n if me + n < WARP else me)
def shfl_xor_u32(x, mask): return _shuffle("shfl_xor_u32", _bits(x), mask, lambda me, n: me ^ n)
def shfl_idx_u32(x, lane): return _shuffle("shfl_idx_u32", _bits(x), lane, lambda me, n: n % WARP)


def ballot(predicate):
    """Bit l of the result: whether lane l's predicate is not zero."""
    return _collective("ballot", bool(predicate),
                       lambda values: [np.uint32(sum(int(v) << lane for lane, v in enumerate(values)))] * WARP)


# ---------------------------------------------------------------- conversions and fast functions
def _bits(x): return np.uint32(int(x) & 0xFFFFFFFF)
def _float(bits): return np.asarray(bits, np.uint32).view(np.float32)[()]


def _from_bf16(x): return (np.asarray(x, np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(x):
    """float32 -> uint16: nearest, ties to even; the arithmetic of ``bf16.from_float32`` on one Python integer."""
    bits = int(np.asarray(x, np.float32).view(np.uint32))
    if bits & 0x7FFFFFFF > 0x7F800000:
        return np.uint16(0x7FFF)
    return np.uint16((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


def from_bf16(x): return _float((int(x) & 0xFFFF) << 16)
def pack(a, b): return np.uint32(int(to_bf16(a)) | int(to_bf16(b)) << 16)
def low(x): return _float((int(x) & 0xFFFF) << 16)
def high(x): return _float(int(x) & 0xFFFF0000)


def _half_bits(x):
    if np.isnan(x):
        return 0x7FFF
    return int(np.float16(np.clip(np.float32(x), -65504, 65504)).view(np.uint16))


def pack16(a, b): return np.uint32(_half_bits(a) | _half_bits(b) << 16)
def low16(x): return np.float32(np.uint16(int(x) & 0xFFFF).view(np.float16))
def high16(x): return np.float32(np.uint16(int(x) >> 16 & 0xFFFF).view(np.float16))
def mul_bf16x2(a, b): return pack(low(a) * low(b), high(a) * high(b))
def tf32(x): return np.uint32((int(np.float32(x).view(np.uint32)) + 0x1000) & 0xFFFFE000)
def ex2(x): return np.exp2(np.float32(x))
def rcp(x): return np.float32(1) / np.float32(x)
def rsqrt(x): return np.float32(1.0 / np.sqrt(np.float64(x)))
def mul_rn(a, b): return np.float32(a) * np.float32(b)
def add_rn(a, b): return np.float32(a) + np.float32(b)
def exp(x): return np.exp(np.float32(x))
def log1p(x): return np.log1p(np.float32(x))
def bits_f32(x): return np.uint32(np.float32(x).view(np.uint32))
def f32_bits(x): return _float(_bits(x))


def fma(a, b, c):
    """a * b + c rounded once: the product is exact in float64, the sum is rounded to odd there."""
    p, c = np.float64(a) * np.float64(b), np.float64(c)
    s = p + c
    if np.isfinite(s):
        t = s - p
        error = (p - (s - t)) + (c - t)
        if error and not s.view(np.int64) & 1:
            s = np.nextafter(s, np.inf if error > 0 else -np.inf)
    return np.float32(s)


# ---------------------------------------------------------------- matrix fragments
_G, _T = np.arange(WARP) // 4, np.arange(WARP) % 4
_D_ROWS, _D_COLS = np.stack([_G, _G, _G + 8, _G + 8], 1), np.stack([2 * _T, 2 * _T + 1] * 2, 1)


def _mma(name, to_float):
    def instruction(d, a, b0, b1):
        def compute(lanes):
            regs = np.array([[int(r) for r in (*a, b0, b1)] for _, a, b0, b1 in lanes], np.uint32)      # [32, 6]
            pairs = to_float(np.stack([regs & 0xFFFF, regs >> 16], -1).astype(np.uint16))              # [32, 6, 2]
            A, B, D = (np.zeros(s, np.float32) for s in ((16, 16), (16, 8), (16, 8)))
            for r, (row, k) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
                for e in (0, 1):
                    A[_G + row, 2 * _T + k + e] = pairs[:, r, e]
            for r, k in ((4, 0), (5, 8)):
                for e in (0, 1):
                    B[2 * _T + k + e, _G] = pairs[:, r, e]
            D[_D_ROWS, _D_COLS] = np.array([d for d, *_ in lanes], np.float32)
            return [tuple(row) for row in (D + A @ B)[_D_ROWS, _D_COLS]]
        return _collective(name, (d, a, b0, b1), compute)
    return instruction


mma = _mma("mma", _from_bf16)
mma16 = _mma("mma16", lambda x: x.view(np.float16).astype(np.float32))


def mma_tf32(d, a, b0, b1):
    def compute(lanes):
        regs = np.array([[int(r) for r in (*a, b0, b1)] for _, a, b0, b1 in lanes], np.uint32)
        values = (regs & np.uint32(0xFFFFE000)).view(np.float32)
        A, B, D = (np.zeros(s, np.float32) for s in ((16, 8), (8, 8), (16, 8)))
        for r, (row, k) in enumerate(((0, 0), (8, 0), (0, 4), (8, 4))):
            A[_G + row, _T + k] = values[:, r]
        B[_T, _G], B[_T + 4, _G] = values[:, 4], values[:, 5]
        D[_D_ROWS, _D_COLS] = np.array([d for d, *_ in lanes], np.float32)
        return [tuple(row) for row in (D + A @ B)[_D_ROWS, _D_COLS]]
    return _collective("mma_tf32", (d, a, b0, b1), compute)


def _ldmatrix(name, transposed):
    def instruction(address):
        def compute(addresses):
            rows = np.stack([_shared_bytes(a, 16).view(np.uint16) for a in addresses]).reshape(4, 8, 8).astype(np.uint32)
            if transposed:
                rows = rows.transpose(0, 2, 1)
            pairs = rows[:, _G, 2 * _T] | rows[:, _G, 2 * _T + 1] << np.uint32(16)           # [4, 32]
            return [tuple(pairs[:, lane]) for lane in range(WARP)]
        return _collective(name, address, compute)
    return instruction


ldsm, ldsm_t = _ldmatrix("ldsm", False), _ldmatrix("ldsm_t", True)


def transpose8(x):
    """An 8x8 matrix of 16-bit values, a row in four lanes, transposed."""
    def compute(lanes):
        pairs = np.array([int(v) for v in lanes], np.uint32)
        m = np.stack([pairs & 0xFFFF, pairs >> 16], -1).reshape(8, 8).T
        return list(m[_G, 2 * _T] | m[_G, 2 * _T + 1] << np.uint32(16))
    return _collective("transpose8", x, compute)


__all__ = [n for n, v in globals().items()
           if not n.startswith("_") and (v is types or callable(v) or isinstance(v, types.Type))
           and n not in ("Dim3", "FakeCUDAModule", "launch", "register")]
