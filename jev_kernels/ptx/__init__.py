"""Tensor-core, async-copy and warp instructions as Numba intrinsics, one PTX statement each.

``ptx(name, ret, args, text, constraints)`` makes an intrinsic. Operand types are scalars or ``(type, n)``: n registers,
a tuple in Python. Under the simulator (``NUMBA_ENABLE_CUDASIM=1``) the same names come from ``sim.ptx``, in
plain Python.

Shared-memory addresses are int32 throughout: in Numba uint32 + uint32 is uint64 and uint64 + int64 is float64, so
unsigned address arithmetic goes wrong silently. int32 + int32 is int64, which is harmless in expressions (LLVM narrows
it); loop-carried counters are cast back with ``i32()`` so that they stay 32-bit registers. Addresses in device memory
are uint64, built as ``base + u64(offset)``.

Source: NVIDIA's PTX ISA manual (sections 9.7.9 data movement, 9.7.13 mbarrier, 9.7.14 mma, 9.7.15 wgmma).
"""
from __future__ import annotations

from numba.cuda.core import config

if config.ENABLE_CUDASIM:
    from jev_kernels.sim.ptx import *  # noqa: F401,F403
else:
    from jev_kernels.ptx.device import *  # noqa: F401,F403
