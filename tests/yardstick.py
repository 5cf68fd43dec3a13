"""The yardstick of the whole model: how far a BF16 forward pass is from float64, ours against Transformers'.

Distances are taken over the hidden states at every position in POSITIONS of a few sequences, so that a seed's figure is
an average over many vectors.
"""
from __future__ import annotations

import numpy as np

from jev.checkpoint.checkpoint import ModelConfig
from jev.model import row_pool, weights
from jev.model.forward import forward
from jev.model.ops.numpy import NumpyOps
from tests import models

SEEDS = range(20)
LENGTH = 140
POSITIONS = np.array([0, 1, 2, 3, 4, 9, 20, 40, 62, 63, 64, 65, 90, 127, 128, 139])
MEAN_RATIO, WORST_RATIO = 1.1, 1.5      # allowed: mean over the seeds, any one of them


def sequences(c: ModelConfig, seed: int) -> list[np.ndarray]:
    """Three random sequences that share nothing, a few tokens, or most of their tokens."""
    first, second = models.sequences(np.random.default_rng(1000 + seed), c.vocab_size, (LENGTH, LENGTH))
    return [first, second, np.concatenate([first[:100], second[100:]])]


def ours(c: ModelConfig, tensors, seed: int, precision: str) -> np.ndarray:
    """float64 [3 * positions, h]: NumpyOps, every prefix that ends at one of POSITIONS, all in one pool."""
    ops = NumpyOps(c, precision, max_length=LENGTH)
    prefixes = [s[:p + 1] for s in sequences(c, seed) for p in POSITIONS]
    return forward(ops, weights.load(tensors, c, ops), row_pool.build(prefixes))


def distance(x: np.ndarray, reference: np.ndarray) -> float:
    """Mean over the vectors of ||x - reference||, over the mean of ||reference||; a NaN anywhere makes it NaN.

    A mean of lengths and not of squares: a single ill-conditioned position, where any BF16 program is far off by chance,
    must not decide for all the others.
    """
    return float(np.linalg.norm(x - reference, axis=1).mean() / np.linalg.norm(reference, axis=1).mean())


def check(name: str, ratios) -> None:
    """Raise AssertionError unless the ratios (ours over Transformers', one per seed) are within the yardstick."""
    ratios = np.asarray(ratios)
    assert ratios.mean() <= MEAN_RATIO and ratios.max() <= WORST_RATIO, \
        f"{name}: BF16 distance over Transformers': mean {ratios.mean():.3f}, worst {ratios.max():.3f}"
