"""The definition of BF16 rounding against exact rational arithmetic, the device functions against the definition."""
from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numba import cuda
from numba.cuda import types

from jev_kernels import bf16
from jev_kernels.ptx import i32, u32, u64
from jev_kernels.runtime.launch import Kernel, address

INTERESTING = np.array(
    [0, 1, 0x7FFF, 0x8000, 0x8001, 0x17FFF, 0x18000, 0x18001, 0x007F7FFF, 0x007F8000, 0x007FFFFF, 0x00800000,
     0x00808000, 0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F818000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000,
     0x7F800001, 0x7F808000, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF], np.uint32)


def exactly_rounded(x: float) -> int:
    """BF16 bits of a float64, by comparing rational numbers."""
    if np.isnan(x):
        return bf16.NAN
    sign = 0x8000 if np.signbit(x) else 0
    if np.isinf(x):
        return sign | 0x7F80
    size = abs(Fraction(float(x)))

    def value(bits):
        exponent, fraction = bits >> 7, bits & 0x7F
        return Fraction(fraction, 128) * Fraction(2) ** -126 if exponent == 0 else (
            (1 + Fraction(fraction, 128)) * Fraction(2) ** (exponent - 127))       # 0x7F80 stands for 2^128

    low, high = 0, 0x7F80
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if value(middle) <= size else (low, middle)
    if size >= value(0x7F80):
        return sign | 0x7F80
    down, up = size - value(low), value(high) - size
    return sign | (low if down < up or (down == up and low % 2 == 0) else high)


def test_from_float32_at_the_edges():
    bits = np.concatenate([INTERESTING, INTERESTING | np.uint32(0x80000000)])
    want = [exactly_rounded(float(x)) for x in bits.view(np.float32)]
    np.testing.assert_array_equal(bf16.from_float32(bits.view(np.float32)), np.array(want, np.uint16))


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 2**64 - 1))
def test_from_float64_rounds_once(bits):
    x = np.array([bits], np.uint64).view(np.float64)
    assert bf16.from_float64(x)[0] == exactly_rounded(x[0])


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 0x7F7F), st.integers(-3, 3), st.booleans())
def test_from_float64_next_to_ties(bits, steps, negative):
    """Midpoints of neighbours, and float64 values so near them that a float32 in between would fall on the midpoint."""
    low = bf16.to_float32(np.array([bits, bits + 1 if bits < 0x7F7F else bits], np.uint16)).astype(np.float64)
    x = low.mean(keepdims=True) if bits < 0x7F7F else low[:1] * (1 + 2.0**-9)
    for _ in range(abs(steps)):
        x = np.nextafter(x, np.inf if steps > 0 else -np.inf)
    x = -x if negative else x
    assert bf16.from_float64(x)[0] == exactly_rounded(x[0])


def test_every_value_survives_the_round_trip():
    every = np.arange(2**16, dtype=np.uint16)
    finite = every[(every & 0x7FFF) <= 0x7F80]
    np.testing.assert_array_equal(bf16.from_float32(bf16.to_float32(finite)), finite)
    exact = bf16.to_float32(finite).astype(np.float64)
    np.testing.assert_array_equal(bf16.round_float64(exact), exact)
    nan = every[(every & 0x7FFF) > 0x7F80]
    assert np.isnan(bf16.to_float32(nan)).all()


def test_other_types_are_refused():
    """float64 would be rounded twice."""
    with pytest.raises(TypeError):
        bf16.from_float32(np.zeros(3))
    with pytest.raises(TypeError):
        bf16.to_float32(np.zeros(3, np.int32))


def test_scalars_and_shapes():
    assert bf16.round_float64(1.00390625).shape == () and bf16.round_float64(1.00390625) == 1.0
    assert bf16.from_float32(np.zeros((2, 0, 3), np.float32)).shape == (2, 0, 3)


def test_pairs():
    x = np.arange(12, dtype=np.uint16).reshape(2, 6) * 0x1111
    packed = bf16.pack_pairs(x)
    assert packed[0, 1] == 0x3333_2222 and packed.dtype == np.uint32
    np.testing.assert_array_equal(bf16.unpack_pairs(packed), x)


def convert(x, out):
    i = cuda.grid(1)
    if i < x.shape[0]:
        out[i, 0] = bf16.from_f32(x[i])
        out[i, 1] = bf16.from_f32_by_definition(x[i])
        out[i, 2] = bf16.from_f32(bf16.to_f32(bf16.from_f32(x[i])))


def test_device_functions():
    rng = np.random.default_rng(0)
    random = rng.integers(0, 2**32, 2000, dtype=np.uint32)
    bits = np.concatenate([INTERESTING, INTERESTING | np.uint32(0x80000000), random])
    x, out = cuda.to_device(bits.view(np.float32)), cuda.to_device(np.zeros((len(bits), 3), np.uint16))
    Kernel(convert, types.void(types.float32[::1], types.uint16[:, ::1]), 64)(0, -(-len(bits) // 64), x, out)
    want = bf16.from_float32(bits.view(np.float32))
    for column in out.copy_to_host().T:
        np.testing.assert_array_equal(column, want)


def copy_kernel(vector):
    load8, load8_once, store8 = bf16.access(vector)

    def copy(src, dst, n):
        at = i32(cuda.threadIdx.x * 8)
        if at < n:
            v, w = load8(src + u64(at * 2), n - at), load8_once(src + u64(at * 2), n - at)
            store8(dst + u64(at * 2), (v[0], v[1], w[2], u32(w[3])), n - at)

    return Kernel(copy, types.void(u64, u64, i32), 32)


@pytest.mark.parametrize("vector, n, shift",
                         [(True, 80, 0), (False, 80, 1), (False, 77, 0), (False, 1, 3), (False, 255, 5)])
def test_eight_values_at_a_time(vector, n, shift):
    data = np.random.default_rng(1).integers(0, 2**16, 300).astype(np.uint16)
    src, dst = cuda.to_device(data), cuda.to_device(np.full(300, 7, np.uint16))
    copy_kernel(vector)(0, 1, address(src) + 2 * shift, address(dst) + 2 * shift, n)
    want = np.full(300, 7, np.uint16)
    want[shift:shift + n] = data[shift:shift + n]
    np.testing.assert_array_equal(dst.copy_to_host(), want)


