"""The gated delta rule over a tree of chunks.

    per value head, key head hv // (HV / HK), float32 from BF16 q, k, v; the state S [128 key, 128 value] starts at 0:
        q = q rsqrt(sum q^2 + 1e-6) / sqrt(128);  k = k rsqrt(sum k^2 + 1e-6)
        S *= exp(g);  d = beta (v - S^T k);  S += k d^T;  o = r(S^T q)

by chunks of 64 tokens, with c = cumsum(g) in the chunk:

    A = strict lower of beta_i (k_i . k_j) exp(c_i - c_j);    P = lower of (q_i . k_j) exp(c_i - c_j)
    (I + A) v_new = beta (v - exp(c) k S);    o = exp(c) q S + P v_new;    S = exp(c_last) S + (exp(c_last - c) k)^T v_new

A chunk is 64 absolute positions of a branch of the token trie (``jev_kernels.pool``): its rows are gathered, it starts
from the state its run has reached, and it writes only the rows that its branch owns. Absent tokens count as zeros,
which change nothing above them, so the bits of a row depend on its prefix alone, and on nothing else in the pool. (As
long as values are finite, here and in attention: later rows of a chunk count 0 times, and 0 x NaN is NaN.)

``gated_delta_rule`` launches the kernel below, or those of ``gdn.hopper`` on compute capability 9.0. The kernel below runs on
any GPU from sm_80 and in the simulator: a CTA per (value head, 64 value columns) walks all runs in their order, parents
first, so states are stored and read back by the thread that owns them and nobody waits for anybody.

Normalisation and decay are factors of rows, so the products k k^T, q k^T, k S and q S take the BF16 inputs themselves
as operands, exactly, and are scaled in float32 afterwards. Rounding points, everything else in float32:
    S as an operand: BF16;  exp(c_last - c) v_new: two BF16 parts, high and low;  P and v_new in P v_new: float16;  o: BF16.

Source: "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (arXiv 2406.06484) and "Gated Delta
Networks" (arXiv 2412.06464); ``torch_recurrent_gated_delta_rule`` of Transformers' Qwen3.5 states the recurrence.
"""
from __future__ import annotations

import functools

import numpy as np
from numba import cuda
from numba.cuda import types
from numba.cuda.core import config

from jev_kernels import pool
from jev_kernels.ptx import (
    cp16,
    cp_wait_all,
    ex2,
    f32,
    high,
    i32,
    ldg,
    ldg2,
    ldg_bf16,
    ldg_i32,
    lds,
    lds_i32,
    ldsm,
    ldsm_t,
    low,
    mma,
    mma16,
    pack,
    pack16,
    pdl_launch,
    pdl_wait,
    rsqrt,
    smem_addr,
    stg2,
    stg_u32,
    sts,
    sts2,
    sts_u32,
    u32,
    u64,
    void,
)
from jev_kernels.ptx.shared_layout import SharedLayout
from jev_kernels.runtime import cubin, device
from jev_kernels.runtime.launch import Kernel, view

D = 128                       # head dims, keys and values
C = pool.CHUNK                # tokens of a chunk
BV = 64                     # value columns of a CTA
THREADS = 256
LOG2E = 1.4426950408889634
EPS = 1e-6
SM_SCALE = D ** -0.5
FLOOR = -150.0                # log2 of a decay that is zero in float32: keeps -inf and huge sums out of c_i - c_j

# Shared memory, in bytes. Row strides of 16 bytes more than a power of two spread ldmatrix over the banks.
ROW, COLS = 2 * D + 16, 2 * BV + 16                  # strides of BF16 rows of 128 and of 64
FROW = 4 * BV + 16                                   # stride of float32 rows of 64
# k and q BF16 [64, 128] each; S BF16 [128 key, 64 value]; y, then v_new, float32 [64, 64]; A float32 [64, 64], and after the
# solve in its place v_new as operands; c as a log2; beta; 1 / |k| and 1 / |q| / sqrt(128); rows of the chunk's tokens
SHARED = SharedLayout(k=C * ROW, q=C * ROW, state=D * COLS, y=C * FROW, a=3 * C * COLS, cumulative=4 * C, beta=4 * C,
                      norms=8 * C, rows=4 * C)
V_NEW, V_HIGH, V_LOW = (SHARED.a + n * C * COLS for n in range(3))    # float16; decayed, BF16, high and low part
SMEM = SHARED.nbytes


