"""Two implementations of the operations side by side: how far apart they are, operation by operation.

The forward pass runs on the implementation under audit; every operation's inputs are also given to a reference
(NumpyOps, usually in float64), and the distance of the outputs is recorded. Errors do not accumulate in the figures:
each compares one operation on identical inputs.
"""
from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np

from jev.model.ops import Ops, Uncached
from jev.model.ops.numpy import NumpyOps


class Pair(NamedTuple):
    """A weight or a pool as both implementations hold it."""
    audited: Any
    reference: Any


class Record(NamedTuple):
    """One call: ||out - reference|| / ||reference||, and the largest element-wise difference. NaN stays NaN."""
    relative: float
    largest: float


class AuditOps(Uncached):
    """``Ops`` that computes with ``audited`` and records the distance from ``reference``.

    ``records`` maps operation names to the records of its calls, in order; an operation with two outputs has one record per
    output and call. Weights and the pool are given as ``Pair``.
    """
    OPERATIONS = ("embed", "rms_norm", "add_rms_norm", "linear", "swiglu", "gdn_conv_gates", "gated_delta_rule",
                  "gated_rms_norm", "qk_rope", "gated_attention", "gather_rows")

    def __init__(self, audited: Ops, reference: NumpyOps):
        self.audited, self.reference = audited, reference
        self.records: dict[str, list[Record]] = defaultdict(list)

    def load(self, specs, tensors, progress=None) -> dict[str, Pair]:
        held = self.audited.load(specs, tensors, progress)
        reference = self.reference.load(specs, tensors)
        return {key: Pair(held[key], reference[key]) for key in held}

    def values(self, x) -> np.ndarray:
        return self.audited.values(x)

    def __getattr__(self, name: str):
        if name not in self.OPERATIONS:
            raise AttributeError(name)

        def call(*args):
            ours = [a.audited if isinstance(a, Pair) else a for a in args]
            # Copies are taken first: an operation may reuse the memory of its inputs.
            theirs = [a.reference if isinstance(a, Pair) else self.audited.values(a) for a in args]
            out = getattr(self.audited, name)(*ours)
            expected = getattr(self.reference, name)(*theirs)
            for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (out, expected))):
                self.records[name].append(compare(self.audited.values(a), b))
            return out
        return call


def compare(x: np.ndarray, reference: np.ndarray) -> Record:
    """How far x is from the reference."""
    difference = x - reference
    scale = np.linalg.norm(reference)
    return Record(float(np.linalg.norm(difference) / (scale if scale else 1.0)), float(np.abs(difference).max()))


def table(records: dict[str, list[Record]]) -> str:
    """The records as text: per operation calls, mean and worst relative distance, largest difference."""
    lines = [f"{'operation':<18}{'calls':>6}{'mean':>11}{'worst':>11}{'largest':>11}"]
    for name, found in records.items():
        relative = np.array([r.relative for r in found])
        largest = max((r.largest for r in found), key=lambda v: np.inf if np.isnan(v) else v)
        lines.append(f"{name:<18}{len(found):>6}{relative.mean():>11.2e}{relative.max():>11.2e}{largest:>11.2e}")
    return "\n".join(lines)
