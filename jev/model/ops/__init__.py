"""The operations of the backbone as a protocol, and its implementations.

``numpy.NumpyOps`` states what each operation does, in float64 with BF16 rounding points or in float64 throughout;
``cuda.CudaOps`` calls the kernels of ``jev_kernels``; ``audit.AuditOps`` runs both on the same inputs.

An activation is whatever the implementation makes of a [rows, width] matrix, a pool what it makes of a ``RowPool``; the
forward pass only hands them on.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jev.model.weights import Spec

Matrix = Any
Pool = Any


class Ops(Protocol):
    """What a forward pass is made of. Formulas, shapes and rounding points: ``jev_kernels.reference``.

    ``projected`` is the output of a layer's stacked input projection, its columns as ``jev.model.weights`` lays them out.
    Weights are what ``load`` returned. An operation may reuse the memory of its inputs unless it says otherwise.
    """

    def load(self, specs: Sequence[Spec], tensors: Mapping[str, np.ndarray],
             progress: Callable[[int], None] | None = None) -> dict[str, Any]:
        """The weights by key, from the checkpoint's tensors (see ``jev.model.weights``)."""

    def values(self, x: Matrix) -> np.ndarray:
        """The live rows of an activation as a float64 copy on the host: for audits."""

    def embed(self, table, pool: Pool) -> Matrix:
        """[rows, hidden]: the embedding of each row's token."""

    def rms_norm(self, x: Matrix, weight) -> Matrix:
        """Keeps x."""

    def add_rms_norm(self, residual: Matrix, delta: Matrix, weight) -> tuple[Matrix, Matrix]:
        """(residual + delta rounded, its norm)."""

    def linear(self, x: Matrix, weight) -> Matrix:
        """x W^T, float32 accumulation or better, one rounding."""

    def swiglu(self, x: Matrix, weight) -> Matrix:
        """[rows, intermediate]: silu(gate) * up of ``linear``'s columns, one operation because a GEMM can do it all."""

    def gdn_conv_gates(self, projected: Matrix, conv, a_log, dt_bias, pool: Pool) -> tuple[Matrix, Matrix, Matrix]:
        """What the delta rule takes, in one operation because it is one launch on a GPU: (qkv, g, beta). Keeps projected.

        qkv [rows, q | k | v]: causal convolution along each path, SiLU; g, beta [rows, value heads]: log decay, not
        rounded, and write strength.
        """

    def gated_delta_rule(self, qkv: Matrix, g: Matrix, beta: Matrix, pool: Pool) -> Matrix:
        """[rows, value_dim]: the recurrence along each path."""

    def gated_rms_norm(self, o: Matrix, projected: Matrix, weight) -> Matrix:
        """Per value head: norm of o, times silu of the z columns of projected."""

    def qk_rope(self, projected: Matrix, q_norm, k_norm, pool: Pool) -> Matrix:
        """projected with the q and k columns normalised per head and rotated by position."""

    def gated_attention(self, projected: Matrix, pool: Pool) -> Matrix:
        """[rows, heads * head_dim]: causal attention along each path, times sigmoid of the gate columns."""

    def exchange_keys(self, projected: Matrix, layer: int, pool: Pool) -> Matrix:
        """projected with the keys and values of resumed prefixes behind its rows; those that are to be kept are copied.

        layer: the number of the layer among those of its kind. Without a prefix cache these three do nothing.
        """

    def exchange_inputs(self, projected: Matrix, layer: int, pool: Pool) -> Matrix:
        """The same of the convolution's inputs; and the delta rule's slots get the states of resumed prefixes."""

    def keep_states(self, layer: int, pool: Pool) -> None:
        """Copy the states that are to be kept, which ``gated_delta_rule`` has left in their slots; at the latest in
        ``exchange_inputs`` of the next such layer, which is where a GPU does it, in one launch."""

    def gather_rows(self, x: Matrix, pool: Pool) -> Matrix:
        """[sequences, width]: the last row of each sequence, in the order in which they were given."""


class Uncached:
    """For ``Ops`` without a prefix cache: nothing is resumed or kept, everything is computed."""

    def exchange_keys(self, projected: Matrix, layer: int, pool: Pool) -> Matrix:
        return projected

    def exchange_inputs(self, projected: Matrix, layer: int, pool: Pool) -> Matrix:
        return projected

    def keep_states(self, layer: int, pool: Pool) -> None:
        pass
