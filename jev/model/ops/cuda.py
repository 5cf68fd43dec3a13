"""The operations on a GPU: one bound set of kernels, GEMM plans and buffers per row bucket.

Every operation launches into one stream and returns a view of a fixed buffer (``cuda_buffers`` lists them), so that the
whole forward pass can be captured into a graph; nothing is allocated and nothing waits.
"""
from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from jev.checkpoint.config import ModelConfig
from jev.model.buckets import Bucket
from jev.model.ops.cuda_buffers import Activation, Buffers, CudaWeights, DevicePool, Weight
from jev.model.ops.cuda_cache import CudaCache
from jev.model.weights import attention_columns, gdn_columns
from jev_kernels import bf16
from jev_kernels.attention import portable as attention
from jev_kernels.gdn import conv as gdn_conv, portable as gdn
from jev_kernels.gemm.selection import Gemm
from jev_kernels.pool import LASTS, PADDING, ROWS
from jev_kernels.rowwise import embed, exchange, rms_norm, rope
from jev_kernels.runtime import device
from jev_kernels.runtime.launch import address


class CudaOps:
    """``Ops`` for one bucket: launches into ``stream``, results in the bucket's buffers.

    pool: the bucket's arrays in device memory, which every operation is given. Operations bind GEMM and attention plans at
    first use, which takes time and memory; ``binding`` does that ahead.

    cache: the memory of the prefix cache; without one nothing is exchanged. pdl: launch every kernel so that it may start
    while the one before it still runs.
    """

    def __init__(self, config: ModelConfig, gemm: Gemm, buffers: Buffers, bucket: Bucket, stream,
                 cache: CudaCache | None = None, pdl: bool = True):
        self.config, self.gemm, self.buffers, self.bucket, self.stream, self.pdl = (
            config, gemm, buffers, bucket, stream, pdl)
        self.cache, self._last_linear = cache, config.layer_types.count("linear_attention") - 1
        self.pool: DevicePool = buffers.pool(bucket)
        self._raised = gdn.stored_flags(buffers.scratch, bucket.chunks, config.linear_num_value_heads, device.on_hopper())
        self.activations = buffers.activations(config, bucket)
        self.eps = config.rms_norm_eps
        of_attention = attention_columns(config)
        of_attention["all"] = slice(0, of_attention["v"].stop)
        of_attention["kv"] = slice(of_attention["k"].start, of_attention["v"].stop)
        self._columns = {"full_attention": of_attention, "linear_attention": gdn_columns(config)}
        read = [a for a in self.activations.values() if a.name in ("x", "act", "mixed") and not a.last]
        self._read_by_gemms = sorted({(address(a.array), a.array.strides[0]) for a in read})   # (address, bytes of a row)
        self._plans: dict[Hashable, Any] = {}
        self._slices: dict[tuple, Any] = {}
        self._binding = False

    def load(self, specs, tensors, progress=None) -> dict[str, Weight]:
        return CudaWeights.from_tensors(specs, tensors, progress).held

    def clear(self, rows: int) -> None:
        """Before a forward pass of so many rows: zeros behind them in what GEMMs read, where no kernel of it writes.

        They are multiplied like any other row. What longer prompts left there costs as much power as a live row, and
        power is what limits the clock (700 W on an H200, at 107 tokens already); zeros cost next to none.
        """
        left = self.buffers.rows_written
        for start, row in self._read_by_gemms if rows < left else ():
            device.zero(start + rows * row, (min(left, self.bucket.rows) - rows) * row, self.stream)
        self.buffers.rows_written = left if left > self.bucket.rows else rows

    def values(self, x: Activation) -> np.ndarray:
        counts = device.pinned(self.pool.counts.shape, np.int32)
        device.to_host(counts, self.pool.counts, self.stream)
        host = np.empty(x.array.shape, x.array.dtype)
        device.to_host(host, x.array, self.stream)
        self.stream.synchronize()
        live = host[:counts[LASTS if x.last else ROWS]]
        return (bf16.to_float32(live) if live.dtype == np.uint16 else live).astype(np.float64)

    def activation(self, name: str, kind: str = "", last: bool = False) -> Activation:
        """The bucket's view of a buffer."""
        return self.activations[name, kind, last]

    def _part(self, projected: Activation, name: str, rows: int):
        """Columns ``name`` of a layer's projection, its first ``rows`` rows."""
        key = projected.kind, name, rows
        if key not in self._slices:
            self._slices[key] = projected.array[:rows, self._columns[projected.kind][name]]
        return self._slices[key]

    @contextmanager
    def binding(self) -> Iterator[None]:
        """Inside, operations make their plans and return their buffers, but launch nothing."""
        device.synchronize()
        self._binding = True
        try:
            yield
        finally:
            self._binding = False
            device.synchronize()

    def _plan(self, key: Hashable, make: Callable[[], Any]):
        """The plan of this key, made by ``make`` at its first use.

        That happens with nothing else running: GEMMs on trial are timed, and share scratch and workspace with plans
        that our stream may be running; and our stream would not wait by itself for the copy of a new tensor map.
        """
        if key not in self._plans:
            if not self._binding:
                with self.binding():
                    return self._plan(key, make)
            self._plans[key] = make()
        return self._plans[key]

    def _launch(self, launch: Callable, *args, pdl: bool = True) -> None:
        if not self._binding:
            launch(self.stream, *args, pdl=self.pdl and pdl)

    def _live(self, x: Activation):
        """Where kernels find how many rows of x there are."""
        return self.pool.live_lasts if x.last else self.pool.live

    def _capacity(self, x: Activation) -> int:
        """Rows that GEMMs multiply."""
        return self.bucket.lasts if x.last else self.bucket.rows

    def embed(self, table: Weight, pool: DevicePool):
        x = self.activation("residual")
        # No early start: the copy of the metadata may be right before this kernel, which reads it at once.
        self._launch(embed.embed, table.array, pool.ids, x.array, pool.live, pdl=False)
        return x

    def rms_norm(self, x: Activation, weight: Weight):
        y = self.activation("x", last=x.last)
        self._launch(rms_norm.rms_norm, x.array, weight.array, y.array, self._live(x), self.eps)
        return y

    def add_rms_norm(self, residual: Activation, delta: Activation, weight: Weight):
        y = self.activation("x", last=residual.last)
        self._launch(rms_norm.add_rms_norm, residual.array, delta.array, weight.array, y.array, self._live(residual), self.eps)
        return residual, y

    def linear(self, x: Activation, weight: Weight):
        if weight.spec.name == "in_proj":
            y = self.activation("projected", weight.spec.kind)
        else:
            y = self.activation("delta", last=x.last)
        self._launch(self._plan((weight.spec.key, x.last), lambda: self.gemm.linear_plan(
            x.array, weight.array, y.array, self._capacity(x))))
        return y

    def swiglu(self, x: Activation, weight: Weight):
        gate_up, y = (self.activation(name, last=x.last) for name in ("gate_up", "act"))
        self._launch(self._plan((weight.spec.key, x.last), lambda: self.gemm.swiglu_plan(
            x.array, weight.array, gate_up.array, y.array, self._capacity(x), self._live(x))))
        return y

    def gdn_conv_gates(self, projected: Activation, conv: Weight, a_log: Weight, dt_bias: Weight, pool: DevicePool):
        qkv, b, a = (self._part(projected, name, self.bucket.rows) for name in ("qkv", "b", "a"))
        y, g, beta = (self.activation(name) for name in ("conv", "g", "beta"))
        self._launch(gdn_conv.gdn_conv_gates, qkv, conv.array, pool.parents, b, a, a_log.array, dt_bias.array,
                     y.array, beta.array, g.array, pool.live)
        return y, g, beta

    def gated_delta_rule(self, qkv: Activation, g: Activation, beta: Activation, pool: DevicePool):
        o, memory = self.activation("mixed", "linear_attention"), self.buffers
        self._launch(gdn.gated_delta_rule, qkv.array, g.array, beta.array, o.array, pool.counts, pool.chunk_rows,
                     pool.chunk_out_rows, pool.chunk_slots, pool.runs, memory.states, memory.scratch, memory.progress)
        return o

    def gated_rms_norm(self, o: Activation, projected: Activation, weight: Weight):
        z = self._part(projected, "z", self.bucket.rows)
        self._launch(rms_norm.gated_rms_norm, o.array, z, weight.array, o.array, self.pool.live, self.eps)
        return o

    def qk_rope(self, projected: Activation, q_norm: Weight, k_norm: Weight, pool: DevicePool):
        c = self.config
        rows = self._part(projected, "all", self.bucket.rows + PADDING)
        self._launch(rope.qk_rope, rows, q_norm.array, k_norm.array, self.buffers.rope_table,
                     pool.positions, pool.live, c.num_attention_heads, c.num_key_value_heads, self.eps)
        return projected

    def gated_attention(self, projected: Activation, pool: DevicePool):
        out = self.activation("mixed", "full_attention")
        q, gate, k, v = (self._part(projected, name, len(projected.array)) for name in ("q", "gate", "k", "v"))
        self._launch(self._plan("attention", lambda: attention.Plan(
            q, k, v, gate, out.array, pool.counts, pool.tiles, pool.paths)))
        return out

    def exchange_keys(self, projected: Activation, layer: int, pool: DevicePool):
        if self.cache is not None:
            self._launch(exchange.exchange_keys, self._part(projected, "kv", len(projected.array)), pool.counts,
                         pool.restored_pages, pool.kept_pages, pool.chunk_rows, self.bucket.first_history,
                         self.cache.keys(layer))
        return projected

    def exchange_inputs(self, projected: Activation, layer: int, pool: DevicePool):
        if self.cache is not None:
            self._launch(exchange.exchange_inputs, self._part(projected, "qkv", len(projected.array)), self.buffers.states,
                         pool.counts, pool.restored_states, pool.kept_states, pool.chunk_rows, pool.chunk_slots,
                         self.cache.inputs(layer), self.cache.states(layer), self.cache.states(layer - 1) if layer else None,
                         self._raised)
        return projected

    def keep_states(self, layer: int, pool: DevicePool) -> None:
        if self.cache is not None and layer == self._last_linear:        # those of the others go with ``exchange_inputs``
            self._launch(exchange.keep_states, self.buffers.states, pool.counts, pool.kept_states, pool.chunk_slots,
                         self.cache.states(layer))

    def gather_rows(self, x: Activation, pool: DevicePool):
        y = self.activation(x.name, x.kind, last=True)
        self._launch(embed.gather_rows, x.array, pool.last_rows, y.array, pool.live)
        return y
