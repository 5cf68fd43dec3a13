"""An export that is interrupted ends with a sentence and leaves nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jev.export import merge
from jev.export.command import main
from jev.export.signals import ENDING
from tests.export.exporting import arguments

SLOWLY = """
import sys, time
from jev import cli
from jev.checkpoint import pinned
from jev.export import command, merge
from tests import export_inputs
from tests.export import exporting

def slowly(entry, real=command.bf16_pieces):
    for piece in real(entry):
        time.sleep(0.2)
        yield piece

pinned.PINNED = (export_inputs.SOURCE,)
command.bf16_pieces = merge.bf16_pieces = slowly
merge.torch_matmul = exporting.fused_matmul
command.read_head = lambda path, width: (list(exporting.WEIGHT), 0.5)
command.chat_frame = lambda base: ("", "")
sys.exit(cli.main(["export", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("signals, ignored, status", [
    ([signal.SIGINT], None, [130]), ([signal.SIGTERM, signal.SIGHUP], None, [129, 143]),
    ([signal.SIGHUP, signal.SIGTERM], signal.SIGHUP, [143])])
def test_the_command_ends_on_a_signal_and_leaves_nothing(inputs, tmp_path, signals, ignored, status):
    def prepare():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # of a program in the foreground
        if ignored:
            signal.signal(ignored, signal.SIG_IGN)
    arguments = [f"--base={inputs / 'base'}", f"--checkpoint={inputs / 'checkpoint'}", f"--out={tmp_path / 'new/out'}"]
    child = subprocess.Popen([sys.executable, "-c", SLOWLY, *arguments], cwd=Path(__file__).parents[2], text=True,
                             stderr=subprocess.PIPE, preexec_fn=prepare)
    try:
        until = time.monotonic() + 60
        while not (tmp_path / "new/out.unfinished/model.safetensors").exists() and time.monotonic() < until:
            time.sleep(0.02)
        for number in (signal.SIGSTOP, *signals, signal.SIGCONT):  # all at once
            child.send_signal(number)
        said = child.communicate(timeout=60)[1]
    finally:
        child.kill()
    assert child.returncode in status, said
    assert said.endswith("\njev export: interrupted; nothing unfinished is left\n")
    assert list(tmp_path.iterdir()) == []


def test_signals_during_the_clean_up_and_after(folder, capsys, monkeypatch, handlers):
    def remove(*a, real=shutil.rmtree, **k):
        for number in ENDING:
            os.kill(os.getpid(), number)
        real(*a, **k)
    monkeypatch.setattr(shutil, "rmtree", remove)
    monkeypatch.setattr(merge, "torch_matmul", lambda b, a: os.kill(os.getpid(), signal.SIGHUP))
    assert main(arguments(folder)) == 129
    os.kill(os.getpid(), signal.SIGINT)
    assert capsys.readouterr().err.endswith("jev export: interrupted; nothing unfinished is left\n")
    assert not (folder / "out").exists() and not (folder / "out.unfinished").exists()


def test_the_command_says_what_an_interruption_left(folder, capsys, monkeypatch, handlers):
    def interrupted(*a):
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("the signal did not raise")
    monkeypatch.setattr(merge, "torch_matmul", interrupted)
    monkeypatch.setattr(shutil, "rmtree", lambda *a, **k: None)
    assert main(arguments(folder)) == 143
    assert f"interrupted; {folder / 'out.unfinished'} is there, unfinished" in capsys.readouterr().err
