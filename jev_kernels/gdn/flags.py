"""How the two kernels of the gated delta rule on Hopper, and the blocks of each, tell each other what is done.

Two kinds of flags, uint32 in device memory, each raised with release and awaited with acquire semantics at GPU scope:

  - *states*: a run that starts from a slot waits until the run that fills it has stored it. Flag (slot, value head, slab)
    counts the warps that have. ``prepare`` zeroes it, after the end of the scan before and before the scan that uses it.
  - *progress*: where a sequence is alone, the scan does not wait for the end of ``prepare`` but follows it chunk by chunk.
    Flag (chunk, value head, slab) is raised when the record is there, and lowered by its one reader. In front of these
    flags stands the number of tickets that blocks of ``prepare`` have drawn for items; the scan resets it. So progress is
    all zeros before a call and after it, and needs to be zeroed once, when it is allocated.

What is announced was written by ordinary stores and is read by bulk copies, through another proxy: both sides fence.

Why a raised progress flag is always this call's: ``prepare`` lets the scan start only after its own ``pdl_wait``, when
the scan before, and all that it followed, has ended; that scan lowered every flag. It in turn does not end before its
``prepare`` has (its last ``pdl_wait``), so a kernel that waits for the scan has waited for ``prepare`` and all before.
A scan without ``pdl_wait`` may read q, k and v, and overwrite what earlier kernels read, once one thread of a block has
seen a flag and the others have met it at a barrier: ``prepare`` raised it after its own wait for those kernels.
"""
from __future__ import annotations

import numpy as np
from numba import cuda
from numba.cuda.core import config

from jev_kernels.ptx import ballot, fence_global, i32, ptx, stg_u32, u32, u64, void

if config.ENABLE_CUDASIM:
    from jev_kernels.sim import flags as simulated

SLABS = 2                     # of a value head's columns: CTAs of the scan that read a record
TICKETS = 0                   # entry of progress: items taken
FIRST = 32                    # entry of the first flag, a cache line further on
TRIES = 1 if config.ENABLE_CUDASIM else 1 << 24          # some seconds; simulated, ``prepare`` has ended when the scan begins


def progress_entries(chunks: int, value_heads: int) -> int:
    """uint32 entries of progress for so many chunks."""
    return FIRST + chunks * value_heads * SLABS


def _trap():
    raise RuntimeError("a flag of the gated delta rule is never raised")


await_flag = ptx("await_flag", void, (u64, i32),                    # (flag, value); traps after some seconds
                 "{ .reg .pred p; .reg .b32 x, n; mov.u32 n, 0;"
                 " W: ld.acquire.gpu.global.u32 x, [$0]; setp.ge.u32 p, x, $1; @p bra D;"
                 " nanosleep.u32 32; add.u32 n, n, 1; setp.lt.u32 p, n, 0x2000000; @p bra W; trap; D: }", "l,r",
                 sim=lambda at, value: simulated.await_at_least(at, value))
count_up = ptx("count_up", void, (u64,), "red.release.gpu.global.add.u32 [$0], 1;", "l",
               sim=lambda at: simulated.add(at, release=True))
raise_flag = ptx("raise_flag", void, (u64,), "st.release.gpu.global.u32 [$0], 1;", "l",
                 sim=lambda at: simulated.store(at, 1, release=True))
take_ticket = ptx("take_ticket", i32, (u64,), "atom.relaxed.gpu.global.add.u32 $0, [$1], 1;", "=r,l",
                  sim=lambda at: np.int32(simulated.add(at)))
ldg_acquire = ptx("ldg_acquire", i32, (u64,), "ld.acquire.gpu.global.u32 $0, [$1];", "=r,l",
                  sim=lambda at: np.int32(simulated.load(at)))
pause = ptx("pause", void, (), "nanosleep.u32 32;", "", sim=lambda: None)
trap = ptx("trap", void, (), "trap;", "", sim=_trap)
trailing_ones = ptx("trailing_ones", i32, (u32,), "{ .reg .b32 t; not.b32 t, $1; brev.b32 t, t; clz.b32 $0, t; }", "=r,r",
                    pure=True, sim=lambda x: np.int32(f"{int(x) | 1 << 32:b}"[::-1].find("0") % 33))


@cuda.jit(device=True, inline="always")
def lower_flags(at, step, left, lane):
    """How many flags in a row are raised, at ``at`` and ``step`` bytes further on each: at least one, at most 32 and at
    most ``left``. Waits for the first one and lowers them. For a whole warp; its lane 0 may then copy in bulk.

    Looking ahead costs nothing, whereas a look at each flag would take as long as half a chunk.
    """
    mine = at + u64(lane * step)
    raised = i32(0)
    tries = i32(0)
    while raised == 0:
        raised = trailing_ones(ballot(ldg_acquire(mine) if lane < left else i32(0)))
        if raised == 0:
            tries = i32(tries + 1)
            if tries == TRIES:
                trap()
            pause()
    if lane < raised:
        stg_u32(mine, u32(0))
    cuda.syncwarp()
    fence_global()
    return raised
