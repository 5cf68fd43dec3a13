"""``ptx.wgmma`` and ``ptx.fragments`` in the simulator: every way an operand may lie, and what is not awaited."""
from __future__ import annotations

import inspect

import numpy as np
import pytest
from numba import cuda
from numba.cuda import types

from jev_kernels import bf16, ptx
from jev_kernels.ptx import fragments, generated
from jev_kernels.ptx.wgmma import K_MAJOR, SharedMatrix, Step, along_k, wgmma, wgmma_wait, zeros
from jev_kernels.runtime.launch import Kernel, address
from jev_kernels.sim import wgmma as simulated

N, DEPTH = 24, 64
LANES = range(32)


def test_maps_are_those_of_the_manual():
    """Figures of PTX ISA 9.7.14.5.8 and 9.7.15.5.1.1, written out lane by lane."""
    rows, columns = fragments.accumulators(16)
    for lane in LANES:
        g, t = lane // 4, lane % 4
        assert (fragments.row(lane), fragments.column(lane)) == (g, 2 * t)
        assert list(zip(rows[lane], columns[lane])) == [
            (g, 2 * t), (g, 2 * t + 1), (g + 8, 2 * t), (g + 8, 2 * t + 1),
            (g, 2 * t + 8), (g, 2 * t + 9), (g + 8, 2 * t + 8), (g + 8, 2 * t + 9)]
        for (a_row, a_column), (row, k) in zip(zip(*(x[lane] for x in fragments.a_pairs())),
                                               ((g, 2 * t), (g + 8, 2 * t), (g, 2 * t + 8), (g + 8, 2 * t + 8))):
            assert list(a_row) == [row, row] and list(a_column) == [k, k + 1]
        b_rows, b_columns = (x[lane] for x in fragments.b_pairs())
        assert b_rows.tolist() == [[2 * t, 2 * t + 1], [2 * t + 8, 2 * t + 9]] and (b_columns == g).all()
        assert [x[lane].tolist() for x in fragments.a_tf32()] == [[g, g + 8, g, g + 8], [t, t, t + 4, t + 4]]
        assert [x[lane].tolist() for x in fragments.b_tf32()] == [[t, t + 4], [g, g]]
        assert [x[lane].tolist() for x in fragments.pairs8()] == [[g, g], [2 * t, 2 * t + 1]]
    for accumulator, a in zip(fragments.accumulators(16), fragments.a_pairs()):
        assert np.array_equal(accumulator.reshape(32, 4, 2), a)            # packed pair by pair it is an A


def swizzled(rows):
    """Bytes of a tile [rows, 64] of 16-bit values as TMA leaves it in shared memory."""
    pieces, r = rows.reshape(len(rows), 8, 8), np.arange(len(rows))[:, None]
    return np.ascontiguousarray(pieces[r, np.arange(8) ^ r % 8]).view(np.uint8).reshape(-1)


