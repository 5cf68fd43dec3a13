from __future__ import annotations

import numpy as np
import pytest
from numba import cuda

from jev_kernels import bf16, reference
from jev_kernels.rowwise import rope
from tests.kernels import checks


@pytest.mark.parametrize("q_heads, k_heads, where", [(3, 1, {}), (2, 2, {"ld": 2056}), (6, 1, {})])
@pytest.mark.parametrize("few_rows", [rope.FEW_ROWS, 0])
def test_qk_rope(monkeypatch, few_rows, q_heads, k_heads, where):
    monkeypatch.setattr(rope, "FEW_ROWS", few_rows)
    checks.check_qk_rope(np.random.default_rng(0), 3, q_heads, k_heads, **where)


def test_rows_after_the_last_one_are_zeroed():
    checks.check_qk_rope(np.random.default_rng(1), 2, 2, 1, capacity=5)


def test_at_most_128_rows_are_zeroed():
    checks.check_qk_rope(np.random.default_rng(1), 1, 1, 1, capacity=131)


@pytest.mark.parametrize("scale", [1e-4, 1e30])
def test_extreme_amplitudes(scale):
    checks.check_qk_rope(np.random.default_rng(2), 2, 2, 1, scale=scale)


def test_rope_table():
    table = reference.rope_table(4000, 64, 1e7)
    assert table.shape == (4000, 64) and table.dtype == np.uint16
    angle = np.arange(4000)[:, None] * 1e7 ** (-np.arange(32) / 32)
    want = np.concatenate([np.cos(angle), np.sin(angle)], 1)
    # float32 angles: off by up to position * 2^-23, as in the reference implementation
    assert np.abs(bf16.to_float32(table) - want).max() < 4000 * 2.0**-23 + 2.0**-8
    assert (table[0, :32] == 0x3F80).all() and not table[0, 32:].any()


def test_refusals():
    counts, w = checks.counts(rows=2), cuda.to_device(np.zeros(256, np.uint16))
    x = cuda.to_device(np.zeros((2, 2048), np.uint16))
    table, positions = cuda.to_device(reference.rope_table(8, 64, 1e4)), cuda.to_device(np.zeros(2, np.int32))
    good = dict(qkv=x, q_weight=w, k_weight=w, table=table, positions=positions, counts=counts, q_heads=3, k_heads=1,
                eps=1e-6)
    shifted = cuda.to_device(np.zeros(257, np.uint16))[1:]
    for name, bad in (("qkv", cuda.to_device(np.zeros((2, 2047), np.uint16))), ("k_weight", shifted),
                      ("table", cuda.to_device(np.zeros((8, 32), np.uint16))),
                      ("positions", cuda.to_device(np.zeros(1, np.int32)))):
        with pytest.raises(ValueError, match=f"^{name} "):
            rope.qk_rope(0, **{**good, name: bad})
