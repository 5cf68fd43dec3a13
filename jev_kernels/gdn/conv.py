"""What stands before the gated delta rule: a short causal convolution with SiLU, and the gates.

    conv     y = r(silu(r( sum_j w[c, j] x[t - 3 + j, c] )))      j = 0..3, along the row's path; zero before its start
    gates    beta = r(sigmoid(b));   g = -exp(A_log) * softplus(a + dt_bias)      softplus(x) = x above 20; g is float32

x [rows, channels] (columns of the stacked projection's output), w [channels, 4], y [rows, channels]; b, a, beta, g
[rows, heads], A_log, dt_bias [heads]. BF16 (uint16) except g; x, b, a and y with any row stride.

Rows are nodes of a token trie in depth-first order, so the previous token of row t is parents[t]: t - 1, except at the
start of a branch. A thread takes eight channels and walks down its rows, four at a time, with the three before them in
registers; it follows ``parents`` three steps up only at its first row and where a branch starts. A row's own arithmetic
is the same either way: fma from the oldest tap to the newest, in float32.

Channels in eights of 16-byte accesses; one by one where pointers, strides or their number rule that out (same bits).
Gates are few: extra blocks of the same launch compute them, or a launch of their own.

Source: ``Qwen3_5GatedDeltaNet`` of Transformers (``causal_conv1d``, whose output is rounded before SiLU).
"""
from __future__ import annotations

import numpy as np
from numba import cuda
from numba.cuda import types

from jev_kernels import bf16, ptx
from jev_kernels.pool import ROWS
from jev_kernels.ptx import f32, i32, u32, u64
from jev_kernels.rowwise.silu import sigmoid, silu
from jev_kernels.runtime import cubin
from jev_kernels.runtime.launch import Kernel, aligned, live, view

THREADS = 128
RESIDENT = 7                     # blocks a multiprocessor: with fewer, loads and arithmetic hardly overlap
FEW_ROWS = 512                   # up to here short blocks, for latency; above, longer ones read less twice
TAPS = 4
MAX_ROWS = 4 * 65535             # the grid's second dimension
LINEAR_FROM = np.float32(20)     # softplus(x) = x above, as PyTorch has it


@ptx.device_function
def gate(a, a_log, dt_bias):
    """-exp(A_log) * softplus(a + dt_bias)."""
    x = ptx.add_rn(a, dt_bias)
    soft = x if x > f32(LINEAR_FROM) else ptx.log1p(ptx.exp(x))
    return ptx.mul_rn(-ptx.exp(a_log), soft)


@ptx.device_function
def taps(w, c, x0, x1, x2, x3):
    """The sum of channel c of eight: its taps, the pairs w[2 c] and w[2 c + 1], on the values of four rows, oldest first."""
    total = ptx.mul_rn(ptx.low(w[2 * c]), x0)
    total = ptx.fma(ptx.high(w[2 * c]), x1, total)
    total = ptx.fma(ptx.low(w[2 * c + 1]), x2, total)
    return ptx.fma(ptx.high(w[2 * c + 1]), x3, total)


@ptx.device_function
def convolved_pair(w, p, x, j):
    """Pair p of four of the row that stands in x[j + 12 ..], its three predecessors before it."""
    a, b, c, d = x[j + p], x[j + 4 + p], x[j + 8 + p], x[j + 12 + p]
    total = ptx.pack(taps(w, 2 * p, ptx.low(a), ptx.low(b), ptx.low(c), ptx.low(d)),
                     taps(w, 2 * p + 1, ptx.high(a), ptx.high(b), ptx.high(c), ptx.high(d)))
    return ptx.pack(silu(ptx.low(total)), silu(ptx.high(total)))