@cuda.jit(device=True, inline="always")
def tile(base, stride, row, col):
    """This lane's address for ldmatrix of a 16 x 16 tile of 2-byte elements at (row, col)."""
    lane = i32(cuda.threadIdx.x) & 31
    return base + (row + (lane & 15)) * stride + (col + (lane >> 4) * 8) * 2


@cuda.jit(device=True, inline="always")
def accumulate(acc, n, d):
    for e in range(4):
        acc[4 * n + e] = d[e]


@cuda.jit(device=True, inline="always")
def mma_at(acc, n, a, b0, b1):
    """acc[16 x 8 tile n] += a b, BF16."""
    accumulate(acc, n, mma((acc[4 * n], acc[4 * n + 1], acc[4 * n + 2], acc[4 * n + 3]), a, b0, b1))


@cuda.jit(device=True, inline="always")
def mma16_at(acc, n, a, b0, b1):
    """The same in float16."""
    accumulate(acc, n, mma16((acc[4 * n], acc[4 * n + 1], acc[4 * n + 2], acc[4 * n + 3]), a, b0, b1))


@cuda.jit(device=True, inline="always")
def squares(pair):
    return low(pair) * low(pair) + high(pair) * high(pair)


@cuda.jit(device=True, inline="always")
def load_chunk(sm, qkv, stride, key_dim, head, tokens):
    """q and k of a key head into shared memory, 16 bytes at a time; rows of absent tokens are zeros."""
    piece = i32(cuda.threadIdx.x)
    while piece < C * 16:
        row = piece >> 4
        at = i32((piece & 15) * 16)
        src = lds_i32(tokens + row * 4)
        size = i32(16) if src >= 0 else i32(0)
        q = qkv + (u64(max(src, i32(0))) * u64(stride) + u64(head * D)) * u64(2) + u64(at)
        cp16(sm + SHARED.k + row * ROW + at, q + u64(key_dim * 2), size)
        cp16(sm + SHARED.k + (C + row) * ROW + at, q, size)
        piece += i32(THREADS)


@cuda.jit(device=True, inline="always")
def load_gates(sm, tid, src, g, g_stride, beta, beta_stride, head):
    """beta of token tid, and g, as log2 of the decay, where its running sum will be."""
    decay = f32(0)
    rate = f32(0)
    if src >= 0:
        decay = max(ldg(g + (u64(src) * u64(g_stride) + u64(head)) * u64(4)) * f32(LOG2E), f32(FLOOR))
        rate = ldg_bf16(beta + (u64(src) * u64(beta_stride) + u64(head)) * u64(2))
    sts(sm + SHARED.cumulative + tid * 4, decay)
    sts(sm + SHARED.beta + tid * 4, rate)


