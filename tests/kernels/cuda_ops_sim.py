"""``jev_kernels.runtime.device`` and the GEMMs for the simulator, so that the CUDA backend runs on a CPU, launchers and all.

    monkeypatch.setattr(jev.model.ops.cuda, "device", cuda_ops_sim)      # and in the other modules of the backend

This module stands for ``device``: arrays are the simulator's, a stream does everything at once. Whatever is taken from
an arena is an allocation of its own, and full of garbage.
"""
from __future__ import annotations

import ctypes

import numpy as np
from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

from jev.checkpoint.config import ModelConfig
from jev.model.buckets import Bucket
from jev.model.cuda_backbone import CudaBackbone
from jev.model.ops.cuda_buffers import Buffers, CudaWeights
from jev.model.weights import assemble, specs
from jev_kernels import bf16
from jev_kernels.gemm.problem import layout
from jev_kernels.rowwise import silu
from jev_kernels.runtime.device import ALIGNMENT, array_bytes, on_hopper  # noqa: F401  parts of what ``device`` has

POISON = 0x7FC1                      # a BF16 NaN; as float32 a NaN; as an index far outside


class Stream:
    def synchronize(self) -> None:
        pass


class Arena:
    """Memory in as many pieces as are taken, together at most ``nbytes``."""

    def __init__(self, nbytes: int, what: str = ""):
        self.nbytes, self.taken = nbytes, []

    def take(self, shape, dtype=np.uint16):
        size = array_bytes(shape, dtype)
        assert sum(piece.nbytes for piece in self.taken) + size <= self.nbytes, "more than the arena was sized for"
        raw = np.empty(size + ALIGNMENT, np.uint8)
        piece = raw[-raw.ctypes.data % ALIGNMENT:][:size]
        piece.view(np.uint16)[:] = POISON
        self.taken.append(piece)
        return FakeCUDAArray(piece[:np.prod(shape, dtype=int) * np.dtype(dtype).itemsize].view(dtype).reshape(shape))


def view(pointer: int, shape, dtype=np.uint16, owner: Arena | None = None):
    """Part of one of the arena's pieces: past its end there is nothing."""
    piece = next(p for p in owner.taken if 0 <= pointer - p.ctypes.data < p.nbytes)
    at, nbytes = pointer - piece.ctypes.data, int(np.prod(shape)) * np.dtype(dtype).itemsize
    return FakeCUDAArray(piece[at:at + nbytes].view(dtype).reshape(shape))


def pinned(shape, dtype=np.uint8) -> np.ndarray:
    return np.zeros(shape, dtype)


def to_device(dst, host: np.ndarray, stream) -> None:
    if isinstance(dst, int):
        ctypes.memmove(dst, host.ctypes.data, host.nbytes)
    else:
        dst.reshape(-1)[:host.size] = host.reshape(-1)


def to_host(host: np.ndarray, src, stream) -> None:
    if isinstance(src, int):
        ctypes.memmove(host.ctypes.data, src, host.nbytes)
    else:
        host.reshape(-1)[:] = src.copy_to_host().reshape(-1)[:host.size]


def fill(array, value: int, stream) -> None:
    array[:] = value


def zero(pointer: int, nbytes: int, stream) -> None:
    ctypes.memset(pointer, 0, nbytes)


def synchronize() -> None:
    pass


class Gemm:
    """y[:rows] = r(x[:rows] W^T) in NumPy: sums in float64, in an order that does not depend on ``rows``.

    The arrays are checked as the real one checks them.
    """

    def linear_plan(self, x, weight, y, rows: int):
        layout(x, weight, y, rows)
        wide = bf16.to_float32(weight.copy_to_host()).astype(np.float64)

        def plan(stream, pdl: bool = False) -> None:
            for row in range(rows):
                y[row] = bf16.from_float64(wide @ bf16.to_float32(x[row].copy_to_host()))
        return plan

    def swiglu_plan(self, x, weight, gate_up, y, rows: int, counts):
        linear = self.linear_plan(x, weight, gate_up, rows)

        def plan(stream, pdl: bool = False) -> None:
            linear(stream)
            silu.silu_mul(stream, gate_up, y, counts, pdl=pdl)
        return plan


class Backbone(CudaBackbone):
    """A CudaBackbone over the checkpoint's ``tensors``, with these buckets, launching kernel by kernel."""

    def __init__(self, config: ModelConfig, tensors, buckets: list[Bucket], max_length: int):
        self.config, self.buckets, self.max_length = config, buckets, max_length
        self.max_rows, self.use_graphs, self._runners = max(b.rows for b in buckets), False, {}
        self.gemm, self.stream, self.log = Gemm(), Stream(), print
        needed = specs(config)
        self.weights = CudaWeights(needed)
        for spec in needed:
            self.weights.held[spec.key].array[:] = spec.stacked(tensors)
        self.model = assemble(self.weights.held, config)
        self.buffers = Buffers(config, buckets, max_length)

    def poison(self) -> None:
        """Garbage in everything that a forward pass may not rely on: all but the weights and the rotation table."""
        table = self.buffers.rope_table.ctypes.data
        for piece in self.buffers.arena.taken:
            if piece.ctypes.data != table:
                piece.view(np.uint16)[:] = POISON
        self.buffers.host_metadata[:] = POISON << 16 | POISON
        self.buffers.host_hidden[:] = POISON
        self.buffers.rows_written = self.max_rows

