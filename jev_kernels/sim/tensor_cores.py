"""``hopper_attention_steps`` in plain Python, for the CUDA simulator: TMA boxes, wgmma tiles, the softmax between them.

Layouts are those of the hardware: boxes and key tiles lie in shared memory in the 128-byte swizzle, a tile in registers
is an array of this thread's elements. A tile's product is taken at the wait that guarantees it, from what shared memory
holds by then, so a slot that is overwritten too early shows. A box lands at once, which hides a missing wait. One block
at a time: clusters are not simulated.
"""
from __future__ import annotations

import threading

import numpy as np

from jev_kernels import bf16
from jev_kernels.sim.ptx import ballot, ldsm, stg_u32x4
from jev_kernels.sim.simulator import READS, WRITES, collective as _collective, shared_bytes as _shared_bytes
from jev_kernels.sim.tma import load_3d, prefetch_tensormap, tma_load, tma_multicast  # noqa: F401

D, SLABS, WG_ROWS = 256, 4, 64
LANES = np.arange(32)
G, T = LANES // 4, LANES % 4


# ---------------------------------------------------------------- instructions
def prefetch_3d(*_): pass
def consumer_registers(): pass
def producer_registers(): pass
def opaque(x): return x
def clear16(at): _shared_bytes(at, 16, use=WRITES)[:] = 0


def first_true(x):
    bits = int(ballot(x))
    return np.int32((bits & -bits).bit_length() - 1)


def running_sum(x):
    return _collective("running_sum", int(x), lambda values: list(np.cumsum(values, dtype=np.int32)))


def copy_out(whether, source, to):
    if whether:
        stg_u32x4(to, _shared_bytes(source, 16, use=READS).view(np.uint32))


# ---------------------------------------------------------------- register tiles
def _tile(at, rows, first, count):
    """Rows first .. of a swizzled tile [rows][4 slabs of 64] at a shared address, as float32 [count, 256]."""
    at = int(at)
    out = np.empty((count, SLABS, 8, 8), np.uint16)
    r = np.arange(first, first + count)
    for slab in range(SLABS):
        start = at + slab * rows * 128
        whole = _shared_bytes(start, rows * 128, 1024).view(np.uint16).reshape(rows, 8, 8)
        for chunk in range(8):
            out[:, slab, chunk] = whole[r, chunk ^ r & 7]
    return bf16.to_float32(out.reshape(count, D))


