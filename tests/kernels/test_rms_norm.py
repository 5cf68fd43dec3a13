from __future__ import annotations

import numpy as np
import pytest
from numba import cuda

from jev_kernels import bf16
from jev_kernels.rowwise import rms_norm
from tests.kernels import checks


@pytest.mark.parametrize("width, where", [(256, {}), (264, {"ld": 272}), (1, {}), (7, {}), (251, {"ld": 260}),
                                          (256, {"offset": 1}), (512, {"ld": 515})])
def test_rms_norm(width, where):
    checks.check_rms_norm(np.random.default_rng(0), 3, width, capacity=5, **where)


def test_order_of_threads_does_not_matter(schedule):
    """More than a warp a row: the block's sum goes through shared memory."""
    checks.check_add_rms_norm(np.random.default_rng(1), 2, 1100, capacity=3)


@pytest.mark.parametrize("where", [{}, {"offset": 3, "ld": 531}])
@pytest.mark.parametrize("in_place, gathered", [(False, False), (True, False), (False, True)])
def test_add_rms_norm(in_place, gathered, where):
    checks.check_add_rms_norm(np.random.default_rng(2), 3, 520, in_place=in_place, gathered=gathered, **where)


def test_rms_norm_of_gathered_rows():
    checks.check_rms_norm(np.random.default_rng(3), 4, 130, gathered=True)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e18, 1e30, 1e38])
def test_extreme_amplitudes(scale):
    """Squares that overflow or vanish in float32."""
    checks.check_rms_norm(np.random.default_rng(4), 2, 264, scale=scale)
    checks.check_gated_rms_norm(np.random.default_rng(4), 2, 3, scale=scale)


def test_not_finite_rows_stay_not_finite():
    data = checks.values(np.random.default_rng(5), 3, 64)
    data[1, 5], data[2, 7] = 0x7F80, 0x7FC0                      # infinity, NaN
    out = checks.check_rms_norm(np.random.default_rng(5), 3, 64, data=data)
    assert np.isnan(bf16.to_float32(out[2])).all()


def test_layouts_give_the_same_bits():
    """16-byte accesses and single values; few rows and many."""
    outs = [checks.check_rms_norm(np.random.default_rng(6), 3, 320, **where)
            for where in ({}, {"offset": 1}, {"ld": 321}, {"capacity": 9})]
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])
    data = checks.values(np.random.default_rng(7), 3, 320)
    alone = checks.check_rms_norm(np.random.default_rng(8), 1, 320, data=data[2:])
    together = checks.check_rms_norm(np.random.default_rng(8), 3, 320, data=data)
    np.testing.assert_array_equal(together[2:], alone)


@pytest.mark.parametrize("where", [{}, {"ld": 400}, {"ld": 385, "offset": 5}])
@pytest.mark.parametrize("in_place", [False, True])
def test_gated_rms_norm(in_place, where):
    checks.check_gated_rms_norm(np.random.default_rng(9), 3, 3, capacity=4, in_place=in_place, **where)


def test_gated_layouts_give_the_same_bits():
    outs = [checks.check_gated_rms_norm(np.random.default_rng(10), 2, 5, **where) for where in ({}, {"offset": 1})]
    np.testing.assert_array_equal(*outs)


def test_layout_covers_every_width():
    for width in (1, 8, 255, 256, 257, 2048, 2049, 4096, 5120, 8192, 8193, 16384, 16385, rms_norm.MAX_WIDTH):
        per_thread, threads = rms_norm.layout(width)
        assert threads % 32 == 0 and threads <= 1024 and per_thread * threads * 8 >= width


def test_refusals():
    counts, w = checks.counts(rows=2), cuda.to_device(np.zeros(64, np.uint16))
    x = cuda.to_device(np.zeros((2, 64), np.uint16))
    good = {"x": x, "weight": w, "y": x, "counts": counts, "eps": 1e-6}
    zeros = lambda dtype, *shape: cuda.to_device(np.zeros(shape, dtype))  # noqa: E731
    for name, bad in (("x", zeros(np.uint16, 2, 65)), ("x", zeros(np.uint16, 3, 64)), ("weight", zeros(np.uint16, 63)),
                      ("y", zeros(np.int32, 2, 64)), ("y", zeros(np.uint16, 64)), ("counts", zeros(np.int64, 16)),
                      ("x", zeros(np.uint16, 2, 128)[:, ::2]), ("x", None)):
        with pytest.raises(ValueError, match=f"^{name} "):
            rms_norm.rms_norm(0, **{**good, name: bad})
    with pytest.raises(ValueError, match="^out "):
        rms_norm.add_rms_norm(0, x, x, w, x, counts, 1e-6, rows=cuda.to_device(np.zeros(2, np.int32)))
    with pytest.raises(ValueError, match="^rows "):
        rms_norm.rms_norm(0, x, w, x, counts, 1e-6, rows=cuda.to_device(np.zeros(1, np.int32)))
    with pytest.raises(ValueError, match="^y "):
        rms_norm.gated_rms_norm(0, x, x, w, x, counts, 1e-6)
