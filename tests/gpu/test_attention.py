"""Gated attention on a GPU: float64, bits that depend on a row's prefix only, the gate, graphs under PDL."""
from __future__ import annotations

import numpy as np
import pytest
from numba.cuda.core import config

torch = pytest.importorskip("torch")

from jev.model.row_pool import build  # noqa: E402
from jev_kernels.attention import portable as attention  # noqa: E402
from jev_kernels.runtime import device  # noqa: E402
from tests.gpu import sanitizer  # noqa: E402
from tests.gpu.attention_problem import POISON, U16, D, Problem, relative_error, stream, tokens  # noqa: E402

pytestmark = pytest.mark.gpu

SIZES = (1, 2, 63, 64, 65, 127, 139, 700, 2048, 4097)
TREES = {
    "options": (lambda: tokens(*[3 + i % 17 for i in range(40)], shared=300)),
    "requests": (lambda: tokens(400, 64, 129, 80, 1, 333)),
    "deep": (lambda: [np.concatenate([s, t]) for s in tokens(30, 90, 1, shared=50, seed=1)
                      for t in tokens(5, 61, 130, shared=20, seed=2)]),
}


def kinds():
    """The kernels that this device runs."""
    try:
        hopper = not config.ENABLE_CUDASIM and device.find_device().hopper
    except device.NoDevice:
        hopper = False
    return ("portable", "hopper1", "hopper2") if hopper else ("portable",)


KINDS = pytest.mark.parametrize("kind", kinds())


def check(problem, kind, limit=2.5e-3):
    """Close to float64, and the fused gate is the gate on its own. Two roundings of the result alone make 2.3e-3."""
    got, plain = problem.run(kind), problem.run(kind, gated=False)
    assert relative_error(plain, problem.expected(gated=False)) <= limit
    assert relative_error(got, problem.expected()) <= limit + 2e-4
    padded = torch.nn.functional.pad(plain, (0, 0, 0, 3), value=POISON)
    attention.gate_mul(stream(), U16(padded), U16(problem.part("gate").view(torch.int16)), U16(padded), problem.counts)
    torch.cuda.synchronize()
    assert torch.equal(padded[:problem.rows], got) and (padded[problem.rows:] == POISON).all()
    return got


@KINDS
@pytest.mark.parametrize("size", SIZES)
def test_sizes(kind, size):
    check(Problem(tokens(size), seed=size), kind)


@KINDS
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("heads", [(24, 4), (16, 4), (2, 1), (6, 1)], ids=str)
def test_trees(kind, tree, heads):
    problem = Problem(TREES[tree](), heads=heads[0], kv_heads=heads[1], seed=5)
    got = check(problem, kind)
    if kind == "hopper2":
        assert torch.equal(problem.run("hopper1"), got)


@KINDS
def test_extremes(kind):
    """Amplitudes far apart, huge and tiny scores, gates that are shut or wide open."""
    rng = np.random.default_rng(3)
    problem = Problem(tokens(200, 45, shared=90), seed=3)
    rows = problem.rows
    scale = torch.from_numpy(10.0 ** rng.uniform(-3, 1.2, (rows, 1))).cuda()
    problem.buffer[:rows] *= scale.to(torch.bfloat16)
    gate = problem.part("gate")[:rows]
    gate[::3] = -200.0
    gate[1::3] = 200.0
    got = check(problem, kind, limit=3e-3)                          # where one key decides, P's rounding shows
    assert torch.isfinite(got.view(torch.bfloat16)).all()


@KINDS
def test_company_changes_nothing(kind):
    """Sequences alone, in random groups and all together: every row the same bits."""
    rng = np.random.default_rng(7)
    prefix = rng.integers(0, 9, 260)
    sequences = [np.r_[prefix[:rng.integers(0, 261)], rng.integers(0, 9, rng.integers(1, 190))].astype(np.int32)
                 for _ in range(24)]
    table = torch.randn(2**15, 2 * 24 * D + 2 * 4 * D, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    table = (2 * table).bfloat16()

    def content(pool):
        """Rows that depend on the prefix only: a hash of it picks them."""
        hashes = np.zeros(pool.n_rows, np.int64)
        for row, (token, parent) in enumerate(zip(pool.ids, pool.parents)):
            hashes[row] = ((hashes[parent] if parent >= 0 else 12345) * 1000003 + int(token) + 1) % (2**31 - 1)
        return table[torch.from_numpy(hashes % len(table)).cuda()]

    def last_rows(group):
        pool = build(group)
        out = Problem(pool=pool, content=content(pool)).run(kind)
        return {s.tobytes(): out[int(pool.last_rows[i])] for i, s in enumerate(group)}

    alone = {}
    for s in sequences:
        alone |= last_rows([s])
    for round_ in range(6):
        order = rng.permutation(len(sequences))
        size = len(sequences) if round_ == 0 else int(rng.integers(2, 12))
        for at in range(0, len(order), size):
            for key, row in last_rows([sequences[i] for i in order[at:at + size]]).items():
                assert torch.equal(row, alone[key])


@KINDS
def test_graph_under_pdl(kind):
    """A chain gate -> attention -> gate over buffers that begin as NaN, replayed: what is read was written before."""
    problem = Problem(tokens(300, 77, 5, shared=120), seed=9)
    want = problem.run(kind)
    fresh = problem.buffer.clone()
    plan = problem.plan(kind)
    ones = torch.full_like(fresh, 200.0)
    args = [U16(x.view(torch.int16)) for x in (fresh, ones, problem.buffer)]
    final = torch.empty_like(problem.out)
    open_gate = U16(ones[:, :problem.wide].view(torch.int16))

    def chain():
        attention.gate_mul(stream(), *args, problem.counts)                       # a copy: the gate is 1
        plan(stream(), pdl=True)
        attention.gate_mul(stream(), U16(problem.out), open_gate, U16(final), problem.counts, pdl=True)

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            chain()
    for _ in range(5):
        problem.buffer[:problem.rows].fill_(float("nan"))
        problem.out.fill_(POISON)
        final.fill_(POISON)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(final[:problem.rows], want)


@KINDS
def test_repeats(kind):
    """Hundreds of launches back to back, of the shapes in which warps wait most unevenly."""
    for sequences in (tokens(139), tokens(2334), tokens(*[10] * 100, shared=1500)):
        problem = Problem(sequences)
        want, plan = problem.run(kind), problem.plan(kind)
        for _ in range(200):
            plan(stream())
        torch.cuda.synchronize()
        assert torch.equal(problem.out[:problem.rows], want)


@KINDS
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_sanitizer(tool, kind):
    sanitizer.check(tool, f"from tests.gpu.attention_problem import one_pass; one_pass({kind!r})")
