"""``jev_kernels.ptx.wgmma`` in plain Python, for the simulator.

A product is computed when the last of a warpgroup's 128 threads has come to it, and reaches its registers at the wait that
covers it: until then a tuple is a ``Started`` that cannot be indexed, and an array holds NaN. If by then shared memory that
the product reads has changed, or registers of its first operand, the wait fails: a GPU may have read either.
"""
from __future__ import annotations

import collections
import threading

import numpy as np

from jev_kernels import bf16
from jev_kernels.ptx import fragments
from jev_kernels.sim.simulator import collective

THREADS = 128                                  # of a warpgroup
K = 16                                         # of an instruction
ADDRESS_BITS = 0x3FFFF                         # of a shared address; those above are the block's rank in its cluster


class Started:
    """A tile that a product in flight will have written."""

    def __init__(self, values):
        self.values = values


class _Group:
    """One product of a warpgroup: what it reads of shared memory, and what that held."""

    def __init__(self, cells, held):
        self.cells, self.held = cells, held


def to_float(dtype: str, bits: np.ndarray) -> np.ndarray:
    """float32 of 16-bit values."""
    return bf16.to_float32(bits) if dtype == "bf16" else bits.view(np.float16).astype(np.float32)


def matrix_cells(address: int, n: int, matrix) -> np.ndarray:
    """Which 16-bit cells of shared memory are the [16, n] matrix (k by n) at an address, as a descriptor says."""
    k, c = np.meshgrid(np.arange(K), np.arange(n), indexing="ij")
    if matrix.transposed:
        if not matrix.swizzled:
            raise NotImplementedError("transposed operands without a swizzle")
        at = address + c // 64 * matrix.leading + k // 8 * matrix.stride + k % 8 * 128 + c % 64 * 2
    elif matrix.swizzled:
        at = address + c // 8 * matrix.stride + c % 8 * 128 + k * 2
    else:
        at = address + k // 8 * matrix.leading + c // 8 * matrix.stride + c % 8 * 16 + k % 8 * 2
    if matrix.swizzled:
        at = at ^ (at >> 7 & 7) << 4
    return at // 2


def from_registers(dtype: str, registers) -> np.ndarray:
    """The float32 [64, 16] operand that 128 threads hold in four registers each, uint32 [128, 4]."""
    pairs = np.asarray(registers, np.uint32).reshape(4, 32, 4)
    halves = np.stack([pairs & 0xFFFF, pairs >> 16], -1).astype(np.uint16)
    out = np.empty((4, 16, 16), np.uint16)
    out[(slice(None), *fragments.a_pairs())] = halves
    return to_float(dtype, out.reshape(64, 16))


