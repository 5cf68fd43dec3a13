"""Copies between a forward pass and what is kept of prefixes: keys and values by pages, states and convolution inputs by
snapshots. Nothing is computed, so nothing is rounded.

A prefix of a multiple of 64 tokens that was computed before is *resumed*: its keys and values stand in rows behind the
pool's own (its *history*), its state in a slot, and the convolution's last three inputs in rows behind the bucket's.
What this pass shall *keep* is copied the other way. Which ones: int32 arrays in device memory (``jev_kernels.pool``).

    exchange_keys      an attention layer, between RoPE and attention
        history row first + 64 i + j  <-  page restored_pages[i], row j
        page kept_pages[i, 0], row j  <-  row chunk_rows[kept_pages[i, 1], j]
    exchange_inputs    a Gated DeltaNet layer, before its convolution
        row tail + j  <-  input j of snapshot restored_states[i, 0],  tail = restored_states[i, 2],  j = 0..2
        slot restored_states[i, 1]  <-  state of that snapshot
        input j of snapshot kept_states[i, 0]  <-  row chunk_rows[kept_states[i, 1], 61 + j]
        and of the Gated DeltaNet layer before, whose slots nobody has written since, what ``keep_states`` does
    keep_states        after the delta rule of the last such layer
        state of snapshot kept_states[i, 0]  <-  slot chunk_slots[kept_states[i, 1]]

Every launch costs a forward pass that exchanges nothing some 2 us, so there are as few as can be: one a layer, and one. A
slot is restored or kept, never both, so the two halves of ``exchange_inputs`` may run in any order.

Memory of a cache, for one layer (``pages``, ``inputs``, ``states``): entry i lies ``stride`` bytes behind entry i - 1, since
the layers' parts of an entry stand together. K and V of a row are adjacent columns of the projection, so a row of a page
is one run of bytes. A slot's state is copied as it is, whatever layout the delta rule gives it.

The grid depends on nothing; blocks find their work by themselves, and leave at once where there is none.
"""
from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import cuda
from numba.cuda import types

from jev_kernels import ptx
from jev_kernels.pool import CHUNK, COUNTS, KEPT_PAGES, KEPT_STATES, RESTORED_PAGES, RESTORED_STATES, TAPS
from jev_kernels.ptx import i32, u32, u64
from jev_kernels.runtime import cubin
from jev_kernels.runtime.launch import Kernel, view

THREADS = 256
BLOCKS = 132                    # one for each multiprocessor of an H200: all that a snapshot has in a layer, in one round
VECTOR = 16                     # bytes of an access
TOGETHER = 8                    # accesses of a thread under way at a time: rows of a page, or eighths of a piece
PIECES = 2                      # of a head's state, copied by a block each


@ptx.device_function
def copy_runs(target, step, a, b, c, d, e, f, g, h, vectors):
    """Eight runs of ``vectors`` 16-byte vectors by one block: from addresses a to h to ones that are ``step`` bytes apart."""
    i = i32(cuda.threadIdx.x)
    while i < vectors:
        at = u64(i * VECTOR)
        x0 = ptx.ldg_u32x4(a + at)
        x1 = ptx.ldg_u32x4(b + at)
        x2 = ptx.ldg_u32x4(c + at)
        x3 = ptx.ldg_u32x4(d + at)
        x4 = ptx.ldg_u32x4(e + at)
        x5 = ptx.ldg_u32x4(f + at)
        x6 = ptx.ldg_u32x4(g + at)
        x7 = ptx.ldg_u32x4(h + at)
        ptx.stg_u32x4(target + at, x0)
        ptx.stg_u32x4(target + u64(step) + at, x1)
        ptx.stg_u32x4(target + u64(2 * step) + at, x2)
        ptx.stg_u32x4(target + u64(3 * step) + at, x3)
        ptx.stg_u32x4(target + u64(4 * step) + at, x4)
        ptx.stg_u32x4(target + u64(5 * step) + at, x5)
        ptx.stg_u32x4(target + u64(6 * step) + at, x6)
        ptx.stg_u32x4(target + u64(7 * step) + at, x7)
        i = i32(i + THREADS)


@ptx.device_function
def copy8(target, target_step, source, step, vectors):
    """Eight runs, ``step`` bytes apart where they come from."""
    copy_runs(target, target_step, source, source + u64(step), source + u64(2 * step), source + u64(3 * step),
              source + u64(4 * step), source + u64(5 * step), source + u64(6 * step), source + u64(7 * step), vectors)


