"""What every test of a refusal asks, and the names of an export's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from jev.checkpoint.checked_json import CheckpointError
from jev.checkpoint.opening import open_export

MANIFEST, WEIGHTS, INDEX = "open_jev_export.json", "model.safetensors", "model.safetensors.index.json"


def refuses(path: Path, *words: str, **arguments) -> None:
    """``open_export`` refuses ``path`` with a sentence that holds all of ``words``."""
    with pytest.raises(CheckpointError) as caught:
        open_export(path, **arguments)
    for word in words:
        assert word in str(caught.value)
