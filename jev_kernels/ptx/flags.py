"""Flags and counters in device memory, by which blocks of a launch, or of two, tell each other what is done.

uint32 each. Raised with release and awaited with acquire semantics at GPU scope, so who has seen a flag sees what was
written before it. What was written by ordinary stores and is read by bulk copies or TMA passes through another proxy:
``fence_global`` on both sides. A wait traps when nobody raises the flag (``jev_kernels.ptx.waits``); under the simulator it
fails with a RuntimeError that names the flag.
"""
from __future__ import annotations

import numpy as np
from numba.cuda.core import config

from jev_kernels.ptx import ballot, fence_global, i32, ptx, u64, uniform, void  # noqa: F401
from jev_kernels.ptx.waits import until

if config.ENABLE_CUDASIM:
    from jev_kernels.sim import flags as simulated

PAUSE = "nanosleep.u32 32;"


def _flags_in_a_row(at, exists):
    low, high = (np.uint64(np.uint32(uniform(int(half)))) for half in (np.uint64(at) & 0xFFFFFFFF, np.uint64(at) >> 32))
    simulated.await_at_least(low | high << np.uint64(32), 1)            # the first lane's flag
    raised = int(ballot(simulated.load(at) if exists else 0))
    return np.int32((~raised & raised + 1).bit_length() - 1)            # trailing ones


await_flag = ptx("await_flag", void, (u64, i32),                    # (flag, value): until it is at least value
                 until(".reg .b32 x; ld.acquire.gpu.global.u32 x, [$0]; setp.ge.u32 ready, x, $1;", PAUSE), "l,r",
                 sim=lambda at, value: simulated.await_at_least(at, value))
# (this lane's flag, 1 if there is one) -> how many in a row are raised, from the first lane's on: at least one, for which
# the warp waits. Looking at 32 takes no longer than looking at one.
await_flags = ptx("await_flags", i32, (u64, i32),
                  until(".reg .pred p; .reg .b32 x; mov.u32 x, 0; setp.ne.s32 p, $2, 0;"
                        " @p ld.acquire.gpu.global.u32 x, [$1]; setp.ne.u32 p, x, 0;"
                        " vote.sync.ballot.b32 x, p, 0xffffffff; not.b32 x, x; brev.b32 x, x; clz.b32 $0, x;"
                        " setp.ne.s32 ready, $0, 0;", PAUSE), "=&r,l,r",
                  sim=_flags_in_a_row)
raise_flag = ptx("raise_flag", void, (u64,), "st.release.gpu.global.u32 [$0], 1;", "l",
                 sim=lambda at: simulated.store(at, 1, release=True))
count_up = ptx("count_up", void, (u64,), "red.release.gpu.global.add.u32 [$0], 1;", "l",
               sim=lambda at: simulated.add(at, release=True))
take_ticket = ptx("take_ticket", i32, (u64,), "atom.relaxed.gpu.global.add.u32 $0, [$1], 1;", "=r,l",
                  sim=lambda at: np.int32(simulated.add(at)))
# (flag, lane): what the whole warp has done before is done; then it is raised, or lowered for the next launch
raise_flag_of_warp = ptx("raise_flag_of_warp", void, (u64, i32),
                         "{ .reg .pred p; bar.warp.sync 0xffffffff; fence.acq_rel.gpu; setp.eq.s32 p, $1, 0;"
                         " @p st.relaxed.gpu.global.u32 [$0], 1; }", "l,r",
                         sim=lambda at, lane: simulated.store_of_warp(at, lane, 1, release=True))
lower_flag_of_warp = ptx("lower_flag_of_warp", void, (u64, i32),
                         "{ .reg .pred p; bar.warp.sync 0xffffffff; setp.eq.s32 p, $1, 0;"
                         " @p st.relaxed.gpu.global.u32 [$0], 0; }", "l,r",
                         sim=lambda at, lane: simulated.store_of_warp(at, lane, 0))
