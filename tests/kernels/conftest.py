"""Kernels under the simulator. It must be chosen before Numba is imported: these tests run in a process of their own.

    NUMBA_ENABLE_CUDASIM=1 python -m pytest tests/kernels
"""
from __future__ import annotations

import os
import sys

import pytest

if "numba" not in sys.modules:
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"

from numba.cuda.core import config  # noqa: E402  the variable must be set first

if not config.ENABLE_CUDASIM:
    raise pytest.UsageError("Numba was imported before tests/kernels could choose its simulator: run these tests in a "
                            "process of their own, NUMBA_ENABLE_CUDASIM=1 python -m pytest tests/kernels")


@pytest.fixture(params=["forward", "backward"])
def schedule(request, monkeypatch):
    """Run a test with the simulated threads in either order: a missing barrier often shows in one of them."""
    from jev_kernels.sim import simulator
    monkeypatch.setattr(simulator, "SCHEDULE", request.param)
    return request.param
