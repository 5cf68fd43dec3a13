"""A demo export, and a copy of it to damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from jev.checkpoint.demo import write_demo_checkpoint


@pytest.fixture(scope="package")
def demo(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("export") / "demo"
    write_demo_checkpoint(path)
    return path


@pytest.fixture
def export(demo, tmp_path) -> Path:
    """A copy of the demo export that a test may damage."""
    return Path(shutil.copytree(demo, tmp_path / "demo"))
