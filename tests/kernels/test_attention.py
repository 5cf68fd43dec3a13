"""Gated attention over the row pool in the simulator, against float64; both kernels, which must not care about company."""
from __future__ import annotations

import numpy as np
import pytest
from numba import cuda

from jev.row_pool import build
from jev_kernels import attention, bf16, reference
from jev_kernels.hopper_attention import HopperPlan
from jev_kernels.pool import COUNTS, ROWS, TILES

D = attention.D


def rounded(rng, *shape, scale=1.0):
    return bf16.from_float32((scale * rng.standard_normal(shape)).astype(np.float32))


class Problem:
    """Random q, k, v and gate for a pool, as column ranges of one buffer with room after the last row."""

    def __init__(self, sequences, heads=2, kv_heads=1, seed=0, scale=1.0, spare=3):
        rng = np.random.default_rng(seed)
        self.pool = pool = build(sequences)
        self.heads, self.kv_heads = heads, kv_heads
        self.rows = pool.n_rows
        wide, narrow = heads * D, kv_heads * D
        self.wide, self.narrow = wide, narrow
        self.buffer = rounded(rng, self.rows + spare, 2 * wide + 2 * narrow, scale=scale)
        self.buffer[self.rows:] = 0x7FC0                             # NaN: nobody may care
        self.out = np.full((self.rows + spare, wide), 0x7FC1, np.uint16)
        self.counts = np.zeros(COUNTS, np.int32)
        self.counts[[ROWS, TILES]] = self.rows, len(pool.tiles)
        self.tiles = np.concatenate([pool.tiles, np.full((2, 4), 2**30, np.int32)])       # garbage beyond the count

    def parts(self, array):
        w, n = self.wide, self.narrow
        return array[:, :w], array[:, 2 * w:2 * w + n], array[:, 2 * w + n:], array[:, w:2 * w]

    def run(self, gated=True, **options):
        """out as uint16, after a check that nothing but the live rows was written."""
        buffer, out = cuda.to_device(self.buffer), cuda.to_device(self.out)
        q, k, v, gate = self.parts(buffer)
        arrays = [cuda.to_device(a) for a in (self.counts, self.tiles, self.pool.paths)]
        options = options or {"hopper": False}
        if options.pop("hopper"):
            operands = attention.check_operands(q, k, v, gate if gated else None, out, *arrays)
            HopperPlan(operands, **{"ctas": 2, **options})(0)
        else:
            attention.Plan(q, k, v, gate if gated else None, out, *arrays, hopper=False)(0)
        result = out.copy_to_host()
        assert (result[self.rows:] == 0x7FC1).all()
        return result[:self.rows]

    def expected(self, gated=True):
        """float64; of the roundings only that of the sigmoid, a factor of the result."""
        q, k, v, gate = (bf16.to_float32(x[:self.rows]).astype(np.float64) for x in self.parts(self.buffer))
        heads = [x.reshape(self.rows, -1, D) for x in (q, k, v, gate)]
        plain = reference.gated_attention(*heads[:3], np.full_like(heads[0], np.inf), self.pool.branches, D ** -0.5)
        plain = plain.reshape(self.rows, -1)
        return plain * bf16.to_float32(bf16.from_float32(reference.sigmoid(gate).astype(np.float32))) if gated else plain


def error(got, want):
    return np.linalg.norm(bf16.to_float32(got) - want) / np.linalg.norm(want)


def tokens(*lengths, shared=()):
    """Sequences of different tokens that begin with ``shared``."""
    return [np.concatenate([np.asarray(shared, np.int32), np.arange(n, dtype=np.int32) + 1000 * (i + 1)])
            for i, n in enumerate(lengths)]


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("sequences", [
    tokens(1), tokens(37), tokens(2, 5, shared=range(30)), tokens(3, 3, 1, 2, shared=range(70)),
    tokens(81)[:1] * 2], ids=["one", "ragged", "branches", "tree", "duplicate"])
def test_close_to_float64(sequences, hopper):
    problem = Problem(sequences)
    assert error(problem.run(hopper=hopper), problem.expected()) < 2.5e-3
