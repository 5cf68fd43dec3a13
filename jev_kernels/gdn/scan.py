"""Gated delta rule on Hopper, second of two kernels: the walk over the chunks, over a tree of them in one launch.

Per value head, chunk by chunk, from the workspaces of ``prepare`` and the state S:

    y = v + k_scale k S;    v_new = A_inv y;    o = q_scale q S + A_qk v_new;    S = decay S + k^T (v_scale v_new)

In the words of the WY representation u = A_inv v and w = A_inv diag(exp(c)) k (beta is in A_inv): v_new = u - w S, taken as
one product.

Everything is held transposed, value columns on wgmma's M side: S^T [64 x 128] is a float32 accumulator and becomes,
packed to BF16, the A operand of the next product without leaving the registers; so do y^T and v_new^T. The four warps that
compute never exchange anything. k serves as B both ways round (wgmma's trans bit), from one 128B-swizzled tile. Four
more warps only copy, three chunks ahead: k, q and v rows by cp.async through the chunk's row list, the workspace and the
state that a run starts from by bulk copies.

Rounding points (everything else float32): S as an operand: BF16. v_scale v_new: two BF16 parts, high and low, so that a state
carries 16 bits of every v_new. y and v_new in A_qk v_new: float16, clamped at 65504 (v has to stay below some 1e4). o: BF16.
With one part, nearly parallel keys leave an error of 1e-2 in a state. A long run corrects that as it goes, but the rows
of a short branch read little else: 6e-3 to 1.5e-2 on the last row of an option, 2 to 3e-3 with both parts.

Work. An item is (block of consecutive runs, value head, block of 64 value columns); CTA b takes items b, b + gridDim,
..., run by run. A block has one run unless there are many (short branches), then up to eight: consecutive runs that start
from the same state find it in shared memory.

States. After a chunk with chunk_slots >= 0 the state goes to that slot, stored once in a call, and each of the four
warps then adds 1 to the flag of (slot, value head, block of columns), with release semantics at GPU scope after its own
stores. A run that starts from a slot waits, with acquire semantics, until the flag is 4. The stores are ordinary ones and the
load is a bulk copy, so both sides have a proxy fence. ``prepare`` zeroes the flags: it runs after the scan before it is
complete (its ``pdl_wait``) and completes before this scan looks at them.

One sequence alone, a single run, has no states to wait for, and leaves multiprocessors idle. There this kernel waits for
the end of ``prepare`` only before its own, and takes chunks as they are announced (``gdn.flags``), in the order in
which they are made.

No deadlock. Runs are ordered parents first, so an item waits only for items of lower number (or for an earlier run of
its own block, whose copies were issued before the wait). A CTA finishes its items in increasing order; so the lowest
unfinished item, once its CTA is resident, never waits. All CTAs become resident: the grid is at most one per
multiprocessor, kernels before do not wait for this one, and a dependent kernel starts only after all CTAs here have
begun. ``prepare``, whose flags are awaited too, waits for nobody here, and its CTAs are resident or gone by then.
What nobody announces would be waited for in vain: the wait traps (``jev_kernels.ptx.waits``).

States are float32, [slot, value head, block of columns] x 32 KB, in the order of the accumulators (see
``state_matrices``), so a run that resumes has the bits of one that carried on in registers.
"""
from __future__ import annotations

from enum import IntEnum

import numpy as np
from numba import cuda
from numba.cuda import types

from jev_kernels import pool
from jev_kernels.gdn.flags import FIRST, TICKETS, V_BLOCKS, lower_flags
from jev_kernels.gdn.prepare import WORKSPACE, WORKSPACE_BYTES, C, D
from jev_kernels.ptx import (
    bulk,
    cp16,
    cp_arrive,
    cp_wait_all,
    f32,
    fence_async,
    high,
    i32,
    ldg_i32,
    ldg_u32x4,
    lds,
    lds2,
    lds4,
    lds_i32,
    ldsm_t,
    low,
    mbar_arrive,
    mbar_expect,
    mbar_fence,
    mbar_init,
    mbar_wait,
    named_sync,
    pack,
    pack16,
    pdl_launch,
    pdl_wait,
    ptx,
    smem_addr,
    stg_u32,
    stg_u32x4,
    sts_u32,
    transpose8,
    u32,
    u64,
    uniform,
    void,
)
from jev_kernels.ptx.flags import await_flag, count_up, fence_global
from jev_kernels.ptx.shared_layout import SWIZZLE_ATOM, SharedLayout, barriers, block_bytes, words
from jev_kernels.ptx.wgmma import SharedMatrix, Step, wgmma, wgmma_wait

