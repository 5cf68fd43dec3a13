"""Where a forward pass stops being finite: run once more, operation by operation, after one gave no score.

Only a failure costs this: the forward that serves requests looks at nothing but its scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jev.checkpoint.finite import describe, first_not_finite
from jev.checkpoint.opening import Export
from jev.model import row_pool
from jev.model.backbone import Backbone
from jev.model.forward import forward
from jev.model.ops import Ops, Uncached
from jev.model.ops.audit import AuditOps
from jev.model.weights import Model


class NotFinite(ArithmeticError):
    """The first operation of a forward pass that gave a NaN or an infinity, and the tensors that it or its layer has."""

    def __init__(self, operation: str, near: str, weights: Sequence[str]) -> None:
        super().__init__(f"{operation} in {near.rstrip('.')}{' with ' + ', '.join(weights) if weights else ''}")
        self.near = near            # what the names of those tensors begin with


class FiniteOps(Uncached):
    """``Ops`` that computes with ``ops`` and raises NotFinite at the first result that is not finite.

    keys: name of each weight by the ``id`` of what ``ops`` holds.
    """

    def __init__(self, ops: Ops, keys: Mapping[int, str]) -> None:
        self.ops, self.keys = ops, keys
        self.near = ""

    def __getattr__(self, name: str) -> Any:
        if name not in AuditOps.OPERATIONS:
            raise AttributeError(name)

        def call(*args: Any) -> Any:
            weights = [self.keys[id(a)] for a in args if id(a) in self.keys]
            for key in weights:                 # an operation without weights belongs to the layer of the one before
                self.near = {"embed": "embed_tokens.", "norm": "norm."}.get(key) or key[:key.rindex(".") + 1]
            out = getattr(self.ops, name)(*args)
            for x in out if isinstance(out, tuple) else (out,):
                if not np.isfinite(self.ops.values(x)).all():
                    raise NotFinite(name, self.near, weights)
            return out
        return call


def weight_keys(model: Model) -> dict[int, str]:
    """Name of each weight, as in ``jev.model.weights``, by the ``id`` of the object that holds it."""
    keys = {id(model.embed): "embed", id(model.norm): "norm"}
    for i, layer in enumerate(model.layers):
        keys |= {id(x): f"layers.{i}.{name}" for name, x in vars(layer).items()
                 if name not in ("kind", "number") and x is not None}
    return keys


def explain(export: Export, backbone: Backbone, sequences: Sequence[np.ndarray]) -> str | None:
    """What in a forward pass over ``sequences`` is the first not to be finite, in a sentence; None if all is.

    For the thread that may use ``backbone``. Whatever the backbone raises comes through.
    """
    bound = backbone.bound(row_pool.build(sequences))
    try:
        forward(FiniteOps(bound.ops, weight_keys(bound.model)), bound.model, bound.pool)
    except NotFinite as found:
        first = f"the first result that is not finite is that of {found}"
        for name, bits in export.tensors.items():
            if name.startswith(found.near) and (at := first_not_finite(bits.reshape(-1))) is not None:
                return f"{first}, and {describe(name, at, int(bits.flat[at]), bits.shape)}"
        return f"{first}; the weights there are all finite"
    return None