@cubin.factory
def conv_gates_kernel(vector: bool, conv: bool, gates: bool) -> Kernel:
    """Blocks (channels, rows); with both, the last column of blocks computes the gates.

    Parameters: x, row stride; w; y, row stride; parents; channels; then b, row stride, a, row stride, A_log, dt_bias,
    beta, g, heads; live count, rows of a block (a multiple of 4). What is not computed is not read.
    """
    load8, _, store8 = bf16.access(vector)

    @ptx.device_function
    def gate_block(first, last, b_at, b_ld, a_at, a_ld, a_log, dt_bias, beta_at, g_at, heads):
        i = i32(cuda.threadIdx.x)
        while i < (last - first) * heads:
            below = ptx.div_u32(i, heads)
            row = i32(first + below)
            head = i32(i - below * heads)
            b = ptx.ldg_bf16(b_at + u64((row * b_ld + head) * 2))
            a = ptx.ldg_bf16(a_at + u64((row * a_ld + head) * 2))
            log, bias = ptx.ldg_bf16(a_log + u64(head * 2)), ptx.ldg_bf16(dt_bias + u64(head * 2))
            to = row * heads + head
            ptx.stg_u16(beta_at + u64(to * 2), ptx.to_bf16(sigmoid(b)))
            ptx.stg(g_at + u64(to * 4), gate(a, log, bias))
            i += i32(THREADS)

    @ptx.device_function
    def load(x, slot, x_at, x_ld, row, wanted, n):
        """Eight channels of a row (zeros unless wanted) into the registers x[4 slot ..]."""
        v = (u32(0), u32(0), u32(0), u32(0))
        if wanted:
            v = load8(x_at + u64(row * x_ld * 2), n)
        x[4 * slot], x[4 * slot + 1], x[4 * slot + 2], x[4 * slot + 3] = v[0], v[1], v[2], v[3]

    @ptx.device_function
    def parent_of(row, parents):
        return ptx.ldg_i32(parents + u64(row * 4)) if row >= 0 else i32(-1)

    @ptx.device_function
    def finish(r, row, last, starts, up, x, w, x_at, x_ld, y_at, y_ld, parents, n):
        """Row r of four; ``starts``: it is the first of a branch, so the three rows above it are elsewhere."""
        if row < last:
            if starts:
                up2 = parent_of(up, parents)
                up3 = parent_of(up2, parents)
                load(x, r, x_at, x_ld, up3, up3 >= 0, n)
                load(x, r + 1, x_at, x_ld, up2, up2 >= 0, n)
                load(x, r + 2, x_at, x_ld, up, up >= 0, n)
            store8(y_at + u64(row * y_ld * 2),
                   (convolved_pair(w, 0, x, 4 * r), convolved_pair(w, 1, x, 4 * r), convolved_pair(w, 2, x, 4 * r),
                    convolved_pair(w, 3, x, 4 * r)), n)

    def gdn_conv_kernel(x_at, x_ld, w_at, y_at, y_ld, parents, channels, b_at, b_ld, a_at, a_ld, a_log, dt_bias,
                        beta_at, g_at, heads, count, rows_a_block):
        ptx.pdl_launch()
        first = i32(i32(cuda.blockIdx.y) * rows_a_block)
        last = i32(min(first + rows_a_block, ptx.ldg_i32(count)))
        if first >= last:
            return
        if gates:
            if not conv or cuda.blockIdx.x == cuda.gridDim.x - 1:
                ptx.pdl_wait()
                gate_block(first, last, b_at, b_ld, a_at, a_ld, a_log, dt_bias, beta_at, g_at, heads)
                return
        if conv:
            at = i32((i32(cuda.blockIdx.x) * i32(THREADS) + i32(cuda.threadIdx.x)) * 8)
            n = i32(channels - at)                       # channels of the thread's eight that exist
            if n <= 0:
                return
            w = cuda.local.array(16, u32)
            for i in range(4):
                v = load8(w_at + u64((at * 4 + 8 * i) * 2), 4 * n - 8 * i)
                w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3] = v[0], v[1], v[2], v[3]
            x_at = x_at + u64(at * 2)
            y_at = y_at + u64(at * 2)
            x = cuda.local.array(28, u32)                # the three rows above, then four rows
            up1 = parent_of(first, parents)
            up2 = parent_of(up1, parents)
            up3 = parent_of(up2, parents)
            ptx.pdl_wait()
            load(x, 0, x_at, x_ld, up3, up3 >= 0, n)
            load(x, 1, x_at, x_ld, up2, up2 >= 0, n)
            load(x, 2, x_at, x_ld, up1, up1 >= 0, n)
            row = i32(first)
            while row < last:
                row1, row2, row3 = i32(row + 1), i32(row + 2), i32(row + 3)
                load(x, 3, x_at, x_ld, row, True, n)
                load(x, 4, x_at, x_ld, row1, row1 < last, n)
                load(x, 5, x_at, x_ld, row2, row2 < last, n)
                load(x, 6, x_at, x_ld, row3, row3 < last, n)
                up0 = parent_of(row, parents)
                up1 = parent_of(row1 if row1 < last else i32(-1), parents)
                up2 = parent_of(row2 if row2 < last else i32(-1), parents)
                up3 = parent_of(row3 if row3 < last else i32(-1), parents)
                finish(0, row, last, row > first and up0 != row - 1, up0, x, w, x_at, x_ld, y_at, y_ld, parents, n)
                finish(1, row1, last, up1 != row, up1, x, w, x_at, x_ld, y_at, y_ld, parents, n)
                finish(2, row2, last, up2 != row1, up2, x, w, x_at, x_ld, y_at, y_ld, parents, n)
                finish(3, row3, last, up3 != row2, up3, x, w, x_at, x_ld, y_at, y_ld, parents, n)
                for i in range(12):
                    x[i] = x[i + 16]
                row = i32(row + 4)

    m = (u64, i32)
    return Kernel(gdn_conv_kernel, types.void(*m, u64, *m, u64, i32, *m, *m, u64, u64, u64, u64, i32, u64, i32), THREADS,
                  resident=RESIDENT if vector else 1)