WARPS = 4                     # that compute, 16 value columns each
COPY_WARPS = 4
THREADS = (WARPS + COPY_WARPS) * 32
BV = WARPS * 16               # value columns of a block
assert V_BLOCKS == D // BV
STAGES = 3
BLOCK = 8                     # runs of an item, at most
LATE = 4                      # k16 steps of q S issued before T Y; the rest keeps the tensor cores busy after it
STATE_BYTES = BV * D * 4
RUNS_AT = pool.RUNS * 4

# What the first stage of a run tells the warps that compute, beside its number of chunks (0: there is no further run):
# start from zeros or from the state buffer, wait for that first, free it afterwards.
LOADED, FRESH, LAST_USE = 1, 2, 4

ldg_i32x4 = ptx("ldg_i32x4", (i32, 4), (u64,), "ld.global.v4.s32 {$0,$1,$2,$3}, [$4];", "=r,=r,=r,=r,l",
                sim=lambda at: tuple(np.uint32(x).astype(np.int32) for x in ldg_u32x4(at)))
stg4 = ptx("stg4", void, (u64, f32, f32, f32, f32), "st.global.v4.f32 [$0], {$1,$2,$3,$4};", "l,f,f,f,f",
           sim=lambda at, *x: stg_u32x4(at, [np.float32(v).view(np.uint32) for v in x]))


# ---------------------------------------------------------------- products
# The first operand is in registers, four a step of 16. b = k or q, contiguous along the reduction: halves of 64 columns
ROWS_AS_COLUMNS = SharedMatrix()
_along = [Step(64, a=4 * k, b=(k >> 2) * 8192 + (k & 3) * 32) for k in range(8)]
mul_k = wgmma("mul_k", "bf16", 32, 32, ROWS_AS_COLUMNS, _along, accumulate=False, in_place=True)
mul_q = wgmma("mul_q", "bf16", 32, 32, ROWS_AS_COLUMNS, _along[:LATE], accumulate=False, in_place=True)
more_q = wgmma("more_q", "bf16", 32, 32, ROWS_AS_COLUMNS, _along[LATE:], in_place=True)
# b = k, contiguous along the result: 16 tokens a step
ROWS = SharedMatrix(leading=8192, transposed=True)
add_k = wgmma("add_k", "bf16", 64, 16, ROWS, [Step(128, a=4 * j, b=j * 2048) for j in range(4)], in_place=True)
# b = a packed triangular tile: tokens 0-31 need its columns 0-31, tokens 32-63 all of them
TRIANGLE = SharedMatrix(leading=128, stride=256, swizzled=False)
_blocks = ([Step(32, a=4 * j, b=j * 1024) for j in range(2)] +
           [Step(32, d=16, a=4 * j, b=2048 + j * 1024) for j in range(4)])
mul_t = wgmma("mul_t", "f16", 32, 16, TRIANGLE, _blocks, accumulate=False, in_place=True)
add_p = wgmma("add_p", "f16", 32, 16, TRIANGLE, _blocks, in_place=True)
wait_x = wgmma_wait("wait_x", 1, (32,), (32,), in_place=True)         # all but mul_q
wait_w = wgmma_wait("wait_w", 1, (32,), (16,), in_place=True)         # all but more_q
wait_o = wgmma_wait("wait_o", 2, (32,), (32,), in_place=True)         # all but the two add_k
wait_s = wgmma_wait("wait_s", 0, (64, 32), (16, 16, 16), in_place=True)


# ---------------------------------------------------------------- shared memory
# Of a stage: k, q and this block's columns of v; the workspace; the chunk's rows of o; the slot of its state; and, of the
# first stage of a run, its code, its number of chunks and its (value head, block of columns).
STAGE = SharedLayout(k=C * D * 2, q=C * D * 2, v=C * BV * 2, workspace=WORKSPACE_BYTES, out_rows=C * 4, slot=words(1),
                     code=words(1), count=words(1), head=words(1))
