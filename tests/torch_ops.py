"""The operations in PyTorch float64, on any device: the reference for models too large for NumPy. Tests and tools only.

The same formulas as ``jev_kernels.reference`` without rounding; ``tests/parity/test_torch_ops.py`` holds the two
together. Weights stay BF16 and are widened where they are used, so a 27B model needs no second copy.
"""
from __future__ import annotations

import numpy as np
import torch

from jev.checkpoint.config import ModelConfig
from jev.model.ops import Uncached
from jev.model.row_pool import RowPool
from jev.model.weights import attention_columns, gdn_columns
from jev_kernels.pool import CHUNK
from jev_kernels.reference import INTERLEAVE, L2_EPS


def tensor(x, device) -> torch.Tensor:
    """BF16 held as uint16 (NumPy, or anything with ``__cuda_array_interface__``) as torch.bfloat16, shared on a GPU."""
    if isinstance(x, np.ndarray):
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16).to(device)
    return torch.as_tensor(x, device=device).view(torch.bfloat16)


def gate_and_up(x: torch.Tensor, dim: int) -> list[torch.Tensor]:
    """[g, u] of a tensor that takes turns of both along ``dim``, as ``jev_kernels.reference.gate_and_up``."""
    return [part.flatten(dim, dim + 1) for part in x.unflatten(dim, (-1, 2, INTERLEAVE)).unbind(dim + 1)]


