"""RMS norms: of a row, of a residual sum that is kept, and of attention heads with a gate.

    rms_norm        y = r( x * rsqrt(mean(x^2) + eps) * (1 + w) )                                  one rounding
    add_rms_norm    res = r(res + delta), kept;  y = rms_norm(res)                                 of the rounded res
    gated_rms_norm  per head of 128: n = r(o * rsqrt(mean(o^2) + eps)), m = r(w * n), y = r(m * silu(z))

x, res, delta, y [rows, width]; o, z, y [rows, heads * 128]; w [width] or [128]. BF16 (uint16), rows any stride apart.

A block holds one row (a half-warp one head) in registers between the two passes, so memory is read once. Thread t owns
the groups of eight values t, t + threads, ...; it sums its squares in that order by fma, lanes by a xor tree, warps by
a second one: the order depends on the width alone. Where pointers, strides or width rule out 16-byte accesses the same
code loads values one by one: same order, same bits.

A float32 sum of squares overflows from |x| = 1e19 / width on. The row is then summed again as 2^-100 x, so every finite
row has a finite norm. float32 throughout; the square root is ``rsqrt.approx`` (2 ulp).

Source: ``Qwen3_5RMSNorm`` and ``Qwen3_5RMSNormGated`` of Transformers.
"""
from __future__ import annotations

import numpy as np
from numba import cuda
from numba.cuda import types

from jev_kernels import bf16, ptx
from jev_kernels.pool import LASTS, ROWS
from jev_kernels.ptx import f32, i32, u32, u64
from jev_kernels.rowwise.silu import MAX_ROWS, silu
from jev_kernels.runtime import cubin
from jev_kernels.runtime.launch import Kernel, aligned, live, view

MAX_WIDTH = 32768
HEAD = 128                       # gated_rms_norm: 16 lanes of eight values
GATED_THREADS = 128
INF = np.float32(np.inf)
SHRINK = np.float32(2.0 ** -100)
INPUT_ROWS_ARE_OUTPUT_ROWS = 0   # the kernels' ``rows``: no index


