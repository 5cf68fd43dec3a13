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
    keep_states        after the delta rule
        state of snapshot kept_states[i, 0]  <-  slot chunk_slots[kept_states[i, 1]]

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
BLOCKS = 264                    # two for each multiprocessor of an H200
VECTOR = 16                     # bytes of an access
TOGETHER = 4                    # rows of a page, or quarters of a state, that a block copies at a time


@ptx.device_function
def copy4(target, target_step, source, source_step, vectors):
    """Four runs of ``vectors`` 16-byte vectors, ``step`` bytes apart, by one block."""
    i = i32(cuda.threadIdx.x)
    while i < vectors:
        at = u64(i * VECTOR)
        a = ptx.ldg_u32x4(source + at)
        b = ptx.ldg_u32x4(source + u64(source_step) + at)
        c = ptx.ldg_u32x4(source + u64(2 * source_step) + at)
        d = ptx.ldg_u32x4(source + u64(3 * source_step) + at)
        ptx.stg_u32x4(target + at, a)
        ptx.stg_u32x4(target + u64(target_step) + at, b)
        ptx.stg_u32x4(target + u64(2 * target_step) + at, c)
        ptx.stg_u32x4(target + u64(3 * target_step) + at, d)
        i = i32(i + THREADS)


@ptx.device_function
def copy_row(target, source, vectors):
    """One run of 16-byte vectors by one block."""
    i = i32(cuda.threadIdx.x)
    while i < vectors:
        ptx.stg_u32x4(target + u64(i * VECTOR), ptx.ldg_u32x4(source + u64(i * VECTOR)))
        i = i32(i + THREADS)


@ptx.device_function
def count(counts, index):
    return ptx.ldg_i32(counts + u64(index * 4))


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
            row = i32((item % parts) * TOGETHER)
            if item < n:
                page = pages + u64(ptx.ldg_i32(restored + u64(entry * 4))) * u64(page_bytes) + u64(row * wide)
                to = rows_at + u64(first + entry * CHUNK + row) * u64(row_bytes)
                copy4(to, row_bytes, page, wide, vectors)
            else:
                page = pages + u64(ptx.ldg_i32(kept + u64(entry * 8))) * u64(page_bytes) + u64(row * wide)
                rows = chunk_rows + u64((ptx.ldg_i32(kept + u64(entry * 8 + 4)) * CHUNK + row) * 4)
                for j in range(TOGETHER):            # a chunk's rows may be those of two branches
                    source = rows_at + u64(ptx.ldg_i32(rows + u64(j * 4))) * u64(row_bytes)
                    copy_row(page + u64(j * wide), source, vectors)
            item = i32(item + cuda.gridDim.x)

    return Kernel(exchange_keys_kernel, types.void(u64, u64, u64, u64, u64, i32, i32, u64, u64, i32), THREADS)


