"""Shared memory by names: what lies where in a block's dynamic shared memory.

    stage = SharedLayout(k=16384, q=16384, v=8192, rows=array(64, 4))
    smem = SharedLayout(stages=array(3, stage.nbytes, align=1024), full=barriers(3), empty=barriers(3))

    smem.full               offset in bytes of a part, behind the start
    smem.nbytes             of all of it
    block_bytes(smem)       what a launch asks for: dynamic shared memory starts at any multiple of 16

A layout is a named tuple of integers, so kernels may use ``smem.full`` as they use a constant. Parts lie one behind the
other in the order given, each at a multiple of its alignment: 16 bytes unless it says so, 8 for mbarriers.
"""
from __future__ import annotations

from collections import namedtuple
from typing import NamedTuple

BARRIER = 8                         # bytes of an mbarrier
SWIZZLE_ATOM = 1024                 # 8 rows of 128 bytes: what is swizzled starts at a multiple of it


class Part(NamedTuple):
    """Bytes that start at a multiple of ``align``."""
    nbytes: int
    align: int = 16


def array(count: int, itemsize: int, align: int = 16) -> Part:
    """``count`` items of so many bytes, the first at a multiple of ``align``."""
    return Part(count * itemsize, align)


def barriers(count: int) -> Part:
    """mbarriers, 8 bytes each."""
    return Part(count * BARRIER, BARRIER)


def words(count: int) -> Part:
    """32-bit words."""
    return Part(4 * count, 4)


def SharedLayout(**parts: int | Part):
    """A named tuple of the parts' offsets in bytes, and ``nbytes``. A part is its size in bytes or a ``Part``."""
    at, offsets = 0, {}
    for name, part in parts.items():
        nbytes, align = part if isinstance(part, Part) else (part, 16)
        if nbytes < 0 or align < 1 or align & (align - 1):
            raise ValueError(f"{name}: {nbytes} bytes at a multiple of {align}")
        offsets[name] = at = -(-at // align) * align
        at += nbytes
    return namedtuple("SharedLayout", [*parts, "nbytes"])(*offsets.values(), at)


def block_bytes(layout, align: int = SWIZZLE_ATOM) -> int:
    """Bytes of dynamic shared memory in which the layout can start at a multiple of ``align``, wherever it begins."""
    return layout.nbytes + align
