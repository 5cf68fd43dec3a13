"""Problems of gated attention on the GPU for tests and the benchmark: pools, random operands, float64 in PyTorch."""
from __future__ import annotations

import numpy as np
import torch

from jev.model.row_pool import RowPool, build
from jev_kernels.attention import portable as attention
from jev_kernels.attention.hopper import HopperPlan
from jev_kernels.pool import COUNTS, PADDING, ROWS, TILES

D = attention.D
POISON = 0x7FC1                  # a NaN
GUARD = 3                        # rows behind the live ones that nobody may write


class U16:
    """A torch int16 tensor as the kernels take it."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.__cuda_array_interface__ = dict(tensor.__cuda_array_interface__, typestr="<u2", stream=None)


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def tokens(*lengths: int, shared: int = 0, seed: int = 0) -> list[np.ndarray]:
    """Sequences of the given own lengths behind a shared prefix, all parting right after it."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, 1000, shared)
    return [np.concatenate([prefix, [1000 + i], rng.integers(0, 1000, n - 1)]).astype(np.int32)
            for i, n in enumerate(lengths)]


class Problem:
    """q | gate | k | v of a pool in one buffer; rows behind the live ones are NaN, and so is the output.

    content [n_rows, width] bfloat16; random when None, q, k and gate with a deviation of ``scale``.
    """

    def __init__(self, sequences=None, pool: RowPool | None = None, heads=24, kv_heads=4, seed=0, scale=2.0,
                 content=None):
        self.pool = pool or build(sequences)
        self.rows, self.heads, self.kv_heads = self.pool.n_rows, heads, kv_heads
        self.wide, self.narrow = heads * D, kv_heads * D
        width = 2 * self.wide + 2 * self.narrow
        if content is None:
            generator = torch.Generator(device="cuda").manual_seed(seed)
            content = torch.randn(self.rows, width, device="cuda", generator=generator)
            content[:, :2 * self.wide + self.narrow] *= scale
            content = content.bfloat16()
        self.buffer = torch.full((self.rows + PADDING, width), float("nan"), device="cuda", dtype=torch.bfloat16)
        self.buffer[:self.rows] = content
        self.out = torch.full((self.rows + GUARD, self.wide), POISON, device="cuda", dtype=torch.int16)
        counts = np.zeros(COUNTS, np.int32)
        counts[[ROWS, TILES]] = self.rows, len(self.pool.tiles)
        spare = np.full((2, 4), 2**30, np.int32)                     # garbage behind the valid entries
        self.counts, self.tiles, self.paths = (torch.from_numpy(np.ascontiguousarray(a)).cuda() for a in (
            counts, np.concatenate([self.pool.tiles, spare]), self.pool.paths))

    def part(self, name: str):
        """q, gate, k or v: columns of the live rows and the padding, bfloat16."""
        w, n = self.wide, self.narrow
        start, size = {"q": (0, w), "gate": (w, w), "k": (2 * w, n), "v": (2 * w + n, n)}[name]
        return self.buffer[:, start:start + size]

    def operands(self, gated=True, out=None):
        q, gate, k, v = (U16(self.part(name).view(torch.int16)) for name in ("q", "gate", "k", "v"))
        return attention.check_operands(q, k, v, gate if gated else None, U16(self.out if out is None else out),
                                        self.counts, self.tiles, self.paths)

    def plan(self, kind: str, gated=True, out=None):
        """kind: portable, hopper1 or hopper2 (clusters of that many)."""
        operands = self.operands(gated, out)
        if kind == "portable":
            return attention.PortablePlan(operands)
        return HopperPlan(operands, cluster=int(kind[6:]))

    def run(self, kind: str, gated=True, pdl=False):
        """The live rows as int16, after a check that nothing else was written."""
        self.out.fill_(POISON)
        self.plan(kind, gated)(stream(), pdl=pdl)
        torch.cuda.synchronize()
        assert (self.out[self.rows:] == POISON).all(), "rows behind the live ones were written"
        return self.out[:self.rows].clone()

    def expected(self, gated=True):
        """float64; of the roundings only that of the sigmoid, which is a factor of the result."""
        out = torch.empty(self.rows, self.heads, D, device="cuda", dtype=torch.float64)
        q = self.part("q")[:self.rows].unflatten(1, (self.heads, D))
        k, v = (self.part(name)[:self.rows].unflatten(1, (self.kv_heads, D)) for name in "kv")
        group = self.heads // self.kv_heads
        for path, start in self.pool.branches:
            path = torch.from_numpy(np.ascontiguousarray(path)).cuda().long()
            own = path[start:]
            later = torch.arange(len(path), device="cuda") > torch.arange(start, len(path), device="cuda")[:, None]
            for h in range(self.heads):
                s = q[own, h].double() @ k[path, h // group].double().t() / D ** 0.5
                out[own, h] = torch.softmax(s.masked_fill_(later, -torch.inf), -1) @ v[path, h // group].double()
        out = out.flatten(1)
        if gated:
            out *= torch.sigmoid(self.part("gate")[:self.rows].double()).bfloat16().double()
        return out


def relative_error(got, want) -> float:
    """||got - want|| / ||want||; got int16 as the kernels leave it."""
    return ((got.view(torch.bfloat16).double() - want).norm() / want.norm()).item()


def one_pass(kind: str) -> None:
    """A small tree, once, gated and in two steps, for compute-sanitizer."""
    problem = Problem(tokens(3, 64, 1, shared=130), heads=6, kv_heads=1)
    assert relative_error(problem.run(kind), problem.expected()) <= 3e-3
    plain = problem.run(kind, gated=False)
    gate = U16(problem.part("gate")[:problem.rows].view(torch.int16))
    attention.gate_mul(stream(), U16(plain), gate, U16(plain), problem.counts)
    assert torch.equal(plain, problem.run(kind))
    print("one pass: ok")
