"""The NumPy backbone against Transformers' outputs, kept in tests/data (tools/make_parity_fixtures.py makes them)."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jev.model import row_pool, weights
from jev.model.forward import forward
from jev.model.ops.numpy import NumpyOps
from jev_kernels import bf16
from tests import models, yardstick

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module", params=models.CONFIGS)
def fixture(request):
    """(name, config, {"float32", "bf16"}: Transformers' hidden states per seed)."""
    return request.param, models.config(request.param), np.load(DATA / f"transformers_{request.param}.npz")


def test_float64_is_transformers_float32(fixture):
    name, c, expected = fixture
    for seed, theirs in enumerate(expected["float32"]):
        ours = yardstick.ours(c, models.tensors(c, seed), seed, "float64")
        assert yardstick.distance(theirs, ours) < 1e-5, (name, seed)


def test_bf16_is_as_close_to_float64_as_transformers(fixture):
    name, c, expected = fixture
    ratios = []
    for seed in yardstick.SEEDS:
        tensors = models.tensors(c, seed)
        exact, rounded = (yardstick.ours(c, tensors, seed, p) for p in ("float64", "bf16"))
        theirs = bf16.to_float32(expected["bf16"][seed])
        ratios.append(yardstick.distance(rounded, exact) / yardstick.distance(theirs, exact))
    yardstick.check(name, ratios)


def test_the_yardstick_can_fail():
    with pytest.raises(AssertionError, match="worst 1.600"):
        yardstick.check("x", [0.9] * 19 + [1.6])
    with pytest.raises(AssertionError, match="mean 1.200"):
        yardstick.check("x", [1.2] * 20)
    with pytest.raises(AssertionError):
        yardstick.check("x", [float("nan")] * 20)


def test_hidden_states_are_bf16_values_and_the_final_norm_is_applied():
    c = models.config("plain")
    ops = NumpyOps(c, "bf16", 64)
    tensors = models.tensors(c)
    hidden = forward(ops, weights.load(tensors, c, ops), row_pool.build([np.array([1, 2, 3])]))
    assert hidden.shape == (1, c.hidden_size)
    assert (bf16.round_float64(hidden) == hidden).all()
    scaled = dict(tensors, **{"norm.weight": bf16.from_float32(np.full(c.hidden_size, -1, np.float32))})
    assert not forward(ops, weights.load(scaled, c, ops), row_pool.build([np.array([1, 2, 3])])).any()


def test_stacked_weights_hold_every_tensor_of_the_checkpoint_once():
    c = models.config("mixed")
    tensors = models.tensors(c)
    pieces = [p for spec in weights.specs(c) for p in spec.pieces(tensors)]
    held = sum(p.size for p in pieces if any(np.shares_memory(p, t) for t in tensors.values()))
    assert held == sum(x.size for x in tensors.values())
    for spec in weights.specs(c):
        assert sum(p.size for p in spec.pieces(tensors)) == np.prod(spec.shape), spec.key


def test_loading_reports_its_progress_in_bytes():
    c = models.config("plain")
    tensors, seen = models.tensors(c), []
    weights.load(tensors, c, NumpyOps(c), seen.append)
    assert sum(seen) == sum(2 * np.prod(spec.shape) for spec in weights.specs(c)) >= sum(x.nbytes for x in tensors.values())


def test_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="precision must be"):
        NumpyOps(models.config("plain"), "float16")
