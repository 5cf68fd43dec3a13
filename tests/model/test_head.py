"""The decision head: its arithmetic, and bits that depend on one row alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jev.model.head import Head
from jev_kernels import bf16


def test_head_scores():
    rng = np.random.default_rng(0)
    weight, bias = rng.standard_normal(5120).astype(np.float32), np.float32(0.375)
    hidden = bf16.from_float32(rng.standard_normal((37, 5120)).astype(np.float32))
    scores = Head(weight, bias).score(hidden)
    exact = [math.fsum(row) for row in bf16.to_float32(hidden).astype(np.float64) * weight.astype(np.float64)]
    assert scores.dtype == np.float32 and scores.shape == (37,)
    # float64 sums of exact products differ from the true sum far below float32's resolution
    assert np.abs(scores - (np.float32(exact) + bias)).max() <= 2 * np.spacing(np.float32(np.abs(exact).max()))
    assert np.mean(scores == np.float32(exact) + bias) > 0.9


def test_a_score_has_the_same_bits_in_any_company():
    rng = np.random.default_rng(1)
    head = Head(rng.standard_normal(256).astype(np.float32), np.float32(-1))
    hidden = bf16.from_float32(rng.standard_normal((64, 256)).astype(np.float32))
    together = head.score(hidden)
    order = rng.permutation(64)
    assert np.array_equal(head.score(hidden[order]), together[order])
    assert np.array_equal(np.concatenate([head.score(hidden[i:i + 1]) for i in range(64)]), together)
    assert np.array_equal(head.score(np.asfortranarray(hidden)), together)
    assert head.score(hidden[:0]).shape == (0,)


@pytest.mark.parametrize("hidden", [np.zeros((2, 255), np.uint16), np.zeros(256, np.uint16), np.zeros((2, 256))])
def test_head_refuses_other_arrays(hidden):
    with pytest.raises(ValueError, match="hidden"):
        Head(np.ones(256, np.float32), np.float32(0)).score(hidden)


def test_non_finite_hidden_states_show_in_the_score():
    hidden = np.full((1, 4), 0x7FC0, np.uint16)
    assert np.isnan(Head(np.ones(4, np.float32), np.float32(0)).score(hidden)).all()