def layout(width: int) -> tuple[int, int]:
    """(groups of eight a thread, threads) for a row: part of the definition, since it fixes the order of summation."""
    groups = -(-width // 8)
    per_thread = 1
    while groups > (256 if per_thread < 2 else 512 if per_thread < 4 else 1024) * per_thread:
        per_thread *= 2
    return per_thread, max(32, -(-groups // (32 * per_thread)) * 32)


@ptx.device_function
def warp_sum(x):
    """The sum of 32 lanes, in every lane."""
    x = ptx.add_rn(x, ptx.shfl_xor(x, 16))
    x = ptx.add_rn(x, ptx.shfl_xor(x, 8))
    x = ptx.add_rn(x, ptx.shfl_xor(x, 4))
    x = ptx.add_rn(x, ptx.shfl_xor(x, 2))
    return ptx.add_rn(x, ptx.shfl_xor(x, 1))


@ptx.device_function
def add_squares(x, total):
    """total + the squares of a pair."""
    return ptx.fma(ptx.high(x), ptx.high(x), ptx.fma(ptx.low(x), ptx.low(x), total))


@ptx.device_function
def add_shrunk_squares(x, total):
    """total + the squares of 2^-100 times a pair."""
    a, b = ptx.mul_rn(ptx.low(x), f32(SHRINK)), ptx.mul_rn(ptx.high(x), f32(SHRINK))
    return ptx.fma(b, b, ptx.fma(a, a, total))


@ptx.device_function
def add_pairs(a, b):
    """Two pairs of BF16 added and rounded."""
    return ptx.pack(ptx.low(a) + ptx.low(b), ptx.high(a) + ptx.high(b))


@ptx.device_function
def scaled_pair(x, rs, w):
    """r(x * rs * (1 + w)) of a pair."""
    return ptx.pack(ptx.mul_rn(ptx.mul_rn(ptx.low(x), rs), f32(1) + ptx.low(w)),
                    ptx.mul_rn(ptx.mul_rn(ptx.high(x), rs), f32(1) + ptx.high(w)))


@cubin.factory
def norm_kernel(per_thread: int, threads: int, vector: bool, add: bool) -> Kernel:
    """The kernel of both row norms; a block takes one row.

    Parameters: addresses and row strides (in values) of x, delta (if add), the sum's row to write (if add), y; the
    weight; rows (int32, which row of x and delta an output row comes from) or 0; the live count; width, 1 / width, eps.
    """
    load8, load8_once, store8 = bf16.access(vector)
    pairs, warps = 4 * per_thread, threads // 32
    slots = 2 * warps

    @ptx.device_function
    def squares(x):
        total = f32(0)
        for i in range(pairs):
            total = add_squares(x[i], total)
        return total

    @ptx.device_function
    def shrunk_squares(x):
        total = f32(0)
        for i in range(pairs):
            total = add_shrunk_squares(x[i], total)
        return total

    @ptx.device_function
    def block_sum(value, partial, first):
        """The sum over the block, in every thread; ``partial[first:first + warps]`` must be unused so far."""
        value = warp_sum(value)
        if warps > 1:
            tid = i32(cuda.threadIdx.x)
            if tid % 32 == 0:
                partial[first + tid // 32] = value
            cuda.syncthreads()
            lane = tid % 32
            value = warp_sum(partial[first + lane] if lane < warps else f32(0))
        return value

    def rms_norm_kernel(x_at, x_ld, delta_at, delta_ld, weight_at, sum_at, sum_ld, y_at, y_ld, rows, count, width,
                        inverse, eps):
        ptx.pdl_launch()
        row = i32(cuda.blockIdx.x)
        if row >= ptx.ldg_i32(count):
            return
        tid = i32(cuda.threadIdx.x)
        partial = cuda.shared.array(slots, f32)
        w = cuda.local.array(pairs, u32)
        x = cuda.local.array(pairs, u32)
        d = cuda.local.array(pairs, u32)
        for i in range(per_thread):                      # weights first: they do not depend on the previous kernel
            at = (tid + i * threads) * 8
            g = (u32(0), u32(0), u32(0), u32(0))
            if at < width:
                g = load8(weight_at + u64(at * 2), width - at)
            w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3] = g[0], g[1], g[2], g[3]
        source = row
        if rows != u64(INPUT_ROWS_ARE_OUTPUT_ROWS):
            source = ptx.ldg_i32(rows + u64(row * 4))
        ptx.pdl_wait()
        x_at = x_at + u64(source * x_ld * 2)
        for i in range(per_thread):
            at = (tid + i * threads) * 8
            g = (u32(0), u32(0), u32(0), u32(0))
            if at < width:
                g = load8_once(x_at + u64(at * 2), width - at)
            x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3] = g[0], g[1], g[2], g[3]
        if add:
            delta_at = delta_at + u64(source * delta_ld * 2)
            for i in range(per_thread):
                at = (tid + i * threads) * 8
                g = (u32(0), u32(0), u32(0), u32(0))
                if at < width:
                    g = load8_once(delta_at + u64(at * 2), width - at)
                d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3] = g[0], g[1], g[2], g[3]
            sum_at = sum_at + u64(row * sum_ld * 2)
            for i in range(pairs):
                x[i] = add_pairs(x[i], d[i])
            for i in range(per_thread):
                at = (tid + i * threads) * 8
                if at < width:
                    store8(sum_at + u64(at * 2), (x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]), width - at)
        total = block_sum(squares(x), partial, 0)
        rs = ptx.rsqrt(ptx.mul_rn(total, inverse) + eps)
        if not total < f32(INF):                         # the same in every thread
            total = block_sum(shrunk_squares(x), partial, warps)
            rs = ptx.mul_rn(ptx.rsqrt(ptx.mul_rn(total, inverse)), f32(SHRINK))
        y_at = y_at + u64(row * y_ld * 2)
        for i in range(per_thread):
            at = (tid + i * threads) * 8
            if at < width:
                store8(y_at + u64(at * 2),
                       (scaled_pair(x[4 * i], rs, w[4 * i]), scaled_pair(x[4 * i + 1], rs, w[4 * i + 1]),
                        scaled_pair(x[4 * i + 2], rs, w[4 * i + 2]), scaled_pair(x[4 * i + 3], rs, w[4 * i + 3])),
                       width - at)

    a = (u64, i32)
    return Kernel(rms_norm_kernel, types.void(*a, *a, u64, *a, *a, u64, u64, i32, f32, f32), threads)


