"""The operations in NumPy float64: with the model's BF16 rounding points, or without any rounding."""
from __future__ import annotations

import numpy as np

from jev.checkpoint.config import ModelConfig
from jev.model.ops.numpy_cache import NumpyCache
from jev.model.row_pool import RowPool
from jev.model.weights import attention_columns, gdn_columns
from jev_kernels import bf16, reference
from jev_kernels.pool import TAPS

# BLAS may order its sums differently for different numbers of rows, so every product here takes this many (the last
# block is filled up with zeros): a row's bits then do not depend on how many others there are.
ROW_BLOCK = 32
# Rows that row-wise operations take at a time: their temporaries then stay in the cache.
ROWS_AT_ONCE = 128


def by_rows(function, *arrays):
    """function(*arrays) of row-wise arithmetic, computed some rows at a time; a tuple of arrays where it gives one."""
    parts = [function(*(a[at:at + ROWS_AT_ONCE] for a in arrays)) for at in range(0, len(arrays[0]), ROWS_AT_ONCE)]
    if isinstance(parts[0], tuple):
        return tuple(np.concatenate(column) for column in zip(*parts))
    return np.concatenate(parts)


def _behind(projected: np.ndarray, columns: slice, entries: np.ndarray) -> np.ndarray:
    """projected with rows behind it whose ``columns`` are the rows of ``entries`` [n, rows, width], one after the other."""
    if not len(entries):
        return projected
    rows = np.zeros((entries.shape[0] * entries.shape[1], projected.shape[1]))
    rows[:, columns] = entries.reshape(len(rows), -1)
    return np.concatenate([projected, rows])


def widened(x: np.ndarray) -> np.ndarray:
    """BF16 (uint16) as float64."""
    return bf16.to_float32(x).astype(np.float64)


