"""``Kernel`` under the simulator, what the simulator refuses, and how launchers look at arrays."""
from __future__ import annotations

import ctypes
import re
from pathlib import Path

import numpy as np
import pytest
from numba import cuda
from numba.cuda import types

from jev_kernels import ptx
from jev_kernels.ptx import f32, i32, u32, u64
from jev_kernels.runtime import launch
from jev_kernels.runtime.launch import Kernel, address
from jev_kernels.sim import simulator

VECTOR = types.float32[::1]


def run(function, *args, threads=32, grid=1, smem=0, signature=None):
    Kernel(function, signature or types.void(*(VECTOR,) * len(args)), threads, smem)(0, grid, *args)


# ---------------------------------------------------------------- what the simulator does
def test_blocks_threads_and_scalars():
    def kernel(out, scale, base):
        i = cuda.blockIdx.x * cuda.blockDim.x * cuda.blockDim.y + cuda.threadIdx.y * cuda.blockDim.x + cuda.threadIdx.x
        out[i] = scale * f32(i + cuda.blockIdx.y) + f32(base)

    out = np.full(24, np.nan, np.float32)
    run(kernel, out, 0.5, -3, threads=(4, 3), grid=(2, 1), signature=types.void(VECTOR, f32, i32))
    np.testing.assert_array_equal(out, np.arange(24) * 0.5 - 3)


def test_arguments_are_checked():
    def kernel(x, n):
        pass

    signature = types.void(VECTOR, i32)
    with pytest.raises(TypeError, match="takes 2 arguments"):
        run(kernel, np.zeros(3, np.float32), signature=signature)
    with pytest.raises(TypeError, match="expected"):
        run(kernel, np.zeros(3, np.float64), 1, signature=signature)
    with pytest.raises(TypeError, match="does not fit"):
        run(kernel, np.zeros(3, np.float32), 2**31, signature=signature)


def test_a_missing_barrier_shows_in_one_order(monkeypatch):
    def kernel(out):
        tile = cuda.shared.array(32, f32)
        i = cuda.threadIdx.x
        tile[i] = f32(i)
        out[i] = tile[31 - i]

    results = []
    for schedule in ("forward", "backward"):
        monkeypatch.setattr(simulator, "SCHEDULE", schedule)
        out = np.zeros(32, np.float32)
        run(kernel, out)
        results.append(out)
    assert np.isnan(results[0]).any() and not np.array_equal(*results)


def test_shared_and_local_memory_start_as_nan():
    def kernel(out):
        out[0] = cuda.shared.array(4, f32)[1]
        out[1] = cuda.local.array(4, f32)[2]
        out[2] = cuda.shared.array(0, f32)[3]

    out = np.zeros(3, np.float32)
    run(kernel, out, smem=64)
    assert np.isnan(out).all()


def test_static_and_dynamic_shared_memory_are_apart():
    def kernel(out):
        a = cuda.shared.array((2, 3), f32)
        b = cuda.shared.array(0, types.uint8)
        if cuda.threadIdx.x == 0:
            out[0] = f32(ptx.smem_addr(b) - ptx.smem_addr(a))
            out[1] = f32(ptx.smem_addr(a[1]) - ptx.smem_addr(a))
            out[2] = f32(b.shape[0])

    out = np.zeros(3, np.float32)
    run(kernel, out, smem=100)
    np.testing.assert_array_equal(out, [32, 12, 100])


def test_a_deadlock_says_who_waits():
    def kernel(out):
        if cuda.threadIdx.x < 16:
            ptx.shfl_xor(f32(1), 1)
        cuda.syncthreads()

    with pytest.raises(RuntimeError, match="deadlock.*16 threads wait for shfl_xor in warp 0"):
        run(kernel, np.zeros(1, np.float32))


def test_lanes_at_different_instructions():
    def kernel(out):
        if cuda.threadIdx.x < 16:
            ptx.shfl_xor(f32(1), 1)
        else:
            ptx.ballot(1)

    with pytest.raises(RuntimeError, match="different instructions: ballot, shfl_xor"):
        run(kernel, np.zeros(1, np.float32))


def test_an_mbarrier_that_nobody_completes():
    def kernel(out):
        bar = ptx.smem_addr(cuda.shared.array(1, types.uint64))
        if cuda.threadIdx.x == 0:
            ptx.mbar_init(bar, 2)
            ptx.mbar_arrive(bar)
        cuda.syncthreads()
        ptx.mbar_wait(bar, 0)

    with pytest.raises(RuntimeError, match="deadlock.*32 threads wait for mbarrier"):
        run(kernel, np.zeros(1, np.float32))


def test_threads_that_have_left_do_not_hold_up_a_barrier():
    def kernel(out):
        if cuda.threadIdx.x >= 20:
            return
        cuda.syncthreads()
        out[cuda.threadIdx.x] = f32(cuda.syncthreads_count(cuda.threadIdx.x < 7))

    out = np.zeros(20, np.float32)
    run(kernel, out)
    assert (out == 7).all()


def test_the_first_failure_stops_the_block():
    def kernel(out):
        if cuda.threadIdx.x == 3:
            out[100] = f32(1)
        cuda.syncthreads()

    with pytest.raises(IndexError) as failure:
        run(kernel, np.zeros(1, np.float32))
    where = "thread (3, 0, 0) of block (0, 0, 0)"
    assert where in getattr(failure.value, "__notes__", [where])       # Python 3.10 has no notes