@cubin.factory
def gated_kernel(vector: bool) -> Kernel:
    """Blocks (heads, rows). Parameters: addresses, row strides of o, z, y; the weight; heads, live count, eps."""
    load8, load8_once, store8 = bf16.access(vector)
    per_block = GATED_THREADS // 16

    @ptx.device_function
    def gated_pair(o, z, w, rs):
        n = ptx.pack(ptx.mul_rn(ptx.low(o), rs), ptx.mul_rn(ptx.high(o), rs))
        m = ptx.pack(ptx.mul_rn(ptx.low(w), ptx.low(n)), ptx.mul_rn(ptx.high(w), ptx.high(n)))
        return ptx.pack(ptx.mul_rn(ptx.low(m), silu(ptx.low(z))), ptx.mul_rn(ptx.high(m), silu(ptx.high(z))))

    @ptx.device_function
    def half_warp_sum(total):
        """The sum over the half-warp, in each of its lanes."""
        total = ptx.add_rn(total, ptx.shfl_xor(total, 8))
        total = ptx.add_rn(total, ptx.shfl_xor(total, 4))
        total = ptx.add_rn(total, ptx.shfl_xor(total, 2))
        return ptx.add_rn(total, ptx.shfl_xor(total, 1))

    def gated_rms_norm_kernel(o_at, o_ld, z_at, z_ld, weight_at, y_at, y_ld, heads, count, eps):
        ptx.pdl_launch()
        row = i32(cuda.blockIdx.y)
        if row >= ptx.ldg_i32(count):
            return
        thread = i32(cuda.threadIdx.x)
        lane = i32(thread & 15)
        head = i32(i32(cuda.blockIdx.x) * i32(per_block) + (thread >> 4))
        there = head < heads                             # the other half-warp may have a head where this one has none
        at = i32(head * HEAD + lane * 8)
        w = load8(weight_at + u64(lane * 16), 8)
        ptx.pdl_wait()
        o = (u32(0), u32(0), u32(0), u32(0))
        z = (u32(0), u32(0), u32(0), u32(0))
        if there:
            o = load8_once(o_at + u64((row * o_ld + at) * 2), 8)
            z = load8_once(z_at + u64((row * z_ld + at) * 2), 8)
        total = half_warp_sum(add_squares(o[3], add_squares(o[2], add_squares(o[1], add_squares(o[0], f32(0))))))
        rs = ptx.rsqrt(ptx.fma(total, f32(1.0 / HEAD), eps))
        big = not total < f32(INF)
        if ptx.ballot(i32(big)) != 0:
            total = half_warp_sum(add_shrunk_squares(o[3], add_shrunk_squares(o[2], add_shrunk_squares(
                o[1], add_shrunk_squares(o[0], f32(0))))))
            if big:
                rs = ptx.mul_rn(ptx.rsqrt(ptx.mul_rn(total, f32(1.0 / HEAD))), f32(SHRINK))
        if there:
            store8(y_at + u64((row * y_ld + at) * 2),
                   (gated_pair(o[0], z[0], w[0], rs), gated_pair(o[1], z[1], w[1], rs),
                    gated_pair(o[2], z[2], w[2], rs), gated_pair(o[3], z[3], w[3], rs)), 8)

    a = (u64, i32)
    return Kernel(gated_rms_norm_kernel, types.void(*a, *a, u64, *a, i32, u64, f32), GATED_THREADS)


# ---------------------------------------------------------------- launchers
def rms_norm(stream, x, weight, y, counts, eps: float, rows=None, pdl: bool = False) -> None:
    """y[:n] = rms_norm(x[:n]), n = counts[ROWS]. With ``rows`` (int32): y[i] = rms_norm(x[rows[i]]), n = counts[LASTS].

    x, y uint16 [capacity, width], weight uint16 [width]. y may be x when there are no ``rows``. Capacities are checked,
    counts are trusted. Raises ValueError naming the argument that does not fit.
    """
    y = view("y", y, np.uint16, None, None)
    width = y.shape[1]
    x = view("x", x, np.uint16, None if rows is not None else y.shape[0], width)
    _launch(stream, x, None, weight, None, y, counts, eps, rows, pdl)


