from __future__ import annotations

import numpy as np
import pytest
from numba import cuda

from jev_kernels.gdn import conv as gdn_conv
from tests.kernels import checks


@pytest.mark.parametrize("channels, where", [(64, {}), (40, {"ld": 64}), (37, {}), (64, {"offset": 1})])
def test_gdn_conv(channels, where):
    checks.check_gdn_conv(np.random.default_rng(0), 11, channels, capacity=19, **where)


@pytest.mark.parametrize("parents", [[-1], [-1, 0], [-1, -1, -1, -1], [-1, 0, 1, 2, 3, 4, 5, 6, 2, 8, 9, 10],
                                     [-1, 0, 1, 2, 1, 4, 0, 6, 7, -1, 9, 10, 11, 5, 13, 14, 15]])
def test_branches(parents):
    """Branches that start anywhere: at a block's first row, in its middle, from row 0, from nothing."""
    checks.check_gdn_conv(np.random.default_rng(1), len(parents), 16, parents=np.array(parents, np.int32))


def test_layouts_and_company_give_the_same_bits():
    outs = [checks.check_gdn_conv(np.random.default_rng(2), 9, 24, **where) for where in ({}, {"offset": 1})]
    np.testing.assert_array_equal(*outs)
    # The same sequence from row 0 and behind another one, where blocks of rows fall differently
    rng = np.random.default_rng(3)
    data, w = checks.values(rng, 5, 16), cuda.to_device(checks.values(rng, 16, 4))
    results = []
    for rows, first in ((5, 0), (12, 7)):
        x = np.concatenate([checks.values(rng, first, 16), data])
        parents = np.arange(-1, rows - 1, dtype=np.int32)
        parents[first] = -1
        y = checks.output(rows, 16)
        gdn_conv.gdn_conv(0, cuda.to_device(x), w, cuda.to_device(parents), y.array, checks.counts(rows=rows))
        results.append(y.read()[first:])
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("heads, where", [(5, {"ld": 30}), (48, {})])
def test_gdn_gates(heads, where):
    checks.check_gdn_gates(np.random.default_rng(4), 9, heads, capacity=11, **where)


def test_saturated_gates():
    """softplus past its threshold, sigmoid at both ends."""
    checks.check_gdn_gates(np.random.default_rng(5), 3, 16, scale=60.0)


@pytest.mark.parametrize("channels", [64, 27])
def test_one_launch_for_both(channels):
    checks.check_gdn_conv_gates(np.random.default_rng(6), 10, channels, 4, capacity=12)


def test_refusals():
    n = checks.counts(rows=2)
    x, y, w, up = (cuda.to_device(v) for v in (np.zeros((2, 16), np.uint16), np.zeros((2, 16), np.uint16),
                                               np.zeros((16, 4), np.uint16), np.zeros(2, np.int32)))
    good = dict(x=x, weight=w, parents=up, y=y, counts=n)
    for name, bad in (("x", cuda.to_device(np.zeros((2, 15), np.uint16))),
                      ("weight", cuda.to_device(np.zeros((16, 3), np.uint16))),
                      ("weight", cuda.to_device(np.zeros((16, 8), np.uint16))[:, :4]),
                      ("parents", cuda.to_device(np.zeros(1, np.int32)))):
        with pytest.raises(ValueError, match=f"^{name} "):
            gdn_conv.gdn_conv(0, **{**good, name: bad})
    g, h = cuda.to_device(np.zeros((2, 4), np.float32)), cuda.to_device(np.zeros(4, np.uint16))
    b = cuda.to_device(np.zeros((2, 4), np.uint16))
    with pytest.raises(ValueError, match="^g "):
        gdn_conv.gdn_gates(0, b, b, h, h, b, b, n)
    with pytest.raises(ValueError, match="^dt_bias "):
        gdn_conv.gdn_gates(0, b, b, h, w, b, g, n)
