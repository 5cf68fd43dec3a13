"""Tensor maps and TMA in plain Python, for the simulator: boxes between device and shared memory, swizzled as asked.

A box lands at once, in every block that it is multicast to; a box that is stored leaves at the wait that guarantees it has
been read, from what shared memory holds by then, and that must be what it held when the store was issued. What waits are
missing the race detector sees.
"""
from __future__ import annotations

import ctypes
import threading

import numpy as np

from jev_kernels.sim.barriers import complete_bytes
from jev_kernels.sim.simulator import (
    COPIED_FROM,
    COPIED_TO,
    COPIES,
    RANK_BIT,
    check_global,
    register,
    shared_bytes,
    split_shared,
)


# ---------------------------------------------------------------- tensor maps
def encode(pointer: int, dims: tuple, strides: tuple, box: tuple) -> bytes:
    """See ``runtime.tensor_maps.encode``; a made-up descriptor of 128 bytes: address, number of dimensions, dims, strides,
    box."""
    fields = np.zeros(16, np.int64)
    fields[:2] = pointer, len(dims)
    fields[2:2 + len(dims)], fields[5:5 + len(strides)], fields[8:8 + len(box)] = dims, strides, box
    return fields.tobytes()


_placed: list[np.ndarray] = []


def place(maps: bytes) -> int:
    """See ``runtime.tensor_maps.place``."""
    _placed.append(np.frombuffer(maps, np.uint8).copy())
    return register(_placed[-1])


class _Box:
    """A box of a tensor map: its rows in device memory and where their bytes lie in shared memory."""

    def __init__(self, tensor_map, starts):
        check_global(int(tensor_map), 128, alignment=16)
        fields = np.frombuffer((ctypes.c_char * 128).from_address(int(tensor_map)), np.int64)
        n = int(fields[1])
        self.address, self.starts = int(fields[0]), [int(s) for s in starts]
        self.dims, self.strides, self.box = ([int(x) for x in part] for part in (
            fields[2:2 + n], fields[5:4 + n], fields[8:8 + n]))
        self.row_bytes = 2 * self.box[0]
        self.swizzle = {128: 7, 64: 3}[self.row_bytes]             # by these bits of a 128-byte line's number
        self.nbytes = self.row_bytes * int(np.prod(self.box[1:]))

    def rows(self):
        """(device address, bytes that lie inside the array) of each row, from the first."""
        columns = max(0, min(self.dims[0] - self.starts[0], self.box[0]))
        for outer in np.ndindex(*self.box[:0:-1]):
            index = [s + o for s, o in zip(self.starts[1:], outer[::-1])]
            inside = all(0 <= i < d for i, d in zip(index, self.dims[1:]))
            yield (self.address + 2 * self.starts[0] + sum(i * s for i, s in zip(index, self.strides)),
                   2 * columns if inside else 0)

    def places(self, address: int) -> np.ndarray:
        """int [rows, row bytes]: where the bytes of the box lie behind ``address``."""
        if address % 128:
            raise ValueError(f"a box at a misaligned shared address {address}")
        at = address + np.arange(self.nbytes)
        return (at ^ (at >> 7 & self.swizzle) << 4).reshape(-1, self.row_bytes) - address


def _load_box(dst, tensor_map, starts, barrier, ranks):
    """A box into the shared memory of the blocks ``ranks``, at the same offset; its bytes complete at the barrier of each."""
    box = _Box(tensor_map, starts)
    image = np.zeros(box.nbytes, np.uint8)
    for places, (address, inside) in zip(box.places(split_shared(dst)[1]), box.rows()):
        if inside:
            check_global(address, inside, COPIED_FROM, alignment=16)
            image[places[:inside]] = np.frombuffer((ctypes.c_uint8 * inside).from_address(address), np.uint8)
    for rank in ranks:
        there = rank << RANK_BIT
        shared_bytes(there | split_shared(dst)[1], box.nbytes, 128, use=COPIES)[:] = image
        complete_bytes(there | split_shared(barrier)[1], box.nbytes)


def tma_load(dst, tensor_map, col, row, barrier, policy):
    _load_box(dst, tensor_map, (col, row), barrier, [split_shared(dst)[0]])


def load_3d(dst, tensor_map, col, head, row, barrier, policy):
    _load_box(dst, tensor_map, (col, head, row), barrier, [split_shared(dst)[0]])


def tma_multicast(dst, tensor_map, col, row, barrier, mask, policy):
    _load_box(dst, tensor_map, (col, row), barrier, [rank for rank in range(16) if int(mask) >> rank & 1])


def prefetch_tensormap(at): pass


# ---------------------------------------------------------------- stores
def tma_store_if(whether, tensor_map, col, row, source):
    """A box from shared memory, a group of its own."""
    if not int(whether):
        return
    me, box = threading.current_thread(), _Box(tensor_map, (col, row))
    held = shared_bytes(source, box.nbytes, 128)
    if me.block.races:
        rank, address = split_shared(source)
        cells = me.block.races.cells(rank, address, box.nbytes)
        me.block.races.begin_reads(me.block.races.threads + me.number, [me.number], np.arange(cells.start, cells.stop),
                                   "has TMA store")
    me.stores.append((box, int(source), held.copy()))


def _stores_read(left):
    """All but the ``left`` latest of this thread's stores have read shared memory."""
    me = threading.current_thread()
    while len(me.stores) > left:
        box, source, held = me.stores.popleft()
        image = shared_bytes(source, box.nbytes, 128)
        if not np.array_equal(image, held):
            raise RuntimeError("shared memory that a TMA store reads has been overwritten")
        for places, (address, inside) in zip(box.places(split_shared(source)[1]), box.rows()):
            if inside:
                check_global(address, inside, COPIED_TO, alignment=16)
                row = np.ascontiguousarray(image[places[:inside]])
                ctypes.memmove(address, row.ctypes.data, inside)
    if me.block.races:
        me.block.races.end_reads(me.block.races.threads + me.number, [me.number], left)


def tma_stores_read_if(whether):
    if int(whether):
        _stores_read(0)


def tma_stores_read_but_one_if(whether):
    if int(whether):
        _stores_read(1)


def tma_stores_done():
    me = threading.current_thread()
    _stores_read(0)
    if me.block.races:
        me.block.races.acquire(me.number, me.block.races.copied(me.number))
