"""Chunked gated delta rule over a tree of chunks, on Hopper tensor cores (sm_90a): the two kernels together.

See ``jev_kernels.gdn.portable`` for the operation, ``prepare`` and ``scan`` for the kernels, which also
list their rounding points. Here: how much memory they need and how they are launched. Arguments are not checked here.

Measured on one H200, 16 / 48 heads, us a call, graphs of ten calls under dependent launch (tools/bench_gdn.py):
    rows        107    512    936   2334   3399    8 questions of 400    255 options of 10 over 300 / over 3000
    both       13.4   24.2   38.9   76.7  103.0                 106.3                          476 / 773
    prepare     6.7    9.2   13.2   25.3   36.4                  38.2                          112 / 197
    scan        5.6   14.8   25.9   60.1   85.6                  68.2                          360 / 577
"both" over one sequence overlap; each by itself is timed as beside other sequences, where they do not.
Relative error to float64 1.7e-3 (rounding o alone: 1.66e-3), with nearly parallel keys 2.7e-3 to 3.1e-3.
"""
from __future__ import annotations

from contextlib import suppress

from jev_kernels.gdn import prepare, scan
from jev_kernels.gdn.flags import progress_entries  # noqa: F401  part of this module's surface
from jev_kernels.gdn.scan import state_matrices  # noqa: F401  part of this module's surface
from jev_kernels.runtime import cubin, device
from jev_kernels.runtime.launch import Kernel, View

FLAGS_ALIGN = 128


@cubin.factory
def kernels(key_heads: int, value_heads: int) -> tuple[Kernel, Kernel]:
    """(prepare, scan) for a number of heads."""
    function, smem = prepare.make_prepare(key_heads, value_heads)
    return (Kernel(function, prepare.SIGNATURE, prepare.THREADS, smem, resident=prepare.RESIDENT),
            Kernel(scan.make_scan(key_heads, value_heads), scan.SIGNATURE, scan.THREADS, scan.SMEM))


def workspace_bytes(chunks: int, value_heads: int) -> int:
    """Bytes of the workspaces of so many chunks; the flags lie behind them."""
    return -(-chunks * value_heads * prepare.WORKSPACE_BYTES // FLAGS_ALIGN) * FLAGS_ALIGN


def scratch_bytes(chunks: int, slots: int, value_heads: int) -> int:
    """Bytes of scratch for so many chunks and state slots. Nothing in it needs to be initialised."""
    return workspace_bytes(chunks, value_heads) + slots * value_heads * scan.V_BLOCKS * 4


def launch(stream, key_heads: int, qkv: View, g: View, beta: View, o: View, counts: View, chunk_rows: View,
           chunk_out_rows: View, chunk_slots: View, runs: View, states: View, scratch: int, progress: int,
           multiprocessors: int, pdl: bool) -> None:
    """Launch both kernels. Arguments as in ``jev_kernels.gdn.portable.gated_delta_rule``, checked there; scratch and progress:
    addresses."""
    heads = g.shape[1]
    chunks = chunk_rows.shape[0]
    first, second = kernels(key_heads, heads)
    flags = scratch + workspace_bytes(chunks, heads)
    first(stream, min(chunks * heads, multiprocessors * prepare.RESIDENT), qkv.address, g.address, beta.address,
          counts.address, chunk_rows.address, chunk_slots.address, scratch, flags, progress, qkv.strides[0], g.strides[0],
          beta.strides[0], pdl=pdl)
    try:
        second(stream, min(runs.shape[0] * heads * scan.V_BLOCKS, multiprocessors), qkv.address, o.address, counts.address,
               chunk_rows.address, chunk_out_rows.address, chunk_slots.address, runs.address, scratch, states.address,
               flags, progress, qkv.strides[0], o.strides[0], pdl=pdl)
    except BaseException:                     # nobody lowers the flags that the first kernel raises
        with suppress(Exception):             # of a GPU that is lost; what happened first matters
            device.zero(progress, 4 * progress_entries(chunks, heads), stream)
        raise
