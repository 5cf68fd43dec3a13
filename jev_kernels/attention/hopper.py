"""Causal gated attention for Hopper: wgmma, TMA and clusters, over the paths of a row pool. Head dim 256.

    out = r( r(softmax(q k^T / 16) v) * r(sigmoid(gate)) ),  r = round to BF16;  without a gate r(softmax(..) v)

    q, gate [rows, Hq*256], k, v [rows, Hk*256], out [rows, Hq*256]: BF16 in uint16, rows any stride apart
    counts, tiles, paths: see jev_kernels.pool. The row at position p of a tile's branch is paths[path_start + p].

Same function as ``jev_kernels.attention.portable`` (which is the one to read first), P rounded to BF16 for P V in both.
Scores, sums and the running output are float32.

Shape of the kernel
    * A CTA is two consumer warpgroups of 64 query rows and a producer warpgroup. They share key tiles of 80 positions;
      K and V have two slots each, in the 128B swizzle that wgmma reads.
    * S = Q K^T takes both operands from shared memory; P goes into P V from registers, and V's tile is read N-major
      through its descriptor, so nothing is ever transposed. S of tile n and P V of tile n-1 are started together; the
      softmax of tile n runs under P V; the other warpgroup fills the tensor cores meanwhile.
    * The gate takes the place of Q in shared memory once the last Q K^T has been read; its sigmoids are computed while
      the last P V runs.
    * CTAs are persistent and find their work in ``tiles`` by themselves: the grid depends on capacities alone.

What a row's bits depend on: its prefix, and nothing else
    * Key tiles start at absolute multiples of 80 and are taken in rising order. A row of a tile is a row of the MMA; no
      arithmetic crosses rows. A key tile beyond a row's own position is masked whole: factor 1, P = 0, no change.
    * So the ways below of dealing rows to CTAs are free to differ with the number of rows, and give the same bits.

Items: what a CTA (or a cluster of CL = 2, which multicasts the key tiles) takes at a time
    * whole: 128 rows of a tile and one head for each CTA.
    * packed, where that makes fewer items: all G = Hq / Hk heads of a KV head for few rows; 64 // G rows a warpgroup,
      MMA row m = row m // G, head m % G. One box of a three-dimensional tensor map brings such rows. 255 options of
      10 tokens over a long prefix would otherwise waste five sixths of every MMA.
    * split, when items are so few that CTAs would idle: the rows of a warpgroup are an item of their own.
    Dealt out in a zigzag, in the order of tiles: longest first.

Keys: a tile whose rows are contiguous is one TMA box; any other is gathered through the path with cp.async by the whole
producer warpgroup. What a box brings from behind the end of the path is masked in S, whatever it is; in V it is set to
zeros, because 0 x NaN would not be 0. So no row outside the path is ever an operand that counts.

Rings, per slot of K and of V
    full = "the tile is there": one arrival by the producer, and for a box the announced bytes
    free = "everybody has read it": one arrival per consumer warp of every CTA of the cluster

The producer's waits trap after some seconds. Consumers have no register to spare for a clock (64 bytes of spills) and wait
without a limit, covered by the producer: it waits for every slot that they release and, at the end, for their last output.
"""
from __future__ import annotations

import math
from enum import IntEnum

from numba import cuda
from numba.cuda import types
from numba.cuda.core import config

from jev_kernels.pool import TILES
from jev_kernels.ptx import (
    ballot,
    cluster_sync,
    cp16,
    cp_wait_all,
    cta_rank,
    evict_first,
    evict_last,
    fence_async,
    i32,
    ldg_i32,
    lds_i32,
    mbar_arrive,
    mbar_arrive_at,
    mbar_arrive_lane0,
    mbar_arrive_pair,
    mbar_expect,
    mbar_fence,
    mbar_init,
    mbar_wait,
    mbar_wait_covered,
    named_sync,
    pdl_launch,
    pdl_wait,
    shfl_idx_i32,
    smem_addr,
    sts_u32,
    u64,
    uniform,
    void,
)
from jev_kernels.ptx.shared_layout import SharedLayout, barriers, block_bytes, words
from jev_kernels.ptx.wgmma import K_MAJOR, SharedMatrix, Step, along_k, wgmma, wgmma_wait, zeros
from jev_kernels.runtime import cubin, tensor_maps
from jev_kernels.runtime.launch import Kernel, View

