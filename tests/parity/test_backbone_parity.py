"""The NumPy backbone against Transformers, live: `make parity`."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from jev_kernels import bf16
from tests import models, parity_reference, yardstick

pytestmark = pytest.mark.parity


def theirs(c, tensors, seed: int, dtype: torch.dtype) -> np.ndarray:
    model = parity_reference.build(c, tensors, dtype)
    return np.concatenate([parity_reference.all_hidden(model, s)[yardstick.POSITIONS] for s in yardstick.sequences(c, seed)])


@pytest.mark.parametrize("name", models.CONFIGS)
def test_transformers_float32_and_bf16(name):
    c = models.config(name)
    ratios = []
    for seed in yardstick.SEEDS:
        tensors = models.tensors(c, seed)
        exact, rounded = (yardstick.ours(c, tensors, seed, p) for p in ("float64", "bf16"))
        if seed < 3:
            assert yardstick.distance(theirs(c, tensors, seed, torch.float32), exact) < 1e-5, seed
        ratios.append(yardstick.distance(rounded, exact) / yardstick.distance(theirs(c, tensors, seed, torch.bfloat16), exact))
    yardstick.check(name, ratios)


@pytest.mark.parametrize("name", models.CONFIGS)
def test_the_fixtures_of_make_test_are_what_transformers_gives(name):
    c = models.config(name)
    kept = np.load(Path(__file__).parents[1] / "data" / f"transformers_{name}.npz")
    tensors = models.tensors(c, 0)
    assert yardstick.distance(theirs(c, tensors, 0, torch.float32), kept["float32"][0].astype(np.float64)) < 1e-5
    fresh, old = theirs(c, tensors, 0, torch.bfloat16), bf16.to_float32(kept["bf16"][0])
    assert yardstick.distance(fresh, old) < 0.05       # BF16 kernels differ from CPU to CPU
