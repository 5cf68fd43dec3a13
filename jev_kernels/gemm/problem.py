"""What a GEMM is asked to do: y = r(x W^T) for BF16 arrays on the device, and what arrays it takes."""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jev_kernels.runtime.launch import address


class Key(NamedTuple):
    """A product y [m, n] = x [m, k] W [n, k]^T and how many elements apart rows are. gated: with the activation behind
    it, silu(gate) * up of y's columns."""
    m: int
    n: int
    k: int
    ldx: int
    ldw: int
    ldy: int
    gated: bool = False


def check_rows(name: str, array) -> None:
    """ValueError unless ``array`` is BF16 [rows, columns], columns side by side, rows at multiples of 16 bytes."""
    if array.dtype != np.uint16 or array.ndim != 2:
        raise ValueError(f"{name}: BF16 held in uint16 [rows, columns] expected, got {array.dtype} {array.shape}")
    if array.strides[1] != 2 or array.strides[0] < 2 * array.shape[1]:
        raise ValueError(f"{name}: columns must be contiguous and rows must not overlap, strides {array.strides}")
    if array.strides[0] % 16 or address(array) % 16:
        raise ValueError(f"{name}: rows must start at multiples of 16 bytes")


def layout(x, weight, y, rows: int) -> tuple[Key, int]:
    """(the key, alignment in bytes that all three arrays have) of y[:rows] = r(x[:rows] W^T).

    x [>= rows, K], weight [N, K], y [>= rows, N]: BF16 in uint16, columns contiguous, rows at multiples of 16 bytes and not
    overlapping. ValueError names the argument that does not fit.
    """
    for name, array in (("x", x), ("weight", weight), ("y", y)):
        check_rows(name, array)
    (n, k) = weight.shape
    if x.shape[1] != k:
        raise ValueError(f"x: {x.shape[1]} columns, the weight [{n}, {k}] takes {k}")
    if y.shape[1] != n:
        raise ValueError(f"y: {y.shape[1]} columns, the weight [{n}, {k}] gives {n}")
    if not 1 <= rows <= min(x.shape[0], y.shape[0]):
        raise ValueError(f"rows: {rows} of x {x.shape} and y {y.shape}")
    alignment = 256 if all(address(a) % 256 == 0 for a in (x, weight, y)) else 16
    return Key(rows, n, k, x.strides[0] // 2, weight.strides[0] // 2, y.strides[0] // 2), alignment
