"""Causal grouped-query attention over the paths of a row pool, with the output gate fused in.

    out = r( r(softmax(q k^T / 16) v) * r(sigmoid(gate)) ),  r = round to BF16;  without a gate r(softmax(..) v)

q, gate, out [rows, Hq * 256], k, v [rows, Hk * 256]: BF16 in uint16, rows any multiple of 8 elements apart, so that
q, gate, k and v may be column ranges of one buffer. Query head h reads KV head h // (Hq / Hk). A row attends to the
rows of its own path, up to itself: ``tiles`` names runs of at most 128 rows of one branch, ``paths`` the row at each
position of it (see ``jev_kernels.pool``). Scores, the running maximum and sum and the running output are float32. The
exponentials are rounded to BF16 for the product with V, and summed before that. Only live rows are written.

``Plan`` binds the arrays and picks the kernel: the one below, for compute capability 8.0 and later, or on Hopper
``jev_kernels.attention.hopper``, the same function with other tiles. ``gate_mul`` is the gate on its own.

How it works (FlashAttention-2): a block of four warps takes 64 query rows of a tile and one query head; a warp owns 16
of the rows. Q stays in shared memory. Keys come in tiles of 32 positions; for each of them

    S = Q K^T                                         mma, BF16 operands, float32 sums
    m' = max(m, rows of S),  f = 2^(m - m')           S is in units of log2(e) / 16, so exponentials are powers of two
    P = 2^(S - m'),  l = f l + rows of P,  O = f O + P V

and in the end out = O / l. Nothing crosses rows, and key tiles start at absolute multiples of 32 and are taken in
rising order; one beyond a row's own position has P = 0 and f = 1 and changes nothing. So a row's bits depend on its
prefix only, not on the rows that share its tile, on where the tile starts or on what else is in the pool. Positions
past the end of the query rows are zeros in shared memory: whatever other branches hold, it is no operand.

Source: ``Qwen3_5Attention`` of Transformers; Dao, FlashAttention-2 (2023); PTX ISA for the fragments.
"""
from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import cuda
from numba.cuda import types
from numba.cuda.core import config

from jev_kernels.pool import COUNTS, ROWS, TILES
from jev_kernels.ptx import (
    add_rn,
    cp16,
    cp_commit,
    cp_wait0,
    cp_wait1,
    ex2,
    f32,
    high,
    i32,
    ldg_i32,
    ldg_u32x4,
    ldsm,
    ldsm_t,
    low,
    mma,
    mul_rn,
    pack,
    pdl_launch,
    pdl_wait,
    rcp,
    shfl_xor,
    smem_addr,
    stg_u32,
    stg_u32x4,
    u32,
    u64,
    void,
)
from jev_kernels.runtime import cubin, device
from jev_kernels.runtime.launch import Kernel, View, aligned, live, view

D = 256                          # head dim
QUERIES = 64                     # query rows of a block, 16 a warp
KEYS = 32                        # positions of a key tile
THREADS = 128
PITCH = (D + 8) * 2              # bytes from row to row in shared memory: a fragment's 8 rows fall into different banks
SMEM = (QUERIES + 2 * KEYS) * PITCH
N_OUT = D // 8 * 4               # a thread's registers of a warp's [16, 256] output
N_SCORES = KEYS // 8 * 4         # ... of its [16, 32] scores
CHUNKS = D // 8                  # 16-byte chunks of a row
SCALE_LOG2 = math.log2(math.e) / math.sqrt(D)
MINUS_LOG2E = -math.log2(math.e)
NEVER = -math.inf


# ---------------------------------------------------------------- the gate
@cuda.jit(device=True, inline="always")
def sigmoid(x):
    """1 / (1 + 2^(-x log2 e)) of a float32: at most 4 ulp off, 0 below -88. Hopper's kernel does the same."""
    return rcp(add_rn(f32(1), ex2(mul_rn(x, f32(MINUS_LOG2E)))))


