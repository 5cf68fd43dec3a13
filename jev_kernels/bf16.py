"""BF16 held in uint16: what the numbers are, in NumPy's integer arithmetic, and the device functions that agree.

A BF16 value is the upper half of a float32: sign, 8 exponent bits, 7 fraction bits. ``from_float32`` is the definition
of rounding in this project: to the nearest, ties to the even neighbour, subnormals kept, overflow to infinity, and
every NaN becomes ``NAN``. That is what the GPU's conversion instruction gives too, so that the two can be compared over
all 2^32 float32 patterns without an exception (``tests/gpu/test_bf16.py`` does).
"""
from __future__ import annotations

import numpy as np

from jev_kernels import ptx
from jev_kernels.ptx import i64, u16, u32, u64

_BLOCK = 1 << 14       # numbers that are rounded at a time: inputs and outputs fit a core's cache
NAN = 0x7FFF           # PTX's canonical BF16 NaN: quiet, positive


def from_float32(x) -> np.ndarray:
    """Round float32 [...] to BF16, as uint16 [...]: nearest, ties to even.

    Raises TypeError for other dtypes: a float64 value must be rounded once, see ``from_float64``.
    """
    x = np.asarray(x)
    if x.dtype != np.float32:
        raise TypeError(f"from_float32 takes float32, got {x.dtype}")
    bits = x.view(np.uint32)
    # Half an ulp less one, plus one more when the kept part is odd. A carry runs into the exponent, which is right:
    # from the largest subnormal to the smallest normal number, and from the largest finite number to infinity.
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where((bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000), np.uint32(NAN), rounded).astype(np.uint16)


def to_float32(x) -> np.ndarray:
    """The values of BF16 in uint16 [...] as float32 [...]: exact. Raises TypeError for other dtypes."""
    x = np.asarray(x)
    if x.dtype != np.uint16:
        raise TypeError(f"to_float32 takes uint16, got {x.dtype}")
    return np.asarray(x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def from_float64(x) -> np.ndarray:
    """Round float64 [...] to BF16, as uint16 [...], once.

    float64 -> float32 -> BF16 would round twice, and a first rounding onto a tie sends the second the wrong way. So the
    first step rounds to odd: a float32 that is not exact keeps the bits toward zero and gets an odd last one, which can
    be neither a tie nor on the wrong side of one.
    """
    x = np.asarray(x, dtype=np.float64)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        near = x.astype(np.float32)
        wide = near.astype(np.float64)
        bits = near.view(np.uint32) - (np.abs(wide) > np.abs(x)).astype(np.uint32)     # one step toward zero
        bits = bits | ((wide != x) & ~np.isnan(x)).astype(np.uint32)
    return from_float32(np.asarray(bits).view(np.float32))


def round_float64(x) -> np.ndarray:
    """float64 [...] rounded once to BF16, the values as float64 [...]: ``to_float32(from_float64(x))``, but quicker.

    A normal number is rounded in its own 64 bits, where 45 of the 52 fraction bits go. Blocks stay in cache. Numbers
    whose BF16 is subnormal, infinite or NaN take the long way.
    """
    x = np.asarray(x, dtype=np.float64)
    out = np.empty(x.shape)
    flat, rounded = np.ascontiguousarray(x).reshape(-1), out.reshape(-1)
    odd = np.empty(min(flat.size, _BLOCK), np.uint64)
    for at in range(0, flat.size, _BLOCK):
        part = flat[at:at + _BLOCK]
        bits, target, o = part.view(np.uint64), rounded[at:at + _BLOCK].view(np.uint64), odd[:part.size]
        np.right_shift(bits, np.uint64(45), out=o)
        np.bitwise_and(o, np.uint64(1), out=o)
        np.add(bits, o, out=target)
        np.add(target, np.uint64((1 << 44) - 1), out=target)
        np.bitwise_and(target, np.uint64(0xFFFFFFFFFFFFFFFF ^ ((1 << 45) - 1)), out=target)
        size = np.abs(part)
        special = ~((size >= 2.0 ** -126) & (np.abs(rounded[at:at + _BLOCK]) < 2.0 ** 128)) & (size != 0)
        if special.any():
            rounded[at:at + _BLOCK][special] = to_float32(from_float64(part[special]))
    return out


def pack_pairs(x) -> np.ndarray:
    """uint16 [..., 2n] as uint32 [..., n]: the first of a pair in the low half, as registers and memory hold them."""
    x = np.asarray(x)
    return x[..., 0::2].astype(np.uint32) | (x[..., 1::2].astype(np.uint32) << np.uint32(16))


def unpack_pairs(x) -> np.ndarray:
    """uint32 [..., n] as uint16 [..., 2n]: the inverse of ``pack_pairs``."""
    x = np.asarray(x)
    halves = np.stack([x & np.uint32(0xFFFF), x >> np.uint32(16)], axis=-1).astype(np.uint16)
    return halves.reshape(*x.shape[:-1], 2 * x.shape[-1])


# ---------------------------------------------------------------- on the device
@ptx.device_function
def to_f32(x):
    """uint16 -> float32, exact."""
    return ptx.from_bf16(x)


@ptx.device_function
def from_f32(x):
    """float32 -> uint16: the conversion instruction, equal to ``from_float32`` for every float32."""
    return ptx.to_bf16(x)


@ptx.device_function
def from_f32_by_definition(x):
    """float32 -> uint16 in integer arithmetic, as ``from_float32`` does it."""
    bits = i64(ptx.bits_f32(x))
    if bits & 0x7FFFFFFF > 0x7F800000:
        return u16(NAN)
    return u16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


def access(vector: bool):
    """Device functions (load8, load8_once, store8) for eight BF16 values as four registers of two.

    load8(address, n): the values at ``address``; n of them count, the others are 0. store8(address, (a, b, c, d), n).
    vector: one 16-byte access; the address is a multiple of 16 and n >= 8. Otherwise n of 2 bytes, at any address.
    """
    if vector:
        @ptx.device_function
        def load8(address, n):
            return ptx.ldg_u32x4(address)

        @ptx.device_function
        def load8_once(address, n):
            return ptx.ldg_u32x4_once(address)

        @ptx.device_function
        def store8(address, x, n):
            ptx.stg_u32x4(address, x)

        return load8, load8_once, store8

    @ptx.device_function
    def load2(address, n):
        return u32(u32(ptx.ldg_u16_if(address, n)) | (u32(ptx.ldg_u16_if(address + u64(2), n - 1)) << u32(16)))

    @ptx.device_function
    def load8(address, n):
        return (load2(address, n), load2(address + u64(4), n - 2), load2(address + u64(8), n - 4),
                load2(address + u64(12), n - 6))

    @ptx.device_function
    def store2(address, x, n):
        ptx.stg_u16_if(address, u16(x & u32(0xFFFF)), n)
        ptx.stg_u16_if(address + u64(2), u16(x >> u32(16)), n - 1)

    @ptx.device_function
    def store8(address, x, n):
        store2(address, x[0], n)
        store2(address + u64(4), x[1], n - 2)
        store2(address + u64(8), x[2], n - 4)
        store2(address + u64(12), x[3], n - 6)

    return load8, load8, store8
