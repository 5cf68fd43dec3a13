"""How the two kernels of the gated delta rule on Hopper, and the blocks of each, tell each other what is done.

Two kinds of flags (``jev_kernels.ptx.flags``), uint32 in device memory:

  - *states*: a run that starts from a slot waits until the run that fills it has stored it. Flag (slot, value head, block of
    columns) counts the warps that have. ``prepare`` zeroes it, after the end of the scan before and before the scan that
    uses it.
  - *progress*: where a sequence is alone, the scan does not wait for the end of ``prepare`` but follows it chunk by chunk.
    Flag (chunk, value head, block of columns) is raised when the workspace is there, and lowered by its one reader. In
    front of these flags stands the number of tickets that blocks of ``prepare`` have drawn for items; the scan resets
    it. So progress is all zeros before a call and after it, and needs to be zeroed once, when it is allocated.

What is announced was written by ordinary stores and is read by bulk copies, through another proxy: both sides fence.

Why a raised progress flag is always this call's: ``prepare`` lets the scan start only after its own ``pdl_wait``, when
the scan before, and all that it followed, has ended; that scan lowered every flag. That scan does not end before its
``prepare`` has (its last ``pdl_wait``), so a kernel that waits for the scan has waited for ``prepare`` and all before.
A scan without ``pdl_wait`` may read q, k and v, and overwrite what earlier kernels read, once one thread of a block has
seen a flag and the others have met it at a barrier: ``prepare`` raised it after its own wait for those kernels.
"""
from __future__ import annotations

from numba import cuda

from jev_kernels.ptx import i32, stg_u32, u32, u64
from jev_kernels.ptx.flags import await_flags, fence_global

V_BLOCKS = 2                     # of a value head's columns: blocks of columns, and CTAs of the scan that read a workspace
TICKETS = 0                   # entry of progress: items taken
FIRST = 32                    # entry of the first flag, a cache line further on


def progress_entries(chunks: int, value_heads: int) -> int:
    """uint32 entries of progress for so many chunks."""
    return FIRST + chunks * value_heads * V_BLOCKS


@cuda.jit(device=True, inline="always")
def lower_flags(at, step, left, lane):
    """How many flags in a row are raised, at ``at`` and ``step`` bytes further on each: at least one, at most 32 and at
    most ``left``. Waits for the first one and lowers them. For a whole warp; its lane 0 may then copy in bulk.

    Looking ahead costs nothing, whereas a look at each flag would take as long as half a chunk.
    """
    mine = at + u64(lane * step)
    raised = await_flags(mine, i32(lane < left))
    if lane < raised:
        stg_u32(mine, u32(0))
    cuda.syncwarp()
    fence_global()
    return raised
