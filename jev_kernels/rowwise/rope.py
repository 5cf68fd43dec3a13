"""Norm and rotary embedding of attention's q and k heads, in place on the output of the stacked projection.

    per head: x = r( x * rsqrt(mean(x^2) + eps) * (1 + w) )                                  w of q_norm or k_norm
    then on its first 2 * half dims, pairs (i, i + half):
        y[i] = r( r(x[i] c) + r(-x[i + half] s) ),   y[i + half] = r( r(x[i + half] c) + r(x[i] s) )
    c = r(cos), s = r(sin) of position * theta^(-2i / rotary_dim), from a table

qkv [rows, 2 Hq D + 2 Hk D] = q | gate | k | v, BF16 (uint16), D = 256, rotary_dim = 64, rows any stride apart, 16-byte
aligned. Table [max_length, 64] = 32 cosines | 32 sines. gate and v are left alone, except this: k and v of the 128 rows
after the last live one (as far as the buffer has them) become zero. Attention tiles read keys past a sequence's end,
and what only masked positions read must still be finite.

A warp takes two or four heads, a lane eight neighbouring dims of each. Lanes 0-7 hold the rotated ones, so the partner of a
dim is in lane xor 4. The sum of squares goes by lane, then by a xor tree: the bits of a head depend on nothing else.

Source: ``Qwen3_5Attention``, ``apply_rotary_pos_emb`` and ``Qwen3_5TextRotaryEmbedding`` of Transformers.
"""
from __future__ import annotations

import numpy as np
from numba import cuda
from numba.cuda import types

from jev_kernels import bf16, ptx
from jev_kernels.pool import ROWS, TILE_ROWS
from jev_kernels.ptx import f32, i32, u32, u64
from jev_kernels.rowwise.rms_norm import INF, MAX_ROWS, SHRINK, add_shrunk_squares, add_squares, scaled_pair, warp_sum
from jev_kernels.runtime import cubin
from jev_kernels.runtime.launch import Kernel, aligned, live, view

HEAD_DIM = 256                   # a warp of eight values a lane
ROTARY_DIM = 64
# (heads a warp, warps of a block): all of a warp's heads are loaded before the first is finished. Few rows: for latency. Many:
# bytes in flight, and one block a row (28 heads of the 27B, 20 of the 9B).
FEW_ROWS = 512
FEW, MANY = (2, 2), (4, 7)
SIGN = 0x80008000                # of both values of a pair


@ptx.device_function
def rotated_pair(x, other, cos, sin):
    """r( r(x c) + r(other s) ) of packed pairs; ``other`` carries the sign of rot(x)."""
    a = ptx.pack(ptx.mul_rn(ptx.low(x), ptx.low(cos)), ptx.mul_rn(ptx.high(x), ptx.high(cos)))
    b = ptx.pack(ptx.mul_rn(ptx.low(other), ptx.low(sin)), ptx.mul_rn(ptx.high(other), ptx.high(sin)))
    return ptx.pack(ptx.add_rn(ptx.low(a), ptx.low(b)), ptx.add_rn(ptx.high(a), ptx.high(b)))


