"""The conversion instructions against the definition, over all 2^32 float32 patterns, NaNs included and bit for bit."""
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numba import cuda
from numba.cuda import types

from jev_kernels import bf16, ptx
from jev_kernels.ptx import u32
from jev_kernels.runtime.launch import Kernel
from tests.kernels.test_bf16 import test_device_functions, test_eight_values_at_a_time  # noqa: F401

pytestmark = pytest.mark.gpu
BATCH = 1 << 28
SLICE = 1 << 20


def convert(first, out, differing):
    """out[i] = the instruction's result for pattern first + i; counts where the definition or packed forms differ."""
    i = cuda.grid(1)
    bits = u32(first + i)
    x = ptx.f32_bits(bits)
    y = ptx.f32_bits(u32(bits ^ u32(0x9E3779B9)))                   # some other pattern beside it
    result = bf16.from_f32(x)
    out[i] = result
    pair = ptx.pack(x, y)
    wrong = result != bf16.from_f32_by_definition(x)
    wrong |= pair & u32(0xFFFF) != u32(result) or pair >> u32(16) != u32(bf16.from_f32_by_definition(y))
    wrong |= ptx.bits_f32(ptx.low(pair)) != u32(result) << u32(16)
    wrong |= ptx.bits_f32(ptx.high(pair)) != pair & u32(0xFFFF0000)
    wrong |= ptx.bits_f32(bf16.to_f32(result)) != u32(result) << u32(16)
    if wrong:
        cuda.atomic.add(differing, 0, 1)


def test_all_float32_patterns():
    kernel = Kernel(convert, types.void(types.uint32, types.uint16[::1], types.int32[::1]), 256)
    out, differing = cuda.device_array(BATCH, np.uint16), cuda.to_device(np.zeros(1, np.int32))
    host = cuda.pinned_array(BATCH, np.uint16)

    def off(at):
        patterns = np.arange(first + at, first + at + SLICE, dtype=np.uint32).view(np.float32)
        return int((bf16.from_float32(patterns) != host[at:at + SLICE]).sum())

    with ThreadPoolExecutor() as pool:
        for first in range(0, 1 << 32, BATCH):
            kernel(0, BATCH // 256, first, out, differing)
            out.copy_to_host(host)
            assert sum(pool.map(off, range(0, BATCH, SLICE))) == 0, f"patterns from {first:#x}"
    assert differing.copy_to_host()[0] == 0
