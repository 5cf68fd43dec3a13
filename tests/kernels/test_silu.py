from __future__ import annotations

import numpy as np
import pytest
from numba import cuda
from numba.cuda import types

from jev_kernels.gemm import activation
from jev_kernels.rowwise import silu
from jev_kernels.runtime.launch import Kernel
from tests.kernels import checks


@pytest.mark.parametrize("width, where",
                         [(64, {}), (72, {"ld": 160}), (60, {}), (64, {"offset": 1}), (4, {}), (2056, {}), (4096, {})])
def test_silu_mul(width, where):
    checks.check_silu_mul(np.random.default_rng(0), 3, width, capacity=4, **where)


def test_layouts_give_the_same_bits():
    outs = [checks.check_silu_mul(np.random.default_rng(1), 2, 96, **where)
            for where in ({}, {"offset": 1}, {"ld": 203})]
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])


def test_every_exponent_of_the_gate():
    """Both signs, all 256 exponents: subnormal results, saturation, infinities, NaN."""
    gate = (np.arange(512, dtype=np.uint16) << 7 | 0x25).reshape(2, 256)
    up = checks.values(np.random.default_rng(2), 2, 256)
    checks.check_silu_mul(np.random.default_rng(2), 2, 256, data=checks.interleaved(gate, up))


def test_gates_where_exp_leaves_float32():
    gate = checks.bf16.from_float64(np.linspace(-110, -80, 256)).reshape(2, 128)
    up = np.full((2, 128), 0x3F80, np.uint16)
    checks.check_silu_mul(np.random.default_rng(2), 2, 128, data=checks.interleaved(gate, up))


def activate_kernel(sums, out, distance):
    lane = cuda.threadIdx.x
    out[lane, 0] = activation.activate(sums[lane, 0], sums[lane, 1], sums[lane, 2], sums[lane, 3],
                                              (lane & distance) != 0, distance)


@pytest.mark.parametrize("distance", [2, 16])
def test_activation_of_sums_in_a_warp(distance):
    """What our GEMMs do with their sums has the bits of silu_mul: the first tile holds gates, the second ups."""
    sums = (3 * np.random.default_rng(3).standard_normal((32, 4))).astype(np.float32)
    out = cuda.to_device(np.zeros((32, 1), np.uint32))
    kernel = Kernel(activate_kernel, types.void(types.float32[:, ::1], types.uint32[:, ::1], types.int32), 32)
    kernel(0, 1, cuda.to_device(sums), out, distance)
    for lane in range(32):
        tile, gate = (1, lane - distance) if lane & distance else (0, lane)
        pair = slice(2 * tile, 2 * tile + 2)
        gate_up = [np.repeat(checks.bf16.from_float32(sums[at, pair]), 2)[None] for at in (gate, gate + distance)]
        x, y = cuda.to_device(checks.interleaved(*gate_up)), cuda.to_device(np.zeros((1, 4), np.uint16))
        silu.silu_mul(0, x, y, checks.counts(rows=1))
        np.testing.assert_array_equal(checks.bf16.unpack_pairs(out.copy_to_host()[lane]), y.copy_to_host()[0, ::2])


def test_refusals():
    counts, y = checks.counts(rows=2), cuda.to_device(np.zeros((2, 64), np.uint16))
    for name, x, out in (("gate_up", np.zeros((2, 127), np.uint16), y), ("gate_up", np.zeros((3, 128), np.uint16), y),
                         ("gate_up", np.zeros((2, 128), np.float32), y), ("y", np.zeros((2, 128), np.uint16), counts),
                         ("y", np.zeros((2, 124), np.uint16), cuda.to_device(np.zeros((2, 62), np.uint16)))):
        with pytest.raises(ValueError, match=f"^{name} "):
            silu.silu_mul(0, cuda.to_device(x), out, counts)
