"""Twenty seconds of tools/soak.py; give it --seconds 600 before a release."""

from __future__ import annotations

import subprocess
import sys

from tests.faults.harness import ROOT


def test_twenty_seconds_of_everything(model):
    command = [sys.executable, "tools/soak.py", "--seconds", "20", "--model", str(model)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