def _gather(registers, columns):
    """[32][n] registers of the lanes -> the warp's [16, columns]."""
    a = np.asarray(registers, np.float32).reshape(32, columns // 8, 2, 2)
    out = np.empty((16, columns), np.float32)
    for j in range(columns // 8):
        for half in range(2):
            for e in range(2):
                out[G + 8 * half, 8 * j + 2 * T + e] = a[:, j, half, e]
    return out


def _scatter(tile):
    """The warp's [16, columns] -> [32][n] registers of the lanes."""
    columns = tile.shape[1]
    a = np.empty((32, columns // 8, 2, 2), np.float32)
    for j in range(columns // 8):
        for half in range(2):
            for e in range(2):
                a[:, j, half, e] = tile[G + 8 * half, 8 * j + 2 * T + e]
    return a.reshape(32, -1)


def _warp_row():
    """First row of this warp in its warpgroup's 64."""
    return threading.current_thread().thread_id // 32 % 4 * 16


def _begin_reads(*tiles):
    """For the race detector: a product of this warp begins to read tiles, (at, rows, first, count) as ``_tile`` has them.

    wgmma and the wait for it are instructions of a whole warp: its first lane stands for it.
    """
    me = threading.current_thread()
    if me.block.races and me.thread_id % 32 == 0:
        starts = [(int(at) + (slab * rows + first) * 128, count) for at, rows, first, count in tiles for slab in range(SLABS)]
        cells = [np.arange(start // 2, start // 2 + count * 64) for start, count in starts]
        races = me.block.races
        races.begin_reads(races.products(me.number // 32), [me.number], np.concatenate(cells))


def _end_reads(left):
    """... and all but the ``left`` latest products have read."""
    me = threading.current_thread()
    if me.block.races and me.thread_id % 32 == 0:
        races = me.block.races
        races.end_reads(races.products(me.number // 32), [me.number], left)


def make_steps(BN: int, scale_log2: float):
    """See ``hopper_attention_steps.make_steps``. A started product is a tuple of what it will be made from."""
    scale = np.float32(scale_log2)
    row_of = np.arange(BN // 2) % 4 // 2                         # 0 for registers of row g, 1 for row g + 8
    out_row = np.arange(D // 2) % 4 // 2

    def quad(name, x, op):
        """x [.] of every lane combined over the four lanes of a row."""
        def compute(values):
            v = np.asarray(values).reshape(8, 4, -1)
            return list(np.repeat(op(op(v[:, 0], v[:, 1]), op(v[:, 2], v[:, 3])), 4, axis=0))
        return _collective(name, x, compute)

    def power_of_two(x):
        return np.exp2(x.astype(np.float64)).astype(np.float32)

    def tree(x):
        """The float32 sum of all, pairwise, as the kernel does it."""
        while len(x) > 1:
            x = np.concatenate([x[:-1:2] + x[1::2], x[len(x) & ~1:]])
        return x[0]

    def qk(q_at, k_at):
        _begin_reads((q_at, WG_ROWS, 0, WG_ROWS), (k_at, BN, 0, BN))
        return int(q_at), int(k_at)

    def pv(o, p, v_at):
        _begin_reads((v_at, BN, 0, BN))
        return o, p, int(v_at)

    def s_wait(s, left=0):
        q_at, k_at = s
        first = _warp_row()

        def compute(_):
            return list(_scatter(_tile(q_at, WG_ROWS, first, 16).astype(np.float64) @ _tile(k_at, BN, 0, BN).T))
        s = _collective("S = Q K^T", None, compute)
        _end_reads(left)
        return s

    def o_wait(o, *kept):
        o, p, v_at = o

        def compute(lanes):
            probabilities = _gather([r[1] for r in lanes], BN)
            product = probabilities.astype(np.float64) @ _tile(v_at, BN, 0, BN)
            return list(_scatter(_gather([r[0] for r in lanes], D) + product))
        o = _collective("O += P V", (o, p), compute)
        _end_reads(0)
        return o

    def mask(s, limit, limit8):
        column = np.arange(BN // 2) // 4 * 8 + np.arange(BN // 2) % 2
        return np.where(column <= np.where(row_of == 0, int(limit), int(limit8)), s, np.float32(-np.inf))

    def softmax(s, state):
        with np.errstate(all="ignore"):
            mine = np.array([s[row_of == r].max() for r in range(2)])
            top = np.maximum(state[:2], quad("row maximum", mine, np.maximum))
            base = top * -scale
            factor = power_of_two(base - state[:2] * -scale)
            p = power_of_two((s.astype(np.float64) * scale + base[row_of]).astype(np.float32))
            sums = state[2:4] * factor + np.array([tree(p[row_of == r]) for r in range(2)])
        return p, np.concatenate([top, sums, factor]).astype(np.float32)

    def sigmoids(part, at, row7, half):
        out = []
        for pair in range(8 * part, 8 * part + 8):
            for x in ldsm(int(at) + (((pair % 4 * 2 | int(half)) ^ int(row7)) << 4) + pair // 4 * WG_ROWS * 128):
                out += [int(x) << 16 & 0xFFFFFFFF, int(x) & 0xFFFF0000]
        with np.errstate(all="ignore"):
            e = power_of_two(np.array(out, np.uint32).view(np.float32) * np.float32(-np.log2(np.e)))
            return bf16.from_float32(np.float32(1) / (e + np.float32(1)))

    def store(o, inverse, at, row7, half, columns, gate):
        values = bf16.from_float32(o[columns] * inverse[out_row[columns]])
        if gate is not None:
            values = bf16.from_float32(bf16.to_float32(values) * bf16.to_float32(gate))
        for n in range(len(values) // 8):                        # stmatrix: four 8x8 matrices, rows from 8 lanes each
            pair = columns.start // 8 + n
            to = int(at) + (((pair % 4 * 2 | int(half)) ^ int(row7)) << 4) + pair // 4 * WG_ROWS * 128

            def compute(lanes):
                for matrix in range(4):
                    rows = np.empty((8, 8), np.uint16)
                    for lane, (_, v) in enumerate(lanes):
                        rows[lane // 4, 2 * (lane % 4):][:2] = v[2 * matrix:2 * matrix + 2]
                    for r in range(8):
                        lane = 8 * matrix + r
                        _shared_bytes(lanes[lane][0], 16, use=WRITES, lane=lane).view(np.uint16)[:] = rows[r]
                return [None] * 32
            _collective("stmatrix", (to, values[8 * n:8 * n + 8]), compute)

    whole, halves = slice(0, D // 2), (slice(0, D // 4), slice(D // 4, D // 2))
    return {
        "zero": lambda: np.zeros(D // 2, np.float32),
        "first_state": lambda: np.array([-np.inf] * 2 + [0.0] * 4, np.float32),
        "qk": qk, "s_wait": s_wait, "s_wait_but_one": lambda s: s_wait(s, 1),
        "pv": pv, "o_wait": o_wait, "o_wait_last": o_wait, "o_wait_gated": o_wait,
        "mask": mask, "softmax": softmax, "pack": lambda s: bf16.to_float32(bf16.from_float32(s)),
        "rescale": lambda o, state: o * state[4:6][out_row],
        "inverses": lambda state: np.float32(1) / quad("row sum", state[2:4], np.add),
        "sigmoids": tuple(lambda at, row7, half, part=part: sigmoids(part, at, row7, half) for part in range(2)),
        "finish": lambda o, inverse, at, row7, half: store(o, inverse, at, row7, half, whole, None),
        "gated_finish": tuple(
            lambda o, inverse, at, row7, half, gate, columns=c: store(o, inverse, at, row7, half, columns, gate)
            for c in halves)}
