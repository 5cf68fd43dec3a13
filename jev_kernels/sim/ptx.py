"""The names of ``jev_kernels.ptx`` in plain Python, for ``jev_kernels.sim.simulator``.

A warp-wide instruction is computed by the last of the 32 lanes to arrive, from the registers of all, with the layout of
fragments that the hardware has. cp.async delivers at the wait that guarantees it, not before. mbarriers are in
``barriers``, TMA in ``tma``, wgmma in ``wgmma``. What is not simulated says NotImplementedError, unless the instruction's
maker gave ``ptx`` a Python function that stands for it.

Source: the PTX ISA manual; fragments as in ``jev_kernels.ptx.fragments``.
"""
from __future__ import annotations

import ctypes
import threading

import numpy as np
from numba.cuda import types

from jev_kernels.ptx import fragments as _fragments
from jev_kernels.sim import simulator as _simulator
from jev_kernels.sim.barriers import (  # noqa: F401
    arrive as _arrive,
    barrier_at as _barrier,
    complete_bytes as _complete_bytes,
    mbar_init,
    mbar_wait,
)
from jev_kernels.sim.races import IN_GLOBAL as _IN_GLOBAL, IN_SHARED as _IN_SHARED
from jev_kernels.sim.simulator import (  # noqa: F401
    COPIED_FROM as _COPIED_FROM,
    COPIES as _COPIES,
    FILLS as _FILLS,
    RANK_BIT as _RANK_BIT,
    READS as _READS,
    WARP,
    WRITES as _WRITES,
    ballot,
    check_global as _check_global,
    collective as _collective,
    device_function,
    load_global as _load_global,
    register,
    shared_bytes as _shared_bytes,
    shuffle as _shuffle,
    split_shared as _split_shared,
)
from jev_kernels.sim.tma import (  # noqa: F401
    prefetch_tensormap,
    tma_load,
    tma_multicast,
    tma_store_if,
    tma_stores_done,
    tma_stores_read_but_one_if,
    tma_stores_read_if,
)

f32, i32, u16, u32, i64, u64, void = (
    types.float32, types.int32, types.uint16, types.uint32, types.int64, types.uint64, types.void)


# ---------------------------------------------------------------- memory
def smem_addr(array) -> np.int32:
    """Address in the shared window of a shared array's first element, with the block's rank in a cluster above it."""
    block = threading.current_thread().block
    return np.int32(array.ctypes.data - block.window_address | block.rank << _RANK_BIT)


def gmem_addr(array) -> np.uint64:
    """Address of a global array's first element."""
    return np.uint64(register(array))


def _lds(dtype, n=1):
    size = n * np.dtype(dtype).itemsize
    if n == 1:
        return lambda address: _shared_bytes(address, size, use=_READS).view(dtype)[0]
    return lambda address: tuple(_shared_bytes(address, size, use=_READS).view(dtype))


def _sts(address, values, dtype):
    values = np.array(values, dtype).reshape(-1)
    _shared_bytes(address, values.nbytes, use=_WRITES).view(dtype)[:] = values


def _ldg(dtype, n=1):
    if n == 1:
        return lambda address: _load_global(address, dtype)[0]
    return lambda address: tuple(_load_global(address, dtype, n).copy())


def _stg(address, values, dtype):
    values = np.array(values, dtype).reshape(-1)
    _check_global(int(address), values.nbytes, _WRITES)
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
def stg4(address, *x): _stg(address, x, np.float32)
def ldg4_if(address, n): return _ldg(np.float32, 4)(address) if int(n) else (np.float32(0),) * 4
def stg_bf16x2_if(address, x, y, n, limit): return stg_u32(address, pack(x, y)) if int(n) > int(limit) else None
def stg2(address, x, y): _stg(address, (x, y), np.float32)
def stg_u32(address, x): _stg(address, int(x) & 0xFFFFFFFF, np.uint32)
def stg_u32x4(address, x): _stg(address, [int(v) & 0xFFFFFFFF for v in x], np.uint32)
def stg_u32x2(address, x): stg_u32x4(address, x)
def ldg_u16_if(address, n): return ldg_u16(address) if int(n) > 0 else np.uint16(0)
def stg_u16_if(address, x, n): return stg_u16(address, x) if int(n) > 0 else None
def stg_u16(address, x): _stg(address, int(x) & 0xFFFF, np.uint16)
def prefetch_l2(address): pass
def evict_first(): return np.uint64(0)
def evict_last(): return np.uint64(0)
def evict_normal(): return np.uint64(0)


