"""Chunked gated delta rule over a tree of chunks, on Hopper tensor cores (sm_90a): the two kernels together.

See ``jev_kernels.gdn`` for the operation, ``hopper_gdn_prepare`` and ``hopper_gdn_scan`` for the kernels, which also list
their rounding points. Here: how much memory they need and how they are launched. Arguments are not checked here.
"""
from __future__ import annotations

from functools import lru_cache

from jev_kernels import hopper_gdn_prepare as prepare
from jev_kernels import hopper_gdn_scan as scan
from jev_kernels.launch import Kernel, address

FLAGS_ALIGN = 128


@lru_cache(maxsize=None)
def kernels(key_heads: int, value_heads: int) -> tuple[Kernel, Kernel]:
    """(prepare, scan) for a number of heads."""
    function, smem = prepare.make_prepare(key_heads, value_heads)
    return (Kernel(function, prepare.SIGNATURE, prepare.THREADS, smem, resident=prepare.RESIDENT),
            Kernel(scan.make_scan(key_heads, value_heads), scan.SIGNATURE, scan.THREADS, scan.SMEM))


def record_bytes(chunks: int, value_heads: int) -> int:
    """Bytes of the records of so many chunks; the flags lie behind them."""
    return -(-chunks * value_heads * prepare.RECORD // FLAGS_ALIGN) * FLAGS_ALIGN


def scratch_bytes(chunks: int, slots: int, value_heads: int) -> int:
    """Bytes of scratch for so many chunks and state slots. Nothing in it needs to be initialised."""
    return record_bytes(chunks, value_heads) + slots * value_heads * scan.SLABS * 4


def gated_delta_rule(stream, qkv, g, beta, o, counts, chunk_rows, chunk_out_rows, chunk_slots, runs, states, scratch,
                     multiprocessors: int, pdl: bool = False) -> None:
    """Launch both kernels. Arguments as in ``jev_kernels.gdn.gated_delta_rule``."""
    hv = g.shape[1]
    hk = (qkv.shape[1] // prepare.D - hv) // 2
    first, second = kernels(hk, hv)
    chunks = chunk_rows.shape[0]
    record = address(scratch)
    flags = record + record_bytes(chunks, hv)
    stride = qkv.strides[0] // 2
    items = chunks * (hv // prepare.heads_at_once(hk, hv))
    first(stream, min(items, multiprocessors * prepare.RESIDENT), address(qkv), address(g), address(beta), address(counts),
          address(chunk_rows), address(chunk_slots), record, flags, stride, g.strides[0] // 4, beta.strides[0] // 2, pdl=pdl)
    second(stream, min(runs.shape[0] * hv * scan.SLABS, multiprocessors), address(qkv), address(o), address(counts),
           address(chunk_rows), address(chunk_out_rows), address(chunk_slots), address(runs), record, address(states), flags,
           stride, o.strides[0] // 2, pdl=pdl)
