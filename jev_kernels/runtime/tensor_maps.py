"""Tensor maps: the descriptors by which TMA copies boxes of an array between device and shared memory.

Source: CUDA driver API, tensor map object management.
"""
from __future__ import annotations

import ctypes
from functools import lru_cache

import numpy as np
from numba.cuda.core import config

from jev_kernels.runtime import device
from jev_kernels.runtime.launch import address, check

if config.ENABLE_CUDASIM:
    from jev_kernels.sim import tma as simulated

BYTES = 128                           # of a map
BLOCK_BYTES = 1 << 16                 # of device memory, taken at a time

_placed: dict[bytes, int] = {}        # maps, one behind the other: where they are in device memory
_arenas: list[device.Arena] = []


def encode(pointer: int, dims: tuple, strides: tuple, box: tuple) -> bytes:
    """The bytes of the map of a BF16 array at ``pointer``: dims from the fastest, strides in bytes of all but that one,
    swizzled as the box is wide, 128 or 64 bytes. What lies outside is read as zeros. Raises ValueError for a pointer
    that TMA cannot read from.

    ctypes, as the driver demands a 64-byte aligned output buffer.
    """
    if pointer % 16:
        raise ValueError("TMA reads from addresses that are multiples of 16")
    if config.ENABLE_CUDASIM:
        return simulated.encode(pointer, dims, strides, box)
    raw = ctypes.create_string_buffer(BYTES + 64)
    at = (ctypes.addressof(raw) + 63) & ~63
    wide, narrow, n = ctypes.c_uint64, ctypes.c_uint32, len(dims)
    bf16, swizzle, l2_256b = 9, {64: 3, 32: 2}[box[0]], 3
    error = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.c_void_p(at), bf16, n, ctypes.c_void_p(pointer), (wide * n)(*dims), (wide * (n - 1))(*strides),
        (narrow * n)(*box), (narrow * n)(*[1] * n), 0, swizzle, l2_256b, 0)
    if error:
        raise RuntimeError(f"cuTensorMapEncodeTiled: error {error}")
    return ctypes.string_at(at, BYTES)


def place(maps: bytes) -> int:
    """Device address of some maps. They are written once and stay for good: graphs hold on to addresses, and a map that
    took the place of another might be served from the GPU's cache of descriptors as the old one ("an illegal instruction
    was encountered")."""
    if config.ENABLE_CUDASIM:
        return simulated.place(maps)
    if maps not in _placed:
        if not _arenas or _arenas[-1].used + device.padded(len(maps)) > _arenas[-1].nbytes:
            _arenas.append(device.Arena(BLOCK_BYTES, "tensor maps"))
        target, raw = _arenas[-1].take(len(maps), np.uint8), np.frombuffer(maps, np.uint8)
        from cuda.bindings import driver
        check(driver.cuMemcpyHtoD(address(target), raw.ctypes.data, raw.nbytes))
        check(driver.cuStreamSynchronize(0))         # the copy is in order with the default stream only
        _placed[maps] = address(target)
    return _placed[maps]


def matrix_dimensions(rows: int, cols: int, stride: int, box_rows: int, box_cols: int = 64) -> tuple:
    """(dims, strides, box) for ``encode`` of a matrix [rows, cols] whose rows are ``stride`` elements apart.

    The box is box_rows x 64 or 32 columns, one line of the swizzle. Raises ValueError for what TMA cannot do.
    """
    if not 0 < box_rows <= 256 or box_rows % 8:
        raise ValueError(f"a box has 8 to 256 rows, a multiple of 8: not {box_rows}")
    if stride < cols or stride % 8:
        raise ValueError(f"rows must be a multiple of 16 bytes apart and not overlap: stride {stride}, {cols} columns")
    return (cols, rows), (stride * 2,), (box_cols, box_rows)


@lru_cache(maxsize=None)
def matrix(pointer: int, rows: int, cols: int, stride: int, box_rows: int, box_cols: int = 64) -> int:
    """Device address of the map of a matrix; see ``matrix_dimensions``."""
    return place(encode(pointer, *matrix_dimensions(rows, cols, stride, box_rows, box_cols)))