# ---------------------------------------------------------------- cp.async and mbarriers
def cp16(dst, src, size):
    """16 bytes into shared memory, of which ``size`` (0 or 16) are read and the rest zeros. Arrives at the wait."""
    if int(size):
        _check_global(int(src), 16, _READS)
    if int(dst) % 16:
        raise ValueError(f"cp.async of 16 bytes to a misaligned shared address {int(dst)}")
    _shared_bytes(dst, 16, use=_FILLS)
    threading.current_thread().copies.append((int(dst), int(src), int(size)))


def cp_commit():
    me = threading.current_thread()
    me.groups.append((me.copies, me.block.races and me.block.races.copied(me.number, proxied=False)))
    me.copies = []


def _deliver(copies):
    for dst, src, size in copies:
        to = _shared_bytes(dst, 16)
        to[:] = 0
        if size:
            to[:size] = np.frombuffer((ctypes.c_uint8 * size).from_address(src), np.uint8)


def _cp_wait(pending):
    me = threading.current_thread()
    while len(me.groups) > pending:
        copies, clock = me.groups.popleft()
        _deliver(copies)
        if me.block.races:
            me.block.races.acquire(me.number, clock)


def cp_wait0(): _cp_wait(0)
def cp_wait1(): _cp_wait(1)


def cp_wait_all():
    cp_commit()
    _cp_wait(0)


def cp_arrive(barrier):
    """The thread's earlier cp.async count as one arrival when they are complete: now."""
    cp_commit()
    groups = threading.current_thread().groups
    while groups:
        copies, clock = groups.popleft()        # the last one's clock has all earlier copies
        _deliver(copies)
    _barrier(barrier).update(1, 0, clock)


def mbar_fence(): pass
def mbar_expect(barrier, nbytes): _arrive(barrier, nbytes)
def mbar_arrive(barrier): _arrive(barrier)
def mbar_arrive_at(barrier, rank): _arrive(_split_shared(barrier)[1] | int(rank) << _RANK_BIT)
def mbar_arrive_pair(barrier, lane): return mbar_arrive_at(barrier, lane) if int(lane) < 2 else None


def mbar_arrive_lane0(barrier, lane):
    if int(lane) == 0:
        _arrive(barrier)


mbar_wait_covered = mbar_wait           # a thread that waits for ever is reported here anyway


def bulk(dst, src, nbytes, barrier):
    """A contiguous copy into shared memory; its bytes complete on the barrier."""
    to = _shared_bytes(dst, int(nbytes), 16, use=_COPIES)
    if int(src) % 16 or int(nbytes) % 16:
        raise ValueError("bulk copies go by 16 bytes from 16-byte aligned addresses")
    _check_global(int(src), int(nbytes), _COPIED_FROM, alignment=16)
    to[:] = np.frombuffer((ctypes.c_uint8 * int(nbytes)).from_address(int(src)), np.uint8)
    _complete_bytes(barrier, nbytes)


def _fence(memory):
    me = threading.current_thread()
    if me.block.races:
        me.block.races.fence(me.number, memory)


def fence_async(): _fence(_IN_SHARED)
def fence_global(): _fence(_IN_GLOBAL)
def cta_rank(): return np.int32(threading.current_thread().block.rank)


def cluster_sync():
    me = threading.current_thread()
    cluster = me.block.cluster
    cluster.meet(cluster.meetings, me, "cluster", cluster.live, None, None, "a barrier of the cluster")


def pdl_launch():
    me = threading.current_thread()
    if me.block.races:
        _simulator.DEVICE.trigger = min(_simulator.DEVICE.trigger, me.block.races.clock[me.number].launch)


def pdl_wait():
    me = threading.current_thread()
    if me.block.races:
        me.block.races.clock[me.number].launch = _simulator.DEVICE.launch


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


