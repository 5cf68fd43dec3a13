"""Our GEMMs in the simulator, on shapes with every kind of edge: float64, what lies beside y, races, and that they are found."""
from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from numba import cuda

from jev_kernels import bf16, reference
from jev_kernels.gemm import narrow, wide
from jev_kernels.sim import simulator

POISON = 0x7FC1                              # a NaN


class Problem:
    """x [m, k] and W [n, k], random BF16; x with NaN behind its live rows, y poisoned, both slices of wider arrays."""

    def __init__(self, m, n, k, gated=False):
        self.m, self.n, self.k, self.gated = m, n, k, gated
        rng = np.random.default_rng(0)
        x, self.w = (bf16.from_float32(rng.standard_normal(s).astype(np.float32)) for s in ((m, k), (n, k)))
        self.x = np.full((m + 3, k + 32), POISON, np.uint16)
        self.x[:m, 16:16 + k] = x

    def run(self, make):
        """y of a plan, make(x, w, y, rows), after a check that nothing beside it was written."""
        width = self.n // 2 if self.gated else self.n
        buffer, x, w = (cuda.to_device(a) for a in (np.full((self.m + 3, width + 32), POISON, np.uint16), self.x, self.w))
        make(x[:, 16:16 + self.k], w, buffer[:, 16:16 + width], self.m)(0)
        buffer = buffer.copy_to_host()
        y = buffer[:self.m, 16:16 + width].copy()
        buffer[:self.m, 16:16 + width] = POISON
        assert (buffer == POISON).all(), "written beside y"
        return y

    def error(self, y):
        """||y - float64|| / ||float64||."""
        want = bf16.to_float32(self.x[:self.m, 16:16 + self.k]).astype(np.float64) @ bf16.to_float32(self.w).astype(np.float64).T
        if self.gated:
            turns = want.reshape(self.m, -1, 2, reference.TURN)
            want = (turns[:, :, 0] * reference.sigmoid(turns[:, :, 0]) * turns[:, :, 1]).reshape(self.m, -1)
        return np.linalg.norm(bf16.to_float32(y) - want) / np.linalg.norm(want)

    def narrow(self, multiprocessors=2):
        return self.run(lambda *arrays: narrow.Plan(*arrays, multiprocessors, self.gated))

    def wide(self, multiprocessors=4):
        scratch = SimpleNamespace(sums=np.full(multiprocessors * wide.GROUPS * 128 * wide.MAX_TOKENS // 2, np.nan, np.float32),
                                  flags=np.zeros(multiprocessors * wide.GROUPS * 4, np.uint32))
        y = self.run(lambda *arrays: wide.Plan(*arrays, scratch, multiprocessors, self.gated))
        assert not scratch.flags.any(), "a flag stayed raised"
        return y


@pytest.fixture
def races(monkeypatch):
    monkeypatch.setattr(simulator, "RACES", True)


@pytest.fixture
def short_parts(monkeypatch):
    """Tiles of the wide GEMM are split however few steps they have."""
    monkeypatch.setattr(wide, "SNAP", 1)


NARROW = pytest.mark.parametrize("m, n, k, gated", [(37, 40, 256, False), (70, 208, 128, False), (9, 48, 128, True), (70, 200, 64, True)])


@NARROW
def test_narrow(m, n, k, gated, races):
    p = Problem(m, n, k, gated)
    assert p.error(p.narrow()) < 4.5e-3


@pytest.mark.parametrize("m, n, k, gated", [(20, 136, 64, False), (140, 520, 128, False), (140, 528, 128, True)])
def test_wide(m, n, k, gated, races, short_parts):
    p = Problem(m, n, k, gated)
    assert p.error(p.wide()) < 4.5e-3