@cuda.jit(device=True, inline="always")
def gate_pair(x, gate):
    """r(x * r(sigmoid(gate))) of two packed pairs."""
    s = pack(sigmoid(low(gate)), sigmoid(high(gate)))
    return pack(mul_rn(low(x), low(s)), mul_rn(high(x), high(s)))


# ---------------------------------------------------------------- the attention
@cuda.jit(device=True, inline="always")
def load_rows(to, source, pitch, first, count, rows, tid):
    """``rows`` rows of 256 into shared memory by cp.async, source rows first .. first + count - 1, then zeros."""
    for i in range(rows * CHUNKS // THREADS):
        chunk = tid + i * THREADS
        r, c = chunk // CHUNKS, chunk % CHUNKS
        cp16(to + r * PITCH + c * 16, source + u64(first + min(r, count - 1)) * u64(pitch) + u64(c * 16),
             16 if r < count else 0)


@cuda.jit(device=True, inline="always")
def load_path(to, source, pitch, path, first, end, tid):
    """A key tile by cp.async: positions first .. first + 31 of a path, zeros from position ``end`` on."""
    for i in range(KEYS * CHUNKS // THREADS):
        chunk = tid + i * THREADS
        r, c = chunk // CHUNKS, chunk % CHUNKS
        row = ldg_i32(path + u64(min(first + r, end - 1)) * u64(4))
        cp16(to + r * PITCH + c * 16, source + u64(row) * u64(pitch) + u64(c * 16), 16 if first + r < end else 0)


@cuda.jit(device=True, inline="always")
def row_max(x):
    """The largest x of the four lanes that hold one row of a fragment."""
    x = max(x, shfl_xor(x, 1))
    return max(x, shfl_xor(x, 2))


@cuda.jit(device=True, inline="always")
def row_sum(x):
    """The sum of x over the four lanes that hold one row of a fragment."""
    x = add_rn(x, shfl_xor(x, 1))
    return add_rn(x, shfl_xor(x, 2))


@cubin.factory
def attention_kernel(group: int, gated: bool) -> Kernel:
    """Blocks (half of a tile, query head). group = Hq / Hk. Pitches: bytes from row to row."""

    def attention_kernel(q, k, v, gate, out, q_pitch, k_pitch, v_pitch, gate_pitch, out_pitch, counts, tiles, paths):
        pdl_launch()
        # The pool's metadata depends on no kernel, so it may be read before the wait for the previous one.
        tile = tiles + u64(cuda.blockIdx.x // 2) * u64(16)
        skip = i32(cuda.blockIdx.x % 2) * QUERIES
        if cuda.blockIdx.x // 2 >= ldg_i32(counts + u64(4 * TILES)) or skip >= ldg_i32(tile + u64(4)):
            return
        n_rows = i32(min(ldg_i32(tile + u64(4)) - skip, QUERIES))
        first_row = i32(ldg_i32(tile) + skip)
        position = i32(ldg_i32(tile + u64(8)) + skip)               # of the block's first row
        path = paths + u64(ldg_i32(tile + u64(12))) * u64(4)
        end = i32(position + n_rows)                                # keys at positions 0 .. end - 1
        head = i32(cuda.blockIdx.y)
        k += u64(head // group * (D * 2))
        v += u64(head // group * (D * 2))
        pdl_wait()

        tid = i32(cuda.threadIdx.x)
        warp, lane = tid // 32, tid % 32
        q_s = smem_addr(cuda.shared.array(0, types.uint8))
        k_s = q_s + QUERIES * PITCH
        v_s = k_s + KEYS * PITCH
        load_rows(q_s, q + u64(head * (D * 2)), q_pitch, first_row, n_rows, QUERIES, tid)
        cp_commit()

        # ldmatrix takes the address of one 16-byte row of an 8x8 matrix from each lane: here those of four matrices.
        q_at = q_s + (warp * 16 + lane % 16) * PITCH + lane // 16 * 16
        k_at = k_s + (lane % 8 + lane // 16 * 8) * PITCH + lane // 8 % 2 * 16
        v_at = v_s + lane % 16 * PITCH + lane // 16 * 16
        # This thread holds elements of rows g and g + 8 of the warp's 16, columns 8 j + 2 t and 8 j + 2 t + 1.
        g, t = lane // 4, lane % 4
        last0 = position + warp * 16 + g                            # last key that row g may see: its own
        last8 = last0 + 8
        o = cuda.local.array(N_OUT, types.float32)
        s = cuda.local.array(N_SCORES, types.float32)
        for i in range(N_OUT):
            o[i] = f32(0)
        max0, max8, sum0, sum8 = f32(NEVER), f32(NEVER), f32(0), f32(0)

        for first in range(0, end, KEYS):
            load_path(k_s, k, k_pitch, path, first, end, tid)
            cp_commit()
            load_path(v_s, v, v_pitch, path, first, end, tid)
            cp_commit()
            cp_wait1()                                              # all but V, which may come while S is computed
            cuda.syncthreads()

            busy = warp * 16 < n_rows and first <= position + warp * 16 + 15
            if busy:                                                # some row of the warp sees some of these keys
                for i in range(N_SCORES):
                    s[i] = f32(0)
                for step in range(D // 16):
                    a = ldsm(q_at + step * 32)
                    for n in range(KEYS // 16):                         # 16 keys: two fragments of 8
                        b = ldsm(k_at + n * 16 * PITCH + step * 32)
                        j = n * 8
                        s[j], s[j + 1], s[j + 2], s[j + 3] = mma((s[j], s[j + 1], s[j + 2], s[j + 3]), a, b[0], b[1])
                        j = n * 8 + 4
                        s[j], s[j + 1], s[j + 2], s[j + 3] = mma((s[j], s[j + 1], s[j + 2], s[j + 3]), a, b[2], b[3])

                top0, top8 = max0, max8
                for i in range(N_SCORES):
                    key = first + i // 4 * 8 + 2 * t + i % 2
                    s[i] = mul_rn(s[i], f32(SCALE_LOG2)) if key <= (last0 if i % 4 < 2 else last8) else f32(NEVER)
                    if i % 4 < 2:
                        top0 = max(top0, s[i])
                    else:
                        top8 = max(top8, s[i])
                top0, top8 = row_max(top0), row_max(top8)
                factor0, factor8 = ex2(max0 - top0), ex2(max8 - top8)
                max0, max8 = top0, top8
                sum0, sum8 = mul_rn(sum0, factor0), mul_rn(sum8, factor8)
                for i in range(N_SCORES):
                    s[i] = ex2(s[i] - (top0 if i % 4 < 2 else top8))
                    if i % 4 < 2:
                        sum0 = add_rn(sum0, s[i])
                    else:
                        sum8 = add_rn(sum8, s[i])
                for i in range(N_OUT):
                    o[i] = mul_rn(o[i], factor0 if i % 4 < 2 else factor8)

            cp_wait0()
            cuda.syncthreads()
            if busy:
                for n in range(KEYS // 16):                             # S's layout is A's: two fragments make 16 keys
                    j = n * 8
                    a = (pack(s[j], s[j + 1]), pack(s[j + 2], s[j + 3]),
                         pack(s[j + 4], s[j + 5]), pack(s[j + 6], s[j + 7]))
                    for c in range(D // 16):
                        b = ldsm_t(v_at + n * 16 * PITCH + c * 32)
                        i = c * 8
                        o[i], o[i + 1], o[i + 2], o[i + 3] = mma((o[i], o[i + 1], o[i + 2], o[i + 3]), a, b[0], b[1])
                        i = c * 8 + 4
                        o[i], o[i + 1], o[i + 2], o[i + 3] = mma((o[i], o[i + 1], o[i + 2], o[i + 3]), a, b[2], b[3])
            cuda.syncthreads()                                      # K and V are overwritten next

        inverse0, inverse8 = rcp(row_sum(sum0)), rcp(row_sum(sum8))
        for half in range(2):
            r = warp * 16 + g + 8 * half
            inverse = inverse8 if half else inverse0
            if r < n_rows:
                at = u64(head * (D * 2) + t * 4)
                to = out + u64(first_row + r) * u64(out_pitch) + at
                from_gate = gate + u64(first_row + r) * u64(gate_pitch) + at
                for j in range(D // 8):
                    i = j * 4 + 2 * half
                    pair = pack(mul_rn(o[i], inverse), mul_rn(o[i + 1], inverse))
                    if gated:
                        pair = gate_pair(pair, u32(ldg_i32(from_gate + u64(j * 16))))
                    stg_u32(to + u64(j * 16), pair)

    signature = void(u64, u64, u64, u64, u64, i32, i32, i32, i32, i32, u64, u64, u64)
    return Kernel(attention_kernel, signature, THREADS, SMEM)


# ---------------------------------------------------------------- the gate alone
def gate_mul_kernel(x, gate, out, x_pitch, gate_pitch, out_pitch, count, width):
    """Blocks (part of the row, row); a thread takes eight values."""
    pdl_launch()
    row = i32(cuda.blockIdx.y)
    column = i32((cuda.blockIdx.x * THREADS + cuda.threadIdx.x) * 8)
    if row >= ldg_i32(count) or column >= width:
        return
    pdl_wait()
    a = ldg_u32x4(x + u64(row) * u64(x_pitch) + u64(column * 2))
    b = ldg_u32x4(gate + u64(row) * u64(gate_pitch) + u64(column * 2))
    stg_u32x4(out + u64(row) * u64(out_pitch) + u64(column * 2),
              (gate_pair(a[0], b[0]), gate_pair(a[1], b[1]), gate_pair(a[2], b[2]), gate_pair(a[3], b[3])))


GATE_MUL = Kernel(gate_mul_kernel, void(u64, u64, u64, i32, i32, i32, u64, i32), THREADS)


def gate_mul(stream, x, gate, out, counts, pdl: bool = False) -> None:
    """out = r(x * r(sigmoid(gate))) of the live rows: bit for bit what the fused kernels make of an ungated result.

    x, gate, out [rows, width]: BF16 (uint16), width and strides multiples of 8; out may be x. counts int32 [16].
    ValueError names the argument that does not fit.
    """
    x_view = view("x", x, np.uint16, None, None)
    rows, width = x_view.shape
    views = x_view, view("gate", gate, np.uint16, None, width), view("out", out, np.uint16, None, width)
    for name, v in zip(("x", "gate", "out"), views):
        if not aligned(v):
            raise ValueError(f"{name} must start at a multiple of 16 bytes, its width and stride be multiples of 8")
    if views[1].shape[0] < rows or views[2].shape[0] < rows:
        raise ValueError(f"gate and out must have at least the {rows} rows of x")
    if rows and width:
        GATE_MUL(stream, (-(-width // (8 * THREADS)), rows), *(v.address for v in views),
                 *(v.strides[0] * 2 for v in views), live(counts, ROWS), width, pdl=pdl)


# ---------------------------------------------------------------- launching
class Operands(NamedTuple):
    """The checked arrays of an attention."""
    q: View
    k: View
    v: View
    gate: View | None
    out: View
    counts: View
    tiles: View
    paths: View

    @property
    def heads(self) -> int:
        return self.q.shape[1] // D

    @property
    def kv_heads(self) -> int:
        return self.k.shape[1] // D


def check_operands(q, k, v, gate, out, counts, tiles, paths) -> Operands:
    """The arrays as views, or ValueError naming the first that does not fit."""
    views = {"q": view("q", q, np.uint16, None, None), "k": view("k", k, np.uint16, None, None)}
    wide, narrow = views["q"].shape[1], views["k"].shape[1]
    if not wide or wide % D:
        raise ValueError(f"q must have heads of {D} columns, not {wide} columns")
    if not narrow or narrow % D or wide % narrow:
        raise ValueError(f"k must have heads of {D} columns, a divisor of q's {wide // D} heads, not {narrow} columns")
    rows, keys = views["q"].shape[0], views["k"].shape[0]
    views["v"] = view("v", v, np.uint16, keys, narrow)
    views["gate"] = None if gate is None else view("gate", gate, np.uint16, rows, wide)
    views["out"] = view("out", out, np.uint16, None, wide)
    for name, found in views.items():
        if found is not None and not aligned(found):
            raise ValueError(f"{name} must start at a multiple of 16 bytes and have a stride that is a multiple of 8")
        if found is not None and found.strides[0] * 2 >= 2**31:
            raise ValueError(f"{name} has a stride of {found.strides[0]}: too far from row to row")
    return Operands(**views, counts=view("counts", counts, np.int32, COUNTS),
                    tiles=view("tiles", tiles, np.int32, None, 4), paths=view("paths", paths, np.int32, None))


class PortablePlan:
    """The kernel of this file bound to its arrays; see ``Plan``."""

    name = "portable"

    def __init__(self, operands: Operands):
        x = operands
        self.kernel = attention_kernel(x.heads // x.kv_heads, x.gate is not None)
        self.grid = (2 * x.tiles.shape[0], x.heads)
        rows = x.q, x.k, x.v, x.gate or x.q, x.out
        self.arguments = (*(v.address for v in rows), *(v.strides[0] * 2 for v in rows),
                          x.counts.address, x.tiles.address, x.paths.address)

    def __call__(self, stream, pdl: bool = False) -> None:
        self.kernel(stream, self.grid, *self.arguments, pdl=pdl)


class Plan:
    """Gated attention bound to its arrays: ``plan(stream, pdl=True)`` launches it, as often as wanted.

    q, gate [rows, Hq * 256], k, v [rows, Hk * 256], out [rows or fewer, Hq * 256]: BF16 (uint16), Hk a divisor of Hq,
    rows contiguous, starting at multiples of 16 bytes and a multiple of 8 elements apart. gate None: no gate.
    counts int32 [16], tiles int32 [n, 4], paths int32 [m]: of the pool, read by the kernel at every launch.

    The grid depends on the shapes alone. Making a plan allocates (on Hopper: tensor maps), so it cannot happen during a
    capture; launching it can. Keep it, and its arrays, as long as any graph that it is in. ``hopper`` chooses the
    kernel; None: by the device. Raises ValueError naming the argument that does not fit.
    """

    def __init__(self, q, k, v, gate, out, counts, tiles, paths, hopper: bool | None = None):
        operands = check_operands(q, k, v, gate, out, counts, tiles, paths)
        self._keep = q, k, v, gate, out, counts, tiles, paths
        if device.on_hopper() if hopper is None else hopper:
            from jev_kernels.attention.hopper import HopperPlan
            self.bound = HopperPlan(operands)
        else:
            self.bound = PortablePlan(operands)

    def __call__(self, stream, pdl: bool = False) -> None:
        self.bound(stream, pdl=pdl)


def gated_attention(stream, q, k, v, gate, out, counts, tiles, paths, pdl: bool = False) -> None:
    """Launch once; see ``Plan``, which is the way to do it often."""
    Plan(q, k, v, gate, out, counts, tiles, paths)(stream, pdl=pdl)


def kernels() -> dict:
    """The kernels with their budgets: {name: (Kernel, compute capabilities, registers, spill bytes)}."""
    both = ((8, 0), (9, 0, "a"))
    found = {"gate_mul": (GATE_MUL, both, 40, 0)}
    for group in (6, 4, 2):                                         # 27B, 9B, the demo
        found[f"attention_{group}"] = (attention_kernel(group, True), both, 255, 0)
    found["attention_ungated"] = (attention_kernel(6, False), both, 255, 0)
    if not config.ENABLE_CUDASIM:
        from jev_kernels.attention import hopper as hopper_attention
        found.update(hopper_attention.kernels())
    return found
