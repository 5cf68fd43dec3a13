"""The float64 reference that GPU tests use for large models is NumpyOps in float64."""
from __future__ import annotations

import numpy as np
import pytest

from jev.model import row_pool, weights
from jev.model.forward import forward
from jev.model.ops.numpy import NumpyOps
from tests import models, torch_ops

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("name", models.CONFIGS)
def test_float64_forward_is_the_same(name):
    c = models.config(name)
    tensors = models.tensors(c)
    rng = np.random.default_rng(0)
    first, second = models.sequences(rng, c.vocab_size, (150, 90))
    pool = row_pool.build([first, second, np.append(first[:64], 3), np.append(first[:100], second), first[:7]])
    ours = NumpyOps(c, "float64", 256)
    theirs = torch_ops.TorchOps(c)
    a = forward(ours, weights.load(tensors, c, ours), pool)
    b = forward(theirs, weights.load(tensors, c, theirs), pool).numpy()
    assert np.linalg.norm(a - b) <= 1e-11 * np.linalg.norm(a)
