"""Matrix fragments: which element of a matrix a lane holds in which register. The one map of them.

With g = lane // 4 and t = lane % 4, of a warp's 16 rows:

    accumulator      float32, of mma.sync m16n8 and of wgmma m64nN alike. Registers 4j and 4j + 1: row g, columns 8j + 2t
    [16, 8j + 8]     and 8j + 2t + 1; registers 4j + 2 and 4j + 3: the same columns of row g + 8. A warpgroup's tile of 64
                     rows is four of these, warp by warp.
    A [16, 16]       16-bit pairs (the lower index in the lower half), four registers a step of 16 along k:
                     row g at k = 2t; row g + 8; the same two at k + 8. Packing an accumulator pair by pair gives an A.
    B [16, 8]        pairs along k: k = 2t of column g; k + 8.
    TF32             A [16, 8]: row g at k = t; row g + 8; the same two at k + 4.  B [8, 8]: k = t of column g; k + 4.
    8 x 8 matrix     of ldmatrix, stmatrix and movmatrix: a pair, row g, columns 2t and 2t + 1. Its rows' addresses come
                     from 8 lanes, matrix m's from lanes 8m to 8m + 7.

``row`` and ``column`` are for kernels, the rest for what generates code, for the simulator and for tests.

Source: PTX ISA 9.7.14 (mma, ldmatrix, stmatrix, movmatrix) and 9.7.15 (wgmma).
"""
from __future__ import annotations

import numpy as np
from numba.cuda.extending import register_jitable


@register_jitable(inline="always")
def row(lane):
    """g: the row, of 16, of a lane's accumulators 4j and 4j + 1; those of 4j + 2 and 4j + 3 are 8 further on."""
    return lane >> 2


@register_jitable(inline="always")
def column(lane):
    """2t: the column, of 8, of a lane's accumulators 4j and 4j + 2; those of 4j + 1 and 4j + 3 are the next."""
    return (lane & 3) * 2


def of_register(i: int) -> tuple[int, int]:
    """(row, column) of accumulator i of a lane, counted from ``row`` and ``column``."""
    return i // 2 % 2 * 8, i // 4 * 8 + i % 2


# ---------------------------------------------------------------- index arrays: matrix[rows, columns] are the registers
_LANES = np.arange(32)
G, T = row(_LANES), column(_LANES) // 2


def accumulators(columns: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows, columns), each int [32, columns / 2], of the accumulators of a [16, columns] tile."""
    first, second = np.array([of_register(i) for i in range(columns // 2)]).T
    return G[:, None] + first, 2 * T[:, None] + second


def a_pairs() -> tuple[np.ndarray, np.ndarray]:
    """(rows, columns), each int [32, 4, 2]: lane, register, half of the pair; of a 16-bit A [16, 16]."""
    rows = G[:, None, None] + np.array([0, 8, 0, 8])[:, None]
    columns = 2 * T[:, None, None] + np.array([0, 0, 8, 8])[:, None] + np.arange(2)
    return np.broadcast_arrays(rows, columns)


def b_pairs() -> tuple[np.ndarray, np.ndarray]:
    """(rows, columns), each int [32, 2, 2]: lane, register, half of the pair; of a 16-bit B [16, 8]."""
    rows = 2 * T[:, None, None] + np.array([0, 8])[:, None] + np.arange(2)
    return np.broadcast_arrays(rows, G[:, None, None])


def a_tf32() -> tuple[np.ndarray, np.ndarray]:
    """(rows, columns), each int [32, 4], of a TF32 A [16, 8]."""
    return G[:, None] + np.array([0, 8, 0, 8]), T[:, None] + np.array([0, 0, 4, 4])


def b_tf32() -> tuple[np.ndarray, np.ndarray]:
    """(rows, columns), each int [32, 2], of a TF32 B [8, 8]."""
    return T[:, None] + np.array([0, 4]), np.broadcast_to(G[:, None], (32, 2))


def pairs8() -> tuple[np.ndarray, np.ndarray]:
    """(rows, columns), each int [32, 2]: lane, half of the pair; of an 8 x 8 matrix of 16-bit values."""
    return np.broadcast_to(G[:, None], (32, 2)), 2 * T[:, None] + np.arange(2)