@cubin.factory
def inputs_kernel() -> Kernel:
    def exchange_inputs_kernel(counts, restored, kept, chunk_rows, rows_at, row_bytes, inputs, inputs_bytes, vectors,
                               snapshots, snapshot_bytes, slots, head_bytes, heads, flags, flags_a_head, raised):
        ptx.pdl_launch()
        a_restored = i32(TAPS + heads)
        n = i32(count(counts, RESTORED_STATES) * a_restored)
        items = i32(n + count(counts, KEPT_STATES) * TAPS)
        if not wait_for_work(items):
            return
        item = i32(cuda.blockIdx.x)
        wide, quarter = i32(vectors * VECTOR), i32(head_bytes // TOGETHER)
        while item < items:
            if item < n:
                entry, part = restored + u64((item // a_restored) * 16), i32(item % a_restored)
                snapshot = u64(ptx.ldg_i32(entry))
                if part < TAPS:
                    row = i32(ptx.ldg_i32(entry + u64(8)) + part)
                    copy_row(rows_at + u64(row) * u64(row_bytes), inputs + snapshot * u64(inputs_bytes) + u64(part * wide),
                             vectors)
                else:
                    head = i32(part - TAPS)
                    of_slot = u64(ptx.ldg_i32(entry + u64(4)) * heads + head)
                    copy4(slots + of_slot * u64(head_bytes), quarter,
                          snapshots + snapshot * u64(snapshot_bytes) + u64(head) * u64(head_bytes), quarter,
                          quarter // VECTOR)
                    if i32(cuda.threadIdx.x) < flags_a_head:         # to the delta rule the slot is one that was stored
                        ptx.stg_u32(flags + (of_slot * u64(flags_a_head) + u64(cuda.threadIdx.x)) * u64(4), u32(raised))
            else:
                entry, part = kept + u64(((item - n) // TAPS) * 8), i32((item - n) % TAPS)
                at = chunk_rows + u64((ptx.ldg_i32(entry + u64(4)) * CHUNK + CHUNK - TAPS + part) * 4)
                copy_row(inputs + u64(ptx.ldg_i32(entry)) * u64(inputs_bytes) + u64(part * wide),
                         rows_at + u64(ptx.ldg_i32(at)) * u64(row_bytes), vectors)
            item = i32(item + cuda.gridDim.x)

    return Kernel(exchange_inputs_kernel, types.void(
        u64, u64, u64, u64, u64, i32, u64, u64, i32, u64, u64, u64, i32, i32, u64, i32, i32), THREADS)


@cubin.factory
def keep_kernel() -> Kernel:
    def keep_states_kernel(counts, kept, chunk_slots, slots, head_bytes, heads, snapshots, snapshot_bytes):
        ptx.pdl_launch()
        items = i32(count(counts, KEPT_STATES) * heads)
        if not wait_for_work(items):
            return
        item = i32(cuda.blockIdx.x)
        quarter = i32(head_bytes // TOGETHER)
        while item < items:
            entry, head = kept + u64((item // heads) * 8), i32(item % heads)
            slot = ptx.ldg_i32(chunk_slots + u64(ptx.ldg_i32(entry + u64(4)) * 4))
            copy4(snapshots + u64(ptx.ldg_i32(entry)) * u64(snapshot_bytes) + u64(head) * u64(head_bytes), quarter,
                  slots + u64(slot * heads + head) * u64(head_bytes), quarter, quarter // VECTOR)
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


def exchange_inputs(stream, qkv, states, counts, restored_states, kept_states, chunk_rows, inputs: Entries,
                    snapshots: Entries, raised: Raised = Raised(), pdl: bool = False) -> None:
    """Inputs of one layer's convolution, and states of its delta rule that are resumed.

    qkv             BF16 [rows, conv_dim], the convolution's columns of the projection, 16-byte aligned rows; rows for the
                    tails included
    states          float32 [slots, value heads, 128, 128]
    counts          int32 [16];  restored_states int32 [n, 4];  kept_states int32 [n, 2];  chunk_rows int32 [chunks, 64]
    inputs          entries of [3, conv_dim] BF16;  snapshots: entries of [value heads, 128, 128] float32

    Raises ValueError naming the argument that does not fit.
    """
    rows, slots, head_bytes = _rows("qkv", qkv), *_states(states)
    number, restored = view("counts", counts, np.int32, COUNTS), view("restored_states", restored_states, np.int32, None, 4)
    kept = view("kept_states", kept_states, np.int32, None, 2)
    chunks = view("chunk_rows", chunk_rows, np.int32, None, CHUNK)
    width, heads = 2 * rows.shape[1], slots.shape[1]
    _entries("inputs", inputs, TAPS * width)
    _entries("snapshots", snapshots, heads * head_bytes)
    inputs_kernel()(stream, BLOCKS, number.address, restored.address, kept.address, chunks.address, rows.address,
                    2 * rows.strides[0], inputs.at, inputs.stride, width // VECTOR, snapshots.at, snapshots.stride,
                    slots.address, head_bytes, heads, raised.at, raised.number, raised.value, pdl=pdl)


def keep_states(stream, states, counts, kept_states, chunk_slots, snapshots: Entries, pdl: bool = False) -> None:
    """States of one layer that are to be kept, from their slots. Arguments as above; chunk_slots int32 [chunks]."""
    slots, head_bytes = _states(states)
    number, kept = view("counts", counts, np.int32, COUNTS), view("kept_states", kept_states, np.int32, None, 2)
    of_chunk = view("chunk_slots", chunk_slots, np.int32, None)
    heads = slots.shape[1]
    _entries("snapshots", snapshots, heads * head_bytes)
    keep_kernel()(stream, BLOCKS, number.address, kept.address, of_chunk.address, slots.address, head_bytes, heads,
                  snapshots.at, snapshots.stride, pdl=pdl)


def _rows(name: str, array):
    rows = view(name, array, np.uint16, None, None)
    if rows.address % VECTOR or 2 * rows.strides[0] % VECTOR or 2 * rows.shape[1] % VECTOR:
        raise ValueError(f"{name} must have rows aligned to {VECTOR} bytes, and of a multiple of {VECTOR} bytes")
    return rows


def _states(states):
    slots = view("states", states, np.float32, None, None, None, None)
    head_bytes = 4 * slots.shape[2] * slots.shape[3]
    if slots.address % VECTOR or slots.strides[1] * 4 != head_bytes or head_bytes % (TOGETHER * VECTOR):
        raise ValueError(f"states must be contiguous and aligned to {VECTOR} bytes")
    return slots, head_bytes


def _entries(name: str, entries: Entries, nbytes: int) -> None:
    if entries.at % VECTOR or entries.stride % VECTOR or entries.stride < nbytes:
        raise ValueError(f"{name} must be aligned to {VECTOR} bytes and at least {nbytes} bytes apart, not {entries.stride}")


def kernels() -> dict:
    """The kernels with their budgets: {name: (Kernel, compute capabilities, registers, spill bytes)}."""
    everywhere = ((8, 0), (9, 0, "a"))
    return {"exchange_keys": (keys_kernel(), everywhere, 64, 0), "exchange_inputs": (inputs_kernel(), everywhere, 64, 0),
            "keep_states": (keep_kernel(), everywhere, 64, 0)}
