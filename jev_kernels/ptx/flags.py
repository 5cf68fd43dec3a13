"""Flags and counters in device memory, by which blocks of a launch, or of two, tell each other what is done.

uint32 each. Raised with release and awaited with acquire semantics at GPU scope, so who has seen a flag sees what was
written before it. What was written by ordinary stores and is read by bulk copies or TMA passes through another proxy:
``fence_global`` on both sides. A wait traps when nobody raises the flag (``jev_kernels.ptx.waits``); under the simulator it
fails with a RuntimeError that names the flag.
"""
from __future__ import annotations

import threading

import numpy as np

from jev_kernels.ptx import ballot, i32, ldg_i32, ptx, stg_u32, u64, uniform, void
from jev_kernels.ptx.waits import until

PAUSE = "nanosleep.u32 32;"


def _wait(at, value):
    me = threading.current_thread()
    me.block.wait(me, lambda: ldg_i32(at) >= value, f"a flag in device memory at {int(at):#x} that nobody raises")


def _flags_in_a_row(at, exists):
    low, high = (np.uint64(np.uint32(uniform(int(half)))) for half in (np.uint64(at) & 0xFFFFFFFF, np.uint64(at) >> 32))
    _wait(low | high << np.uint64(32), 1)                               # the first lane's flag
    raised = int(ballot(ldg_i32(at) if exists else 0))
    return np.int32((~raised & raised + 1).bit_length() - 1)            # trailing ones


def _add(at):
    before = ldg_i32(at)
    stg_u32(at, np.uint32(before + 1))
    return before


await_flag = ptx("await_flag", void, (u64, i32),                    # (flag, value): until it is at least value
                 until(".reg .b32 x; ld.acquire.gpu.global.u32 x, [$0]; setp.ge.u32 ready, x, $1;", PAUSE), "l,r",
                 sim=_wait)
# (this lane's flag, 1 if there is one) -> how many in a row are raised, from the first lane's on: at least one, for which
# the warp waits. Looking at 32 takes no longer than looking at one.
await_flags = ptx("await_flags", i32, (u64, i32),
                  until(".reg .pred p; .reg .b32 x; mov.u32 x, 0; setp.ne.s32 p, $2, 0;"
                        " @p ld.acquire.gpu.global.u32 x, [$1]; setp.ne.u32 p, x, 0;"
                        " vote.sync.ballot.b32 x, p, 0xffffffff; not.b32 x, x; brev.b32 x, x; clz.b32 $0, x;"
                        " setp.ne.s32 ready, $0, 0;", PAUSE), "=&r,l,r",
                  sim=_flags_in_a_row)
raise_flag = ptx("raise_flag", void, (u64,), "st.release.gpu.global.u32 [$0], 1;", "l",
                 sim=lambda at: stg_u32(at, np.uint32(1)))
count_up = ptx("count_up", void, (u64,), "red.release.gpu.global.add.u32 [$0], 1;", "l", sim=_add)
take_ticket = ptx("take_ticket", i32, (u64,), "atom.relaxed.gpu.global.add.u32 $0, [$1], 1;", "=r,l", sim=_add)
fence_global = ptx("fence_global", void, (), "fence.proxy.async.global;", "", sim=lambda: None, since=(9, 0))