def add_rms_norm(stream, res, delta, weight, y, counts, eps: float, out=None, rows=None, pdl: bool = False) -> None:
    """out[:n] = r(res[:n] + delta[:n]), y[:n] = rms_norm(out[:n]) with n = counts[ROWS].

    With ``rows`` (int32): out[i] = r(res[rows[i]] + delta[rows[i]]), n = counts[LASTS]. out is res unless given; it
    must be given with ``rows``. y may be delta when there are no ``rows``. res, delta, out, y uint16 [capacity, width],
    weight uint16 [width]. Raises ValueError naming the argument that does not fit.
    """
    if out is None and rows is not None:
        raise ValueError("out must be given with rows: several outputs may come from one row of res")
    y = view("y", y, np.uint16, None, None)
    capacity, width = y.shape
    res_view = view("res", res, np.uint16, None if rows is not None else capacity, width)
    delta = view("delta", delta, np.uint16, res_view.shape[0], width)
    out = res_view if out is None else view("out", out, np.uint16, capacity, width)
    _launch(stream, res_view, delta, weight, out, y, counts, eps, rows, pdl)


def _launch(stream, x, delta, weight, out, y, counts, eps, rows, pdl):
    capacity, width = y.shape
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"y must have 1 to {MAX_WIDTH} columns, not {width}")
    weight = view("weight", weight, np.uint16, width)
    if rows is not None:
        count = live(counts, LASTS)
        rows = view("rows", rows, np.int32, None)
        if rows.shape[0] < capacity:
            raise ValueError(f"rows has {rows.shape[0]} entries for {capacity} output rows")
        rows = rows.address
    else:
        count, rows = live(counts, ROWS), INPUT_ROWS_ARE_OUTPUT_ROWS
    arrays = [v for v in (x, delta, weight, out, y) if v is not None]
    kernel = norm_kernel(*layout(width), aligned(*arrays), delta is not None)
    nothing = (0, 0)
    place = lambda v: nothing if v is None else (v.address, v.strides[0])  # noqa: E731
    if capacity:
        kernel(stream, capacity, *place(x), *place(delta), weight.address, *place(out), *place(y), rows, count, width,
               1.0 / width, eps, pdl=pdl)


def gated_rms_norm(stream, o, z, weight, y, counts, eps: float, pdl: bool = False) -> None:
    """y[:n] = gated_rms_norm(o[:n], z[:n]) per head of 128, n = counts[ROWS].

    o, z, y uint16 [capacity, heads * 128], any row strides; y may be o. weight uint16 [128]. Raises ValueError naming
    the argument that does not fit.
    """
    y = view("y", y, np.uint16, None, None)
    capacity, width = y.shape
    if width % HEAD or not width:
        raise ValueError(f"y must have a multiple of {HEAD} columns, not {width}")
    o = view("o", o, np.uint16, capacity, width)
    z = view("z", z, np.uint16, capacity, width)
    weight = view("weight", weight, np.uint16, HEAD)
    if capacity > MAX_ROWS:
        raise ValueError(f"y must have at most {MAX_ROWS} rows, not {capacity}")
    heads = width // HEAD
    if capacity:
        gated_kernel(aligned(o, z, weight, y))(
            stream, (-(-heads // (GATED_THREADS // 16)), capacity), o.address, o.strides[0], z.address, z.strides[0],
            weight.address, y.address, y.strides[0], heads, live(counts, ROWS), eps, pdl=pdl)


def kernels() -> dict:
    """The 27B's kernels with their budgets: {name: (Kernel, compute capabilities, registers, spill bytes)}."""
    everywhere = ((8, 0), (9, 0, "a"))
    return {"rms_norm": (norm_kernel(*layout(5120), True, False), everywhere, 64, 0),
            "rms_norm_scalar": (norm_kernel(*layout(5120), False, False), everywhere, 72, 0),
            "add_rms_norm": (norm_kernel(*layout(5120), True, True), everywhere, 64, 0),
            "add_rms_norm_wide": (norm_kernel(*layout(MAX_WIDTH), True, True), everywhere, 64, 512),
            "gated_rms_norm": (gated_kernel(True), everywhere, 48, 0),
            "gated_rms_norm_scalar": (gated_kernel(False), everywhere, 64, 0)}