def tile(registers, n: int) -> np.ndarray:
    """The float32 [64, n] tile that 128 threads hold, [128, n / 2]."""
    out = np.empty((4, 16, n), np.float32)
    out[(slice(None), *fragments.accumulators(n))] = np.asarray(registers, np.float32).reshape(4, 32, n // 2)
    return out.reshape(64, n)


def tile_registers(values: np.ndarray) -> np.ndarray:
    """The inverse of ``tile``."""
    n = values.shape[1]
    return values.reshape(4, 16, n)[(slice(None), *fragments.accumulators(n))].reshape(THREADS, n // 2)


def _in_flight(thread) -> collections.deque:
    """A thread's groups: (group, its array or None, what that will hold, (registers of the operand, what they held) or
    None)."""
    if not hasattr(thread, "wgmma_groups"):
        thread.wgmma_groups = collections.deque()
    return thread.wgmma_groups


def _held(thread, tile) -> np.ndarray:
    """What a tile will hold when all products so far are over."""
    if isinstance(tile, Started):
        return tile.values
    for _, array, values, _ in reversed(_in_flight(thread)):
        if array is tile:
            return values
    return np.array(tile, np.float32)


def wgmma(name, dtype, d, a, b, steps, accumulate, in_place, wait):
    """See ``ptx.wgmma.wgmma``."""
    a_registers = isinstance(a, int)

    def compute(members):
        places = {(None if a_registers else int(a_given), int(b_at)) for _, (_, a_given, b_at) in members}
        if len(places) > 1:
            raise RuntimeError(f"{name}: threads of a warpgroup give different addresses")
        (a_at, b_at), = places
        by_thread = sorted(members, key=lambda member: member[0].thread_id)
        tiles = [_held(thread, tile) if accumulate else np.full(d, np.nan, np.float32) for thread, (tile, _, _) in by_thread]
        values, read, written, memory = np.stack(tiles), [], set(), members[0][0].block.window.view(np.uint16)
        for step in steps:
            b_cells = matrix_cells((b_at & ADDRESS_BITS) + step.b, step.n, b)
            read.append(b_cells)
            if a_registers:
                x = from_registers(dtype, [[int(r) for r in a_given[step.a:step.a + 4]] for _, (_, a_given, _) in by_thread])
            else:
                read.append(matrix_cells((a_at & ADDRESS_BITS) + step.a, 64, a))
                x = to_float(dtype, memory[read[-1]]).T
            part = slice(step.d, step.d + step.n // 2)
            product = tile_registers(x.astype(np.float64) @ to_float(dtype, memory[b_cells]))
            values[:, part] = values[:, part] + product if accumulate or step.d in written else product
            written.add(step.d)
        read = np.unique(np.concatenate([cells.reshape(-1) for cells in read]))
        group, started = _Group(read, memory[read].copy()), {}
        for (thread, (tile, a_given, _)), mine in zip(by_thread, values):
            operand = (a_given, np.array(a_given, np.uint32)) if a_registers else None
            _in_flight(thread).append((group, tile if in_place else None, mine, operand))
            if in_place:
                tile[:d] = np.nan
            started[thread] = None if in_place else Started(mine)
        block = by_thread[0][0].block
        races = block.races
        if races:
            for warp in range(4):
                numbers = [thread.number for thread, _ in by_thread[32 * warp:32 * warp + 32]]
                races.begin_reads(races.products(numbers[0] // 32), numbers, read + block.rank * races.block_cells)
        return [started[thread] for thread, _ in members]

    def product(*given):
        me = threading.current_thread()
        given = given if len(given) == 3 else (None, *given)
        started = me.block.meet(me, ("wgmma", me.thread_id // THREADS), THREADS, given, compute, f"{name} of a warpgroup")
        if wait is not None:
            _wait(name, wait)
        return started
    return product


def _wait(name, left):
    """All but the ``left`` latest groups of this warp have ended: their results reach the registers."""
    me = threading.current_thread()

    def compute(threads):
        memory = me.block.window.view(np.uint16)
        for thread in threads:
            groups = _in_flight(thread)
            while len(groups) > left:
                group, array, values, operand = groups.popleft()
                if thread is threads[0] and not np.array_equal(memory[group.cells], group.held):
                    raise RuntimeError(f"{name}: shared memory that a product in flight reads has been overwritten")
                if operand is not None and not np.array_equal(*operand):
                    raise RuntimeError(f"{name}: registers that a product in flight reads have been overwritten")
                if array is not None and not any(later is array for _, later, _, _ in groups):
                    array[:len(values)] = values
        if me.block.races:
            numbers = [thread.number for thread in threads]
            me.block.races.end_reads(me.block.races.products(numbers[0] // 32), numbers, left)
        return [None] * len(threads)
    collective(name, me, compute)


def wgmma_wait(name, left, results, kept, in_place):
    """See ``ptx.wgmma.wgmma_wait``."""
    def wait(*given):
        _wait(name, left)
        if in_place:
            return None
        first, me = given[0], threading.current_thread()
        if not isinstance(first, Started) or any(values is first.values for _, _, values, _ in _in_flight(me)):
            return first
        return first.values
    return wait


def zeros(d):
    """See ``ptx.wgmma.zeros``."""
    return lambda: np.zeros(d, np.float32)
