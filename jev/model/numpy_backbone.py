"""The backbone on the CPU."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jev.checkpoint.checkpoint import Export
from jev.model import row_pool, weights
from jev.model.backbone import Bound
from jev.model.forward import forward
from jev.model.ops.numpy import NumpyOps
from jev.model.row_pool import RowPool


class NumpyBackbone:
    """The backbone on the CPU, in NumPy: small checkpoints, and the statement that kernels are held to.

    precision: "bf16" rounds where the model rounds; "float64" rounds nowhere and then ``hidden`` returns float64.
    """
    name = "numpy"

    def __init__(self, export: Export, max_length: int | None = None, precision: str = "bf16", max_rows: int = 16384):
        length = max_length or export.manifest.max_length
        self.max_rows = max(max_rows, length)
        self.ops = NumpyOps(export.config, precision, length)
        self.model = weights.load(export.tensors, export.config, self.ops)

    def hidden(self, sequences: Sequence[np.ndarray]) -> tuple[np.ndarray, int]:
        pool = row_pool.build(sequences)
        return self.ops.store(forward(self.ops, self.model, pool)), pool.n_rows

    def bound(self, pool: RowPool) -> Bound:
        pool = replace(pool, last_rows=np.unique(pool.last_rows))
        return Bound(self.ops, self.model, pool, pool)

    def close(self) -> None:
        self.model = None