@cubin.factory
def qk_rope_kernel(heads_a_warp: int, warps: int) -> Kernel:
    """Blocks (heads, rows). Parameters: qkv, row stride; q_norm, k_norm; table; positions; live count; heads; eps."""
    _, load8_once, store8 = bf16.access(True)
    words = 4 * heads_a_warp

    @ptx.device_function
    def finished(x0, x1, x2, x3, w, cos, sin, eps, lane):
        """A lane's eight dims of a head, normalised and rotated."""
        total = warp_sum(add_squares(x3, add_squares(x2, add_squares(x1, add_squares(x0, f32(0))))))
        rs = ptx.rsqrt(ptx.fma(total, f32(1.0 / HEAD_DIM), eps))
        if not total < f32(INF):                         # the same in every lane
            total = warp_sum(add_shrunk_squares(x3, add_shrunk_squares(x2, add_shrunk_squares(
                x1, add_shrunk_squares(x0, f32(0))))))
            rs = ptx.mul_rn(ptx.rsqrt(ptx.mul_rn(total, f32(1.0 / HEAD_DIM))), f32(SHRINK))
        y0, y1, y2, y3 = (scaled_pair(x0, rs, w[0]), scaled_pair(x1, rs, w[1]), scaled_pair(x2, rs, w[2]),
                          scaled_pair(x3, rs, w[3]))
        sign = u32(SIGN) if lane < 4 else u32(0)
        z0, z1, z2, z3 = (ptx.shfl_xor_u32(y0, 4) ^ sign, ptx.shfl_xor_u32(y1, 4) ^ sign,
                          ptx.shfl_xor_u32(y2, 4) ^ sign, ptx.shfl_xor_u32(y3, 4) ^ sign)
        if lane < 8:
            y0, y1, y2, y3 = (rotated_pair(y0, z0, cos[0], sin[0]), rotated_pair(y1, z1, cos[1], sin[1]),
                              rotated_pair(y2, z2, cos[2], sin[2]), rotated_pair(y3, z3, cos[3], sin[3]))
        return y0, y1, y2, y3

    def qk_rope_kernel(x_at, x_ld, q_weight, k_weight, table, positions, count, q_heads, k_heads, eps):
        ptx.pdl_launch()
        thread = i32(cuda.threadIdx.x)
        lane = i32(thread & 31)
        warp = i32(i32(cuda.blockIdx.x) * i32(warps) + (thread >> 5))
        row = i32(cuda.blockIdx.y)
        heads = i32(q_heads + k_heads)
        first = i32(warp * i32(heads_a_warp))
        n = ptx.ldg_i32(count)
        if row >= n + i32(TILE_ROWS) or (row < n and first >= heads):
            return
        row_at = x_at + u64(row * x_ld * 2) + u64(lane * 16)
        if row >= n:                                     # zeros for attention's masked keys
            ptx.pdl_wait()
            head = warp
            while head < 2 * k_heads:
                store8(row_at + u64((2 * q_heads + head) * i32(HEAD_DIM * 2)), (u32(0), u32(0), u32(0), u32(0)), 8)
                head = i32(head + i32(cuda.gridDim.x) * i32(warps))
            return
        position = ptx.ldg_i32(positions + u64(row * 4))
        x = cuda.local.array(words, u32)
        ptx.pdl_wait()
        for i in range(heads_a_warp):
            head = i32(min(first + i32(i), heads - 1))
            v = load8_once(row_at + u64(i32(head if head < q_heads else head + q_heads) * i32(HEAD_DIM * 2)), 8)
            x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3] = v[0], v[1], v[2], v[3]
        angle = table + u64(position * i32(ROTARY_DIM * 2) + lane % 4 * 16)
        cos = ptx.ldc_u32x4(angle)
        sin = ptx.ldc_u32x4(angle + u64(ROTARY_DIM))
        for i in range(heads_a_warp):
            head = i32(first + i32(i))
            if head < heads:
                w = ptx.ldc_u32x4((q_weight if head < q_heads else k_weight) + u64(lane * 16))
                store8(row_at + u64(i32(head if head < q_heads else head + q_heads) * i32(HEAD_DIM * 2)),
                       finished(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3], w, cos, sin, eps, lane), 8)

    return Kernel(qk_rope_kernel, types.void(u64, i32, u64, u64, u64, u64, u64, i32, i32, f32), warps * 32)


def qk_rope(stream, qkv, q_weight, k_weight, table, positions, counts, q_heads: int, k_heads: int, eps: float,
            pdl: bool = False) -> None:
    """Norm and rotate the q and k heads of qkv[:n], n = counts[ROWS], in place; zero k and v of the next 128 rows.

    qkv uint16 [capacity, 2 (q_heads + k_heads) 256], q_weight, k_weight uint16 [256], table uint16 [max_length, 64]
    (see ``reference.rope_table``), positions int32 [>= capacity], below max_length. Raises ValueError naming the argument
    that does not fit.
    """
    x = view("qkv", qkv, np.uint16, None, 2 * (q_heads + k_heads) * HEAD_DIM)
    capacity = x.shape[0]
    q_weight = view("q_weight", q_weight, np.uint16, HEAD_DIM)
    k_weight = view("k_weight", k_weight, np.uint16, HEAD_DIM)
    table = view("table", table, np.uint16, None, ROTARY_DIM)
    positions = view("positions", positions, np.int32, None)
    if positions.shape[0] < capacity:
        raise ValueError(f"positions has {positions.shape[0]} entries for {capacity} rows of qkv")
    for name, v in (("qkv", x), ("q_weight", q_weight), ("k_weight", k_weight), ("table", table)):
        if not aligned(v):
            raise ValueError(f"{name} must be aligned to 16 bytes in every row")
    if table.strides[0] != ROTARY_DIM:
        raise ValueError("table must be contiguous")
    if capacity > MAX_ROWS:
        raise ValueError(f"qkv must have at most {MAX_ROWS} rows, not {capacity}")
    if capacity:
        heads, warps = FEW if capacity <= FEW_ROWS else MANY
        blocks = -(-(q_heads + k_heads) // (heads * warps))
        qk_rope_kernel(heads, warps)(stream, (blocks, capacity), x.address, x.strides[0], q_weight.address, k_weight.address,
                         table.address, positions.address, live(counts, ROWS), q_heads, k_heads, eps, pdl=pdl)


def kernels() -> dict:
    """The kernels with their budgets: {name: (Kernel, compute capabilities, registers, spill bytes)}."""
    everywhere = ((8, 0), (9, 0, "a"))
    return {"qk_rope": (qk_rope_kernel(*FEW), everywhere, 48, 0), "qk_rope_many": (qk_rope_kernel(*MANY), everywhere, 64, 0)}
