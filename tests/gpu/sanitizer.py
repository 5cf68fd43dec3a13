"""One run of a piece of code under compute-sanitizer."""
from __future__ import annotations

import shutil
import subprocess
import sys

import pytest


def check(tool: str, code: str) -> None:
    """Run Python ``code``, which ends by printing "one pass: ok", under ``tool``; AssertionError for what it reports.

    Skips the test where there is no compute-sanitizer, or it cannot use the device. Failed calls of the driver's API are
    not reported: the bindings try which functions it has.
    """
    if shutil.which("compute-sanitizer") is None:
        pytest.skip("needs compute-sanitizer")
    done = subprocess.run(["compute-sanitizer", "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9",
                           sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=250)
    if "not supported" in done.stdout:
        pytest.skip("compute-sanitizer cannot use this device")
    said = "\n".join(line for line in (done.stdout + done.stderr).splitlines() if "Host Frame" not in line)
    assert done.returncode == 0 and "one pass: ok" in done.stdout, said[-3000:]