if config.ENABLE_CUDASIM:
    from jev_kernels.sim import attention_steps as hw
else:
    from jev_kernels.attention import hopper_steps as hw

D, WG_ROWS = 256, 64        # head dim; query rows of a warpgroup
PANELS = D // 64            # a tile is in panels [rows][64 columns = 128 bytes], the width of the swizzle
BN = 80                     # positions of a key tile
GROUPS = 2                  # consumer warpgroups
THREADS = GROUPS * 128 + 128
WG_BYTES = WG_ROWS * D * 2  # bytes of a warpgroup's rows in shared memory
KEY_BYTES = BN * D * 2      # ... of a K or V tile
PANEL_BYTES = BN * 128      # ... of a panel of it
# A work tile as the producer describes it to the consumers: rows of q from ``row`` on, their first position and head,
# whether heads are packed, key tiles, positions of the path that count. ``rows`` is NO_MORE behind the last one.
WORK_TILE = SharedLayout(row=words(1), rows=words(1), position=words(1), head=words(1), packed=words(1), key_tiles=words(1),
                         end=words(1))
WORK_TILE_BYTES = 32
NO_MORE = -1
# Two slots of K, of V and of work tiles. One of each of the last four barriers for each warpgroup: Q and the work tile are
# there; Q may be overwritten by the gate; the gate is there; the output has left shared memory.
SHARED = SharedLayout(q=GROUPS * WG_BYTES, k=2 * KEY_BYTES, v=2 * KEY_BYTES, k_full=barriers(2), k_free=barriers(2),
                      v_full=barriers(2), v_free=barriers(2), q_full=barriers(GROUPS), q_read=barriers(GROUPS),
                      gate_full=barriers(GROUPS), q_free=barriers(GROUPS), work_tiles=2 * WORK_TILE_BYTES)
SMEM = block_bytes(SHARED)


class Barrier(IntEnum):
    """Named barriers; 0 is the whole block's."""
    FIRST_GROUP = 1         # of the first consumer warpgroup; the second one's follows
    PRODUCER = 1 + GROUPS


FIRST_GROUP_BARRIER, PRODUCER_BARRIER = int(Barrier.FIRST_GROUP), int(Barrier.PRODUCER)
PRODUCER = GROUPS * 4       # first producer warp
MAP_BYTES = 128             # of a tensor map; in device memory in this order:
Q_WHOLE, Q_PACKED, K_MAP, V_MAP, GATE_WHOLE, GATE_PACKED = (i * MAP_BYTES for i in range(6))

#                maps counts tiles paths k    v    out  k, v, out: bytes from row to row
SIGNATURE = void(u64, u64, u64, u64, u64, u64, u64, i32, i32, i32)


