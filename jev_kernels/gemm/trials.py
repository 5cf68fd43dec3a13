"""What the choice of GEMM algorithms rests on: random data on the device, comparison of bits, timing.

See ``selection.py``, which chooses.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numba import cuda
from numba.cuda import types

from jev_kernels.pool import COUNTS, ROWS
from jev_kernels.ptx import pack
from jev_kernels.runtime import device
from jev_kernels.runtime.graph import capture
from jev_kernels.runtime.launch import Kernel

MAX_COPIES = 16                # of a weight: 128 MB of the smallest that is timed
SLOW = 1.5                     # an algorithm that many times slower than the best in its first replay gets no second
REFERENCE_ROWS = 128           # rows at which the reference order is chosen, and of the blocks that apply it


# ---------------------------------------------------------------- random data and comparison
@cuda.jit(device=True, inline="always")
def hashed_normal(index, seed):
    """float32, near-normal, from the bytes of a 32-bit mix (MurmurHash3's finalizer) of index and seed."""
    h = types.uint32(index ^ types.uint32(seed * types.uint32(0x9E3779B9)))
    h = types.uint32(types.uint32(h ^ (h >> types.uint32(16))) * types.uint32(0x85EBCA6B))
    h = types.uint32(types.uint32(h ^ (h >> types.uint32(13))) * types.uint32(0xC2B2AE35))
    h = types.uint32(h ^ (h >> types.uint32(16)))
    total = (h & types.uint32(255)) + ((h >> types.uint32(8)) & types.uint32(255)) + (
        (h >> types.uint32(16)) & types.uint32(255)) + (h >> types.uint32(24))
    return (types.float32(total) - types.float32(510.0)) * types.float32(1 / 147.8)


def random_bf16(out, seed, spread):
    """out [rows, cols] uint16: BF16 near-normal numbers (four added bytes) of variance 1, times exp(spread z) with a z
    per column. A function of (seed, row, column) alone."""
    rows, cols = out.shape
    first = cuda.grid(1)
    for i in range(first, rows * cols, cuda.gridsize(1)):
        row = i // cols
        col = i - row * cols
        value = hashed_normal(types.uint32(i), types.uint32(seed))
        scale = cuda.libdevice.expf(spread * hashed_normal(types.uint32(col), types.uint32(seed + 1)))
        out[row, col] = types.uint16(pack(value * scale, types.float32(0)) & types.uint32(0xFFFF))


def count_different(a, b, found):
    """found[0] += the number of elements in which a and b, uint16 [rows, cols], differ."""
    rows, cols = a.shape
    wrong = 0
    for i in range(cuda.grid(1), rows * cols, cuda.gridsize(1)):
        row = i // cols
        col = i - row * cols
        if a[row, col] != b[row, col]:
            wrong += 1
    if wrong:
        cuda.atomic.add(found, 0, wrong)


_MATRIX = types.Array(types.uint16, 2, "A")
RANDOM = Kernel(random_bf16, types.void(_MATRIX, types.int32, types.float32), threads=256)
DIFFERENT = Kernel(count_different, types.void(_MATRIX, _MATRIX, types.Array(types.int32, 1, "C")), threads=256)
FILL_BLOCKS = 132 * 8


def kernels() -> dict:
    """The two helpers for the resource budget: {name: (Kernel, [cc], registers, spilled bytes)}."""
    return {k.name: (k, [(8, 0), (9, 0, "a")], 64, 0) for k in (RANDOM, DIFFERENT)}


# ---------------------------------------------------------------- trials
class Trial:
    """Random data of one weight shape for up to ``rows`` rows, on the device: what admission and timing run on.

    weights   copies that together exceed the L2 cache several times, so that timing reads them from memory
    x         [rows, K]; reference, y [rows, N], or [rows, N / 2] if gated; rows rounded up to whole reference blocks
    """

    def __init__(self, n: int, k: int, gated: bool, rows: int, l2_bytes: int, stream):
        self.n, self.k, self.gated, self.stream = n, k, gated, stream
        self.rows = rows = -(-rows // REFERENCE_ROWS) * REFERENCE_ROWS
        copies = max(1, min(MAX_COPIES, -(-4 * l2_bytes // (2 * n * k))))
        sizes = [(n, k)] * copies + [(rows, k)] + [(rows, n // 2 if gated else n)] * 2 + [(rows, n)] * gated
        self.arena = device.Arena(sum(map(device.array_bytes, sizes)) + device.array_bytes(rows + COUNTS, np.int32) + 256,
                                  f"tuning GEMMs of {n} x {k}")
        arrays = [self.arena.take(s) for s in sizes]
        self.weights, (self.x, self.reference, self.y, *between) = arrays[:copies], arrays[copies:]
        self.gate_up = between[0] if gated else None
        self.numbers = self.arena.take(rows + COUNTS, np.int32)             # 0, 1, 2 ...
        device.to_device(self.numbers, np.arange(rows + COUNTS, dtype=np.int32), stream)
        self.found = self.arena.take(1, np.int32)
        self.referenced = 0                       # rows of ``reference`` that are there
        for seed, w in enumerate(self.weights):
            RANDOM(stream, FILL_BLOCKS, w, 2 * seed + 11, 0.0)
        RANDOM(stream, FILL_BLOCKS, self.x, 1, 2.0)

    def differences(self, plan: Callable, rows: int, reference=None) -> int:
        """Elements in which ``plan``, bound to y's first rows, differs from the reference; y is poisoned before."""
        reference = self.reference if reference is None else reference
        for array in (self.y, self.gate_up) if self.gated else (self.y,):
            device.fill(array[:rows], 0x7FC1, self.stream)
        device.fill(self.found, 0, self.stream)
        plan(self.stream)
        DIFFERENT(self.stream, FILL_BLOCKS, self.y[:rows], reference[:rows], self.found)
        self.stream.synchronize()
        return int(self.found.copy_to_host()[0])

    def counts(self, rows: int):
        """The pool's ``counts`` with so many rows."""
        return self.numbers[rows - ROWS:][:COUNTS]

    def time(self, plans: dict[str, Sequence[Callable]], rows: int, repeats: int = 3) -> dict[str, float]:
        """us a launch for each name: the median of ``repeats`` replays of a graph that goes round the weights.

        Names alternate, so that heat and clocks are shared evenly. The first replay is warm-up; what is SLOW in it is
        timed by it alone.
        """
        launches = len(self.weights) * max(1, (8 if rows <= 512 else 4 if rows <= 1024 else 2) // len(self.weights))
        graphs = {}
        for name, bound in plans.items():
            def launch_all(bound=bound):
                for i in range(launches):
                    bound[i % len(bound)](self.stream, pdl=True)
            graphs[name] = capture(self.stream, launch_all, keep=tuple(bound))
        times: dict[str, list[float]] = {name: [] for name in plans}
        for replay in range(repeats + 1):
            for name, graph in graphs.items():
                if replay and times[name][0] > SLOW * min(t[0] for t in times.values()):
                    continue
                start = device.Event().record(self.stream)
                graph.launch(self.stream)
                end = device.Event().record(self.stream)
                end.synchronize()
                times[name].append(start.milliseconds_to(end) * 1e3 / launches)
        for graph in graphs.values():
            graph.destroy()
        timed = {name: sorted(t[1:] or t) for name, t in times.items()}
        return {name: t[len(t) // 2] for name, t in timed.items()}
