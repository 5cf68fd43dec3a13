"""The operations on a GPU: one bound set of kernels, GEMM plans and buffers per row bucket.

``CudaWeights`` holds the weights, ``Buffers`` the activations of the largest bucket; ``CudaOps`` puts the two together
for one bucket. Every operation launches into one stream and returns a view of a fixed buffer, so that the whole forward
pass can be captured into a graph; nothing is allocated and nothing waits. Activations live in these buffers:

==============  ==========================================  ==========================================================
``residual``    [rows, hidden]                              running sum of the layers
``x``           [rows, hidden]                              its norm, the input of a GEMM
``projected``   [rows + PADDING, widest in_proj]            output of ``in_proj``; attention may read past the last row
``conv``        [rows, conv_dim]                            q | k | v of linear attention
``g, beta``     [rows, value heads]                         float32 log decay, BF16 write strength
``mixed``       [rows, widest mixer]                        output of a mixer
``gate_up``     [rows, 2 * intermediate]                    unless the GEMM goes on to ``act`` by itself
``act``         [rows, intermediate]                        silu(gate) * up
``delta``       [rows, hidden]                              what a GEMM adds to the residual
==============  ==========================================  ==========================================================

After the last mixer the pass goes on with the last rows alone, in buffers of their own (``last_*``).
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from jev.checkpoint.checkpoint import ModelConfig
from jev.model.buckets import MAX_SLOTS, Bucket
from jev.model.weights import attention_columns, gdn_columns, in_proj_width
from jev_kernels import bf16, reference
from jev_kernels.attention import portable as attention
from jev_kernels.gdn import conv as gdn_conv, portable as gdn
from jev_kernels.gemm.selection import Gemm
from jev_kernels.pool import LASTS, PADDING
from jev_kernels.rowwise import embed, rms_norm, rope
from jev_kernels.runtime import device
from jev_kernels.runtime.device import array_bytes
from jev_kernels.runtime.launch import address


class Weight(NamedTuple):
    """A weight on the device. key: as in ``jev.model.weights``."""
    key: str
    array: Any


class CudaWeights:
    """Every weight of the model in one allocation. held: key -> Weight. Raises OutOfMemory."""

    def __init__(self, specs):
        self.arena = device.Arena(sum(array_bytes(s.shape) for s in specs), "the weights")
        self.held = {s.key: Weight(s.key, self.arena.take(s.shape)) for s in specs}

    @classmethod
    def from_tensors(cls, specs, tensors, progress: Callable[[int], None] | None = None) -> CudaWeights:
        """Weights streamed from the checkpoint's mapped files through pinned memory. progress: told the bytes sent."""
        self = cls(specs)
        with device.Uploader() as uploader:
            for spec in specs:
                uploader.upload(self.held[spec.key].array, spec.rows(tensors), progress, spec.interleave)
        return self


def buffer_shapes(c: ModelConfig, bucket: Bucket) -> dict[str, tuple[tuple[int, ...], type]]:
    """Shape and dtype of every activation of a bucket. ``name/kind`` are two shapes of the one buffer ``name``."""
    u16, f32 = np.uint16, np.float32
    heads = c.linear_num_value_heads
    mixed = {"full_attention": c.num_attention_heads * c.head_dim, "linear_attention": c.value_dim}
    shapes = {"conv": ((bucket.rows, c.conv_dim), u16), "g": ((bucket.rows, heads), f32),
              "beta": ((bucket.rows, heads), u16)}
    for kind in mixed:
        shapes[f"projected/{kind}"] = ((bucket.rows + PADDING, in_proj_width(c, kind)), u16)
    for prefix, rows in (("", bucket.rows), ("last_", bucket.lasts)):
        for name, width in (("residual", c.hidden_size), ("x", c.hidden_size), ("delta", c.hidden_size),
                            ("gate_up", 2 * c.intermediate_size), ("act", c.intermediate_size),
                            *((f"mixed/{kind}", width) for kind, width in mixed.items())):
            shapes[prefix + name] = ((rows, width), u16)
    return shapes


