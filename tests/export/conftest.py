"""The inputs of an export, in a package that pins them and needs no torch; and the signals' usual handlers."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from jev.checkpoint import pinned
from jev.export import command, merge
from jev.export.signals import ENDING
from tests import export_inputs
from tests.export.exporting import WEIGHT, fused_matmul
from tests.export_inputs import SOURCE


@pytest.fixture(scope="package")
def inputs(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("inputs")
    export_inputs.write_base(path / "base")
    export_inputs.write_checkpoint(path / "checkpoint")
    (path / "checkpoint" / "head.pt").touch()
    return path


@pytest.fixture
def folder(inputs, tmp_path, monkeypatch) -> Path:
    """A folder with base/ and checkpoint/, and a package that pins that checkpoint and needs no torch."""
    monkeypatch.setattr(pinned, "PINNED", (*pinned.PINNED, SOURCE))
    monkeypatch.setattr(merge, "torch_matmul", fused_matmul)
    monkeypatch.setattr(command, "read_head", lambda path, width: (list(WEIGHT), 0.5))
    monkeypatch.setattr(command, "chat_frame", lambda base: ("<user>", "<end>"))
    return Path(shutil.copytree(inputs, tmp_path / "work"))


@pytest.fixture
def handlers() -> Iterator[dict[int, object]]:
    """Of signals, as they were before the test; they are put back. In it they are the usual ones, under nohup too."""
    before = {number: signal.getsignal(number) for number in ENDING}
    for number in ENDING:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)
