"""The backbone on the CPU."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jev.checkpoint.opening import Export
from jev.model import row_pool, weights
from jev.model.backbone import Bound, Computed
from jev.model.forward import forward
from jev.model.ops.numpy import NumpyOps
from jev.model.ops.numpy_cache import NumpyCache
from jev.model.row_pool import RowPool
from jev.model.sequences import Sequences
from jev.prefix_cache.passes import forward_pass


class NumpyBackbone:
    """The backbone on the CPU, in NumPy: small checkpoints, and the statement that kernels are held to.

    precision: "bf16" rounds where the model rounds; "float64" rounds nowhere and then ``hidden`` returns float64.
    cache: memory for what is kept of prefixes, if any.
    """
    name = "numpy"

    def __init__(self, export: Export, max_length: int | None = None, precision: str = "bf16", max_rows: int = 16384,
                 cache: NumpyCache | None = None):
        length = max_length or export.manifest.max_length
        self.max_rows, self.cache = max(max_rows, length), cache
        self.ops = NumpyOps(export.config, precision, length, cache=cache)
        self.model = weights.load(export.tensors, export.config, self.ops)

    def hidden(self, sequences: Sequence[np.ndarray]) -> Computed:
        sequences = Sequences.of(sequences)
        if self.cache is None:
            pool = row_pool.build(sequences)
            return Computed(self._forward(pool), pool.n_rows, np.zeros(len(sequences), np.intp))
        with forward_pass(self.cache, sequences) as made:
            pool = row_pool.build(sequences, made.plan)
            hidden = self._forward(pool)
            made.done(hidden)
        return Computed(hidden, pool.n_rows, made.plan.tokens)

    def _forward(self, pool: RowPool) -> np.ndarray:
        return self.ops.store(forward(self.ops, self.model, pool))

    def resumable(self, ids: np.ndarray) -> int:
        return 0 if self.cache is None else self.cache.tree.length(ids)

    def bound(self, pool: RowPool) -> Bound:
        pool = replace(pool, last_rows=np.unique(pool.last_rows))
        return Bound(self.ops, self.model, pool, pool)

    def close(self) -> None:
        self.model = None