class Buffers:
    """Activations, scratch and metadata for the largest of ``buckets``, in one allocation that all of them share."""

    def __init__(self, config: ModelConfig, buckets: list[Bucket], max_length: int):
        sizes: dict[str, int] = {}
        for bucket in buckets:
            for name, (shape, dtype) in buffer_shapes(config, bucket).items():
                base = name.split("/")[0]
                sizes[base] = max(sizes.get(base, 0), array_bytes(shape, dtype))
        chunks, heads = max(b.chunks for b in buckets), config.linear_num_value_heads
        table = reference.rope_table(max_length, config.rotary_dim, config.rope_theta)
        states = gdn.states_shape(MAX_SLOTS, heads)
        scratch = gdn.scratch_bytes(chunks, MAX_SLOTS, config.linear_num_key_heads, heads, device.on_hopper())
        progress = gdn.progress_entries(chunks, heads, device.on_hopper())
        entries = max(b.size for b in buckets)
        self.arena = device.Arena(sum(sizes.values()) + array_bytes(table.shape) + array_bytes(states, np.float32)
                                  + array_bytes(scratch, np.uint8) + array_bytes(progress, np.uint32)
                                  + array_bytes(entries, np.int32),
                                  f"activations of {max(b.rows for b in buckets)} rows")
        self.metadata = self.arena.take(entries, np.int32)
        self.metadata_at = address(self.metadata)
        self.rope_table = self.arena.take(table.shape)
        self.states = self.arena.take(states, np.float32)
        self.scratch = self.arena.take(scratch, np.uint8)
        self.progress = self.arena.take(progress, np.uint32)
        self.at = {name: self.arena.take(size, np.uint8) for name, size in sizes.items()}
        stream = device.Stream()
        host = device.pinned(table.shape, np.uint16)
        host[:] = table
        device.to_device(self.rope_table, host, stream)
        # Rows beyond the live ones are multiplied like any other: they must hold numbers, not what was in memory.
        for name in sizes:
            device.fill(self.at[name].view(np.int32), 0, stream)
        if progress:
            device.fill(self.progress, 0, stream)
        stream.synchronize()
        self.rows_written = 0                 # behind them all rows that GEMMs read are zeros still, see ``CudaOps.clear``

    def bind(self, config: ModelConfig, bucket: Bucket) -> tuple[dict[str, Any], dict[str, Any]]:
        """(activations, metadata) of a bucket: views of this memory."""
        activations = {name: device.view(address(self.at[name.split("/")[0]]), shape, dtype, owner=self.arena)
                       for name, (shape, dtype) in buffer_shapes(config, bucket).items()}
        metadata = {name: device.view(address(self.metadata) + 4 * s.at, s.shape, np.int32, owner=self.arena)
                    for name, s in bucket.sections.items()}
        return activations, metadata