@cubin.factory
def make_kernel(HQ: int, HK: int, CL: int = 1, gated: bool = True) -> Kernel:
    """The kernel for HQ query heads and HK KV heads, launched in clusters of CL CTAs."""
    G = HQ // HK
    WG_PACKED_ROWS = WG_ROWS // G                    # rows of a warpgroup in a packed item
    PACKED_ROWS = GROUPS * WG_PACKED_ROWS * CL       # ... of all its warpgroups
    PACKED_BYTES = WG_PACKED_ROWS * G * D * 2
    UNPACKED_ITEMS = HQ // CL                        # items of a tile that is not packed
    INVERSE_G = 65536 // G + 1                       # 1 / G in 16-bit fixed point: (m * INVERSE_G) >> 16 = m // G for m < 64
    PART = BN // CL                                  # rows of a key box that this CTA loads
    MASK = (1 << CL) - 1
    steps = hw.make_steps(BN, math.log2(math.e) / 16)
    first_state, mask, softmax, pack, rescale, inverses, finish = (steps[name] for name in (
        "first_state", "mask", "softmax", "pack", "rescale", "inverses", "finish"))
    (sigmoids, more_sigmoids), (gated_finish, more_gated_finish) = steps["sigmoids"], steps["gated_finish"]
    # Registers a thread of S and O, of P and of half the gates. S = Q K^T from shared memory, O += P V with P from registers
    # and V contiguous along the head dim.
    S, O, P, GATES = BN // 2, D // 2, BN // 4, D // 8
    qk = wgmma("qk", "bf16", S, K_MAJOR, K_MAJOR, along_k(BN, PANELS, WG_ROWS * 128, PANEL_BYTES), accumulate=False)
    pv = wgmma("pv", "bf16", O, P, SharedMatrix(leading=PANEL_BYTES, transposed=True),
               [Step(D, a=4 * k, b=2048 * k) for k in range(BN // 16)])
    zero = zeros("zero", O)
    s_wait, s_wait_but_one = wgmma_wait("s_wait", 0, (S,)), wgmma_wait("s_wait_but_one", 1, (S,))
    o_wait, o_wait_last, o_wait_gated = (wgmma_wait(name, 0, (O,), kept) for name, kept in (
        ("o_wait", (P, S)), ("o_wait_last", (P,)), ("o_wait_gated", (P, GATES))))
    inline = cuda.jit(device=True, inline="always")

    # ---------------------------------------------------------------- the tile scheduler
    @inline
    def items_of(count):
        """Items of a tile of count rows."""
        return i32(min((count + PACKED_ROWS - 1) // PACKED_ROWS * HK, UNPACKED_ITEMS))

    @inline
    def count_items(tiles, first, n_tiles, lane):
        """Lane l: the items of tiles first .. first + l."""
        count = ldg_i32(tiles + u64(max(min(first + lane, n_tiles - 1), 0) * 16 + 4))
        return hw.running_sum(items_of(count) if first + lane < n_tiles else i32(0))

    # ---------------------------------------------------------------- loads
    @inline
    def load_rows(dst, map_whole, work_tile, ready, parity, bar, policy):
        """The work tile's rows of Q or of the gate: each warpgroup's on its own barrier, once its place is ready."""
        row, rows, head, packed = (lds_i32(work_tile + WORK_TILE.row), lds_i32(work_tile + WORK_TILE.rows),
                                   lds_i32(work_tile + WORK_TILE.head), lds_i32(work_tile + WORK_TILE.packed))
        span = i32(WG_PACKED_ROWS if packed else WG_ROWS)
        source = map_whole + u64(MAP_BYTES if packed else 0)
        for w in range(GROUPS):
            mbar_wait(ready + w * 8, parity)
            if rows > w * span:
                mbar_expect(bar + w * 8, PACKED_BYTES if packed else WG_BYTES)
                for c in range(PANELS):
                    hw.load_3d(dst + w * WG_BYTES + c * (WG_ROWS * 128), source, c * 64, head, row + w * span,
                               bar + w * 8, policy)
            else:
                mbar_arrive(bar + w * 8)

    @inline
    def fetch_rows(map_whole, work_tile):
        """The same rows, into L2."""
        row, head, packed = (lds_i32(work_tile + WORK_TILE.row), lds_i32(work_tile + WORK_TILE.head),
                             lds_i32(work_tile + WORK_TILE.packed))
        source = map_whole + u64(MAP_BYTES if packed else 0)
        for w in range(GROUPS):
            for c in range(PANELS):
                hw.prefetch_3d(source, c * 64, head, row + w * (WG_PACKED_ROWS if packed else WG_ROWS))

    @inline
    def load_keys(dst, tensor, col, row, rank, bar, policy):
        """A tile of K or V in BN consecutive rows: every CTA of the cluster loads its part for all of them."""
        mbar_expect(bar, KEY_BYTES)
        for c in range(PANELS):
            at = dst + c * PANEL_BYTES + rank * (PART * 128)
            if CL > 1:
                hw.tma_multicast(at, tensor, col + c * 64, row + rank * PART, bar, MASK, policy)
            else:
                hw.tma_load(at, tensor, col + c * 64, row, bar, policy)

    @inline
    def gather_keys(dst, source, stride, path, first, end, thread):
        """The same row by row, by the producer warpgroup: a warp a row, 16 bytes a lane, swizzled as TMA would.
        Positions from ``end`` on repeat the row before. It is all there once the four warps have returned."""
        thread = hw.opaque(thread)                   # or 20 addresses are kept in registers all along
        lane, top = thread & 31, thread >> 5
        row = ldg_i32(path + u64(min(first + top + 4 * min(lane, BN // 4 - 1), end - 1) * 4))
        to = i32(dst + (lane >> 3) * PANEL_BYTES + top * 128 + (((lane & 7) ^ top) << 4))
        other = to ^ 64                              # chunk 4 further: rows top + 4, top + 12, ..
        source += u64(lane * 16)
        for m in range(BN // 4):
            cp16((other if m & 1 else to) + m * 512, source + u64(shfl_idx_i32(row, m)) * u64(stride), 16)
        cp_wait_all()
        fence_async()

    @inline
    def fill_slot(keys, full, free, at, contiguous, tensor, col, row, rank, policy, source, stride, path, first, end, warp,
                  lead, thread):
        """Key tile number ``at`` of K or V into its slot, once everybody has read what was there: a box of consecutive rows, or
        gathered. Addresses are computed where they are needed: the producer has few registers."""
        slot = at & 1
        if contiguous:
            if lead:
                mbar_wait(free + slot * 8, ((at >> 1) & 1) ^ 1)
                load_keys(keys + slot * KEY_BYTES, tensor, col, row, rank, full + slot * 8, policy)
        else:
            if warp == PRODUCER:
                mbar_wait(free + slot * 8, ((at >> 1) & 1) ^ 1)
            named_sync(PRODUCER_BARRIER, 128)
            gather_keys(keys + slot * KEY_BYTES, source + u64(col * 2), stride, path, first, end, thread)
            named_sync(PRODUCER_BARRIER, 128)
            if lead:
                mbar_arrive(full + slot * 8)

    # ---------------------------------------------------------------- what consumers do beside products
    @inline
    def clear_rows(tile, first, thread):
        """Zeros in rows first .. BN - 1 of a V tile, by a warpgroup, there for its wgmma.

        The other warpgroup may read the tile by then, but not before it has written the same zeros.
        """
        for c in range(thread, (BN - first) * 32, 128):
            hw.clear16(tile + (c >> 3 & 3) * PANEL_BYTES + (first + (c >> 5)) * 128 + (c & 7) * 16)
        fence_async()

    @inline
    def release_slot(bar, lane):
        """This warp has read the slot."""
        if CL > 1:
            mbar_arrive_pair(bar, lane)
        else:
            mbar_arrive_lane0(bar, lane)

    @inline
    def arrive_at(bar, cta):
        if CL > 1:
            mbar_arrive_at(bar, cta)
        else:
            mbar_arrive(bar)

    @inline
    def pass_over(sm, base, n, all_n):
        """Take key tiles n .. all_n - 1, which only other warps need, as read by this one: one lane does it, because
        nothing here holds a warp's lanes together, and one that fell two rounds of a ring behind would wait for ever."""
        for i in range(n, all_n):
            at = i32(base + i)
            slot = at & 1
            mbar_wait_covered(sm + SHARED.k_full + slot * 8, (at >> 1) & 1)
            for cta in range(CL):
                arrive_at(sm + SHARED.k_free + slot * 8, cta)
            mbar_wait_covered(sm + SHARED.v_full + slot * 8, (at >> 1) & 1)
            for cta in range(CL):
                arrive_at(sm + SHARED.v_free + slot * 8, cta)

    @inline
    def store_rows(out, out_stride, work_tile, q_at, wg, warp, lane, span, rows, packed):
        """The epilogue's stores: from shared memory, a row of the tile at a time, 512 bytes: only rows that are this tile's."""
        row0 = lds_i32(work_tile + WORK_TILE.row) + wg * span
        to = out + u64(lds_i32(work_tile + WORK_TILE.head) * (D * 2) + lane * 16)
        source = i32(q_at + (lane >> 3) * (WG_ROWS * 128))
        for j in range(0, hw.opaque(16), 4):         # a loop, or its addresses take registers
            for u in range(4):
                m = i32((warp & 3) * 16 + j + u)
                r = i32((m * INVERSE_G) >> 16 if packed else m)
                hw.copy_out(i32(r < rows), source + m * 128 + (((lane & 7) ^ (m & 7)) << 4),
                            to + u64(row0 + r) * u64(out_stride) + u64((m - r * G if packed else 0) * (D * 2)))

    # ---------------------------------------------------------------- the two roles
    @inline
    def producer(sm, tid, warp, lane, rank, maps, counts, tiles, paths, k, v, k_stride, v_stride):
        """The producer warpgroup: finds work tiles, and loads their rows of Q and the gate and their key tiles."""
        k_s, v_s = sm + SHARED.k, sm + SHARED.v
        k_full, k_free, v_full, v_free = sm + SHARED.k_full, sm + SHARED.k_free, sm + SHARED.v_full, sm + SHARED.v_free
        q_full, q_read, gate_full, q_free = (sm + SHARED.q_full, sm + SHARED.q_read, sm + SHARED.gate_full,
                                             sm + SHARED.q_free)
        thread = tid & 127
        lead = thread == 0
        base = i32(0)                                # key tiles done, over all items
        done = i32(0)                                # items done
        if lead:
            for at in (Q_WHOLE, K_MAP, V_MAP, GATE_WHOLE):
                hw.prefetch_tensormap(maps + u64(at))
        stay, leave = evict_last(), evict_first()
        clusters = i32(cuda.gridDim.x // CL)
        mine = i32(cuda.blockIdx.x // CL)
        item = mine
        n_tiles = ldg_i32(counts + u64(4 * TILES))
        first = i32(0)                               # the lanes hold the items of tiles first .. first + 31
        passed = i32(0)                              # items of the tiles before
        t_items = count_items(tiles, first, n_tiles, lane)
        split = i32(1 if CL == 1 and n_tiles <= 32 and 2 * shfl_idx_i32(t_items, 31) <= clusters else 0)
        while True:
            source = hw.first_true(i32(passed + t_items > (item >> split)))
            while source < 0 and first + 32 < n_tiles:
                passed = i32(passed + shfl_idx_i32(t_items, 31))
                first = i32(first + 32)
                t_items = count_items(tiles, first, n_tiles, lane)
                source = hw.first_true(i32(passed + t_items > (item >> split)))
            if source < 0:
                break
            tile = tiles + u64((first + source) * 16)
            count = ldg_i32(tile + u64(4))
            position = ldg_i32(tile + u64(8))
            path = paths + u64(ldg_i32(tile + u64(12))) * u64(4)
            sub = i32((item >> split) - passed - shfl_idx_i32(t_items, source) + items_of(count))
            packed = items_of(count) < UNPACKED_ITEMS
            span = i32(WG_PACKED_ROWS if packed else WG_ROWS)         # rows of a warpgroup
            start = i32(sub // HK * PACKED_ROWS if packed else 0)
            stop = i32(min(count, start + PACKED_ROWS) if packed else count)
            head = i32(sub % HK * G if packed else sub * CL + rank)
            k_col = i32(head // G * D)
            if split:
                start = i32(start + (item & 1) * span)
                stop = i32(min(stop, start + span))
            end = i32(position + stop)                                # positions of the path that count here
            if CL > 1 and packed:
                start = i32(start + rank * (GROUPS * WG_PACKED_ROWS))
            rows = i32(max(min(stop - start, GROUPS * span), 0))
            deal = i32(item // clusters + 1)                          # the next round
            item = i32(deal * clusters + (clusters - 1 - mine if deal & 1 else mine))
            if CL == 1 and rows == 0:
                continue
            n = i32((end + BN - 1) // BN)
            work_tile = i32(sm + SHARED.work_tiles + (done & 1) * WORK_TILE_BYTES)
            if lead:
                sts_u32(work_tile + WORK_TILE.row, ldg_i32(tile) + start)
                sts_u32(work_tile + WORK_TILE.rows, rows)
                sts_u32(work_tile + WORK_TILE.position, position + start)
                sts_u32(work_tile + WORK_TILE.head, head)
                sts_u32(work_tile + WORK_TILE.packed, i32(packed))
                sts_u32(work_tile + WORK_TILE.key_tiles, n)
                sts_u32(work_tile + WORK_TILE.end, end)
            at_row = i32(0)
            box = i32(0)
            for i in range(n + 1):                                    # K of tile i, then V of the one before
                row_before, box_before = at_row, box
                if i < n:
                    at = i32(base + i)
                    if i & 31 == 0:                                   # lane l looks at key tile i + l
                        low = i32((i + lane) * BN)
                        high = i32(min(low + BN, end) - 1)
                        first_rows = ldg_i32(path + u64(min(low, end - 1) * 4))
                        boxes = i32(ballot(i32(ldg_i32(path + u64(high * 4)) - first_rows == high - low)))
                    at_row = shfl_idx_i32(first_rows, i & 31)
                    box = i32((boxes >> (i & 31)) & 1)
                    if i == 0:
                        pdl_wait()
                    fill_slot(k_s, k_full, k_free, at, box, maps + u64(K_MAP), k_col, at_row, rank, stay, k, k_stride, path,
                              i32(i * BN), end, warp, lead, thread)
                    if i == 0 and lead:
                        load_rows(sm + SHARED.q, maps + u64(Q_WHOLE), work_tile, q_free, (done & 1) ^ 1,
                                  q_full, leave)
                if i > 0:
                    fill_slot(v_s, v_full, v_free, i32(base + i - 1), box_before, maps + u64(V_MAP), k_col, row_before, rank,
                              stay, v, v_stride, path, i32(i * BN - BN), end, warp, lead, thread)
                    if gated and lead and i == 1:                     # not needed soon, but from L2 then
                        fetch_rows(maps + u64(GATE_WHOLE), work_tile)
            if gated and lead:                       # the gate takes the place of Q once that has been read
                load_rows(sm + SHARED.q, maps + u64(GATE_WHOLE), work_tile, q_read, done & 1,
                          gate_full, leave)
            base = i32(base + n)
            done = i32(done + 1)
        if lead:                                     # no more
            sts_u32(sm + SHARED.work_tiles + (done & 1) * WORK_TILE_BYTES + WORK_TILE.rows, NO_MORE)
            for w in range(GROUPS):
                mbar_wait(q_free + w * 8, (done & 1) ^ 1)
                mbar_arrive(q_full + w * 8)

    @inline
    def consumer(sm, tid, warp, lane, out, out_stride):
        """A consumer warpgroup: 64 rows of each work tile over its key tiles, then the epilogue."""
        k_s, v_s = sm + SHARED.k, sm + SHARED.v
        k_full, k_free, v_full, v_free = sm + SHARED.k_full, sm + SHARED.k_free, sm + SHARED.v_full, sm + SHARED.v_free
        q_full, q_read, gate_full, q_free = (sm + SHARED.q_full, sm + SHARED.q_read, sm + SHARED.gate_full,
                                             sm + SHARED.q_free)
        base = i32(0)                                # key tiles done, over all items
        done = i32(0)                                # items done
        wg = warp >> 2
        q_at = i32(sm + SHARED.q + wg * WG_BYTES)
        spot = i32(q_at + ((warp & 3) * 16 + (lane & 15)) * 128)      # this lane's row of ld/stmatrix
        while True:
            mbar_wait_covered(q_full + wg * 8, done & 1)
            work_tile = i32(sm + SHARED.work_tiles + (done & 1) * WORK_TILE_BYTES)
            rows = uniform(lds_i32(work_tile + WORK_TILE.rows))
            if rows < 0:                             # NO_MORE
                break
            packed = uniform(lds_i32(work_tile + WORK_TILE.packed)) != 0
            all_n = uniform(lds_i32(work_tile + WORK_TILE.key_tiles))
            span = i32(WG_PACKED_ROWS if packed else WG_ROWS)
            low = i32(uniform(lds_i32(work_tile + WORK_TILE.position)) + wg * span)   # position of the warpgroup's first row
            rows = i32(min(rows - wg * span, span))                   # rows of the warpgroup
            n = i32((low + rows + BN - 1) // BN) if rows > 0 else i32(0)
            if n > 0:
                m = i32((warp & 3) * 16 + (lane >> 2))
                limit = i32(low - 2 * (lane & 3) + ((m * INVERSE_G) >> 16 if packed else m))
                limit8 = i32(low - 2 * (lane & 3) + (((m + 8) * INVERSE_G) >> 16 if packed else m + 8))
                slot = base & 1
                mbar_wait_covered(k_full + slot * 8, (base >> 1) & 1)
                s = s_wait(qk(q_at, k_s + slot * KEY_BYTES))
                release_slot(k_free + slot * 8, lane)
                if gated and n == 1:
                    mbar_arrive_lane0(q_read + wg * 8, lane)
                if BN - 1 > low:
                    s = mask(s, limit, limit8)
                s, state = softmax(s, first_state())
                p = pack(s)
                o = zero()
                for i in range(1, n):
                    at = i32(base + i)
                    slot = at & 1
                    before = slot ^ 1
                    mbar_wait_covered(k_full + slot * 8, (at >> 1) & 1)
                    s = qk(q_at, k_s + slot * KEY_BYTES)
                    mbar_wait_covered(v_full + before * 8, ((at - 1) >> 1) & 1)
                    o = pv(o, p, v_s + before * KEY_BYTES)
                    s = s_wait_but_one(s)
                    release_slot(k_free + slot * 8, lane)
                    if gated and i == n - 1:
                        mbar_arrive_lane0(q_read + wg * 8, lane)
                    if i * BN + BN - 1 > low:
                        s = mask(s, limit - i * BN, limit8 - i * BN)
                    s, state = softmax(s, state)
                    o = o_wait(o, p, s)
                    release_slot(v_free + before * 8, lane)
                    o = rescale(o, state)
                    p = pack(s)
                at = i32(base + n - 1)
                slot = at & 1
                mbar_wait_covered(v_full + slot * 8, (at >> 1) & 1)
                tail = i32(uniform(lds_i32(work_tile + WORK_TILE.end)) - (n - 1) * BN)
                if tail < BN:                                         # what lies behind is masked, but may be NaN
                    clear_rows(v_s + slot * KEY_BYTES, tail, tid & 127)
                    named_sync(wg + FIRST_GROUP_BARRIER, 128)
                o = pv(o, p, v_s + slot * KEY_BYTES)
                if gated:
                    mbar_wait_covered(gate_full + wg * 8, done & 1)
                    gates = sigmoids(spot, lane & 7, lane >> 4)       # while the last P V runs
                    o = o_wait_gated(o, p, gates)
                    release_slot(v_free + slot * 8, lane)
                    inverse = inverses(state)
                    gated_finish(o, inverse, spot, lane & 7, lane >> 4, gates)
                    gates = more_sigmoids(spot, lane & 7, lane >> 4)
                    more_gated_finish(o, inverse, spot, lane & 7, lane >> 4, gates)
                else:
                    o = o_wait_last(o, p)
                    release_slot(v_free + slot * 8, lane)
                    named_sync(wg + FIRST_GROUP_BARRIER, 128)         # the others have read Q, too
                    finish(o, inverses(state), spot, lane & 7, lane >> 4)
                cuda.syncwarp()
                store_rows(out, out_stride, work_tile, q_at, wg, warp, lane, span, rows, packed)
                fence_async()
            if lane == 0:
                pass_over(sm, base, n, all_n)
            if gated and n == 0:                                      # no rows: only keep step
                mbar_arrive_lane0(q_read + wg * 8, lane)
                mbar_wait_covered(gate_full + wg * 8, done & 1)
            named_sync(wg + FIRST_GROUP_BARRIER, 128)
            if tid & 127 == 0:
                mbar_arrive(q_free + wg * 8)
            base = i32(base + all_n)
            done = i32(done + 1)

    def attention(maps, counts, tiles, paths, k, v, out, k_stride, v_stride, out_stride):
        sm = (smem_addr(cuda.shared.array(0, types.uint8)) + 1023) & ~1023
        tid = cuda.threadIdx.x
        lane = tid & 31
        warp = uniform(tid >> 5)
        rank = cta_rank() if CL > 1 else 0
        if tid == 0:
            for s in range(2):
                mbar_init(sm + SHARED.k_full + s * 8, 1)
                mbar_init(sm + SHARED.v_full + s * 8, 1)
                mbar_init(sm + SHARED.k_free + s * 8, GROUPS * 4 * CL)
                mbar_init(sm + SHARED.v_free + s * 8, GROUPS * 4 * CL)
                mbar_init(sm + SHARED.q_full + s * 8, 1)
                mbar_init(sm + SHARED.q_read + s * 8, 4)
                mbar_init(sm + SHARED.gate_full + s * 8, 1)
                mbar_init(sm + SHARED.q_free + s * 8, 1)
            mbar_fence()
        if CL > 1:
            cluster_sync()
        else:
            cuda.syncthreads()
        pdl_launch()
        if warp >= PRODUCER:
            hw.producer_registers()
            producer(sm, tid, warp, lane, rank, maps, counts, tiles, paths, k, v, k_stride, v_stride)
        else:
            hw.consumer_registers()
            pdl_wait()                               # an earlier kernel may still read what `out` held
            consumer(sm, tid, warp, lane, out, out_stride)
        if CL > 1:
            cluster_sync()                           # nobody leaves while others still signal its barriers

    return Kernel(attention, SIGNATURE, THREADS, SMEM, CL)


# ---------------------------------------------------------------- launching
class HopperPlan:
    """The kernel bound to its arrays (``attention.Operands``); see ``attention.Plan``.

    cluster: CTAs of a cluster; the bits are the same. Two, which share key tiles, are 2 % faster over one sequence of 3,399
    rows and 1.6 to 1.8 times slower over 255 options (tools/bench_attention.py), so the default is one. ctas: how many at
    most, by default one for each multiprocessor.
    """

    name = "hopper"

    def __init__(self, x, cluster: int = 1, ctas: int | None = None):
        group = x.heads // x.kv_heads
        if group > WG_ROWS:
            raise ValueError(f"q must have at most {WG_ROWS} heads for one of k, not {group}")
        if group % cluster:
            raise ValueError(f"clusters of {cluster} need a multiple of {cluster} q heads for one of k, not {group}")
        self.kernel = make_kernel(x.heads, x.kv_heads, cluster, x.gate is not None)

        def rows_map(v: View, heads: int, rows: int) -> bytes:
            return tensor_maps.encode(v.address, (D, x.heads, v.shape[0]), (D * 2, v.strides[0] * 2), (64, heads, rows))

        def keys_map(v: View) -> bytes:
            return tensor_maps.encode(v.address, (v.shape[1], v.shape[0]), (v.strides[0] * 2,), (64, BN // cluster))

        gate = x.gate or x.q
        maps = tensor_maps.place(b"".join((
            rows_map(x.q, 1, WG_ROWS), rows_map(x.q, group, WG_ROWS // group), keys_map(x.k), keys_map(x.v),
            rows_map(gate, 1, WG_ROWS), rows_map(gate, group, WG_ROWS // group))))
        self.arguments = (maps, x.counts.address, x.tiles.address, x.paths.address,
                          x.k.address, x.v.address, x.out.address,
                          x.k.strides[0] * 2, x.v.strides[0] * 2, x.out.strides[0] * 2)
        ctas = ctas or cuda.get_current_device().MULTIPROCESSOR_COUNT
        items = x.tiles.shape[0] * (2 * x.heads // cluster)
        self.grid = min(ctas // cluster, items) * cluster

    def __call__(self, stream, pdl: bool = False) -> None:
        self.kernel(stream, self.grid, *self.arguments, pdl=pdl)


def kernels() -> dict:
    """The kernels with their budgets: {name: (Kernel, compute capabilities, registers, spill bytes)}."""
    return {f"hopper_attention_{hq}_{hk}_{cl}{'' if gated else '_ungated'}": (
        make_kernel(hq, hk, cl, gated), ((9, 0, "a"),), 168, 0)
        for hq, hk, cl, gated in ((24, 4, 1, True), (24, 4, 2, True), (16, 4, 1, True), (16, 4, 2, True),
                                  (2, 1, 1, True), (24, 4, 1, False))}