class TorchOps(Uncached):
    """``Ops`` over float64 tensors. Attention and the delta rule take a pool of any shape; memory for one head at a time."""

    def __init__(self, config: ModelConfig, device="cpu"):
        self.config, self.device = config, device
        self.attention, self.gdn = attention_columns(config), gdn_columns(config)
        c = config
        self.frequency = c.rope_theta ** -(torch.arange(0, c.rotary_dim, 2, dtype=torch.float64, device=device) / c.rotary_dim)

    def load(self, specs, tensors, progress=None):
        held = {}
        for spec in specs:
            held[spec.key] = tensor(spec.stacked(tensors), self.device)
            if progress:
                progress(held[spec.key].numel() * 2)
        return held

    def _index(self, x) -> torch.Tensor:
        return torch.from_numpy(np.asarray(x, np.int64)).to(self.device)

    def embed(self, table, pool: RowPool):
        return table[self._index(pool.ids)].double()

    def rms_norm(self, x, weight):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.config.rms_norm_eps) * (1 + weight.double())

    def add_rms_norm(self, residual, delta, weight):
        residual = residual + delta
        return residual, self.rms_norm(residual, weight)

    def linear(self, x, weight):
        return torch.cat([x @ part.double().T for part in weight.split(4096)], dim=1)

    def gdn_conv_gates(self, projected, weight, a_log, dt_bias, pool: RowPool):
        x = torch.cat([projected[:, self.gdn["qkv"]], projected.new_zeros(1, self.config.conv_dim)])
        row, total = np.arange(pool.n_rows), 0
        up = np.append(pool.parents, -1)
        for tap in range(weight.shape[1] - 1, -1, -1):
            total = total + x[self._index(np.where(row < 0, pool.n_rows, row))] * weight[:, tap].double()
            row = up[row]
        b, a = projected[:, self.gdn["b"]], projected[:, self.gdn["a"]]
        g = -torch.exp(a_log.double()) * torch.nn.functional.softplus(a + dt_bias.double())
        return torch.nn.functional.silu(total), g, torch.sigmoid(b)

    def gated_delta_rule(self, qkv, g, beta, pool: RowPool):
        c = self.config
        repeat = c.linear_num_value_heads // c.linear_num_key_heads
        q, k, v = qkv.split([c.key_dim, c.key_dim, c.value_dim], dim=1)
        q, k = (x.unflatten(1, (c.linear_num_key_heads, -1)) for x in (q, k))
        v = v.unflatten(1, (c.linear_num_value_heads, -1))
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS) for x in (q, k))
        q, k = ((x * s).repeat_interleave(repeat, 1) for x, s in ((q, c.linear_key_head_dim ** -0.5), (k, 1.0)))
        out = torch.empty_like(v)
        keep = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=self.device).tril()
        slots = {}
        for first, count, start, _ in pool.runs:
            state = q.new_zeros(v.shape[1], q.shape[2], v.shape[2]) if start < 0 else slots[start]
            for chunk in range(first, first + count):
                n = int((pool.chunk_rows[chunk] >= 0).sum())
                rows = self._index(pool.chunk_rows[chunk][:n])
                qc, kc, vc = (x[rows].transpose(0, 1) for x in (q, k, v))
                c_sum, bc = g[rows].T.cumsum(1), beta[rows].T
                ratio = torch.where(keep[:n, :n], c_sum[:, :, None] - c_sum[:, None, :], -torch.inf).exp()
                inner = (bc[:, :, None] * (kc @ kc.mT) * ratio).tril(-1)
                rhs = bc[:, :, None] * (vc - c_sum.exp()[:, :, None] * (kc @ state))
                new = torch.linalg.solve_triangular(inner, rhs, upper=False, unitriangular=True)
                o = c_sum.exp()[:, :, None] * (qc @ state) + ((qc @ kc.mT) * ratio) @ new
                last = c_sum[:, -1:]
                state = last.exp()[:, :, None] * state + kc.mT @ ((last - c_sum).exp()[:, :, None] * new)
                mine = pool.chunk_out_rows[chunk][:n] >= 0
                out[rows[self._index(np.flatnonzero(mine))]] = o.transpose(0, 1)[self._index(np.flatnonzero(mine))]
                if pool.chunk_slots[chunk] >= 0:
                    slots[pool.chunk_slots[chunk]] = state
        return out.flatten(1)

    def gated_rms_norm(self, o, projected, weight):
        o = o.unflatten(1, (self.config.linear_num_value_heads, -1))
        z = projected[:, self.gdn["z"]].unflatten(1, (self.config.linear_num_value_heads, -1))
        n = o * torch.rsqrt((o * o).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return (weight.double() * n * torch.nn.functional.silu(z)).flatten(1)

    def qk_rope(self, projected, q_norm, k_norm, pool: RowPool):
        angle = self._index(pool.positions)[:, None].double() * self.frequency
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        half = len(self.frequency)
        out = projected.clone()
        for name, weight in (("q", q_norm), ("k", k_norm)):
            x = self.rms_norm(projected[:, self.attention[name]].unflatten(1, (-1, self.config.head_dim)), weight)
            a, b = x[..., :half], x[..., half:2 * half]
            x = torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., 2 * half:]], dim=-1)
            out[:, self.attention[name]] = x.flatten(1)
        return out

    def gated_attention(self, projected, pool: RowPool):
        c = self.config
        q, gate, k, v = (projected[:, self.attention[n]].unflatten(1, (-1, c.head_dim)) for n in ("q", "gate", "k", "v"))
        out = torch.empty_like(q)
        for path, start in pool.branches:
            rows, keys = self._index(path[start:]), self._index(path)
            later = torch.arange(len(path), device=self.device) > torch.arange(start, len(path), device=self.device)[:, None]
            for h in range(c.num_attention_heads):
                kv = h // (c.num_attention_heads // c.num_key_value_heads)
                s = (q[rows, h] @ k[keys, kv].T * c.head_dim ** -0.5).masked_fill(later, -torch.inf)
                out[rows, h] = s.softmax(-1) @ v[keys, kv]
        return (out * gate.sigmoid()).flatten(1)

    def swiglu(self, x, weight):
        g, u = gate_and_up(self.linear(x, weight), 1)
        return torch.nn.functional.silu(g) * u

    def gather_rows(self, x, pool: RowPool):
        return x[self._index(pool.last_rows)]
