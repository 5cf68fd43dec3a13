"""SiLU of the gate times up: the activation of the MLP.

    a = r(silu(g)),  y = r(a * u)        silu(x) = x / (1 + exp(-x))

gate_up [rows, 2 width]: INTERLEAVE columns of g, as many of u, and so on; y [rows, width]; BF16 (uint16), rows any
stride apart. float32 between the two roundings. Four by four a 16-byte access brings values of g and the u that
belong to them, and our GEMMs, which hold neighbouring columns in one warp, can do this in their last step
(``silu_mul_pair``).

A thread takes two pieces of four g and four u, 16 bytes each; where pointers or strides rule that out it loads them one
by one: same arithmetic, same bits.

silu is computed from e = exp(-|x|), which is at most 1: nothing overflows, the division is by a number in [1, 2], and
for x < -88, where 1 + exp(-x) would be infinite, x e keeps the subnormal result that is left. e is the square of
exp(-|x| / 2), which is far from subnormal, where the fast exponential would give 0. The relative error grows with |x|:
6e-7 up to |x| = 8, 4e-6 at 87; half an ulp of BF16 is 2e-3. (With an exact 2^x, r(silu(x)) is right for all 65,536 x.)

Source: ``Qwen3_5MLP`` of Transformers.
"""
from __future__ import annotations

import math

import numpy as np
from numba import cuda
from numba.cuda import types

from jev_kernels import bf16, ptx
from jev_kernels.pool import ROWS
from jev_kernels.ptx import f32, i32, u32, u64
from jev_kernels.reference import INTERLEAVE
from jev_kernels.runtime import cubin
from jev_kernels.runtime.launch import Kernel, aligned, live, view

THREADS = 256
HALF_LOG2 = -0.5 / math.log(2)   # exp(-x / 2) = 2^(HALF_LOG2 x)
MAX_ROWS = 65535                 # of a launch: rows are the grid's second dimension


@ptx.device_function
def exp_minus_abs(x):
    """exp(-|x|) of a float32, subnormal results included."""
    half = ptx.ex2(ptx.mul_rn(abs(x), f32(HALF_LOG2)))
    return ptx.mul_rn(half, half)


@ptx.device_function
def sigmoid(x):
    """1 / (1 + exp(-x)) of a float32."""
    e = exp_minus_abs(x)
    return ptx.mul_rn(f32(1) if x >= f32(0) else e, ptx.rcp(ptx.add_rn(f32(1), e)))


@ptx.device_function
def silu(x):
    """x * sigmoid(x) of a float32."""
    e = exp_minus_abs(x)
    return ptx.mul_rn(x if x >= f32(0) else ptx.mul_rn(x, e), ptx.rcp(ptx.add_rn(f32(1), e)))


@ptx.device_function
def silu_mul_pair(g, u):
    """r(r(silu(g)) * u) of two packed pairs."""
    a = ptx.pack(silu(ptx.low(g)), silu(ptx.high(g)))
    return ptx.pack(ptx.mul_rn(ptx.low(a), ptx.low(u)), ptx.mul_rn(ptx.high(a), ptx.high(u)))


@cubin.factory
def silu_mul_kernel(vector: bool) -> Kernel:
    """Blocks (part of the row, row). Parameters: gate_up, its row stride, y, its row stride, live count, width."""
    _, load8_once, store8 = bf16.access(vector)

    @ptx.device_function
    def finish(x, y_at):
        """Four results of a piece: g in two registers, u in two."""
        a, b = silu_mul_pair(x[0], x[2]), silu_mul_pair(x[1], x[3])
        if vector:
            ptx.stg_u32x2(y_at, (a, b))
        else:
            store8(y_at, (a, b, u32(0), u32(0)), i32(INTERLEAVE))

    def silu_mul_kernel(x_at, x_ld, y_at, y_ld, count, width):
        ptx.pdl_launch()
        row = i32(cuda.blockIdx.y)
        piece = i32(i32(cuda.blockIdx.x) * i32(2 * THREADS) + i32(cuda.threadIdx.x))
        pieces = i32(width // INTERLEAVE)
        if row >= ptx.ldg_i32(count) or piece >= pieces:
            return
        ptx.pdl_wait()
        x_at = x_at + u64((row * x_ld + piece * 2 * INTERLEAVE) * 2)
        y_at = y_at + u64((row * y_ld + piece * INTERLEAVE) * 2)
        first = load8_once(x_at, i32(8))
        second = first
        if piece + THREADS < pieces:
            second = load8_once(x_at + u64(THREADS * 16), i32(8))
        finish(first, y_at)
        if piece + THREADS < pieces:
            finish(second, y_at + u64(THREADS * 8))

    return Kernel(silu_mul_kernel, types.void(u64, i32, u64, i32, u64, i32), THREADS)


def silu_mul(stream, gate_up, y, counts, pdl: bool = False) -> None:
    """y[:n] = r(r(silu(gate)) * up), n = counts[ROWS].

    gate_up uint16 [capacity, 2 width], y uint16 [capacity, width], any row strides, width a multiple of INTERLEAVE. Raises
    ValueError naming the argument that does not fit.
    """
    y = view("y", y, np.uint16, None, None)
    capacity, width = y.shape
    x = view("gate_up", gate_up, np.uint16, capacity, 2 * width)
    if capacity > MAX_ROWS:
        raise ValueError(f"y must have at most {MAX_ROWS} rows, not {capacity}")
    if width % INTERLEAVE:
        raise ValueError(f"y must have a multiple of {INTERLEAVE} columns, not {width}")
    if capacity and width:
        silu_mul_kernel(aligned(x, y))(
            stream, (-(-width // (2 * INTERLEAVE * THREADS)), capacity), x.address, x.strides[0], y.address, y.strides[0],
            live(counts, ROWS), width, pdl=pdl)


def kernels() -> dict:
    """The kernels with their budgets: {name: (Kernel, compute capabilities, registers, spill bytes)}."""
    everywhere = ((8, 0), (9, 0, "a"))
    return {"silu_mul": (silu_mul_kernel(True), everywhere, 40, 0),
            "silu_mul_scalar": (silu_mul_kernel(False), everywhere, 48, 0)}
