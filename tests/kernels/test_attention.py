"""Gated attention over the row pool in the simulator: float64, and bits that depend on a row's prefix alone."""
from __future__ import annotations

import threading
from random import Random

import numpy as np
import pytest
from numba import cuda

from jev.model.row_pool import build
from jev_kernels import bf16, reference
from jev_kernels.attention import portable as attention
from jev_kernels.attention.hopper import HopperPlan
from jev_kernels.pool import COUNTS, ROWS, TILES
from jev_kernels.sim import barriers, simulator, tma

D = attention.D
POISON = 0x7FC1                              # a NaN
KINDS = pytest.mark.parametrize("kind", ["portable", "hopper"])


def tokens(*lengths, shared=0):
    """Sequences of the given own lengths behind a shared prefix, all parting right after it."""
    return [np.concatenate([np.arange(shared), 1000 * (i + 1) + np.arange(n)]).astype(np.int32)
            for i, n in enumerate(lengths)]


def prefix_rows(pool, count):
    """For each row a number below count that depends on its prefix only."""
    out = np.zeros(pool.n_rows, np.int64)
    for row, (token, parent) in enumerate(zip(pool.ids, pool.parents)):
        out[row] = ((out[parent] if parent >= 0 else 1) * 1000003 + int(token)) % (2**31 - 1)
    return out % count


class Problem:
    """q | gate | k | v of a pool in one buffer, each row random by its prefix; NaN behind the live ones and in out."""

    def __init__(self, sequences, heads=2, kv_heads=1, scale=1.0):
        self.pool, self.wide, self.narrow = build(sequences), heads * D, kv_heads * D
        self.rows = self.pool.n_rows
        table = scale * np.random.default_rng(0).standard_normal((4099, 2 * self.wide + 2 * self.narrow))
        self.buffer = np.full((self.rows + 3, table.shape[1]), POISON, np.uint16)
        self.buffer[:self.rows] = bf16.from_float32(table[prefix_rows(self.pool, len(table))].astype(np.float32))
        self.counts = np.zeros(COUNTS, np.int32)
        self.counts[[ROWS, TILES]] = self.rows, len(self.pool.tiles)
        self.tiles = np.concatenate([self.pool.tiles, np.full((2, 4), 2**30, np.int32)])     # garbage behind the valid

    def part(self, name, array=None):
        w, n = self.wide, self.narrow
        start, size = {"q": (0, w), "gate": (w, w), "k": (2 * w, n), "v": (2 * w + n, n)}[name]
        return (self.buffer if array is None else array)[:, start:start + size]

    def run(self, kind, gated=True, ctas=2):
        """The live rows (uint16), after a check that nothing else was written."""
        out = cuda.to_device(np.full((self.rows + 3, self.wide), POISON, np.uint16))
        buffer = cuda.to_device(self.buffer)
        q, gate, k, v = (self.part(name, buffer) for name in ("q", "gate", "k", "v"))
        pool = [cuda.to_device(a) for a in (self.counts, self.tiles, self.pool.paths)]
        operands = attention.check_operands(q, k, v, gate if gated else None, out, *pool)
        (HopperPlan(operands, ctas=ctas) if kind == "hopper" else attention.PortablePlan(operands))(0)
        result = out.copy_to_host()
        assert (result[self.rows:] == POISON).all(), "rows behind the live ones were written"
        return result[:self.rows]

    def error(self, got, gated=True):
        """||got - float64|| / ||float64||; of the roundings only that of the sigmoid is in the reference."""
        q, gate, k, v = (bf16.to_float32(self.part(n)[:self.rows]).astype(np.float64) for n in ("q", "gate", "k", "v"))
        heads = [x.reshape(self.rows, -1, D) for x in (q, k, v)]
        want = reference.gated_attention(*heads, np.full_like(heads[0], np.inf), self.pool.branches, D ** -0.5)
        want = want.reshape(self.rows, -1)
        if gated:
            want = want * bf16.to_float32(bf16.from_float32(reference.sigmoid(gate).astype(np.float32)))
        return np.linalg.norm(bf16.to_float32(got) - want) / np.linalg.norm(want)


@KINDS
@pytest.mark.parametrize("sequences", [tokens(1), tokens(37), tokens(2, 21, shared=62), tokens(81)[:1] * 2],
                         ids=["one", "ragged", "branches", "twice"])
def test_close_to_float64(kind, sequences):
    problem = Problem(sequences)
    got = problem.run(kind)
    assert problem.error(got) < 2.7e-3                       # two roundings of the result alone are 2.3e-3
    plain = problem.run(kind, gated=False)
    assert problem.error(plain, gated=False) < 2.5e-3

    # the gate on its own gives the same bits
    x, buffer = cuda.to_device(np.concatenate([plain, np.full_like(plain[:3], POISON)])), cuda.to_device(problem.buffer)
    attention.gate_mul(0, x, problem.part("gate", buffer), x, cuda.to_device(problem.counts))
    x = x.copy_to_host()
    assert np.array_equal(x[:problem.rows], got) and (x[problem.rows:] == POISON).all()


@pytest.mark.parametrize("heads, kv_heads, length", [(6, 1, 107), (4, 2, 83), (1, 1, 70)])
def test_hopper_items(heads, kv_heads, length, schedule):
    """A tile whole, a head at a time by two warpgroups, or packed, all heads of few rows; split when CTAs are idle."""
    problem = Problem(tokens(length), heads, kv_heads)
    got = problem.run("hopper", ctas=1)
    assert problem.error(got) < 2.7e-3
    assert np.array_equal(problem.run("hopper", ctas=64), got)


