"""Every wait on the GPU has an end, and what the host makes of it. tests/kernels/test_waits.py waits, simulated."""
from __future__ import annotations

import re
from pathlib import Path

import pytest

import jev_kernels
from jev_kernels.ptx.waits import LIMIT, TICK_SECONDS, until
from jev_kernels.runtime.errors import DeviceError, DeviceLost, driver_error

SOURCES = {str(p.relative_to(Path(jev_kernels.__file__).parent)): p.read_text()
           for p in Path(jev_kernels.__file__).parent.rglob("*.py") if p.parent.name != "sim"}


def test_the_limit_leaves_time_for_a_sanitizer_and_none_for_a_hang():
    assert (LIMIT - 1) * TICK_SECONDS > 10 and LIMIT * TICK_SECONDS < 20
    assert f"setp.ge.u32 late, now, {LIMIT};" in until("") and "trap;" in until("")


def test_no_kernel_waits_in_another_way():
    """Polling instructions stand inside ``until``; the one exception is for consumers whose producer waits for them."""
    found = {}
    for name, text in SOURCES.items():
        for match in re.finditer(r"try_wait|ld\.acquire|bra [A-Z]", re.sub(r"until\(\s*(f?\"[^\n]*\"\s*)+", "", text)):
            found.setdefault(name, []).append(match[0])
    assert found == {"ptx/waits.py": ["try_wait", "bra D", "bra D", "bra A"], "ptx/device.py": ["try_wait", "bra W"]}
    users = {name for name, text in SOURCES.items() if "mbar_wait_covered(" in text}
    assert users == {"attention/hopper.py"}


@pytest.mark.parametrize("code", ["CUDA_ERROR_LAUNCH_FAILED", "CUDA_ERROR_ILLEGAL_ADDRESS"])
def test_a_kernel_that_ended_abnormally_is_a_lost_device(code):
    error = driver_error(code)
    assert isinstance(error, DeviceLost) and isinstance(error, DeviceError)
    assert code in str(error) and "Restart the process" in str(error)
    assert ("did not come within 17 s" in str(error)) == (code == "CUDA_ERROR_LAUNCH_FAILED")


def test_other_errors_are_not():
    error = driver_error("CUDA_ERROR_OUT_OF_MEMORY")
    assert type(error) is RuntimeError and str(error) == "CUDA: CUDA_ERROR_OUT_OF_MEMORY"


def test_the_drivers_codes_are_recognised():
    driver = pytest.importorskip("cuda.bindings.driver")
    from jev_kernels.runtime.launch import check
    with pytest.raises(DeviceLost, match="LAUNCH_FAILED"):
        check((driver.CUresult.CUDA_ERROR_LAUNCH_FAILED,))
    with pytest.raises(RuntimeError, match="^CUDA: CUDA_ERROR_INVALID_VALUE$"):
        check((driver.CUresult.CUDA_ERROR_INVALID_VALUE, 3))
    assert check((driver.CUresult.CUDA_SUCCESS, 3)) == 3
