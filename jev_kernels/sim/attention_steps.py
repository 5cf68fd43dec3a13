"""``attention.hopper_steps`` in plain Python, for the simulator: what happens in registers between products.

A tile in registers is an array of this thread's elements, P an array of BF16 pairs in uint32.
"""
from __future__ import annotations

import numpy as np

from jev_kernels import bf16
from jev_kernels.sim.ptx import ballot, ldsm, stg_u32x4
from jev_kernels.sim.simulator import READS, WRITES, collective as _collective, shared_bytes as _shared_bytes
from jev_kernels.sim.tma import load_3d, prefetch_tensormap, tma_load, tma_multicast  # noqa: F401

D, PANELS, WG_ROWS = 256, 4, 64


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


def make_steps(BN: int, scale_log2: float):
    """See ``attention.hopper_steps.make_steps``."""
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

    def packed(s):
        pairs = bf16.from_float32(s).astype(np.uint32).reshape(-1, 2)
        return pairs[:, 0] | pairs[:, 1] << np.uint32(16)

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
        "first_state": lambda: np.array([-np.inf] * 2 + [0.0] * 4, np.float32),
        "mask": mask, "softmax": softmax, "pack": packed,
        "rescale": lambda o, state: o * state[4:6][out_row],
        "inverses": lambda state: np.float32(1) / quad("row sum", state[2:4], np.add),
        "sigmoids": tuple(lambda at, row7, half, part=part: sigmoids(part, at, row7, half) for part in range(2)),
        "finish": lambda o, inverse, at, row7, half: store(o, inverse, at, row7, half, whole, None),
        "gated_finish": tuple(
            lambda o, inverse, at, row7, half, gate, columns=c: store(o, inverse, at, row7, half, columns, gate)
            for c in halves)}
