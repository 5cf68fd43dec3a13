"""Flags and mbarriers that nobody raises are reported, and those that are raised end the wait."""
from __future__ import annotations

import numpy as np
import pytest
from numba import cuda
from numba.cuda import types

from jev_kernels import ptx
from jev_kernels.ptx import i32, u32, u64
from jev_kernels.ptx.flags import await_flag, await_flags, count_up, raise_flag, take_ticket
from jev_kernels.runtime.launch import Kernel, address

ADDRESS = types.void(types.uint64)


def launch(function, flags, threads=32, smem=0):
    on_device = cuda.to_device(flags)
    Kernel(function, ADDRESS, threads, smem=smem)(0, 1, address(on_device))
    return on_device.copy_to_host()


def test_a_flag_that_nobody_raises_is_reported():
    def lost(flags):
        await_flag(flags, 1)
    with pytest.raises(RuntimeError, match="32 threads wait for a flag in device memory at 0x[0-9a-f]+ that nobody raises"):
        launch(lost, np.zeros(4, np.uint32))


def test_a_flag_is_awaited_from_another_warp(schedule):
    def counted(flags):
        if cuda.threadIdx.x >= 32:
            await_flag(flags, 3)
            if cuda.threadIdx.x == 32:
                ptx.stg_u32(flags + u64(4), u32(take_ticket(flags + u64(8))))
        elif cuda.threadIdx.x < 3:
            count_up(flags)
    assert launch(counted, np.array([0, 0, 5, 0], np.uint32), 64).tolist() == [3, 5, 6, 0]


def test_flags_in_a_row_are_counted_from_the_first(schedule):
    def counted(flags):
        lane = cuda.threadIdx.x & 31
        if cuda.threadIdx.x >= 32:
            n = await_flags(flags + u64(lane * 4), i32(lane < 20))
            ptx.stg_u32(flags + u64((32 + lane) * 4), u32(n))
        elif lane == 0:
            raise_flag(flags)
    for raised, expected in ((range(1, 32), 20), (range(1, 5), 5), (range(2, 32), 1)):
        flags = np.zeros(64, np.uint32)
        flags[list(raised)] = 1
        assert set(launch(counted, flags, 64)[32:].tolist()) == {expected}


def test_flags_of_which_the_first_is_missing_are_reported():
    def lost(flags):
        lane = cuda.threadIdx.x & 31
        await_flags(flags + u64(lane * 4), i32(1))
    with pytest.raises(RuntimeError, match="32 threads wait for a flag in device memory"):
        launch(lost, np.array([0] + [1] * 31, np.uint32))


@pytest.mark.parametrize("wait", ["mbar_wait", "mbar_wait_covered"])
def test_an_arrival_that_never_comes_is_reported(wait):
    wait = getattr(ptx, wait)

    def lost(flags):
        bar = i32(ptx.smem_addr(cuda.shared.array(0, types.uint8)))
        if cuda.threadIdx.x == 0:
            ptx.mbar_init(bar, 2)
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            ptx.mbar_arrive(bar)
        wait(bar, 0)
    with pytest.raises(RuntimeError, match="32 threads wait for mbarrier"):
        launch(lost, np.zeros(1, np.uint32), smem=64)
