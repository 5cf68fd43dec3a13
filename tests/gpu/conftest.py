"""GPU tests run on a GPU: pytest -m gpu tests/gpu."""
from __future__ import annotations

import pytest
from numba.cuda.core import config


@pytest.fixture(scope="session", autouse=True)
def gpu():
    """The device that the tests run on; without one they are skipped, with the reason."""
    if config.ENABLE_CUDASIM:
        pytest.skip("NUMBA_ENABLE_CUDASIM is set: these tests are for a GPU")
    from jev_kernels.runtime import device
    try:
        return device.find_device()
    except device.NoDevice as error:
        pytest.skip(str(error))