# ---------------------------------------------------------------- warps
def uniform(x): return _collective("uniform", x, lambda values: [values[0]] * WARP)
def shfl_idx_i32(x, lane): return _shuffle("shfl_idx_i32", x, lane, lambda me, n: n % WARP)
def shfl_xor(x, mask): return _shuffle("shfl_xor", np.float32(x), mask, lambda me, n: me ^ n)
def shfl_idx(x, lane): return _shuffle("shfl_idx", np.float32(x), lane, lambda me, n: n % WARP)
def shfl_up(x, n): return _shuffle("shfl_up", np.float32(x), n, lambda me, n: me - n if me >= n else me)
def shfl_down(x, n): return _shuffle("shfl_down", np.float32(x), n, lambda me, n: me + n if me + n < WARP else me)
def shfl_xor_u32(x, mask): return _shuffle("shfl_xor_u32", _bits(x), mask, lambda me, n: me ^ n)
def shfl_idx_u32(x, lane): return _shuffle("shfl_idx_u32", _bits(x), lane, lambda me, n: n % WARP)


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
# Functions and sums of products in float64, rounded once: NumPy's float32 ones are not the same on every processor.
def ex2(x): return np.float32(np.exp2(np.float64(np.float32(x))))
def rcp(x): return np.float32(1) / np.float32(x)
def rsqrt(x): return np.float32(1.0 / np.sqrt(np.float64(x)))
def div_u32(a, b): return np.int32(int(a) // int(b))
def mul_rn(a, b): return np.float32(a) * np.float32(b)
def add_rn(a, b): return np.float32(a) + np.float32(b)
def exp(x): return np.float32(np.exp(np.float64(np.float32(x))))
def log1p(x): return np.float32(np.log1p(np.float64(np.float32(x))))
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


# ---------------------------------------------------------------- matrices of a warp
_D, _A, _B = _fragments.accumulators(8), _fragments.a_pairs(), _fragments.b_pairs()
_A_TF32, _B_TF32, _PAIR = _fragments.a_tf32(), _fragments.b_tf32(), _fragments.pairs8()


def _product(lanes, a_map, b_map, k, elements):
    """D of the 32 lanes after D += A B. elements: the operands' registers, uint32 [32, n], as the maps have them."""
    regs = np.array([[int(r) for r in (*a, b0, b1)] for _, a, b0, b1 in lanes], np.uint32)                   # [32, 6]
    A, B, D = (np.zeros(s) for s in ((16, k), (k, 8), (16, 8)))
    A[a_map], B[b_map], D[_D] = elements(regs[:, :4]), elements(regs[:, 4:]), np.array([d for d, *_ in lanes], np.float32)
    return [tuple(row) for row in (D + A @ B).astype(np.float32)[_D]]


def _mma(name, to_float):
    def pairs(regs):
        return to_float(np.stack([regs & 0xFFFF, regs >> 16], -1).astype(np.uint16))

    def instruction(d, a, b0, b1):
        return _collective(name, (d, a, b0, b1), lambda lanes: _product(lanes, _A, _B, 16, pairs))
    return instruction


mma = _mma("mma", _from_bf16)
mma16 = _mma("mma16", lambda x: x.view(np.float16).astype(np.float32))


def mma_tf32(d, a, b0, b1):
    def rounded(regs):
        return (regs & np.uint32(0xFFFFE000)).view(np.float32)
    return _collective("mma_tf32", (d, a, b0, b1), lambda lanes: _product(lanes, _A_TF32, _B_TF32, 8, rounded))


def _joined_pairs(matrices):
    """The registers of 8 x 8 matrices, uint32 [..., 32]."""
    values = matrices.astype(np.uint32)[(..., *_PAIR)]
    return values[..., 0] | values[..., 1] << np.uint32(16)


def _ldmatrix(name, transposed):
    def instruction(address):
        def compute(addresses):
            rows = np.stack([_shared_bytes(a, 16, use=_READS, lane=lane).view(np.uint16)
                             for lane, a in enumerate(addresses)])
            matrices = rows.reshape(4, 8, 8)
            return list(_joined_pairs(matrices.transpose(0, 2, 1) if transposed else matrices).T)
        return _collective(name, address, compute)
    return instruction


def _stmatrix(name, matrices):
    def instruction(address, *registers):
        def compute(lanes):
            for m in range(matrices):
                pairs = np.array([int(registers[m]) for _, registers in lanes], np.uint32)
                rows = np.empty((8, 8), np.uint16)
                rows[_PAIR] = np.stack([pairs & 0xFFFF, pairs >> 16], -1)
                for r, lane in enumerate(range(8 * m, 8 * m + 8)):
                    _shared_bytes(lanes[lane][0], 16, use=_WRITES, lane=lane).view(np.uint16)[:] = rows[:, r]
            return [None] * WARP
        _collective(name, (address, registers), compute)
    return instruction


ldsm, ldsm_t = _ldmatrix("ldsm", False), _ldmatrix("ldsm_t", True)
stsm4_t, stsm2_t = _stmatrix("stsm4_t", 4), _stmatrix("stsm2_t", 2)


def transpose8(x):
    """An 8x8 matrix of 16-bit values, a row in four lanes, transposed."""
    def compute(lanes):
        pairs, matrix = np.array([int(v) for v in lanes], np.uint32), np.empty((8, 8), np.uint16)
        matrix[_PAIR] = np.stack([pairs & 0xFFFF, pairs >> 16], -1)
        return list(_joined_pairs(matrix.T))
    return _collective("transpose8", x, compute)


__all__ = [n for n, v in globals().items()
           if not n.startswith("_") and (v is types or callable(v) or isinstance(v, types.Type))
           and n != "register"]
