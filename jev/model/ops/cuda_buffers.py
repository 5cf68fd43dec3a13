"""What a forward pass on a GPU reads and writes: weights, activations, and the pool's arrays, each in one allocation.

Activations live in these buffers, of which every row bucket has views:

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

After the last mixer the pass goes on with the last rows alone, in buffers of their own.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jev.checkpoint.config import ModelConfig
from jev.model.buckets import MAX_SLOTS, Bucket
from jev.model.weights import Spec, in_proj_width
from jev_kernels import reference
from jev_kernels.gdn import portable as gdn
from jev_kernels.pool import LASTS, PADDING
from jev_kernels.runtime import device
from jev_kernels.runtime.device import array_bytes
from jev_kernels.runtime.launch import address


class Weight(NamedTuple):
    """A weight on the device, and what it is of the model."""
    spec: Spec
    array: Any


class CudaWeights:
    """Every weight of the model in one allocation. held: key -> Weight. Raises OutOfMemory."""

    def __init__(self, specs: Sequence[Spec]):
        self.arena = device.Arena(sum(array_bytes(s.shape) for s in specs), "the weights")
        self.held = {s.key: Weight(s, self.arena.take(s.shape)) for s in specs}

    @classmethod
    def from_tensors(cls, specs: Sequence[Spec], tensors: Mapping[str, np.ndarray],
                     progress: Callable[[int], None] | None = None) -> CudaWeights:
        """Weights streamed from the checkpoint's mapped files through pinned memory. progress: told the bytes sent."""
        self = cls(specs)
        with device.Uploader() as uploader:
            for spec in specs:
                uploader.upload(self.held[spec.key].array, spec.rows(tensors), progress, spec.interleave)
        return self


@dataclass(frozen=True, eq=False)
class Activation:
    """A bucket's view of a buffer. kind: of the layer, where buffers of the two kinds differ in shape, else "". last: one
    row a sequence, after the last mixer, not one a token."""
    name: str
    array: Any
    kind: str = ""
    last: bool = False


class DevicePool(NamedTuple):
    """A bucket's views of the pool's arrays in device memory, as ``jev_kernels.pool`` describes them.

    live, live_lasts: where kernels find how many rows there are, before the last mixer and after it.
    """
    counts: Any
    ids: Any
    positions: Any
    parents: Any
    last_rows: Any
    tiles: Any
    runs: Any
    chunk_slots: Any
    chunk_rows: Any
    chunk_out_rows: Any
    paths: Any
    live: Any
    live_lasts: Any


ByUse = dict[tuple[str, str, bool], tuple[tuple[int, ...], type]]


def activation_shapes(c: ModelConfig, bucket: Bucket) -> ByUse:
    """Shape and dtype of every activation of a bucket, by name, kind and whether it holds last rows."""
    u16, f32 = np.uint16, np.float32
    heads = c.linear_num_value_heads
    mixed = {"full_attention": c.num_attention_heads * c.head_dim, "linear_attention": c.value_dim}
    shapes: ByUse = {("conv", "", False): ((bucket.rows, c.conv_dim), u16), ("g", "", False): ((bucket.rows, heads), f32),
                     ("beta", "", False): ((bucket.rows, heads), u16)}
    for kind in mixed:
        shapes["projected", kind, False] = (bucket.rows + PADDING, in_proj_width(c, kind)), u16
    for last, rows in ((False, bucket.rows), (True, bucket.lasts)):
        for name, width in (("residual", c.hidden_size), ("x", c.hidden_size), ("delta", c.hidden_size),
                            ("gate_up", 2 * c.intermediate_size), ("act", c.intermediate_size)):
            shapes[name, "", last] = (rows, width), u16
        for kind, width in mixed.items():
            shapes["mixed", kind, last] = (rows, width), u16
    return shapes


class Buffers:
    """Activations, scratch, metadata and what the host exchanges with them, for the largest of ``buckets``; all share it."""

    def __init__(self, config: ModelConfig, buckets: Sequence[Bucket], max_length: int):
        sizes: dict[tuple[str, bool], int] = {}           # two kinds share a buffer
        for bucket in buckets:
            for (name, _, last), (shape, dtype) in activation_shapes(config, bucket).items():
                sizes[name, last] = max(sizes.get((name, last), 0), array_bytes(shape, dtype))
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
        self._at = {use: self.arena.take(size, np.uint8) for use, size in sizes.items()}
        self.host_metadata = device.pinned(entries, np.int32)
        self.host_hidden = device.pinned((max(b.lasts for b in buckets), config.hidden_size), np.uint16)
        stream = device.Stream()
        host = device.pinned(table.shape, np.uint16)
        host[:] = table
        device.to_device(self.rope_table, host, stream)
        # Rows beyond the live ones are multiplied like any other: they must hold numbers, not what was in memory.
        for buffer in self._at.values():
            device.fill(buffer.view(np.int32), 0, stream)
        if progress:
            device.fill(self.progress, 0, stream)
        stream.synchronize()
        self.rows_written = 0                 # behind them all rows that GEMMs read are zeros still, see ``CudaOps.clear``

    def activations(self, config: ModelConfig, bucket: Bucket) -> dict[tuple[str, str, bool], Activation]:
        """The bucket's views of the activations, by name, kind and whether they hold last rows."""
        return {(name, kind, last): Activation(name, device.view(address(self._at[name, last]), shape, dtype,
                                                                 owner=self.arena), kind, last)
                for (name, kind, last), (shape, dtype) in activation_shapes(config, bucket).items()}

    def pool(self, bucket: Bucket) -> DevicePool:
        """The bucket's views of the metadata."""
        views = {name: device.view(self.metadata_at + 4 * s.at, s.shape, np.int32, owner=self.arena)
                 for name, s in bucket.sections.items()}
        # Past the last mixer rows are last rows: to row-wise kernels their count stands where that of rows did.
        return DevicePool(**views, live=views["counts"], live_lasts=views["counts"][LASTS:])