STAGE_BYTES = -(-STAGE.nbytes // SWIZZLE_ATOM) * SWIZZLE_ATOM
SHARED = SharedLayout(stages=STAGES * STAGE_BYTES, state=STATE_BYTES, full=barriers(STAGES), empty=barriers(STAGES),
                      state_full=barriers(1), state_empty=barriers(1))
SMEM = block_bytes(SHARED)


class Barrier(IntEnum):
    """Named barriers of the block; 0 is the whole block's."""
    COPY_WARPS = 1


COPY_BARRIER = int(Barrier.COPY_WARPS)


@cuda.jit(device=True, inline="always")
def runs_of_item(n_runs):
    """Runs of an item: one, unless that makes more items than keep the CTAs evenly busy."""
    return i32(min(i32(BLOCK), max(i32(1), n_runs >> 4)))


@cuda.jit(device=True, inline="always")
def fetch_list(mine, chunk_rows, chunk, kr, vr):
    """The rows that this thread copies of a chunk: eight of k and q, four of v."""
    rows = chunk_rows + u64(chunk * 256)
    for it in range(8):
        mine[it] = ldg_i32(rows + u64(kr * 4 + it * 32))
    for it in range(4):
        mine[8 + it] = ldg_i32(rows + u64(vr * 4 + it * 64))


@cuda.jit(device=True, inline="always")
def put_rows(done, to, o_at, o_stride):
    """Store a chunk's output, transposed back: rows `to`, where they are to be written."""
    for m in range(8):
        lo = transpose8(done[2 * m])
        hi = transpose8(done[2 * m + 1])
        if to[m] >= 0:
            at = o_at + u64(to[m]) * u64(o_stride * 2)
            stg_u32(at, lo)
            stg_u32(at + u64(16), hi)


@cuda.jit(device=True, inline="always")
def read_run(runs, run, live):
    """(first chunk, chunks, start slot) of a run; no chunks when there is none."""
    first = i32(0)
    count = i32(0)
    start = i32(-1)
    if live:
        entry = ldg_i32x4(runs + u64(run * 16))
        first = entry[0]
        count = entry[1]
        start = entry[2]
    return first, count, start


def make_scan(HK: int, HV: int):
    """The kernel for HK key heads and HV value heads."""
    R = HV // HK
    HEADS = HV * V_BLOCKS                      # (value head, block of columns) pairs

    @cuda.jit(device=True, inline="always")
    def copy_chunks(sm, tid, lane, n_runs, single_sequence, qkv, chunk_rows, chunk_out_rows, chunk_slots, runs, workspace,
                    states, flags, progress, stride):
        """The producer, four warps: the tile scheduler's items, run by run, chunk by chunk, into the ring of stages."""
        full, empty = i32(sm + SHARED.full), i32(sm + SHARED.empty)
        state_full, state_empty = i32(sm + SHARED.state_full), i32(sm + SHARED.state_empty)
        stage = i32(0)
        phase = i32(0)
        state_phase = i32(0)
        me = i32(tid - WARPS * 32)
        c = i32(me & 15)                     # my 16-byte piece of rows kr, kr + 8, ... of k and q
        kr = i32(me >> 4)
        vr = i32(me >> 3)                    # of rows vr, vr + 16, ... of v: piece me & 7
        k_to = i32((c >> 3) * 8192 + kr * 128 + (((c & 7) ^ (kr & 7)) << 4))
        v_to = i32(STAGE.v + vr * 128 + (((me & 7) ^ (vr & 7)) << 4))
        mine = cuda.local.array(12, i32)     # the rows to copy, fetched a chunk ahead
        group = runs_of_item(n_runs)
        items = i32((n_runs + group - 1) // group * HEADS)
        item = i32(cuda.blockIdx.x)
        run = i32(item // HEADS * group)
        end = min(i32(run + group), n_runs)
        head = i32(item % HEADS)
        first, count, start = read_run(runs, run, item < items)
        slot = i32(-1)
        if count > 0:
            fetch_list(mine, chunk_rows, first, kr, vr)
            slot = ldg_i32(chunk_slots + u64(first * 4))
        kept = False
        ready = i32(0)                       # chunks of a single sequence that have been announced, to the first warp
        if not single_sequence:
            pdl_wait()
        elif count > 0:
            # The first flag also says that what was before ``prepare`` has ended: q, k and v are there, for all.
            if me < 32:
                ready = lower_flags(progress + u64((FIRST + first * HEADS + head) * 4), HEADS * 4, count, lane)
            named_sync(COPY_BARRIER, COPY_WARPS * 32)
        while count > 0:
            run = i32(run + 1)
            if run == end:
                item = i32(item + cuda.gridDim.x)
                run = i32(item // HEADS * group)
                end = min(i32(run + group), n_runs)
            head2 = i32(item % HEADS)
            first2, count2, start2 = read_run(runs, run, item < items)
            keep = count2 > 0 and start >= 0 and start2 == start and head2 == head
            code = i32(0)
            if start >= 0:
                code = i32(LOADED + (0 if kept else FRESH) + (0 if keep else LAST_USE))
            q_at = qkv + u64((head // V_BLOCKS // R * D + c * 8) * 2)
            v_at = qkv + u64((2 * HK * D + head * BV + (me & 7) * 8) * 2)
            for n in range(count):
                chunk = i32(first + n)
                mbar_wait(empty + stage * 8, phase ^ 1)
                base = i32(sm + stage * STAGE_BYTES)
                bar = i32(full + stage * 8)
                if single_sequence and me < 32 and n >= ready:
                    at = progress + u64((FIRST + chunk * HEADS + head) * 4)
                    ready = i32(n + lower_flags(at, HEADS * 4, count - n, lane))
                if me == 0:
                    sts_u32(base + STAGE.slot, slot)
                    if n == 0:
                        sts_u32(base + STAGE.code, code)
                        sts_u32(base + STAGE.count, count)
                        sts_u32(base + STAGE.head, head)
                    mbar_expect(bar, WORKSPACE_BYTES)
                    bulk(base + STAGE.workspace, workspace + u64(chunk * HV + head // V_BLOCKS) * u64(WORKSPACE_BYTES),
                         WORKSPACE_BYTES, bar)
                for it in range(8):
                    size = i32(16) if mine[it] >= 0 else i32(0)
                    at = q_at + u64(max(mine[it], i32(0))) * u64(stride * 2)
                    cp16(base + k_to + it * 1024, at + u64(HK * D * 2), size)
                    cp16(base + STAGE.q + k_to + it * 1024, at, size)
                for it in range(4):
                    size = i32(16) if mine[8 + it] >= 0 else i32(0)
                    cp16(base + v_to + it * 2048, v_at + u64(max(mine[8 + it], i32(0))) * u64(stride * 2), size)
                if me < 16:
                    cp16(base + STAGE.out_rows + me * 16, chunk_out_rows + u64(chunk * 256 + me * 16), 16)
                cp_arrive(bar)
                # Behind the copies, which shall not wait for what is known of the next run.
                ahead = i32(chunk + 1)
                if n + 1 == count:
                    ahead = first2
                if n + 1 < count or count2 > 0:
                    fetch_list(mine, chunk_rows, ahead, kr, vr)
                    slot = ldg_i32(chunk_slots + u64(ahead * 4))
                if n == 0 and code & FRESH:
                    if me == 0:
                        mbar_wait(state_empty, state_phase ^ 1)
                        await_flag(flags + u64((start * HEADS + head) * 4), WARPS)
                        fence_global()
                        mbar_expect(state_full, STATE_BYTES)
                        at = states + u64(start * HEADS + head) * u64(STATE_BYTES)
                        bulk(sm + SHARED.state, at, STATE_BYTES, state_full)
                    state_phase = i32(state_phase ^ 1)
                stage = i32(stage + 1)
                if stage == STAGES:
                    stage = i32(0)
                    phase = i32(phase ^ 1)
            ready = i32(0)
            first = first2
            count = count2
            start = start2
            head = head2
            kept = keep
        mbar_wait(empty + stage * 8, phase ^ 1)
        if me == 0:
            sts_u32(sm + stage * STAGE_BYTES + STAGE.count, i32(0))
            mbar_arrive(full + stage * 8)
        cp_arrive(full + stage * 8)
        cp_wait_all()
        if me == 0:
            pdl_wait()                         # this kernel shall not be over before ``prepare`` is
            if single_sequence and cuda.blockIdx.x == 0:
                stg_u32(progress + u64(TICKETS * 4), u32(0))

    @cuda.jit(device=True, inline="always")
    def walk_chunks(sm, tid, warp, lane, single_sequence, o, states, flags, o_stride):
        """The consumers, four warps of 16 value columns each: the recurrence over a run's chunks, its state in registers."""
        full, empty = i32(sm + SHARED.full), i32(sm + SHARED.empty)
        state_full, state_empty = i32(sm + SHARED.state_full), i32(sm + SHARED.state_empty)
        stage = i32(0)
        phase = i32(0)
        state_phase = i32(0)
        gg = i32(lane >> 2)
        tt = i32(lane & 3)
        if not single_sequence:
            pdl_wait()                         # before storing anything
        row7 = i32(lane & 7)
        v_lane = i32((row7 + ((lane >> 4) << 3)) * 128 + (((warp * 2 + ((lane >> 3) & 1)) ^ row7) << 4))
        s = cuda.local.array(64, f32)          # S^T: 16 value columns x 128 key dims
        x = cuda.local.array(32, f32)          # S^T k^T
        out = cuda.local.array(32, f32)        # O^T
        w = cuda.local.array(32, f32)          # v_new^T
        sa = cuda.local.array(32, u32)         # S^T, bf16
        y = cuda.local.array(16, u32)          # y^T, fp16
        wp = cuda.local.array(16, u32)         # v_new^T, fp16
        wk = cuda.local.array(16, u32)         # decayed v_new^T, bf16, and
        wl = cuda.local.array(16, u32)         # ... what that leaves
        zs = cuda.local.array(16, f32)         # decay factors of this lane's tokens
        done = cuda.local.array(16, u32)       # the previous chunk's output ...
        to = cuda.local.array(8, i32)          # ... its rows ...
        o_col = o + u64((warp * 16 + tt * 2) * 2)
        o_at = o_col                           # ... and its columns
        for e in range(16):
            done[e] = u32(0)
        for m in range(8):
            to[m] = i32(-1)
        mbar_wait(full + stage * 8, phase)
        count = uniform(lds_i32(sm + stage * STAGE_BYTES + STAGE.count))
        while count > 0:
            code = uniform(lds_i32(sm + stage * STAGE_BYTES + STAGE.code))
            head = uniform(lds_i32(sm + stage * STAGE_BYTES + STAGE.head))
            o_next = o_col + u64(head * (BV * 2))
            if code & LOADED:
                if code & FRESH:
                    mbar_wait(state_full, state_phase)
                    state_phase = i32(state_phase ^ 1)
                for n in range(16):
                    z4 = lds4(sm + SHARED.state + n * 2048 + tid * 16)
                    for e in range(4):
                        s[4 * n + e] = z4[e]
                if code & LAST_USE:
                    cuda.syncwarp()
                    if lane == 0:
                        mbar_arrive(state_empty)
            else:
                for e in range(64):
                    s[e] = f32(0)
            for n in range(count):
                mbar_wait(full + stage * 8, phase)
                fence_async()                  # k and q came by cp.async; wgmma reads through the other proxy
                base = i32(sm + stage * STAGE_BYTES)
                chunk_at = i32(base + STAGE.workspace)
                for e in range(32):
                    sa[e] = pack(s[2 * e], s[2 * e + 1])
                mul_k(x, sa, base)
                mul_q(out, sa, i32(base + STAGE.q))
                # meanwhile: the previous chunk's output goes out, and what Y needs comes in
                put_rows(done, to, o_at, o_stride)
                o_at = o_next
                for m in range(4):
                    vv = ldsm_t(base + STAGE.v + v_lane + m * 2048)
                    for e in range(4):
                        y[4 * m + e] = vv[e]
                for m in range(8):
                    z = lds2(chunk_at + WORKSPACE.k_scale + m * 32 + tt * 8)
                    zs[2 * m] = z[0]
                    zs[2 * m + 1] = z[1]
                last = lds(chunk_at + WORKSPACE.decay)
                wait_x(x, sa)
                # y^T = v^T - (decayed X)^T
                for m in range(8):
                    for e in range(2):
                        j = 4 * m + 2 * e
                        v = y[2 * m + e]
                        y[2 * m + e] = pack16(low(v) + x[j] * zs[2 * m], high(v) + x[j + 1] * zs[2 * m + 1])
                mul_t(w, y, i32(chunk_at + WORKSPACE.a_inv))
                more_q(out, sa, i32(base + STAGE.q))
                for m in range(8):
                    z = lds2(chunk_at + WORKSPACE.v_scale + m * 32 + tt * 8)
                    zs[2 * m] = z[0]
                    zs[2 * m + 1] = z[1]
                # S^T = last S^T + (decayed v_new)^T k
                for e in range(64):
                    s[e] *= last
                wait_w(w, y)
                for m in range(8):
                    for e in range(2):
                        j = 4 * m + 2 * e
                        wk[2 * m + e] = pack(w[j] * zs[2 * m], w[j + 1] * zs[2 * m + 1])
                add_k(s, wk, base)
                for m in range(8):
                    for e in range(2):
                        j = 4 * m + 2 * e
                        a = w[j] * zs[2 * m] - low(wk[2 * m + e])
                        b = w[j + 1] * zs[2 * m + 1] - high(wk[2 * m + e])
                        wl[2 * m + e] = pack(a, b)
                add_k(s, wl, base)
                # O^T = decayed (S^T q^T) + v_new^T A_qk^T, S from before the update
                wait_o(out, sa)
                for m in range(8):
                    z = lds2(chunk_at + WORKSPACE.q_scale + m * 32 + tt * 8)
                    for e in range(2):
                        out[4 * m + 2 * e] *= z[0]
                        out[4 * m + 2 * e + 1] *= z[1]
                for e in range(16):
                    wp[e] = pack16(w[2 * e], w[2 * e + 1])
                add_p(out, wp, i32(chunk_at + WORKSPACE.a_qk))
                for m in range(8):
                    to[m] = lds_i32(base + STAGE.out_rows + (m * 8 + gg) * 4)
                slot = uniform(lds_i32(base + STAGE.slot))
                wait_s(s, out, wk, wl, wp)
                for e in range(16):
                    done[e] = pack(out[2 * e], out[2 * e + 1])
                cuda.syncwarp()
                if lane == 0:
                    mbar_arrive(empty + stage * 8)
                if slot >= 0:
                    at = states + u64(slot * HEADS + head) * u64(STATE_BYTES) + u64(tid * 16)
                    for e in range(16):
                        stg4(at + u64(e * 2048), s[4 * e], s[4 * e + 1], s[4 * e + 2], s[4 * e + 3])
                    fence_global()
                    cuda.syncwarp()
                    if lane == 0:
                        count_up(flags + u64((slot * HEADS + head) * 4))
                stage = i32(stage + 1)
                if stage == STAGES:
                    stage = i32(0)
                    phase = i32(phase ^ 1)
            mbar_wait(full + stage * 8, phase)
            count = uniform(lds_i32(sm + stage * STAGE_BYTES + STAGE.count))
        put_rows(done, to, o_at, o_stride)

    def scan(qkv, o, counts, chunk_rows, chunk_out_rows, chunk_slots, runs, workspace, states, flags, progress, stride,
             o_stride):
        """qkv: BF16 rows q|k|v; o: BF16; row strides in elements. See the module."""
        pdl_launch()
        sm = i32((smem_addr(cuda.shared.array(0, types.uint8)) + 1023) & ~1023)
        tid = i32(cuda.threadIdx.x)
        warp = uniform(tid >> 5)                # wgmma needs ptxas to know that it is uniform
        lane = i32(tid & 31)
        full = i32(sm + SHARED.full)
        empty = i32(sm + SHARED.empty)
        state_full = i32(sm + SHARED.state_full)
        state_empty = i32(sm + SHARED.state_empty)
        if tid == 0:
            for n in range(STAGES):
                mbar_init(full + n * 8, COPY_WARPS * 32 + 1)      # every thread's copies, 1 announcement of the workspace
                mbar_init(empty + n * 8, WARPS)
            mbar_init(state_full, 1)
            mbar_init(state_empty, WARPS)
            mbar_fence()
        cuda.syncthreads()
        n_runs = ldg_i32(counts + u64(RUNS_AT))
        single_sequence = n_runs == 1            # then chunks are taken as ``prepare`` announces them
        if warp >= WARPS:
            copy_chunks(sm, tid, lane, n_runs, single_sequence, qkv, chunk_rows, chunk_out_rows, chunk_slots, runs, workspace,
                        states, flags, progress, stride)
        else:
            walk_chunks(sm, tid, warp, lane, single_sequence, o, states, flags, o_stride)

    return scan


SIGNATURE = void(*[u64] * 11, i32, i32)


def state_matrices(states: np.ndarray) -> np.ndarray:
    """States as the scan stores them, float32 [slots, HV, 128, 128], as S [slots, HV, key, value]."""
    slots, heads = states.shape[:2]
    #              v block, key block, warp, row of 8, pair of columns, upper half, column
    x = states.reshape(slots, heads, V_BLOCKS, D // 8, WARPS, 8, 4, 2, 2)
    #          key block, pair, column | v block, warp, upper half, row
    return x.transpose(0, 1, 3, 6, 8, 2, 4, 7, 5).reshape(slots, heads, D, D)
