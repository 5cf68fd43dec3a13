"""A wait that is never met traps, and the process learns it as a lost device."""
from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

LOST = """
import time
import numpy as np
from numba import cuda
from numba.cuda import types
from jev_kernels.ptx import i32, mbar_init, ptx, smem_addr, u64, void
from jev_kernels.ptx.waits import until
from jev_kernels.runtime import cubin, device
from jev_kernels.runtime.errors import DeviceLost
from jev_kernels.runtime.launch import Kernel, address

cubin.ENABLED = False
device.find_device()
flag = ptx("flag", void, (u64,), until(".reg .b32 x; ld.acquire.gpu.global.u32 x, [$0]; setp.ge.u32 ready, x, 1;",
                                       limit=1), "l")
barrier = ptx("barrier", void, (i32, i32), until("mbarrier.try_wait.parity.shared::cta.b64 ready, [$0], $1;", limit=1), "r,r")

def lost(at):
    bar = smem_addr(cuda.shared.array(0, types.uint8))
    if cuda.threadIdx.x == 0:
        mbar_init(bar, 1)
    cuda.syncthreads()
    WAIT

zeros = cuda.to_device(np.zeros(4, np.uint32))
started = time.perf_counter()
Kernel(lost, types.void(types.uint64), 32, smem=64)(0, 1, address(zeros))
for call in range(2):                       # and every later call fails alike
    try:
        device.synchronize()
    except DeviceLost as error:
        assert "LAUNCH_FAILED" in str(error), error
    else:
        raise AssertionError("the wait ended without an error")
assert time.perf_counter() - started < 10
print("lost, as it should be", flush=True)
import os
os._exit(0)
"""


@pytest.mark.parametrize("wait", ["flag(at)", "barrier(bar, 0)"])
def test_a_lost_predecessor_ends_the_kernel(wait):
    done = subprocess.run([sys.executable, "-c", LOST.replace("WAIT", wait)], capture_output=True, text=True, timeout=120)
    assert "lost, as it should be" in done.stdout, done.stderr[-3000:]
