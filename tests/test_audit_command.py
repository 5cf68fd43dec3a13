"""``jev audit`` on the demo checkpoint."""
from __future__ import annotations

import json

import pytest

from jev import audit, cli
from jev.checkpoint.demo import write_demo_checkpoint
from jev.model.ops.audit import AuditOps
from jev.model.ops.numpy import NumpyOps


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    path = tmp_path_factory.mktemp("audit") / "demo"
    write_demo_checkpoint(path)
    return path


def test_prints_and_writes_every_operation(export, tmp_path, capsys):
    assert audit.main([str(export), "--backend", "numpy", "--json", str(tmp_path / "a.json")]) == 0
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "a.json").read_text())
    assert set(found["operations"]) == set(AuditOps.OPERATIONS) and all(name in out for name in AuditOps.OPERATIONS)
    assert 0 < found["hidden"]["relative"] < 0.1
    assert max(r["relative"] for r in found["operations"]["linear"]) < 2e-3


@pytest.mark.parametrize("text, words", [("no JSON", "not JSON"), ('{"state": 1, "questions": {}}', "state")])
def test_a_request_that_is_none_is_named_with_its_file(export, tmp_path, text, words, capsys):
    (tmp_path / "r.json").write_text(text)
    assert cli.main(["audit", str(export), "--backend", "numpy", "--request", str(tmp_path / "r.json")]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"jev: {tmp_path / 'r.json'}: body") and words in said and said.count("\n") == 1


def test_what_is_not_finite_fails(export, monkeypatch, capsys):
    def broken(self, x, weight):
        return self.linear(x, weight)[:, ::2] * float("nan")
    monkeypatch.setattr(NumpyOps, "swiglu", broken)
    assert audit.main([str(export), "--backend", "numpy"]) == 1
    assert "not finite" in capsys.readouterr().err