@ptx.device_function
def row(rows_at, row_bytes, numbers, j):
    """The address of the row whose number is the j-th of ``numbers``."""
    return rows_at + u64(ptx.ldg_i32(numbers + u64(4 * j))) * u64(row_bytes)


@ptx.device_function
def gather8(target, step, rows_at, row_bytes, numbers, vectors):
    """Eight rows by their numbers: a chunk's may be those of several branches."""
    copy_runs(target, step, row(rows_at, row_bytes, numbers, 0), row(rows_at, row_bytes, numbers, 1),
              row(rows_at, row_bytes, numbers, 2), row(rows_at, row_bytes, numbers, 3), row(rows_at, row_bytes, numbers, 4),
              row(rows_at, row_bytes, numbers, 5), row(rows_at, row_bytes, numbers, 6), row(rows_at, row_bytes, numbers, 7),
              vectors)


@ptx.device_function
def copy_state(target, source, piece, piece_bytes):
    """One of the pieces of a layer's state."""
    run = i32(piece_bytes // TOGETHER)
    at = u64(piece) * u64(piece_bytes)
    copy8(target + at, run, source + at, run, i32(run // VECTOR))


@ptx.device_function
def count(counts, index):
    return ptx.ldg_i32(counts + u64(index * 4))


@ptx.device_function
def slot_at(slots, chunk_slots, kept, state_bytes):
    """Where the state after the chunk of an entry of ``kept_states`` is."""
    slot = ptx.ldg_i32(chunk_slots + u64(ptx.ldg_i32(kept + u64(4)) * 4))
    return slots + u64(slot) * u64(state_bytes)


@ptx.device_function
def wait_for_work(items):
    """Whether this block has any; one block waits for the kernel before in any case (see ``Kernel.__call__``)."""
    if i32(cuda.blockIdx.x) < max(items, i32(1)):
        ptx.pdl_wait()
    return i32(cuda.blockIdx.x) < items


@cubin.factory
def keys_kernel() -> Kernel:
    parts = CHUNK // TOGETHER

    def exchange_keys_kernel(counts, restored, kept, chunk_rows, rows_at, row_bytes, first, pages, page_bytes, vectors):
        ptx.pdl_launch()
        n = i32(count(counts, RESTORED_PAGES) * parts)
        items = i32(n + count(counts, KEPT_PAGES) * parts)
        if not wait_for_work(items):
            return
        item = i32(cuda.blockIdx.x)
        wide = i32(vectors * VECTOR)
        while item < items:
            entry = i32((item if item < n else item - n) // parts)
            at = i32((item % parts) * TOGETHER)
            if item < n:
                page = pages + u64(ptx.ldg_i32(restored + u64(entry * 4))) * u64(page_bytes) + u64(at * wide)
                copy8(rows_at + u64(first + entry * CHUNK + at) * u64(row_bytes), row_bytes, page, wide, vectors)
            else:
                page = pages + u64(ptx.ldg_i32(kept + u64(entry * 8))) * u64(page_bytes) + u64(at * wide)
                numbers = chunk_rows + u64((ptx.ldg_i32(kept + u64(entry * 8 + 4)) * CHUNK + at) * 4)
                gather8(page, wide, rows_at, row_bytes, numbers, vectors)
            item = i32(item + cuda.gridDim.x)

    return Kernel(exchange_keys_kernel, types.void(u64, u64, u64, u64, u64, i32, i32, u64, u64, i32), THREADS)


@cubin.factory
def inputs_kernel() -> Kernel:
    def exchange_inputs_kernel(counts, restored, kept, chunk_rows, chunk_slots, rows_at, row_bytes, inputs, inputs_bytes,
                               vectors, snapshots, before, snapshot_bytes, slots, state_bytes, pieces, flags, flags_a_piece,
                               raised):
        ptx.pdl_launch()
        a_row = i32((vectors + THREADS - 1) // THREADS)          # items of an input: one access a thread
        a_restored = i32(TAPS * a_row + pieces)
        a_kept = i32(TAPS * a_row + (pieces if before != u64(0) else i32(0)))
        n = i32(count(counts, RESTORED_STATES) * a_restored)
        items = i32(n + count(counts, KEPT_STATES) * a_kept)
        if not wait_for_work(items):
            return
        item = i32(cuda.blockIdx.x)
        while item < items:
            restoring = item < n
            if restoring:
                entry, part = restored + u64((item // a_restored) * 16), i32(item % a_restored)
            else:
                entry, part = kept + u64(((item - n) // a_kept) * 8), i32((item - n) % a_kept)
            snapshot = u64(ptx.ldg_i32(entry))
            piece = i32(part - TAPS * a_row)
            if piece < 0:
                tap, i = i32(part // a_row), i32(part % a_row * THREADS + cuda.threadIdx.x)
                held = inputs + snapshot * u64(inputs_bytes) + u64((tap * vectors + i) * VECTOR)
                if restoring:
                    number = i32(ptx.ldg_i32(entry + u64(8)) + tap)
                else:
                    number = ptx.ldg_i32(chunk_rows + u64((ptx.ldg_i32(entry + u64(4)) * CHUNK + CHUNK - TAPS + tap) * 4))
                live = rows_at + u64(number) * u64(row_bytes) + u64(i * VECTOR)
                if i < vectors:
                    if restoring:
                        ptx.stg_u32x4(live, ptx.ldg_u32x4(held))
                    else:
                        ptx.stg_u32x4(held, ptx.ldg_u32x4(live))
            elif restoring:
                slot = u64(ptx.ldg_i32(entry + u64(4)))
                copy_state(slots + slot * u64(state_bytes), snapshots + snapshot * u64(snapshot_bytes), piece,
                           i32(state_bytes // pieces))
                if i32(cuda.threadIdx.x) < flags_a_piece:            # to the delta rule the slot is one that was stored
                    flag = (slot * u64(pieces) + u64(piece)) * u64(flags_a_piece) + u64(cuda.threadIdx.x)
                    ptx.stg_u32(flags + flag * u64(4), u32(raised))
            else:
                copy_state(before + snapshot * u64(snapshot_bytes), slot_at(slots, chunk_slots, entry, state_bytes), piece,
                           i32(state_bytes // pieces))
            item = i32(item + cuda.gridDim.x)

    return Kernel(exchange_inputs_kernel, types.void(
        u64, u64, u64, u64, u64, u64, i32, u64, u64, i32, u64, u64, u64, u64, i32, i32, u64, i32, i32), THREADS)


@cubin.factory
def keep_kernel() -> Kernel:
    def keep_states_kernel(counts, kept, chunk_slots, slots, state_bytes, pieces, snapshots, snapshot_bytes):
        ptx.pdl_launch()
        items = i32(count(counts, KEPT_STATES) * pieces)
        if not wait_for_work(items):
            return
        item = i32(cuda.blockIdx.x)
        while item < items:
            entry = kept + u64((item // pieces) * 8)
            copy_state(snapshots + u64(ptx.ldg_i32(entry)) * u64(snapshot_bytes),
                       slot_at(slots, chunk_slots, entry, state_bytes), i32(item % pieces), i32(state_bytes // pieces))
            item = i32(item + cuda.gridDim.x)

    return Kernel(keep_states_kernel, types.void(u64, u64, u64, u64, i32, i32, u64, u64), THREADS)


# ---------------------------------------------------------------- launchers
class Entries(NamedTuple):
    """One layer's part of every page or snapshot: address of the first, bytes from one to the next."""
    at: int
    stride: int


class Raised(NamedTuple):
    """How the delta rule's scan learns that a slot holds a state: ``number`` uint32 flags a head at ``at``, set to
    ``value``. None of them for kernels that do not ask."""
    at: int = 0
    number: int = 0
    value: int = 0


NONE_RAISED = Raised()


def exchange_keys(stream, kv, counts, restored_pages, kept_pages, chunk_rows, first: int, pages: Entries,
                  pdl: bool = False) -> None:
    """Keys and values of one attention layer, to history rows and from rows that are to be kept.

    kv              BF16 [rows, 2 * kv_dim], the columns k | v of the projection, any row stride, 16-byte aligned rows;
                    history rows included
    counts          int32 [16];  restored_pages int32 [n];  kept_pages int32 [n, 2];  chunk_rows int32 [chunks, 64]
    first           the first history row
    pages           entries of [64, 2 * kv_dim] BF16

    Raises ValueError naming the argument that does not fit.
    """
    rows = _rows("kv", kv)
    number, restored = view("counts", counts, np.int32, COUNTS), view("restored_pages", restored_pages, np.int32, None)
    kept = view("kept_pages", kept_pages, np.int32, None, 2)
    chunks = view("chunk_rows", chunk_rows, np.int32, None, CHUNK)
    if first + CHUNK * restored.shape[0] > rows.shape[0]:
        raise ValueError(f"kv has {rows.shape[0]} rows: no room for {restored.shape[0]} pages of history from row {first}")
    width = 2 * rows.shape[1]
    _entries("pages", pages, CHUNK * width)
    keys_kernel()(stream, BLOCKS, number.address, restored.address, kept.address, chunks.address, rows.address,
                  2 * rows.strides[0], first, pages.at, pages.stride, width // VECTOR, pdl=pdl)


def exchange_inputs(stream, qkv, states, counts, restored_states, kept_states, chunk_rows, chunk_slots, inputs: Entries,
                    snapshots: Entries, before: Entries | None = None, raised: Raised = NONE_RAISED, pdl: bool = False) -> None:
    """Inputs of one layer's convolution, states of its delta rule that are resumed, and those of the layer before it that
    are to be kept.

    qkv             BF16 [rows, conv_dim], the convolution's columns of the projection, 16-byte aligned rows; rows for the
                    tails included
    states          float32 [slots, value heads, 128, 128]
    counts          int32 [16];  restored_states int32 [n, 4];  kept_states int32 [n, 2];  chunk_rows int32 [chunks, 64];
                    chunk_slots int32 [chunks]
    inputs          entries of [3, conv_dim] BF16;  snapshots: entries of [value heads, 128, 128] float32
    before          the layer's before it, as far apart as ``snapshots``; None for the first

    Raises ValueError naming the argument that does not fit.
    """
    rows = _rows("qkv", qkv)
    slots, state_bytes, pieces = _states(states)
    number, restored = view("counts", counts, np.int32, COUNTS), view("restored_states", restored_states, np.int32, None, 4)
    kept = view("kept_states", kept_states, np.int32, None, 2)
    chunks = view("chunk_rows", chunk_rows, np.int32, None, CHUNK)
    of_chunk = view("chunk_slots", chunk_slots, np.int32, None)
    width = 2 * rows.shape[1]
    _entries("inputs", inputs, TAPS * width)
    _entries("snapshots", snapshots, state_bytes)
    if before is not None and before.stride != snapshots.stride:
        raise ValueError(f"before must have entries {snapshots.stride} bytes apart, as snapshots, not {before.stride}")
    if raised.number % PIECES:
        raise ValueError(f"raised must have a multiple of {PIECES} flags a head, not {raised.number}")
    inputs_kernel()(stream, BLOCKS, number.address, restored.address, kept.address, chunks.address, of_chunk.address,
                    rows.address, 2 * rows.strides[0], inputs.at, inputs.stride, width // VECTOR, snapshots.at,
                    before.at if before else 0, snapshots.stride, slots.address, state_bytes, pieces, raised.at,
                    raised.number // PIECES, raised.value, pdl=pdl)


def keep_states(stream, states, counts, kept_states, chunk_slots, snapshots: Entries, pdl: bool = False) -> None:
    """States of one layer that are to be kept, from their slots. Arguments as above."""
    slots, state_bytes, pieces = _states(states)
    number, kept = view("counts", counts, np.int32, COUNTS), view("kept_states", kept_states, np.int32, None, 2)
    of_chunk = view("chunk_slots", chunk_slots, np.int32, None)
    _entries("snapshots", snapshots, state_bytes)
    keep_kernel()(stream, BLOCKS, number.address, kept.address, of_chunk.address, slots.address, state_bytes, pieces,
                  snapshots.at, snapshots.stride, pdl=pdl)


def _rows(name: str, array):
    rows = view(name, array, np.uint16, None, None)
    if rows.address % VECTOR or 2 * rows.strides[0] % VECTOR or 2 * rows.shape[1] % VECTOR:
        raise ValueError(f"{name} must have rows aligned to {VECTOR} bytes, and of a multiple of {VECTOR} bytes")
    return rows


def _states(states):
    """(view, bytes of a slot, pieces of a slot)."""
    slots = view("states", states, np.float32, None, None, None, None)
    heads, head_bytes = slots.shape[1], 4 * slots.shape[2] * slots.shape[3]
    if slots.address % VECTOR or slots.strides[1] * 4 != head_bytes or head_bytes % (PIECES * TOGETHER * VECTOR):
        raise ValueError(f"states must be contiguous and aligned to {VECTOR} bytes")
    return slots, heads * head_bytes, heads * PIECES


def _entries(name: str, entries: Entries, nbytes: int) -> None:
    if entries.at % VECTOR or entries.stride % VECTOR or entries.stride < nbytes:
        raise ValueError(f"{name} must be aligned to {VECTOR} bytes and at least {nbytes} bytes apart, not {entries.stride}")


def kernels() -> dict:
    """The kernels with their budgets: {name: (Kernel, compute capabilities, registers, spill bytes)}."""
    everywhere = ((8, 0), (9, 0, "a"))
    return {"exchange_keys": (keys_kernel(), everywhere, 96, 0), "exchange_inputs": (inputs_kernel(), everywhere, 96, 0),
            "keep_states": (keep_kernel(), everywhere, 64, 0)}
