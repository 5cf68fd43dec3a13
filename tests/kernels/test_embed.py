from __future__ import annotations

import numpy as np
import pytest
from numba import cuda

from jev_kernels.rowwise import embed
from tests.kernels import checks

WHERE = [(64, {}), (64, {"ld": 72}), (61, {}), (64, {"offset": 1}), (5128, {})]


@pytest.mark.parametrize("width, where", WHERE)
def test_embed(width, where):
    checks.check_embed(np.random.default_rng(0), 3, width, capacity=4, **where)


@pytest.mark.parametrize("width, where", WHERE[:4])
def test_gather_rows(width, where):
    checks.check_gather_rows(np.random.default_rng(1), 5, width, 3, capacity=6, **where)


def test_refusals():
    counts = checks.counts(rows=2, lasts=2)
    table, ids, x = (cuda.to_device(np.zeros(shape, dtype)) for shape, dtype in (
        ((9, 8), np.uint16), (2, np.int32), ((2, 8), np.uint16)))
    with pytest.raises(ValueError, match="^table "):
        embed.embed(0, cuda.to_device(np.zeros((9, 7), np.uint16)), ids, x, counts)
    with pytest.raises(ValueError, match="^ids "):
        embed.embed(0, table, cuda.to_device(np.zeros(2, np.int64)), x, counts)
    with pytest.raises(ValueError, match="^ids has 1 entries for 2 rows of x"):
        embed.embed(0, table, cuda.to_device(np.zeros(1, np.int32)), x, counts)
    with pytest.raises(ValueError, match="^rows has 1 entries for 2 rows of y"):
        embed.gather_rows(0, table, cuda.to_device(np.zeros(1, np.int32)), x, counts)
