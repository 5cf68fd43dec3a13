"""The chunked gated delta rule is the recurrence; the numerically delicate references behave at their edges."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from jev.model import row_pool
from jev_kernels import bf16, reference
from tests.model.test_row_pool import trees


def inputs(rng, rows, lk=2, lv=6, dk=16, dv=16, decay=0.1):
    return (rng.standard_normal((rows, lk, dk)), rng.standard_normal((rows, lk, dk)), rng.standard_normal((rows, lv, dv)),
            -decay * rng.random((rows, lv)), rng.random((rows, lv)))


@settings(max_examples=20, deadline=None)
@given(trees(6))
def test_chunked_gated_delta_rule_is_the_recurrence(sequences):
    pool = row_pool.build(sequences)
    for decay in (1e-3, 0.1, 30.0):
        x = inputs(np.random.default_rng(pool.n_rows), pool.n_rows, decay=decay)
        naive = reference.gated_delta_rule(*x, pool.parents)
        chunked = reference.gated_delta_rule_chunked(*x, pool)
        assert np.abs(chunked - naive).max() <= 1e-9 * np.abs(naive).max()


def test_zero_keys_leave_the_state_alone():
    q, k, v, g, beta = inputs(np.random.default_rng(0), 10)
    o = reference.gated_delta_rule(q, np.zeros_like(k), v, g, beta, np.arange(-1, 9))
    assert not o.any()


def test_attention_rows_see_their_own_past_only():
    rng = np.random.default_rng(1)
    pool = row_pool.build([np.array([1, 2, 3, 4]), np.array([1, 2, 9])])
    q, gate = rng.standard_normal((2, pool.n_rows, 4, 8))
    k, v = rng.standard_normal((2, pool.n_rows, 2, 8))
    out = reference.gated_attention(q, k, v, gate, pool.branches, 8 ** -0.5)
    for row in range(pool.n_rows):
        path = [row]
        while pool.parents[path[0]] >= 0:
            path.insert(0, pool.parents[path[0]])
        for h in range(4):
            s = k[path, h // 2] @ q[row, h] * 8 ** -0.5
            p = np.exp(s) / np.exp(s).sum()
            expected = p @ v[path, h // 2] / (1 + np.exp(-gate[row, h]))
            assert np.allclose(out[row, h], expected, rtol=1e-12)


def test_conv_reaches_back_along_the_path_and_starts_at_zero():
    x = np.array([[1.0], [10.0], [100.0], [1000.0]])
    w = np.array([[1.0, 2.0, 3.0, 4.0]])
    parents = np.array([-1, 0, 1, 1])                       # row 3 branches off after row 1
    expected = np.array([4, 43, 432, 4032.0])
    got = reference.gdn_conv(x, parents, w)
    assert np.allclose(got[:, 0], expected / (1 + np.exp(-expected)))


def test_saturated_functions_stay_finite():
    x = np.array([-1e4, -800.0, -20.0, 0.0, 20.0, 20.5, 800.0, 1e4])
    with np.errstate(over="raise", invalid="raise"):
        assert np.isfinite(reference.sigmoid(x)).all() and np.isfinite(reference.silu(x)).all()
        g, beta = reference.gdn_gates(x, x, np.float64(-4.6), np.float64(1.0), bf16.round_float64)
    assert np.isfinite(g).all() and (g <= 0).all() and (0 <= beta).all() and (beta <= 1).all()


@pytest.mark.parametrize("theta, rotary", [(1e4, 16), (1e7, 64)])
def test_rope_table_is_the_rounded_float32_angle(theta, rotary):
    table = bf16.to_float32(reference.rope_table(300, rotary, theta)).astype(np.float64)
    angle = np.arange(300)[:, None] * theta ** -(np.arange(0, rotary, 2) / rotary)
    exact = np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
    assert np.abs(table - exact).max() <= 2 ** -8
