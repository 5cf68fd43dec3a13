"""Inputs, float64 reference and launches of the gated delta rule on a GPU, for its tests and its benchmark."""
from __future__ import annotations

import numpy as np
import torch

from jev.model.row_pool import RowPool, build
from jev_kernels.gdn import portable as gdn
from jev_kernels.pool import CHUNKS, COUNTS, ROWS, RUNS
from jev_kernels.runtime import device

D = gdn.D
KINDS = ("plain", "weak", "strong", "mixed", "correlated", "aligned", "half aligned", "zero mean", "zero keys",
         "small", "large", "faint", "loud", "endless")


def inputs(rows: int, kind: str, key_heads: int, value_heads: int, seed: int = 0):
    """q, k, v, beta (BF16) and g (float32), [rows, heads(, 128)], on the GPU."""
    gen = torch.Generator("cuda").manual_seed(seed)

    def randn(*s):
        return torch.randn(*s, device="cuda", generator=gen)

    def rand(*s):
        return torch.rand(*s, device="cuda", generator=gen)

    silu = torch.nn.functional.silu
    q, k, v = silu(randn(rows, key_heads, D)), silu(randn(rows, key_heads, D)), silu(randn(rows, value_heads, D))
    g, beta = -0.1 * rand(rows, value_heads), torch.sigmoid(randn(rows, value_heads))
    if kind == "weak":
        g *= 1e-3
    if kind == "strong":
        g *= 200
    if kind == "mixed":
        g = -torch.exp(4 * randn(rows, value_heads) - 3)
    if kind in ("correlated", "aligned", "half aligned"):         # nearly parallel keys, and queries like them
        base = randn(1, key_heads, D)
        k = base + 0.1 * randn(rows, key_heads, D)
        q = q if kind == "correlated" else base + 0.1 * randn(rows, key_heads, D)
        g *= 0.01
        beta = 0.5 * rand(rows, value_heads) if kind == "half aligned" else 1 - 0.05 * rand(rows, value_heads)
    if kind == "zero mean":
        q, k, v = randn(rows, key_heads, D), randn(rows, key_heads, D), randn(rows, value_heads, D)
    if kind == "zero keys":
        k[::3] = 0
        q[1::5] = 0
    if kind == "small":
        q, k = q * 1e-3, k * 1e-3
    if kind == "large":
        q, k = q * 1e4, k * 1e4
    if kind == "faint":
        v = v * 1e-4
    if kind == "loud":
        v = v * 1e3
    if kind == "endless":                              # some tokens forget everything
        g[::7] = -torch.inf
        g[3::11] = -1e30
    return q.bfloat16(), k.bfloat16(), v.bfloat16(), g.float().contiguous(), beta.bfloat16()