def test_hopper_many_tiles():
    """More tiles than a warp looks at in one go, dealt out to any number of CTAs."""
    problem = Problem(tokens(*[1] * 35, shared=2), heads=1)
    got = problem.run("hopper", ctas=1)
    assert problem.error(got) < 2.7e-3
    assert np.array_equal(problem.run("hopper", ctas=3), got)


@pytest.fixture
def any_order(monkeypatch):
    """Threads, lanes of a warp included, run in random order and may stop at barriers; boxes land at random times.

    A warp's lanes may really part, and then only instructions for whole warps bring them together again."""
    random, landing = Random(0), []

    def next_thread(cluster):
        while True:
            awake = [entry for entry in cluster.waiting if entry[1]()]
            if landing and (not (cluster.ready or awake) or random.random() < 0.5):
                landing.pop(random.randrange(len(landing)))()
                continue
            if not cluster.ready and not awake:
                return None
            i = random.randrange(len(cluster.ready) + len(awake))
            if i < len(cluster.ready):
                thread = cluster.ready[i]
                del cluster.ready[i]
                return thread
            cluster.waiting.remove(awake[i - len(cluster.ready)])
            return awake[i - len(cluster.ready)][0]

    def update(barrier, arrivals, nbytes, clock, real=barriers.Barrier.update):
        real(barrier, arrivals, nbytes, clock)
        thread = threading.current_thread()
        if arrivals and random.random() < 0.05:
            thread.block.cluster.ready.append(thread)
            thread.block.cluster.switch(thread)

    def load_box(*box, real=tma._load_box):
        landing.append(lambda: real(*box))
    monkeypatch.setattr(simulator._Cluster, "_next", next_thread)
    monkeypatch.setattr(barriers.Barrier, "update", update)
    monkeypatch.setattr(tma, "_load_box", load_box)
    return random


def test_hopper_in_any_order(any_order):
    """A warpgroup without rows, over more key tiles than the ring holds: its lanes must not lose step."""
    problem = Problem(tokens(3, 2, shared=410), heads=4)
    short = problem.pool.tiles[problem.pool.tiles[:, 1] < 20]
    assert len(short) == 1
    problem.tiles, problem.counts[TILES] = short, 1
    rows = slice(short[0, 0], short[0, 0] + short[0, 1])
    results = []
    for seed in range(5):
        any_order.seed(seed)
        results.append(problem.run("hopper", ctas=1)[rows])
        assert np.array_equal(results[0], results[-1])


@KINDS
def test_company_changes_nothing(kind):
    """Three sequences alone and together: tiles begin elsewhere, rows lie elsewhere, every bit is the same."""
    sequences = [tokens(13, shared=60)[0], *tokens(30, 2, shared=66)]
    together = Problem(sequences, heads=1)
    got = together.run(kind)
    for i, sequence in enumerate(sequences):
        alone = Problem([sequence], heads=1)
        branch = next(b for b in together.pool.branches if b.path[-1] == together.pool.last_rows[i])
        assert np.array_equal(alone.run(kind), got[branch.path])


@KINDS
def test_what_other_branches_hold_does_not_matter(kind):
    problem = Problem(tokens(9, 11, shared=66), heads=1)
    clean = problem.run(kind)
    first, second = problem.pool.branches
    problem.buffer[second.path[second.start:]] = 0x7F80                     # infinities in q, k, v and gate
    assert np.array_equal(problem.run(kind)[first.path], clean[first.path])


def test_rows_far_apart():
    """Scores of all sizes, gates shut and open: finite, and close."""
    problem = Problem(tokens(40, 25), scale=6.0)
    problem.part("gate")[:problem.rows:3] = bf16.from_float32(np.float32(-300))
    problem.part("gate")[1:problem.rows:3] = bf16.from_float32(np.float32(300))
    got = problem.run("portable")
    assert np.isfinite(bf16.to_float32(got)).all() and problem.error(got) < 3e-3


def test_arguments():
    problem = Problem(tokens(2))
    buffer, out = cuda.to_device(problem.buffer), cuda.to_device(np.zeros((5, problem.wide), np.uint16))
    good = {name: problem.part(name, buffer) for name in ("q", "k", "v", "gate")}
    good |= {"out": out, "counts": cuda.to_device(problem.counts), "tiles": cuda.to_device(problem.tiles),
             "paths": cuda.to_device(problem.pool.paths)}
    attention.Plan(**good)
    bad = {"q": [buffer[:, 4:4 + problem.wide], buffer[:, :300], good["paths"]], "k": [buffer[:, :3 * D]],
           "v": [good["q"]], "gate": [good["k"]], "out": [good["k"], good["tiles"]], "counts": [good["paths"]],
           "tiles": [good["paths"]], "paths": [good["tiles"]]}
    for name, values in bad.items():
        for value in values:
            with pytest.raises(ValueError, match=name):
                attention.Plan(**{**good, name: value})
    with pytest.raises(ValueError, match="gate"):
        attention.gate_mul(0, good["q"], good["k"], out, good["counts"])
    with pytest.raises(ValueError, match="multiple of"):
        HopperPlan(attention.check_operands(**{**good, "k": good["q"], "v": good["gate"]}), cluster=2)