@pytest.mark.parametrize("offset, error", [(4 * 8, IndexError), (-4, IndexError), (2, ValueError)])
def test_global_accesses_are_checked(offset, error):
    def kernel(at, offset):
        ptx.ldg(u64(int(at) + offset))

    x = np.zeros(8, np.float32)
    with pytest.raises(error, match="global access of 4 bytes"):
        run(kernel, address(x), offset, threads=1, signature=types.void(u64, i32))


def test_shared_accesses_are_checked():
    def kernel(out):
        ptx.lds(ptx.smem_addr(cuda.shared.array(4, f32)) + 16)

    with pytest.raises(IndexError, match="outside the block's shared arrays"):
        run(kernel, np.zeros(1, np.float32), threads=1)


def test_cp_async_arrives_at_the_wait():
    def kernel(src, out):
        tile = cuda.shared.array(4, f32)
        ptx.cp16(ptx.smem_addr(tile), ptx.gmem_addr(src), 16)
        ptx.cp_commit()
        out[0] = tile[1]
        ptx.cp_wait0()
        out[1] = tile[1]

    out = np.zeros(2, np.float32)
    run(kernel, np.arange(4, dtype=np.float32), out, threads=1)
    assert np.isnan(out[0]) and out[1] == 1


def test_integer_casts_wrap():
    assert i32(2**31) == -(2**31) and i32(-1) == -1 and u32(-1) == 2**32 - 1 and u64(2**64 + 3) == 3
    assert i32(3.7) == 3 and u32(np.int64(-2)) == 2**32 - 2


def test_instructions_say_that_they_are_not_simulated():
    mine = ptx.ptx("mine", i32, (i32,), "not $0, $1;", "=r,r")
    with pytest.raises(NotImplementedError, match="mine"):
        mine(3)
    assert ptx.ptx("mine", i32, (i32,), "not $0, $1;", "=r,r", sim=lambda x: ~x)(3) == -4
    with pytest.raises(ValueError, match="clusters of 2"):
        Kernel(lambda x: None, types.void(VECTOR), 32, cluster=2)(0, 3, np.zeros(1, np.float32))


def test_device_functions_see_the_kernel():
    @ptx.device_function
    def where():
        return cuda.threadIdx.x

    def kernel(out):
        out[cuda.threadIdx.x] = f32(where())

    out = np.zeros(32, np.float32)
    run(kernel, out)
    np.testing.assert_array_equal(out, np.arange(32))


# ---------------------------------------------------------------- launchers' view of arrays
def test_view():
    base = cuda.to_device(np.arange(40, dtype=np.uint16).reshape(4, 10))
    v = launch.view("x", base[1:, 2:8], np.uint16, None, 6)
    assert v.shape == (3, 6) and v.strides == (10, 1) and v.address == address(base) + 2 * 12
    assert launch.view("x", base, np.uint16, 4, 10).strides == (10, 1)
    for bad, message in ((base[:, ::2], "contiguous in its last"), (base.T, "shape"), (base[0], "shape"),
                         ([1], "device array"), (cuda.to_device(np.zeros((4, 10), np.float16)), "uint16, not float16")):
        with pytest.raises(ValueError, match=f"^x .*({message})"):
            launch.view("x", bad, np.uint16, 4, None)


def test_aligned():
    base = cuda.to_device(np.zeros(1024, np.uint16))
    first = -address(base) % 16 // 2                                   # host arrays need not start at a multiple of 16
    even = base[first:first + 960].reshape(8, 120)
    views = {"whole": even, "columns": even[:, 8:24], "shifted": even[:, 1:17], "odd": even[:, :15]}
    found = {k: launch.aligned(launch.view("x", v, np.uint16, None, None)) for k, v in views.items()}
    assert found == {"whole": True, "columns": True, "shifted": False, "odd": False}
    odd_rows = base[first:first + 984].reshape(8, 123)[:, :16]
    assert not launch.aligned(launch.view("x", odd_rows, np.uint16, None, None))


def test_live():
    counts = cuda.to_device(np.arange(16, dtype=np.int32))
    assert launch.live(counts, 4) == address(counts) + 16
    with pytest.raises(ValueError, match="^counts"):
        launch.live(counts, 16)
    with pytest.raises(ValueError, match="^counts"):
        launch.live(cuda.to_device(np.zeros(16, np.int64)), 0)


def test_argument_packing():
    """An array as Numba's compiled code takes it: two unused pointers, count, item size, data, shape, byte strides."""
    class Array:
        __cuda_array_interface__ = {"shape": (3, 5), "typestr": "<u2", "data": (4096, False), "strides": None,
                                    "version": 3}

    values, ctyp = launch.pack_argument(types.uint16[:, ::1], Array())
    assert values == [0, 0, 15, 2, 4096, 3, 5, 10, 2] and len(ctyp) == 9 and ctyp[2] is ctypes.c_int64
    assert launch.pack_argument(types.float32, 1.5) == ([1.5], [ctypes.c_float])


def test_the_simulation_has_every_instruction():
    source = (Path(launch.__file__).parents[1] / "ptx/device.py").read_text()
    names = re.findall(r"^(\w+) = ptx\(", source, re.M) + re.findall(r"^def (\w+)\(", source, re.M)
    assert len(names) > 90 and not [n for n in names if not hasattr(ptx, n)]