def reference(pool: RowPool, q, k, v, g, beta) -> torch.Tensor:
    """``jev_kernels.reference.gated_delta_rule`` in float64 on the GPU: [rows, value heads, 128]."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    group = v.shape[1] // q.shape[1]
    q = (q * torch.rsqrt((q * q).sum(-1, True) + 1e-6) * D ** -0.5).repeat_interleave(group, 1)
    k = (k * torch.rsqrt((k * k).sum(-1, True) + 1e-6)).repeat_interleave(group, 1)
    decay = torch.exp(g)[:, :, None, None]
    children = np.bincount(pool.parents[pool.parents >= 0], minlength=pool.n_rows)
    kept, out, state = {}, torch.empty_like(v), None
    for t, parent in enumerate(pool.parents):
        if parent < 0:
            state = torch.zeros(v.shape[1], D, D, dtype=torch.float64, device="cuda")
        elif parent != t - 1:
            state = kept[parent].clone()
        state = state * decay[t]
        d = beta[t][:, None] * (v[t] - torch.bmm(k[t][:, None], state)[:, 0])
        state = torch.baddbmm(state, k[t][:, :, None], d[:, None])
        out[t] = torch.bmm(q[t][:, None], state)[:, 0]
        if children[t] > 1 or children[t] and (t + 1 == pool.n_rows or pool.parents[t + 1] != t):
            kept[t] = state.clone()
    return out


class Array:
    """A torch tensor under the dtype that the kernels ask for."""

    def __init__(self, tensor: torch.Tensor, typestr: str):
        self.tensor = tensor
        self.__cuda_array_interface__ = dict(tensor.__cuda_array_interface__, typestr=typestr)

    @property
    def shape(self):
        return tuple(self.tensor.shape)


def bf16(tensor: torch.Tensor) -> Array:
    return Array(tensor.view(torch.int16), "<u2")


class Problem:
    """A pool's buffers, with room beyond what it needs, NaN or garbage wherever nobody may look."""

    def __init__(self, sequences, kind="plain", key_heads=16, value_heads=48, seed=0, hopper=None, data=None,
                 spare=(5, 3, 2)):
        self.pool = pool = build([np.asarray(s, np.int32) for s in sequences])
        self.heads = key_heads, value_heads
        self.hopper = device.on_hopper() if hopper is None else hopper
        rows, chunks, runs = pool.n_rows + spare[0], len(pool.chunk_rows) + spare[1], len(pool.runs) + spare[2]
        self.data = inputs(pool.n_rows, kind, key_heads, value_heads, seed) if data is None else data
        q, k, v, g, beta = self.data

        def room(x):
            return torch.cat([x, torch.full((spare[0], *x.shape[1:]), torch.nan, dtype=x.dtype, device="cuda")])

        qkv = room(torch.cat([x.reshape(pool.n_rows, -1) for x in (q, k, v)], 1))
        self.qkv, self.g = bf16(qkv), Array(room(g), "<f4")
        strided = torch.empty(rows, value_heads + 3, dtype=torch.bfloat16, device="cuda")[:, :value_heads]
        strided.copy_(room(beta))
        self.beta = bf16(strided)
        self.out = torch.empty(rows, value_heads * D, dtype=torch.bfloat16, device="cuda")
        self.states = torch.empty(gdn.states_shape(pool.n_slots, value_heads), device="cuda")
        size = gdn.scratch_bytes(chunks, self.states.shape[0], key_heads, value_heads, self.hopper)
        self.scratch = torch.empty(max(size, 16), dtype=torch.uint8, device="cuda")
        self.progress = torch.zeros(max(gdn.progress_entries(chunks, value_heads, self.hopper), 1), dtype=torch.int32,
                                    device="cuda")
        self.counts = torch.zeros(COUNTS, dtype=torch.int32)
        self.counts[ROWS], self.counts[CHUNKS], self.counts[RUNS] = pool.n_rows, len(pool.chunk_rows), len(pool.runs)

        def indices(x, n):
            garbage = np.full((n - len(x), *x.shape[1:]), 2 ** 30, np.int32)
            return torch.from_numpy(np.concatenate([x, garbage])).cuda()

        self.metadata = [Array(x, "<i4") for x in (
            self.counts.cuda(), indices(pool.chunk_rows, chunks), indices(pool.chunk_out_rows, chunks),
            indices(pool.chunk_slots, chunks), indices(pool.runs, runs))]
        self.arguments = (self.qkv, self.g, self.beta, bf16(self.out), *self.metadata, Array(self.states, "<f4"),
                          Array(self.scratch, "|u1"), Array(self.progress, "<u4"))
        self.poison()

    def poison(self) -> None:
        """NaN into everything that a call writes; the scratch holds NaN, and flags that claim to be set."""
        self.out.fill_(torch.nan)
        self.states.fill_(torch.nan)
        self.scratch.fill_(0x7F)

    def launch(self, pdl=True) -> None:
        gdn.gated_delta_rule(torch.cuda.current_stream().cuda_stream, *self.arguments, pdl=pdl, hopper=self.hopper)

    def run(self, pdl=True) -> torch.Tensor:
        """The output, BF16 [rows, value heads, 128], after a check that only live rows were written."""
        self.launch(pdl)
        torch.cuda.synchronize()
        assert not self.progress.any()
        assert torch.isnan(self.out[self.pool.n_rows:].float()).all()
        return self.out[:self.pool.n_rows].reshape(-1, self.heads[1], D)

    def rows_of(self, sequence: int) -> np.ndarray:
        """Rows of a sequence, in its order."""
        rows, row = [], int(self.pool.last_rows[sequence])
        while row >= 0:
            rows.append(row)
            row = int(self.pool.parents[row])
        return np.array(rows[::-1])


def error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """Relative error; NaN anywhere gives NaN."""
    return ((out.double() - ref).norm() / ref.norm()).item()


def capture(call, n: int = 1) -> torch.cuda.CUDAGraph:
    """A graph of n calls."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(n):
            call()
    return graph


def one_pass(hopper: bool, few_blocks: bool) -> None:
    """A small tree and a sequence by itself, once, for compute-sanitizer. few_blocks: each of them has several items."""
    if few_blocks:
        gdn.multiprocessors = lambda: 1
    shared = np.arange(66)
    tree = [shared, np.r_[shared, 900], np.r_[shared[:64], 901, 902], np.r_[shared[:3], 903]]
    for sequences in (tree, [shared]):
        p = Problem(sequences, key_heads=1, value_heads=3, hopper=hopper)
        assert error(p.run(pdl=False), reference(p.pool, *p.data)) <= 4e-3
    print("one pass: ok")
