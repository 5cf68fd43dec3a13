"""The forward pass, written once over the operations of ``jev.model.ops``; and the backends that serve it.

Qwen3.5 / Qwen3.8 text, prefill only: token ids in, the final-norm hidden state of each sequence's last token out.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from jev.checkpoint.checkpoint import Export
from jev.model import row_pool, weights
from jev.model.ops import Matrix, Ops
from jev.model.row_pool import RowPool
from jev.model.weights import Layer, Model


class BackendError(RuntimeError):
    """A backend cannot be used, or a forward pass failed; the message says what is needed or what happened."""


class BackendLost(BackendError):
    """The backend is lost to this process for good; only a new process can use it. What asked for it ends."""


def forward(ops: Ops, model: Model, pool: RowPool) -> Matrix:
    """Hidden states [sequences, hidden] after the final norm, last token of each, in the order they were given."""
    residual = ops.embed(model.embed, pool)
    x = ops.rms_norm(residual, model.layers[0].input_norm)
    for layer, following in zip(model.layers, model.layers[1:] + (None,)):
        mix = full_attention if layer.kind == "full_attention" else linear_attention
        y = mix(ops, layer, x, pool)
        if following is None:                    # past the last mixer only last tokens matter
            residual, y = ops.gather_rows(residual, pool), ops.gather_rows(y, pool)
        y = ops.linear(y, layer.out_proj)
        residual, x = ops.add_rms_norm(residual, y, layer.post_norm)
        y = ops.linear(ops.swiglu(x, layer.gate_up), layer.down_proj)
        residual, x = ops.add_rms_norm(residual, y, following.input_norm if following else model.norm)
    return x


def full_attention(ops: Ops, layer: Layer, x: Matrix, pool: RowPool) -> Matrix:
    """Gated causal attention, up to its output projection."""
    projected = ops.qk_rope(ops.linear(x, layer.in_proj), layer.q_norm, layer.k_norm, pool)
    return ops.gated_attention(projected, pool)


def linear_attention(ops: Ops, layer: Layer, x: Matrix, pool: RowPool) -> Matrix:
    """Gated DeltaNet, up to its output projection."""
    projected = ops.linear(x, layer.in_proj)
    qkv, g, beta = ops.gdn_conv_gates(projected, layer.conv, layer.a_log, layer.dt_bias, pool)
    o = ops.gated_delta_rule(qkv, g, beta, pool)
    return ops.gated_rms_norm(o, projected, layer.gdn_norm)


class Backbone(Protocol):
    """A loaded backbone as the engine sees it. For one thread at a time, whichever."""
    name: str           # "cuda" or "numpy"
    max_rows: int       # rows that one forward pass takes

    def hidden(self, sequences: Sequence[np.ndarray]) -> tuple[np.ndarray, int]:
        """(BF16 hidden states uint16 [n, h] in the order of ``sequences``, rows computed). Raises BackendError."""

    def bound(self, pool: RowPool) -> tuple[Ops, Model, RowPool]:
        """What ``forward`` takes for one pass over this pool, operation by operation: for ``jev.audit``.

        The pool comes back with each last row once, in ascending order.
        """

    def close(self) -> None:
        """Release what the backend holds."""


class NumpyBackbone:
    """The backbone on the CPU, in NumPy: small checkpoints, and the statement that kernels are held to.

    precision: "bf16" rounds where the model rounds; "float64" rounds nowhere and then ``hidden`` returns float64.
    """
    name = "numpy"

    def __init__(self, export: Export, max_length: int | None = None, precision: str = "bf16", max_rows: int = 16384):
        from jev.model.ops.numpy import NumpyOps
        length = max_length or export.manifest.max_length
        self.max_rows = max(max_rows, length)
        self.ops = NumpyOps(export.config, precision, length)
        self.model = weights.load(export.tensors, export.config, self.ops)

    def hidden(self, sequences: Sequence[np.ndarray]) -> tuple[np.ndarray, int]:
        pool = row_pool.build(sequences)
        return self.ops.store(forward(self.ops, self.model, pool)), pool.n_rows

    def bound(self, pool: RowPool) -> tuple[Ops, Model, RowPool]:
        return self.ops, self.model, replace(pool, last_rows=np.unique(pool.last_rows))

    def close(self) -> None:
        self.model = None


def open_backbone(export: Export, backend: str = "auto", max_length: int | None = None, graph: bool = True,
                  log=print) -> Backbone:
    """Load ``export`` on the backend asked for. "auto": CUDA where there is a usable GPU, else NumPy; ``log`` says which.

    Raises BackendError if the backend cannot be used here.
    """
    if backend not in ("auto", "cuda", "numpy"):
        raise BackendError(f"unknown backend {backend!r}: expected auto, cuda or numpy")
    if backend == "numpy":
        log("backend: numpy")
        return NumpyBackbone(export, max_length)
    from jev_kernels.runtime import device
    try:
        found = device.find_device()
    except device.NoDevice as reason:
        if backend == "cuda":
            raise BackendError(f"the cuda backend was asked for, but {reason}") from reason
        log(f"backend: numpy ({reason})")
        return NumpyBackbone(export, max_length)
    log(f"backend: cuda on {found}")
    from jev.model.cuda_backbone import CudaBackbone
    return CudaBackbone(export, found, max_length=max_length, graph=graph, log=log)