# ---------------------------------------------------------------- launchers
def gdn_conv(stream, x, weight, parents, y, counts, pdl: bool = False) -> None:
    """y[:n] = conv(x[:n]) along ``parents``, n = counts[ROWS].

    x, y uint16 [capacity, channels], not overlapping; weight uint16 [channels, 4], contiguous; parents int32
    [>= capacity], -1 at position 0. Raises ValueError naming the argument that does not fit.
    """
    columns, capacity, vector, arguments = _conv(x, weight, parents, y)
    if capacity and columns:
        grid_rows, rows = row_blocks(capacity)
        kernel = conv_gates_kernel(vector, True, False)
        kernel(stream, (columns, grid_rows), *arguments, *(0,) * 9, live(counts, ROWS), rows, pdl=pdl)


def gdn_gates(stream, b, a, a_log, dt_bias, beta, g, counts, pdl: bool = False) -> None:
    """beta[:n] = r(sigmoid(b)), g[:n] = -exp(A_log) * softplus(a + dt_bias), n = counts[ROWS].

    b, a uint16 [capacity, heads], any row strides; a_log, dt_bias uint16 [heads]; beta uint16 and g float32
    [capacity, heads], contiguous. Raises ValueError naming the argument that does not fit.
    """
    capacity, arguments = _gates(b, a, a_log, dt_bias, beta, g)
    if capacity:
        grid_rows, rows = row_blocks(capacity)
        kernel = conv_gates_kernel(True, False, True)
        kernel(stream, (1, grid_rows), *(0,) * 7, *arguments, live(counts, ROWS), rows, pdl=pdl)


def gdn_conv_gates(stream, x, weight, parents, b, a, a_log, dt_bias, y, beta, g, counts, pdl: bool = False) -> None:
    """``gdn_conv`` and ``gdn_gates`` in one launch: the same arguments, the same bits."""
    columns, capacity, vector, conv_arguments = _conv(x, weight, parents, y)
    gate_capacity, gate_arguments = _gates(b, a, a_log, dt_bias, beta, g)
    if gate_capacity != capacity:
        raise ValueError(f"b has {gate_capacity} rows, x has {capacity}")
    if capacity:
        grid_rows, rows = row_blocks(capacity)
        kernel = conv_gates_kernel(vector, True, True)
        kernel(stream, (columns + 1, grid_rows), *conv_arguments, *gate_arguments, live(counts, ROWS), rows, pdl=pdl)


def _conv(x, weight, parents, y):
    """(blocks of channels, capacity, whether by 16 bytes, kernel arguments)."""
    y = view("y", y, np.uint16, None, None)
    capacity, channels = y.shape
    x = view("x", x, np.uint16, capacity, channels)
    w = view("weight", weight, np.uint16, channels, TAPS)
    parents = view("parents", parents, np.int32, None)
    if channels > 1 and w.strides[0] != TAPS:
        raise ValueError("weight must be contiguous")
    if parents.shape[0] < capacity:
        raise ValueError(f"parents has {parents.shape[0]} entries for {capacity} rows of y")
    vector = aligned(x, y) and w.address % 16 == 0
    return (-(-channels // (8 * THREADS)), _fitting("y", capacity), vector,
            (x.address, x.strides[0], w.address, y.address, y.strides[0], parents.address, channels))


def _gates(b, a, a_log, dt_bias, beta, g):
    """(capacity, kernel arguments)."""
    beta = view("beta", beta, np.uint16, None, None)
    capacity, heads = beta.shape
    b = view("b", b, np.uint16, capacity, heads)
    a = view("a", a, np.uint16, capacity, heads)
    g = view("g", g, np.float32, capacity, heads)
    a_log = view("a_log", a_log, np.uint16, heads)
    dt_bias = view("dt_bias", dt_bias, np.uint16, heads)
    for name, v in (("beta", beta), ("g", g)):
        if capacity > 1 and v.strides[0] != heads:
            raise ValueError(f"{name} must be contiguous")
    return _fitting("beta", capacity), (b.address, b.strides[0], a.address, a.strides[0], a_log.address,
                                        dt_bias.address, beta.address, g.address, heads)


def _fitting(name: str, capacity: int) -> int:
    if capacity > MAX_ROWS:
        raise ValueError(f"{name} must have at most {MAX_ROWS} rows, not {capacity}")
    return capacity


def row_blocks(capacity: int) -> tuple[int, int]:
    """(blocks, rows of a block). Rows are computed alike wherever a block starts, so this only matters for speed."""
    rows = 4 if capacity <= FEW_ROWS else 8
    return -(-capacity // rows), rows


def kernels() -> dict:
    """The kernels with their budgets: {name: (Kernel, compute capabilities, registers, spill bytes)}."""
    everywhere = ((8, 0), (9, 0, "a"))
    return {"gdn_conv": (conv_gates_kernel(True, True, False), everywhere, 72, 0),
            "gdn_conv_scalar": (conv_gates_kernel(False, True, False), everywhere, 128, 0),
            "gdn_gates": (conv_gates_kernel(True, False, True), everywhere, 40, 0),
            "gdn_conv_gates": (conv_gates_kernel(True, True, True), everywhere, 72, 0)}