class NumpyOps:
    """``Ops`` over float64 arrays. precision "bf16": rounds where the model does; "float64": nowhere.

    cache: the memory of the prefix cache. resident: keep weights as float64, four times their size; otherwise as BF16,
    widened at every use, which is slow and fits a 27B model into the memory of a large host. Raises ValueError for another
    precision.
    """

    def __init__(self, config: ModelConfig, precision: str = "bf16", max_length: int = 4096, resident: bool = True,
                 cache: NumpyCache | None = None):
        if precision not in ("bf16", "float64"):
            raise ValueError(f"precision must be bf16 or float64, not {precision!r}")
        self.config, self.precision, self.resident, self.cache = config, precision, resident, cache
        self._slots: dict[int, np.ndarray] = {}           # states of the delta rule in the layer under way
        self.r = bf16.round_float64 if precision == "bf16" else reference.exact
        self.attention, self.gdn = attention_columns(config), gdn_columns(config)
        half = config.rotary_dim // 2
        if precision == "bf16":
            table = bf16.to_float32(reference.rope_table(max_length, config.rotary_dim, config.rope_theta)).astype(np.float64)
            self.cos, self.sin = table[:, :half], table[:, half:]
        else:
            frequency = config.rope_theta ** -(np.arange(0, config.rotary_dim, 2) / config.rotary_dim)
            angle = np.arange(max_length)[:, None] * frequency
            self.cos, self.sin = np.cos(angle), np.sin(angle)

    def load(self, specs, tensors, progress=None):
        held = {}
        for spec in specs:
            stacked = spec.stacked(tensors)
            held[spec.key] = widened(stacked) if self.resident else stacked
            if progress:
                progress(stacked.size * 2)
        return held

    def weight(self, held: np.ndarray) -> np.ndarray:
        """A weight as float64."""
        return held if self.resident else widened(held)

    def store(self, x: np.ndarray) -> np.ndarray:
        """Activations as they leave the backbone: BF16 (uint16), or float64 in that precision."""
        return bf16.from_float32(x.astype(np.float32)) if self.precision == "bf16" else x

    def values(self, x: np.ndarray) -> np.ndarray:
        return x.copy()

    def embed(self, table, pool: RowPool):
        return self.weight(reference.embed(table, pool.ids))

    def rms_norm(self, x, weight):
        weight = self.weight(weight)
        return by_rows(lambda x: reference.rms_norm(x, weight, self.config.rms_norm_eps, self.r), x)

    def add_rms_norm(self, residual, delta, weight):
        weight, eps = self.weight(weight), self.config.rms_norm_eps
        return by_rows(lambda x, y: reference.add_rms_norm(x, y, weight, eps, self.r), residual, delta)

    def linear(self, x, weight):
        weight = self.weight(weight)
        y = np.empty((len(x), len(weight)))
        for at in range(0, len(x), ROW_BLOCK):
            block = x[at:at + ROW_BLOCK]
            n = len(block)
            if n < ROW_BLOCK:
                block = np.concatenate([block, np.zeros((ROW_BLOCK - n, x.shape[1]))])
            y[at:at + n] = self.r(block @ weight.T)[:n]
        return y

    def gdn_conv_gates(self, projected, conv, a_log, dt_bias, pool: RowPool):
        qkv, b, a = (projected[:, self.gdn[name]] for name in ("qkv", "b", "a"))
        conv, a_log, dt_bias = map(self.weight, (conv, a_log, dt_bias))
        y, (g, beta) = reference.gdn_conv(qkv, pool.parents, conv, self.r), reference.gdn_gates(b, a, a_log, dt_bias, self.r)
        return y[:pool.n_rows], g[:pool.n_rows], beta[:pool.n_rows]

    def gated_delta_rule(self, qkv, g, beta, pool: RowPool):
        c = self.config
        q, k, v = np.split(qkv, [c.key_dim, 2 * c.key_dim], axis=1)
        q, k = (x.reshape(len(x), c.linear_num_key_heads, c.linear_key_head_dim) for x in (q, k))
        v = v.reshape(len(v), c.linear_num_value_heads, c.linear_value_head_dim)
        o = reference.gated_delta_rule_chunked(q, k, v, g, beta, pool, self.r, self._slots)
        return o.reshape(len(o), c.value_dim)

    def gated_rms_norm(self, o, projected, weight):
        heads = (len(o), self.config.linear_num_value_heads, self.config.linear_value_head_dim)
        z = projected[:len(o), self.gdn["z"]].reshape(heads)
        weight, eps = self.weight(weight), self.config.rms_norm_eps
        out = by_rows(lambda o, z: reference.gated_rms_norm(o, z, weight, eps, self.r), o.reshape(heads), z)
        return out.reshape(len(o), self.config.value_dim)

    def qk_rope(self, projected, q_norm, k_norm, pool: RowPool):
        q, k = (self._heads(projected, name) for name in "qk")
        at = pool.positions
        q_norm, k_norm = self.weight(q_norm), self.weight(k_norm)
        q, k = reference.qk_rope(q, k, q_norm, k_norm, self.cos[at], self.sin[at], self.config.rms_norm_eps, self.r)
        out = projected.copy()
        out[:, self.attention["q"]] = q.reshape(len(q), -1)
        out[:, self.attention["k"]] = k.reshape(len(k), -1)
        return out

    def gated_attention(self, projected, pool: RowPool):
        q, gate, k, v = (self._heads(projected, name) for name in ("q", "gate", "k", "v"))
        out = reference.gated_attention(q, k, v, gate, pool.branches, self.config.head_dim ** -0.5, self.r)
        return out.reshape(len(out), -1)[:pool.n_rows]

    def exchange_keys(self, projected, layer: int, pool: RowPool):
        if self.cache is None:
            return projected
        pages = self.cache.keys[layer]
        columns = slice(self.attention["k"].start, self.attention["v"].stop)
        for page, chunk in pool.kept_pages:
            pages[page] = projected[pool.chunk_rows[chunk], columns]
        return _behind(projected, columns, pages[pool.restored_pages])

    def exchange_inputs(self, projected, layer: int, pool: RowPool):
        self._slots = {}
        if self.cache is None:
            return projected
        inputs, columns = self.cache.inputs[layer], self.gdn["qkv"]
        for snapshot, chunk in pool.kept_states:
            inputs[snapshot] = projected[pool.chunk_rows[chunk, -TAPS:], columns]
        for snapshot, slot, _, _ in pool.restored_states:
            self._slots[slot] = self.cache.states[layer, snapshot]
        return _behind(projected, columns, inputs[pool.restored_states[:, 0]])

    def keep_states(self, layer: int, pool: RowPool) -> None:
        if self.cache is not None:
            for snapshot, chunk in pool.kept_states:
                self.cache.states[layer, snapshot] = self._slots[pool.chunk_slots[chunk]]

    def _heads(self, projected, name: str):
        x = projected[:, self.attention[name]]
        return x.reshape(len(x), -1, self.config.head_dim)

    def swiglu(self, x, weight):
        return by_rows(lambda x: reference.silu_mul(x, self.r), self.linear(x, weight))

    def gather_rows(self, x, pool: RowPool):
        return reference.gather_rows(x, pool.last_rows)
