"""The demo's scores beside those that Transformers gave."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from jev.checkpoint.demo import write_demo_checkpoint
from jev.checkpoint.opening import open_export
from jev.model.numpy_backbone import NumpyBackbone
from jev_kernels import bf16


def test_scores_of_the_demo_are_those_of_transformers(tmp_path):
    """float64 to the accuracy of Transformers' (whose norms are float32), BF16 within its own distance from that."""
    write_demo_checkpoint(tmp_path / "demo")
    demo = open_export(tmp_path / "demo")
    cases = json.loads((Path(__file__).parents[1] / "data" / "export_scores.json").read_text())
    ids = [np.array(case["ids"], np.int32) for case in cases]
    hidden = np.array([case["hidden"] for case in cases])
    exact = NumpyBackbone(demo, precision="float64").hidden(ids)[0]
    assert np.abs(exact - hidden).max() < 2e-5
    weight = demo.head.weight.astype(np.float64)
    assert np.abs(exact @ weight + demo.head.bias - [case["score"] for case in cases]).max() < 1e-4
    rounded = NumpyBackbone(demo).hidden(ids)[0]
    distance = np.linalg.norm(bf16.to_float32(rounded) - hidden, axis=1) / np.linalg.norm(hidden, axis=1)
    theirs = np.array([case["bf16_distance"] for case in cases])
    assert (distance / theirs).mean() < 1.15 and (distance / theirs).max() < 1.5
    scores = demo.head.score(rounded)
    assert np.abs(scores - [case["score"] for case in cases]).max() < 0.25