def core_matrices(rows):
    """... of a tile [rows, 64] as core matrices, those of 8 rows one behind the other along k."""
    return np.ascontiguousarray(rows.reshape(len(rows) // 8, 8, 8, 8).transpose(0, 2, 1, 3)).view(np.uint8).reshape(-1)


def run(body, *memory):
    """The tile [64, N] that a warpgroup holds after body(addresses of the pieces of memory, thread), which returns the
    registers."""
    starts = np.cumsum([0] + [-(-len(m) // 1024) * 1024 for m in memory])
    source = np.zeros(starts[-1], np.uint8)
    for start, m in zip(starts, memory):
        source[start:start + len(m)] = m
    out = np.zeros((128, N // 2), np.float32)

    def kernel(source, out):
        at = (ptx.smem_addr(cuda.shared.array(0, types.uint8)) + 1023) & ~1023
        tid = cuda.threadIdx.x
        for i in range(tid * 16, int(starts[-1]), 2048):
            ptx.cp16(at + i, source + i, 16)
        ptx.cp_wait_all()
        ptx.fence_async()
        cuda.syncthreads()
        tile = body([at + int(start) for start in starts], tid)
        for i in range(N // 2):
            ptx.stg(out + (tid * (N // 2) + i) * 4, tile[i])
    launch = Kernel(kernel, types.void(types.uint64, types.uint64), 128, smem=int(starts[-1]) + 1024)
    launch(0, 1, address(source), address(out))
    return simulated.tile(out, N)


def operands(dtype):
    """(a [64, 64], b [N, 64]) as bits and as float64."""
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(s).astype(np.float32) for s in ((64, DEPTH), (N, DEPTH))]
    if dtype == "f16":
        bits = [v.astype(np.float16).view(np.uint16) for v in values]
    else:
        bits = [bf16.from_float32(v) for v in values]
    return bits, [simulated.to_float(dtype, b).astype(np.float64) for b in bits]


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_both_operands_in_shared_memory(dtype):
    (a, b), (x, y) = operands(dtype)
    start = wgmma("start", dtype, N // 2, K_MAJOR, K_MAJOR, along_k(N, 1, 0, 0))
    wait, zero = wgmma_wait("wait", 0, (N // 2,)), zeros("zero", N // 2)
    got = run(lambda at, tid: wait(start(zero(), at[0], at[1])), swizzled(a), swizzled(b))
    np.testing.assert_allclose(got, x @ y.T, rtol=2e-5, atol=2e-5)
    fresh = wgmma("fresh", dtype, N // 2, K_MAJOR, K_MAJOR, along_k(N, 1, 0, 0), accumulate=False)
    assert np.array_equal(run(lambda at, tid: wait(fresh(at[0], at[1])), swizzled(a), swizzled(b)), got)


@pytest.mark.parametrize("layout", ["swizzled", "core matrices", "transposed"])
def test_first_operand_in_registers(layout):
    """In place, twice: the second product goes on from the first while it is in flight."""
    (a, b), (x, y) = operands("bf16")
    matrix, memory, step = {
        "swizzled": (SharedMatrix(), swizzled(b), lambda k: 32 * k),
        "core matrices": (SharedMatrix(leading=128, stride=1024, swizzled=False), core_matrices(b), lambda k: 256 * k),
        "transposed": (SharedMatrix(leading=8192, transposed=True),
                       swizzled(np.concatenate([b.T, np.zeros((DEPTH, 64 - N), np.uint16)], 1)), lambda k: 2048 * k)}[layout]
    steps = [Step(N, 0, 4 * k, step(k)) for k in range(4)]
    overwrite = wgmma("overwrite", "bf16", N // 2, 16, matrix, steps, accumulate=False, in_place=True)
    add, wait = (wgmma("add", "bf16", N // 2, 16, matrix, steps, in_place=True),
                 wgmma_wait("wait", 0, (N // 2,), (16,), in_place=True))
    rows, columns = fragments.a_pairs()
    registers = a.reshape(4, 16, 4, 16)[:, rows, :, columns]        # lane, register, half | warp, k
    registers = bf16.pack_pairs(np.ascontiguousarray(registers.transpose(3, 0, 4, 1, 2))).reshape(128, 16)

    def body(at, tid):
        tile = np.zeros(N // 2, np.float32)
        mine = registers[tid].copy()
        overwrite(tile, mine, at[0])
        add(tile, mine, at[0])
        assert np.isnan(tile).all()                        # not there before the wait
        wait(tile, mine)
        return tile
    np.testing.assert_allclose(run(body, memory), 2 * x @ y.T, rtol=2e-5, atol=4e-5)


@pytest.mark.parametrize("wrong", ["no wait", "one group too many left", "overwritten"])
def test_what_is_not_awaited(wrong):
    (a, b), _ = operands("bf16")
    start = wgmma("start", "bf16", N // 2, K_MAJOR, K_MAJOR, along_k(N, 1, 0, 0), accumulate=False)
    wait = wgmma_wait("wait", int(wrong == "one group too many left"), (N // 2,))

    def body(at, tid):
        tile = start(at[0], at[1])
        if wrong == "overwritten":
            ptx.sts(at[1] + 4 * tid, np.float32(1))
        return tile if wrong == "no wait" else wait(tile)
    with pytest.raises((TypeError, RuntimeError), match="overwritten" if wrong == "overwritten" else "Started"):
        run(body, swizzled(a), swizzled(b))


def test_a_warpgroup_gives_one_address():
    (a, b), _ = operands("bf16")
    start = wgmma("start", "bf16", N // 2, K_MAJOR, K_MAJOR, along_k(N, 1, 0, 0), accumulate=False)
    with pytest.raises(RuntimeError, match="different addresses"):
        run(lambda at, tid: start(at[0], at[1] + tid // 64 * 32), swizzled(a), swizzled(b))


def test_generated_functions_show_their_source():
    made = generated.function("def twice(x):\n    return two * x\n", two=2)
    assert made(4) == 8 and "two * x" in inspect.getsource(made) and generated.source(made).startswith("def twice")