@cuda.jit(device=True, inline="always")
def solve(sm, tid, live):
    """v_new of (I + A) v_new = Y in place of Y, by forward substitution in blocks of 16 tokens, as far as tokens go."""
    col = i32(tid & (BV - 1))
    group = i32(tid // BV)
    v = cuda.local.array(16, f32)
    for block in range((live + 15) >> 4):
        first = i32(block * 16)
        y = sm + SHARED.y + col * 4 + first * FROW
        if group == 0:
            for i in range(16):
                x = lds(y + i * FROW)
                a = sm + SHARED.a + (first + i) * FROW + first * 4
                for j in range(i):                       # what this thread has just stored
                    x -= lds(a + j * 4) * lds(y + j * FROW)
                sts(y + i * FROW, x)
        cuda.syncthreads()
        for i in range(16):
            v[i] = lds(y + i * FROW)
        row = i32(first + 16 + group)
        while row < live:
            x = lds(sm + SHARED.y + row * FROW + col * 4)
            a = sm + SHARED.a + row * FROW + first * 4
            for j in range(16):
                x -= lds(a + j * 4) * v[j]
            sts(sm + SHARED.y + row * FROW + col * 4, x)
            row += i32(THREADS // BV)
        cuda.syncthreads()


@cubin.factory
def kernel(key_heads: int, value_heads: int) -> Kernel:
    """The portable kernel. Grid: (128 / BV, value heads). Parameters: addresses and row strides in elements."""
    group = value_heads // key_heads
    key_dim = key_heads * D

    def gated_delta_rule_kernel(qkv, stride, g, g_stride, beta, beta_stride, o, o_stride, counts, chunk_rows,
                                chunk_out_rows, chunk_slots, runs, states):
        sm = smem_addr(cuda.shared.array(0, types.uint8))
        tid = i32(cuda.threadIdx.x)
        warp = i32(tid >> 5)
        gg = i32((tid & 31) >> 2)                # row, and
        tt = i32(tid & 3)                        # ... pair of columns, of this lane in an 8 x 8 tile
        head = i32(cuda.blockIdx.y)
        v_column = i32(cuda.blockIdx.x) * BV
        token = i32((warp & 3) * 16)             # the 16 tokens of this warp:
        of_q = warp >= 4                         # ... warps 0-3 multiply their k, warps 4-7 their q
        mine = sm + SHARED.k + (i32(C * ROW) if of_q else i32(0))
        i0 = i32(token + gg)                     # tokens of this lane's accumulators: i0 and i0 + 8
        key = i32(warp * 16)                     # the 16 rows of S of this warp, keys, in registers
        pairs = cuda.local.array(32, f32)        # 16 tokens x 64 tokens: k k^T or q k^T
        prod = cuda.local.array(32, f32)         # 16 tokens x 64 columns: k S or q S
        s = cuda.local.array(32, f32)            # 16 keys x 64 columns
        p = cuda.local.array(16, u32)            # P as an operand
        pdl_wait()
        pdl_launch()
        for run in range(ldg_i32(counts + u64(4 * pool.RUNS))):
            entry = runs + u64(run * 16)
            first = ldg_i32(entry)
            start = ldg_i32(entry + u64(8))
            cell = u64((key + gg) * D + v_column + tt * 2) * u64(4)           # of S, in its slot and head
            for n in range(8):
                for half in range(2):
                    x = (f32(0), f32(0))
                    if start >= 0:
                        x = ldg2(states + u64(start * value_heads + head) * u64(4 * D * D) + cell
                                 + u64((half * 8 * D + n * 8) * 4))
                    s[4 * n + 2 * half] = x[0]
                    s[4 * n + 2 * half + 1] = x[1]
            for chunk in range(first, first + ldg_i32(entry + u64(4))):
                # inputs, and S as an operand
                src = i32(-1)
                if tid < C:
                    src = ldg_i32(chunk_rows + u64((chunk * C + tid) * 4))
                    sts_u32(sm + SHARED.rows + tid * 4, src)
                    load_gates(sm, tid, src, g, g_stride, beta, beta_stride, head)
                for n in range(8):
                    at = sm + SHARED.state + (key + gg) * COLS + (n * 8 + tt * 2) * 2
                    sts_u32(at, pack(s[4 * n], s[4 * n + 1]))
                    sts_u32(at + 8 * COLS, pack(s[4 * n + 2], s[4 * n + 3]))
                # the chunk's tokens: what lies behind them is left out
                live = i32(cuda.syncthreads_count(i32(1) if src >= 0 else i32(0)))
                load_chunk(sm, qkv, stride, key_dim, head // group, sm + SHARED.rows)
                c = f32(0)
                if tid < C:
                    for i in range(tid + 1):
                        c += lds(sm + SHARED.cumulative + i * 4)
                cp_wait_all()
                cuda.syncthreads()
                if tid < C:
                    sts(sm + SHARED.cumulative + tid * 4, c)

                # products of this warp's 16 tokens with k and with S, and their norms
                for e in range(32):
                    pairs[e] = f32(0)
                    prod[e] = f32(0)
                n0 = f32(0)
                n1 = f32(0)
                if token < live:
                    for kk in range(8):
                        a = ldsm(tile(mine, ROW, token, kk * 16))
                        n0 += squares(a[0]) + squares(a[2])
                        n1 += squares(a[1]) + squares(a[3])
                        for n in range(4):
                            if n * 16 <= token:
                                b = ldsm(tile(sm + SHARED.k, ROW, n * 16, kk * 16))
                                mma_at(pairs, 2 * n, a, b[0], b[2])
                                mma_at(pairs, 2 * n + 1, a, b[1], b[3])
                            b = ldsm_t(tile(sm + SHARED.state, COLS, kk * 16, n * 16))
                            mma_at(prod, 2 * n, a, b[0], b[1])
                            mma_at(prod, 2 * n + 1, a, b[2], b[3])
                for shift in range(2):
                    n0 += cuda.shfl_xor_sync(0xffffffff, n0, 1 << shift)
                    n1 += cuda.shfl_xor_sync(0xffffffff, n1, 1 << shift)
                n0 = rsqrt(n0 + f32(EPS))
                n1 = rsqrt(n1 + f32(EPS))
                if of_q:
                    n0 *= f32(SM_SCALE)
                    n1 *= f32(SM_SCALE)
                if tt == 0:
                    norms = sm + SHARED.norms + (i32(4 * C) if of_q else i32(0))
                    sts(norms + i0 * 4, n0)
                    sts(norms + i0 * 4 + 32, n1)
                cuda.syncthreads()

                # A and Y = beta (v - exp(c) k S) to shared memory (warps 0-3), P stays in registers (warps 4-7)
                c0 = lds(sm + SHARED.cumulative + i0 * 4)
                c1 = lds(sm + SHARED.cumulative + i0 * 4 + 32)
                f0 = n0 if of_q else n0 * lds(sm + SHARED.beta + i0 * 4)
                f1 = n1 if of_q else n1 * lds(sm + SHARED.beta + i0 * 4 + 32)
                below = i32(1) if of_q else i32(0)                       # P keeps the diagonal
                if token < live:
                    for n in range(8):
                        j = i32(n * 8 + tt * 2)
                        for e in range(2):
                            cj = lds(sm + SHARED.cumulative + (j + e) * 4)
                            rj = lds(sm + SHARED.norms + (j + e) * 4)
                            above = pairs[4 * n + e] * f0 * rj * ex2(c0 - cj)
                            under = pairs[4 * n + 2 + e] * f1 * rj * ex2(c1 - cj)
                            pairs[4 * n + e] = above if j + e < i0 + below else f32(0)
                            pairs[4 * n + 2 + e] = under if j + e < i0 + 8 + below else f32(0)
                        if of_q:
                            p[2 * n] = pack16(pairs[4 * n], pairs[4 * n + 1])
                            p[2 * n + 1] = pack16(pairs[4 * n + 2], pairs[4 * n + 3])
                        else:
                            at = sm + SHARED.a + i0 * FROW + j * 4
                            sts2(at, pairs[4 * n], pairs[4 * n + 1])
                            sts2(at + 8 * FROW, pairs[4 * n + 2], pairs[4 * n + 3])
                            for half in range(2):
                                row = i32(i0 + half * 8)
                                src = lds_i32(sm + SHARED.rows + row * 4)
                                v = u32(0)
                                if src >= 0:
                                    column = u64(2 * key_dim + head * D + v_column + j)
                                    v = u32(ldg_i32(qkv + (u64(src) * u64(stride) + column) * u64(2)))
                                rate = lds(sm + SHARED.beta + row * 4)
                                decay = (f1 if half else f0) * ex2(c1 if half else c0)           # has beta in it
                                sts2(sm + SHARED.y + row * FROW + j * 4, rate * low(v) - decay * prod[4 * n + 2 * half],
                                     rate * high(v) - decay * prod[4 * n + 2 * half + 1])
                cuda.syncthreads()
                solve(sm, tid, live)

                # v_new as operands, where A was
                last = lds(sm + SHARED.cumulative + 4 * (C - 1))
                col = i32(tid & 31) * 2
                for row in range(warp, (live + 15) & ~15, THREADS // 32):
                    x = lds(sm + SHARED.y + row * FROW + col * 4)
                    y = lds(sm + SHARED.y + row * FROW + col * 4 + 4)
                    to = row * COLS + col * 2
                    sts_u32(sm + V_NEW + to, pack16(x, y))
                    scale = lds(sm + SHARED.norms + row * 4) * ex2(last - lds(sm + SHARED.cumulative + row * 4))
                    whole = pack(x * scale, y * scale)
                    sts_u32(sm + V_HIGH + to, whole)
                    sts_u32(sm + V_LOW + to, pack(x * scale - low(whole), y * scale - high(whole)))
                cuda.syncthreads()

                # o = exp(c) q S + P v_new
                if of_q and token < live:
                    for n in range(8):
                        for e in range(2):
                            prod[4 * n + e] *= n0 * ex2(c0)
                            prod[4 * n + 2 + e] *= n1 * ex2(c1)
                    for kk in range(4):
                        if kk * 16 <= token:
                            a = (p[4 * kk], p[4 * kk + 1], p[4 * kk + 2], p[4 * kk + 3])
                            for n in range(4):
                                b = ldsm_t(tile(sm + V_NEW, COLS, kk * 16, n * 16))
                                mma16_at(prod, 2 * n, a, b[0], b[1])
                                mma16_at(prod, 2 * n + 1, a, b[2], b[3])
                    for half in range(2):
                        row = ldg_i32(chunk_out_rows + u64((chunk * C + i0 + half * 8) * 4))
                        if row >= 0:
                            at = o + (u64(row) * u64(o_stride) + u64(head * D + v_column + tt * 2)) * u64(2)
                            for n in range(8):
                                stg_u32(at + u64(n * 16), pack(prod[4 * n + 2 * half], prod[4 * n + 2 * half + 1]))

                # S = exp(c_last) S + k^T (exp(c_last - c) v_new)
                for e in range(32):
                    s[e] *= ex2(last)
                for kk in range((live + 15) >> 4):
                    k = ldsm_t(tile(sm + SHARED.k, ROW, kk * 16, key))
                    a = (k[0], k[2], k[1], k[3])
                    for part in range(2):
                        for n in range(4):
                            b = ldsm_t(tile(sm + (V_LOW if part else V_HIGH), COLS, kk * 16, n * 16))
                            mma_at(s, 2 * n, a, b[0], b[1])
                            mma_at(s, 2 * n + 1, a, b[2], b[3])
                slot = ldg_i32(chunk_slots + u64(chunk * 4))
                if slot >= 0:
                    at = states + u64(slot * value_heads + head) * u64(4 * D * D) + cell
                    for n in range(8):
                        stg2(at + u64(n * 32), s[4 * n], s[4 * n + 1])
                        stg2(at + u64(n * 32 + 8 * D * 4), s[4 * n + 2], s[4 * n + 3])
                cuda.syncthreads()                                       # before shared memory is written again

    return Kernel(gated_delta_rule_kernel, void(u64, i32, u64, i32, u64, i32, u64, i32, *[u64] * 6), THREADS, SMEM)


# ---------------------------------------------------------------- launching
def scratch_bytes(chunks: int, slots: int, key_heads: int, value_heads: int, hopper: bool) -> int:
    """Bytes of scratch that capacities of so many chunks and state slots ask for. It needs no initialisation."""
    _check_heads(key_heads, value_heads)
    if not hopper:
        return 0
    from jev_kernels.gdn import hopper as hopper_gdn
    return hopper_gdn.scratch_bytes(chunks, slots, value_heads)


def progress_entries(chunks: int, value_heads: int, hopper: bool) -> int:
    """uint32 entries of ``progress`` for capacities of so many chunks."""
    if not hopper:
        return 0
    from jev_kernels.gdn import hopper as hopper_gdn
    return hopper_gdn.progress_entries(chunks, value_heads)


def states_shape(slots: int, value_heads: int) -> tuple[int, int, int, int]:
    """Shape of the float32 states kept for branching; each slot's layout is the kernel's own."""
    return max(slots, 1), value_heads, D, D


def state_matrices(states: np.ndarray, hopper: bool) -> np.ndarray:
    """States on the host, [slots, value heads, 128, 128], as matrices S [slots, value heads, key, value]."""
    if not hopper:
        return states
    from jev_kernels.gdn import hopper as hopper_gdn
    return hopper_gdn.state_matrices(states)


def gated_delta_rule(stream, qkv, g, beta, o, counts, chunk_rows, chunk_out_rows, chunk_slots, runs, states, scratch,
                     progress, pdl: bool = False, hopper: bool | None = None) -> None:
    """Launch the gated delta rule over a pool's chunks. All arrays are on the device.

    qkv     BF16 [rows, 2 key_dim + value_dim]: q | k | v, 16-byte aligned rows
    g       float32 [rows, value heads], log of the decay;  beta BF16 [rows, value heads];  both with any row stride
    o       BF16 [rows, value_dim], the output, 4-byte aligned rows
    counts, chunk_rows, chunk_out_rows, chunk_slots, runs     int32, as ``jev_kernels.pool`` says
    states  float32 of ``states_shape``: a slot is stored (once) and read within the call
    scratch uint8 [>= ``scratch_bytes``], 16-byte aligned
    progress  uint32 [>= ``progress_entries``]: zeros, and zeros again after the call. One for calls that follow one another
            in a stream, whatever their capacities. Where there is one run, all chunks must be its: counts are trusted
    pdl     launched with programmatic dependent launch
    hopper  which kernels; by default those for the current device

    Raises ValueError naming the argument that does not fit.
    """
    if hopper is None:
        hopper = device.on_hopper()
    x = view("qkv", qkv, np.uint16, None, None)
    rates = view("g", g, np.float32, x.shape[0], None)
    heads = rates.shape[1]
    key_heads, rest = divmod(x.shape[1] - heads * D, 2 * D)
    if key_heads < 1 or rest:
        raise ValueError(f"qkv has {x.shape[1]} columns: not q | k | v of {heads} value heads (the columns of g)")
    _check_heads(key_heads, heads)
    betas = view("beta", beta, np.uint16, x.shape[0], heads)
    out = view("o", o, np.uint16, x.shape[0], heads * D)
    number = view("counts", counts, np.int32, pool.COUNTS)
    rows = view("chunk_rows", chunk_rows, np.int32, None, C)
    chunks = rows.shape[0]
    out_rows = view("chunk_out_rows", chunk_out_rows, np.int32, chunks, C)
    slots = view("chunk_slots", chunk_slots, np.int32, chunks)
    run_list = view("runs", runs, np.int32, None, 4)
    kept = view("states", states, np.float32, None, heads, D, D)
    for name, v, alignment, step in (
            ("qkv", x, 16, 8), ("o", out, 4, 2), ("chunk_rows", rows, 16, 0), ("chunk_out_rows", out_rows, 16, 0),
            ("runs", run_list, 16, 0), ("states", kept, 16, 0)):
        if v.address % alignment:
            raise ValueError(f"{name} must be aligned to {alignment} bytes")
        if step and v.strides[0] % step:
            raise ValueError(f"{name} must have rows aligned to {alignment} bytes, not {v.strides[0]} elements apart")
        if not step and v.strides != _contiguous(v.shape):
            raise ValueError(f"{name} must be contiguous, not have strides {v.strides} for shape {v.shape}")
    if hopper:
        from jev_kernels.gdn import hopper as hopper_gdn
        need = hopper_gdn.scratch_bytes(chunks, kept.shape[0], heads)
        room = view("scratch", scratch, np.uint8, None)
        if room.shape[0] < need or room.address % 16:
            raise ValueError(f"scratch must be {need} bytes, 16-byte aligned, not {room.shape[0]} at {room.address:#x}")
        announced = view("progress", progress, np.uint32, None)
        need = hopper_gdn.progress_entries(chunks, heads)
        if announced.shape[0] < need:
            raise ValueError(f"progress must have {need} entries, not {announced.shape[0]}")
        hopper_gdn.launch(stream, key_heads, x, rates, betas, out, number, rows, out_rows, slots, run_list, kept,
                          room.address, announced.address, multiprocessors(), pdl)
    else:
        kernel(key_heads, heads)(
            stream, (D // BV, heads), x.address, x.strides[0], rates.address, rates.strides[0], betas.address,
            betas.strides[0], out.address, out.strides[0], number.address, rows.address, out_rows.address,
            slots.address, run_list.address, kept.address, pdl=pdl)


def _check_heads(key_heads: int, value_heads: int) -> None:
    if value_heads % key_heads:
        raise ValueError(f"{value_heads} value heads do not share {key_heads} key heads evenly")


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for n in shape[:0:-1]:
        strides.insert(0, strides[0] * n)
    return tuple(strides)


@functools.lru_cache(maxsize=None)
def multiprocessors() -> int:
    """Of the current device; the simulator runs one block at a time, in order."""
    return 1 if config.ENABLE_CUDASIM else cuda.get_current_device().MULTIPROCESSOR_COUNT


def kernels() -> dict[str, tuple[Kernel, list, int, int]]:
    """Kernels to budget: name -> (kernel, compute capabilities, most registers, most bytes of spill stores)."""
    from jev_kernels.gdn import hopper as hopper_gdn
    prepare, scan = hopper_gdn.kernels(16, 48)
    return {"gated_delta_rule": (kernel(16, 48), [(8, 0), (9, 0, "a")], 255, 0),
            "hopper_gdn_prepare": (prepare, [(9, 0, "a")], 80, 64),
            "hopper_gdn_scan": (scan, [(9, 0, "a")], 255, 0)}