class CudaOps:
    """``Ops`` for one bucket: launches into ``stream``, results in the bucket's buffers.

    ``pool`` arguments are not read: what they describe is in the metadata on the device. Operations bind GEMM and
    attention plans at first use, which takes time and memory; ``binding`` does that ahead.

    pdl: launch every kernel so that it may start while the one before it still runs.
    """

    def __init__(self, config: ModelConfig, gemm: Gemm, buffers: Buffers, bucket: Bucket, stream, pdl: bool = True):
        self.config, self.gemm, self.buffers, self.bucket, self.stream, self.pdl = (
            config, gemm, buffers, bucket, stream, pdl)
        self.activations, self.metadata = buffers.bind(config, bucket)
        counts = self.metadata["counts"]
        # Past the last mixer rows are last rows: to row-wise kernels their count stands where that of rows did.
        self.counts = {"": counts, "last_": counts[LASTS:]}
        self.eps = config.rms_norm_eps
        self.columns = {"full_attention": attention_columns(config), "linear_attention": gdn_columns(config)}
        read = (self.activations[name] for name in ("x", "act", *(f"mixed/{kind}" for kind in self.columns)))
        self._read_by_gemms = sorted({(address(a), a.strides[0]) for a in read})      # (address, bytes of a row)
        self._plans: dict[tuple, Any] = {}
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

    def values(self, x) -> np.ndarray:
        """The live rows of an activation as a float64 copy on the host (for ``AuditOps``)."""
        counts = device.pinned(self.counts[""].shape, np.int32)
        device.to_host(counts, self.counts[""], self.stream)
        host = np.empty(x.shape, x.dtype)
        device.to_host(host, x, self.stream)
        self.stream.synchronize()
        live = host[:counts[LASTS if self._prefix(x) else 0]]
        return (bf16.to_float32(live) if live.dtype == np.uint16 else live).astype(np.float64)

    def _prefix(self, x) -> str:
        """"last_" if x holds last rows, else ""."""
        at = address(x)
        last = (a for name, a in self.activations.items() if name.startswith("last_"))
        return "last_" if any(address(a) == at for a in last) else ""

    def _part(self, kind: str, name: str, rows: int):
        """Columns ``name`` of the projection of a layer of this kind, its first ``rows`` rows."""
        key = (kind, name, rows)
        if key not in self._slices:
            self._slices[key] = self.activations[f"projected/{kind}"][:rows, self.columns[kind][name]]
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

    def _plan(self, key, make: Callable[[], Any]):
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

    def embed(self, table: Weight, pool):
        x = self.activations["residual"]
        # No early start: the copy of the metadata may be right before this kernel, which reads it at once.
        self._launch(embed.embed, table.array, self.metadata["ids"], x, self.counts[""], pdl=False)
        return x

    def rms_norm(self, x, weight: Weight):
        y = self.activations[self._prefix(x) + "x"]
        self._launch(rms_norm.rms_norm, x, weight.array, y, self.counts[self._prefix(x)], self.eps)
        return y

    def add_rms_norm(self, residual, delta, weight: Weight):
        prefix = self._prefix(residual)
        y = self.activations[prefix + "x"]
        self._launch(rms_norm.add_rms_norm, residual, delta, weight.array, y, self.counts[prefix], self.eps)
        return residual, y

    def linear(self, x, weight: Weight):
        def make():
            prefix, name = self._prefix(x), weight.key.rsplit(".", 1)[1]
            target = self.activations[prefix + "delta"]
            if name == "in_proj":
                kind = self.config.layer_types[int(weight.key.split(".")[1])]
                target = self.activations[f"projected/{kind}"]
            return self.gemm.linear_plan(x, weight.array, target, self._capacity(prefix)), target

        return self._product(x, weight, make)

    def swiglu(self, x, weight: Weight):
        def make():
            prefix = self._prefix(x)
            target = self.activations[prefix + "act"]
            return self.gemm.swiglu_plan(x, weight.array, self.activations[prefix + "gate_up"], target,
                                         self._capacity(prefix), self.counts[prefix]), target

        return self._product(x, weight, make)

    def _product(self, x, weight: Weight, make: Callable[[], tuple]):
        """Launch the GEMM of these operands, for which ``make`` gives (plan, where its result goes); returns the latter."""
        plan, target = self._plan((weight.key, address(x)), make)
        self._launch(plan)
        return target

    def _capacity(self, prefix: str) -> int:
        """Rows of the buffers with this prefix."""
        return self.bucket.lasts if prefix else self.bucket.rows

    def gdn_conv_gates(self, projected, conv: Weight, a_log: Weight, dt_bias: Weight, pool):
        qkv, b, a = (self._part("linear_attention", name, self.bucket.rows) for name in ("qkv", "b", "a"))
        y, g, beta = (self.activations[name] for name in ("conv", "g", "beta"))
        self._launch(gdn_conv.gdn_conv_gates, qkv, conv.array, self.metadata["parents"], b, a, a_log.array, dt_bias.array,
                     y, beta, g, self.counts[""])
        return y, g, beta

    def gated_delta_rule(self, qkv, g, beta, pool):
        m, o = self.metadata, self.activations["mixed/linear_attention"]
        self._launch(gdn.gated_delta_rule, qkv, g, beta, o, m["counts"], m["chunk_rows"], m["chunk_out_rows"],
                     m["chunk_slots"], m["runs"], self.buffers.states, self.buffers.scratch, self.buffers.progress)
        return o

    def gated_rms_norm(self, o, projected, weight: Weight):
        z = self._part("linear_attention", "z", self.bucket.rows)
        self._launch(rms_norm.gated_rms_norm, o, z, weight.array, o, self.counts[""], self.eps)
        return o

    def qk_rope(self, projected, q_norm: Weight, k_norm: Weight, pool):
        c = self.config
        self._launch(rope.qk_rope, projected, q_norm.array, k_norm.array, self.buffers.rope_table,
                     self.metadata["positions"], self.counts[""], c.num_attention_heads, c.num_key_value_heads, self.eps)
        return projected

    def gated_attention(self, projected, pool):
        out, m = self.activations["mixed/full_attention"], self.metadata
        rows = self.bucket.rows + PADDING
        q, gate, k, v = (self._part("full_attention", name, rows) for name in ("q", "gate", "k", "v"))
        plan = self._plan("attention", lambda: attention.Plan(q, k, v, gate, out, m["counts"], m["tiles"], m["paths"]))
        self._launch(plan)
        return out

    def gather_rows(self, x, pool):
        name = next(n for n, a in self.activations.items() if a is x)
        y = self.activations["last_" + name]
        self._launch(embed.gather_rows, x, self.metadata["last_rows"], y, self.counts[""])
        return y

    @property
    def hidden(self):
        """Where a forward pass leaves the hidden states of the last rows: [lasts, hidden]."""
        return self.activations["last_x"]

    @cached_property
    def hidden_at(self) -> int:
        """Its address."""
        return address(self.hidden)
