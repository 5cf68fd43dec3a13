"""AuditOps: it computes what the audited operations compute, and sees where they are wrong."""
from __future__ import annotations

import numpy as np
import pytest

from jev.model import row_pool, weights
from jev.model.forward import forward
from jev.model.ops.audit import AuditOps, Pair, table
from jev.model.ops.numpy import NumpyOps
from tests import models

C = models.config("grouped")
POOL = row_pool.build(models.sequences(np.random.default_rng(0), C.vocab_size, (70, 3)))


def audit(ops):
    audited = AuditOps(ops, NumpyOps(C, "float64", 128))
    return audited, forward(audited, weights.load(models.tensors(C), C, audited), Pair(POOL, POOL))


def test_every_operation_is_recorded_and_the_result_is_the_audited_one():
    ops = NumpyOps(C, "bf16", 128)
    audited, hidden = audit(ops)
    assert (hidden == forward(ops, weights.load(models.tensors(C), C, ops), POOL)).all()
    assert set(audited.records) == set(AuditOps.OPERATIONS)
    for name, records in audited.records.items():
        assert max(r.relative for r in records) < 8e-3, name
    assert audited.records["embed"][0].largest == 0
    assert len(audited.records["linear"]) == 3 * C.num_layers and len(audited.records["swiglu"]) == C.num_layers
    assert table(audited.records).count("\n") == len(AuditOps.OPERATIONS)


def test_a_wrong_operation_stands_out_alone():
    class Wrong(NumpyOps):
        def swiglu(self, x, weight):
            return super().swiglu(x, weight) * 1.05

    audited, _ = audit(Wrong(C, "bf16", 128))
    worst = {name: max(r.relative for r in records) for name, records in audited.records.items()}
    assert worst.pop("swiglu") > 0.04 and max(worst.values()) < 8e-3


def test_nan_is_not_lost():
    class Broken(NumpyOps):
        def gated_attention(self, projected, pool):
            return super().gated_attention(projected, pool) * np.nan

    audited, _ = audit(Broken(C, "bf16", 128))
    assert np.isnan(audited.records["gated_attention"][0].relative)
    assert "nan" in table(audited.records)


def test_unknown_operations_are_refused():
    with pytest.raises(AttributeError):
        _ = AuditOps(NumpyOps(C), NumpyOps(C)).dropout
