"""Row copies through an index: embedding, and the rows of last tokens.

    embed          x[i] = table[ids[i]]      for i < counts[ROWS]
    gather_rows    y[i] = x[rows[i]]         for i < counts[LASTS]

table [vocabulary, width], x, y [rows, width] BF16 (uint16), rows any stride apart; ids, rows int32. Nothing is rounded.

A block copies a part of one row, two groups of 16 bytes a thread; value by value where pointers, strides or the width
rule 16-byte accesses out. Indices are trusted: the host that made them has checked them.

Source: ``torch.nn.Embedding`` in ``Qwen3_5TextModel``.
"""
from __future__ import annotations

import numpy as np
from numba import cuda
from numba.cuda import types

from jev_kernels import bf16, ptx
from jev_kernels.pool import LASTS, ROWS
from jev_kernels.ptx import i32, u64
from jev_kernels.runtime import cubin
from jev_kernels.runtime.launch import Kernel, aligned, live, view

THREADS = 320                    # two groups a thread: a block copies 5120 values
MAX_ROWS = 65535                 # of a launch: rows are the grid's second dimension


@cubin.factory
def copy_kernel(vector: bool) -> Kernel:
    """Blocks (part of the row, row). Parameters: source, row stride, index, target, row stride, live count, width."""
    _, load8_once, store8 = bf16.access(vector)

    def copy_rows_kernel(x_at, x_ld, rows, y_at, y_ld, count, width):
        ptx.pdl_launch()
        row = i32(cuda.blockIdx.y)
        first = (i32(cuda.blockIdx.x) * i32(2 * THREADS) + i32(cuda.threadIdx.x)) * 8
        second = first + i32(THREADS * 8)
        if row >= ptx.ldg_i32(count) or first >= width:
            return
        x_at = x_at + u64(ptx.ldg_i32(rows + u64(row * 4)) * x_ld * 2)
        y_at = y_at + u64(row * y_ld * 2)
        ptx.pdl_wait()
        a = load8_once(x_at + u64(first * 2), width - first)
        if second < width:
            b = load8_once(x_at + u64(second * 2), width - second)
            store8(y_at + u64(second * 2), b, width - second)
        store8(y_at + u64(first * 2), a, width - first)

    return Kernel(copy_rows_kernel, types.void(u64, i32, u64, u64, i32, u64, i32), THREADS)


def embed(stream, table, ids, x, counts, pdl: bool = False) -> None:
    """x[:n] = table[ids[:n]], n = counts[ROWS].

    table uint16 [vocabulary, width], ids int32 [>= capacity], x uint16 [capacity, width]. Raises ValueError naming the
    argument that does not fit.
    """
    _copy(stream, "table", table, "ids", ids, "x", x, counts, ROWS, pdl)


def gather_rows(stream, x, rows, y, counts, pdl: bool = False) -> None:
    """y[:n] = x[rows[:n]], n = counts[LASTS].

    x uint16 [any, width], rows int32 [>= capacity], y uint16 [capacity, width], not overlapping x. Raises ValueError
    naming the argument that does not fit.
    """
    _copy(stream, "x", x, "rows", rows, "y", y, counts, LASTS, pdl)


def _copy(stream, source_name, source, index_name, index, target_name, target, counts, live_index, pdl):
    target = view(target_name, target, np.uint16, None, None)
    capacity, width = target.shape
    source = view(source_name, source, np.uint16, None, width)
    index = view(index_name, index, np.int32, None)
    if index.shape[0] < capacity:
        raise ValueError(f"{index_name} has {index.shape[0]} entries for {capacity} rows of {target_name}")
    if capacity > MAX_ROWS:
        raise ValueError(f"{target_name} must have at most {MAX_ROWS} rows, not {capacity}")
    if capacity and width:
        copy_kernel(aligned(source, target))(
            stream, (-(-width // (16 * THREADS)), capacity), source.address, source.strides[0], index.address,
            target.address, target.strides[0], live(counts, live_index), width, pdl=pdl)


def kernels() -> dict:
    """The kernels with their budgets: {name: (Kernel, compute capabilities, registers, spill bytes)}."""
    everywhere = ((8, 0), (9, 0, "a"))
    return {"copy_rows": (copy_kernel(True), everywhere, 32, 0),
            "copy_rows_scalar": (copy_kernel(False), everywhere, 48, 0)}
