"""Making exports without torch: stand-ins for what needs it, and what every test of a refusal asks.

tests/parity/test_export_parity.py runs the three places that are replaced here.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jev.checkpoint.checked_json import CheckpointError
from jev.checkpoint.manifest import Manifest
from jev.checkpoint.pinned import DEMO_MODEL_ID
from jev.export.command import export_merged
from tests import export_inputs

WEIGHT = tuple(np.linspace(-1, 1, 64, dtype=np.float32).tolist())
ADAPTER = "adapter/adapter_model.safetensors"
Q_A = "base_model.model.layers.1.self_attn.q_proj.lora_A.weight"
FILES = {"tokenizer.json": b"{}"}


def fused_matmul(b: np.ndarray, a: np.ndarray) -> np.ndarray:
    """float32 b @ a, products added in order with one rounding each (in float64, then float32), on any machine."""
    total = np.zeros((b.shape[0], a.shape[1]), np.float32)
    for k in range(b.shape[1]):
        total = (b[:, k:k + 1].astype(np.float64) * a[k:k + 1] + total).astype(np.float32)
    return total


def run(folder: Path, out: str = "out", **arguments) -> Path:
    export_merged(folder / "base", folder / "checkpoint", folder / out, **arguments)
    return folder / out


def refuses(folder: Path, *words: str, **arguments) -> None:
    """The export is refused with all of ``words``, and leaves nothing behind."""
    before = sorted(folder.iterdir())
    with pytest.raises(CheckpointError) as caught:
        run(folder, **arguments)
    for word in words:
        assert word in str(caught.value)
    assert sorted(folder.iterdir()) == before


def arguments(folder: Path, *more: str) -> list[str]:
    return [*(f"--{name}={folder / name}" for name in ("base", "checkpoint", "out")), *more]


def manifest() -> Manifest:
    return Manifest(DEMO_MODEL_ID, "demo", "demo", 1.0, 10, "", "", WEIGHT, 0.0, demo=True)


def good_stream():
    return ((name, [x]) for name, x in export_inputs.base_tensors(0).items())
