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
    * split, when items are so few that CTAs would idle: a warpgroup's share is an item of its own.
    Dealt out in a zigzag, in the order of tiles: longest first.

Keys: a tile whose rows are contiguous is one TMA box; any other is gathered through the path with cp.async by the whole
producer warpgroup. What a box brings from behind the end of the path is masked in S, whatever it is; in V it is set to
zeros, because 0 x NaN would not be 0. So no row outside the path is ever an operand that counts.

Rings, per slot of K and of V
    full = "the tile is there": one arrival by the producer, and for a box the announced bytes
    free = "everybody has read it": one arrival per consumer warp of every CTA of the cluster
"""
from __future__ import annotations

import math

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
    pick,
    smem_addr,
    sts_u32,
    u64,
    uniform,
    void,
)
from jev_kernels.ptx.wgmma import K_MAJOR, SharedMatrix, Step, along_k, wgmma, wgmma_wait, zeros
from jev_kernels.runtime import cubin, tensor_maps
from jev_kernels.runtime.launch import Kernel, View

if config.ENABLE_CUDASIM:
    from jev_kernels.sim import attention_steps as hw
else:
    from jev_kernels.attention import hopper_steps as hw

D, SLABS, WG_ROWS = 256, 4, 64      # head dim; slabs of 64 columns; query rows of a warpgroup
BN = 80                     # positions of a key tile
GROUPS = 2                  # consumer warpgroups
THREADS = GROUPS * 128 + 128
WG_BYTES = WG_ROWS * D * 2  # bytes of a warpgroup's rows in shared memory
KEY_BYTES = BN * D * 2      # ... of a K or V tile
SLAB = BN * 128             # ... of its 64 columns
SMEM = GROUPS * WG_BYTES + 4 * KEY_BYTES + 256 + 1024
PRODUCER = GROUPS * 4       # first producer warp
MAP_BYTES = 128             # of a tensor map; in device memory in this order:
Q_WHOLE, Q_PACKED, K_MAP, V_MAP, GATE_WHOLE, GATE_PACKED = (i * MAP_BYTES for i in range(6))

#                maps counts tiles paths k    v    out  k, v, out: bytes from row to row
SIGNATURE = void(u64, u64, u64, u64, u64, u64, u64, i32, i32, i32)


@cubin.factory
def make_kernel(HQ: int, HK: int, CL: int = 1, gated: bool = True) -> Kernel:
    """The kernel for HQ query heads and HK KV heads, launched in clusters of CL CTAs."""
    G = HQ // HK
    PACK = WG_ROWS // G                              # rows of a warpgroup in a packed item
    SHARE = GROUPS * PACK * CL                       # ... of all its warpgroups
    BY_G = 65536 // G + 1                            # (m * BY_G) >> 16 = m // G for m < 64
    WHOLE = HQ // CL                                 # items of a tile that is not packed
    PART = BN // CL                                  # rows of a key box that this CTA loads
    MASK = (1 << CL) - 1
    PACKED_BYTES = PACK * G * D * 2
    steps = hw.make_steps(BN, math.log2(math.e) / 16)
    first_state, mask, softmax, pack, rescale, inverses, finish = (steps[name] for name in (
        "first_state", "mask", "softmax", "pack", "rescale", "inverses", "finish"))
    (sigmoids, more_sigmoids), (gated_finish, more_gated_finish) = steps["sigmoids"], steps["gated_finish"]
    # Registers a thread of S and O, of P and of half the gates. S = Q K^T from shared memory, O += P V with P from registers
    # and V contiguous along the head dim.
    S, O, P, GATES = BN // 2, D // 2, BN // 4, D // 8
    qk = wgmma("qk", "bf16", S, K_MAJOR, K_MAJOR, along_k(BN, SLABS, WG_ROWS * 128, SLAB), accumulate=False)
    pv = wgmma("pv", "bf16", O, P, SharedMatrix(leading=SLAB, transposed=True),
               [Step(D, a=4 * k, b=2048 * k) for k in range(BN // 16)])
    zero = zeros("zero", O)
    s_wait, s_wait_but_one = wgmma_wait("s_wait", 0, (S,)), wgmma_wait("s_wait_but_one", 1, (S,))
    o_wait, o_wait_last, o_wait_gated = (wgmma_wait(name, 0, (O,), kept) for name, kept in (
        ("o_wait", (P, S)), ("o_wait_last", (P,)), ("o_wait_gated", (P, GATES))))
    inline = cuda.jit(device=True, inline="always")

    @inline
    def items_of(count):
        """Items of a tile of count rows."""
        return i32(min((count + SHARE - 1) // SHARE * HK, WHOLE))

    @inline
    def look(tiles, first, n_tiles, lane):
        """Lane l: the items of tiles first .. first + l."""
        count = ldg_i32(tiles + u64(max(min(first + lane, n_tiles - 1), 0) * 16 + 4))
        return hw.running_sum(items_of(count) if first + lane < n_tiles else i32(0))

    @inline
    def load_rows(dst, map_whole, told, ready, parity, bar, policy):
        """The item's rows of Q or of the gate: each warpgroup's on its own barrier, once its place is ready."""
        row, rows, head, packed = lds_i32(told), lds_i32(told + 4), lds_i32(told + 12), lds_i32(told + 16)
        span = i32(PACK if packed else WG_ROWS)
        source = map_whole + u64(MAP_BYTES if packed else 0)
        for w in range(GROUPS):
            mbar_wait(ready + w * 8, parity)
            if rows > w * span:
                mbar_expect(bar + w * 8, PACKED_BYTES if packed else WG_BYTES)
                for c in range(SLABS):
                    hw.load_3d(dst + w * WG_BYTES + c * (WG_ROWS * 128), source, c * 64, head, row + w * span,
                               bar + w * 8, policy)
            else:
                mbar_arrive(bar + w * 8)

    @inline
    def fetch_rows(map_whole, told):
        """The same rows, into L2."""
        row, head, packed = lds_i32(told), lds_i32(told + 12), lds_i32(told + 16)
        source = map_whole + u64(MAP_BYTES if packed else 0)
        for w in range(GROUPS):
            for c in range(SLABS):
                hw.prefetch_3d(source, c * 64, head, row + w * (PACK if packed else WG_ROWS))

    @inline
    def load_keys(dst, tensor, col, row, rank, bar, policy):
        """A tile of K or V in BN consecutive rows: every CTA of the cluster loads its part for all of them."""
        mbar_expect(bar, KEY_BYTES)
        for c in range(SLABS):
            at = dst + c * SLAB + rank * (PART * 128)
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
        to = i32(dst + (lane >> 3) * SLAB + top * 128 + (((lane & 7) ^ top) << 4))
        other = to ^ 64                              # chunk 4 further: rows top + 4, top + 12, ..
        source += u64(lane * 16)
        for m in range(BN // 4):
            cp16((other if m & 1 else to) + m * 512, source + u64(pick(row, m)) * u64(stride), 16)
        cp_wait_all()
        fence_async()

    @inline
    def clear_rows(tile, first, thread):
        """Zeros in rows first .. BN - 1 of a V tile, by a warpgroup, there for its wgmma.

        The other warpgroup may read the tile by then, but not before it has written the same zeros.
        """
        for c in range(thread, (BN - first) * 32, 128):
            hw.clear16(tile + (c >> 3 & 3) * SLAB + (first + (c >> 5)) * 128 + (c & 7) * 16)
        fence_async()

    @inline
    def free(bar, lane):
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
    def pass_over(k_full, k_free, v_full, v_free, base, n, all_n):
        """Take key tiles n .. all_n - 1, which only other warps need, as read by this one: one lane does it, because
        nothing here holds a warp's lanes together, and one that fell two rounds of a ring behind would wait for ever."""
        for i in range(n, all_n):
            at = i32(base + i)
            slot = at & 1
            mbar_wait_covered(k_full + slot * 8, (at >> 1) & 1)
            for cta in range(CL):
                arrive_at(k_free + slot * 8, cta)
            mbar_wait_covered(v_full + slot * 8, (at >> 1) & 1)
            for cta in range(CL):
                arrive_at(v_free + slot * 8, cta)

    def attention(maps, counts, tiles, paths, k, v, out, k_stride, v_stride, out_stride):
        q_s = (smem_addr(cuda.shared.array(0, types.uint8)) + 1023) & ~1023
        k_s = q_s + GROUPS * WG_BYTES
        v_s = k_s + 2 * KEY_BYTES
        k_full = v_s + 2 * KEY_BYTES
        k_free = k_full + 16
        v_full = k_full + 32
        v_free = k_full + 48
        q_full = k_full + 64                         # one of each per warpgroup: Q and the item are there
        q_read = k_full + 80                         # Q may be overwritten by the gate
        g_full = k_full + 96
        q_free = k_full + 112                        # the output has left shared memory
        item_s = k_full + 128                        # two slots of (row, rows, position, head, packed, key tiles, end)
        tid = cuda.threadIdx.x
        lane = tid & 31
        warp = uniform(tid >> 5)
        rank = cta_rank() if CL > 1 else 0
        if tid == 0:
            for s in range(2):
                mbar_init(k_full + s * 8, 1)
                mbar_init(v_full + s * 8, 1)
                mbar_init(k_free + s * 8, GROUPS * 4 * CL)
                mbar_init(v_free + s * 8, GROUPS * 4 * CL)
                mbar_init(q_full + s * 8, 1)
                mbar_init(q_read + s * 8, 4)
                mbar_init(g_full + s * 8, 1)
                mbar_init(q_free + s * 8, 1)
            mbar_fence()
        if CL > 1:
            cluster_sync()
        else:
            cuda.syncthreads()
        pdl_launch()

        base = i32(0)                                # key tiles done, over all items
        turn = i32(0)                                # items done
        if warp >= PRODUCER:
            hw.producer_registers()
            thread = tid & 127
            lead = thread == 0
            if lead:
                for at in (Q_WHOLE, K_MAP, V_MAP, GATE_WHOLE):
                    hw.prefetch_tensormap(maps + u64(at))
            stay, leave = evict_last(), evict_first()
            clusters = i32(cuda.gridDim.x // CL)
            mine = i32(cuda.blockIdx.x // CL)
            item = mine
            n_tiles = ldg_i32(counts + u64(4 * TILES))
            first = i32(0)                           # the lanes hold the items of tiles first .. first + 31
            passed = i32(0)                          # items of the tiles before
            t_items = look(tiles, first, n_tiles, lane)
            split = i32(1 if CL == 1 and n_tiles <= 32 and 2 * pick(t_items, 31) <= clusters else 0)
            while True:
                source = hw.first_true(i32(passed + t_items > (item >> split)))
                while source < 0 and first + 32 < n_tiles:
                    passed = i32(passed + pick(t_items, 31))
                    first = i32(first + 32)
                    t_items = look(tiles, first, n_tiles, lane)
                    source = hw.first_true(i32(passed + t_items > (item >> split)))
                if source < 0:
                    break
                tile = tiles + u64((first + source) * 16)
                count = ldg_i32(tile + u64(4))
                position = ldg_i32(tile + u64(8))
                path = paths + u64(ldg_i32(tile + u64(12))) * u64(4)
                sub = i32((item >> split) - passed - pick(t_items, source) + items_of(count))
                packed = items_of(count) < WHOLE
                span = i32(PACK if packed else WG_ROWS)                   # rows of a warpgroup
                start = i32(sub // HK * SHARE if packed else 0)
                stop = i32(min(count, start + SHARE) if packed else count)
                head = i32(sub % HK * G if packed else sub * CL + rank)
                k_col = i32(head // G * D)
                if split:
                    start = i32(start + (item & 1) * span)
                    stop = i32(min(stop, start + span))
                end = i32(position + stop)                                # positions of the path that count here
                if CL > 1 and packed:
                    start = i32(start + rank * (GROUPS * PACK))
                rows = i32(max(min(stop - start, GROUPS * span), 0))
                deal = i32(item // clusters + 1)                          # the next round
                item = i32(deal * clusters + (clusters - 1 - mine if deal & 1 else mine))
                if CL == 1 and rows == 0:
                    continue
                n = i32((end + BN - 1) // BN)
                told = i32(item_s + (turn & 1) * 32)
                if lead:
                    sts_u32(told, ldg_i32(tile) + start)
                    sts_u32(told + 4, rows)
                    sts_u32(told + 8, position + start)
                    sts_u32(told + 12, head)
                    sts_u32(told + 16, i32(packed))
                    sts_u32(told + 20, n)
                    sts_u32(told + 24, end)
                at_row = i32(0)
                box = i32(0)
                for i in range(n + 1):
                    row_before, box_before = at_row, box
                    if i < n:
                        at = i32(base + i)
                        slot = at & 1
                        if i & 31 == 0:                                   # lane l looks at key tile i + l
                            low = i32((i + lane) * BN)
                            high = i32(min(low + BN, end) - 1)
                            first_rows = ldg_i32(path + u64(min(low, end - 1) * 4))
                            boxes = i32(ballot(i32(ldg_i32(path + u64(high * 4)) - first_rows == high - low)))
                        at_row = pick(first_rows, i & 31)
                        box = i32((boxes >> (i & 31)) & 1)
                        if i == 0:
                            pdl_wait()
                        if box:
                            if lead:
                                mbar_wait(k_free + slot * 8, ((at >> 1) & 1) ^ 1)
                                load_keys(k_s + slot * KEY_BYTES, maps + u64(K_MAP), k_col, at_row, rank,
                                          k_full + slot * 8, stay)
                        else:
                            if warp == PRODUCER:
                                mbar_wait(k_free + slot * 8, ((at >> 1) & 1) ^ 1)
                            named_sync(3, 128)
                            gather_keys(k_s + slot * KEY_BYTES, k + u64(k_col * 2), k_stride, path, i32(i * BN), end,
                                        thread)
                            named_sync(3, 128)
                            if lead:
                                mbar_arrive(k_full + slot * 8)
                        if i == 0 and lead:
                            load_rows(q_s, maps + u64(Q_WHOLE), told, q_free, (turn & 1) ^ 1, q_full, leave)
                    if i > 0:
                        at = i32(base + i - 1)
                        slot = at & 1
                        if box_before:
                            if lead:
                                mbar_wait(v_free + slot * 8, ((at >> 1) & 1) ^ 1)
                                load_keys(v_s + slot * KEY_BYTES, maps + u64(V_MAP), k_col, row_before, rank,
                                          v_full + slot * 8, stay)
                        else:
                            if warp == PRODUCER:
                                mbar_wait(v_free + slot * 8, ((at >> 1) & 1) ^ 1)
                            named_sync(3, 128)
                            gather_keys(v_s + slot * KEY_BYTES, v + u64(k_col * 2), v_stride, path, i32(i * BN - BN),
                                        end, thread)
                            named_sync(3, 128)
                            if lead:
                                mbar_arrive(v_full + slot * 8)
                        if gated and lead and i == 1:                     # not needed soon, but from L2 then
                            fetch_rows(maps + u64(GATE_WHOLE), told)
                if gated and lead:                   # the gate takes the place of Q once that has been read
                    load_rows(q_s, maps + u64(GATE_WHOLE), told, q_read, turn & 1, g_full, leave)
                base = i32(base + n)
                turn = i32(turn + 1)
            if lead:                                 # no more
                sts_u32(item_s + (turn & 1) * 32 + 4, -1)
                for w in range(GROUPS):
                    mbar_wait(q_free + w * 8, (turn & 1) ^ 1)
                    mbar_arrive(q_full + w * 8)
        else:
            hw.consumer_registers()
            pdl_wait()                               # an earlier kernel may still read what `out` held
            wg = warp >> 2
            q_at = i32(q_s + wg * WG_BYTES)
            spot = i32(q_at + ((warp & 3) * 16 + (lane & 15)) * 128)      # this lane's row of ld/stmatrix
            while True:
                mbar_wait_covered(q_full + wg * 8, turn & 1)
                told = i32(item_s + (turn & 1) * 32)
                rows = uniform(lds_i32(told + 4))
                if rows < 0:
                    break
                packed = uniform(lds_i32(told + 16)) != 0
                all_n = uniform(lds_i32(told + 20))
                span = i32(PACK if packed else WG_ROWS)
                low = i32(uniform(lds_i32(told + 8)) + wg * span)         # position of the warpgroup's first row
                rows = i32(min(rows - wg * span, span))                   # rows of the warpgroup
                n = i32((low + rows + BN - 1) // BN) if rows > 0 else i32(0)
                if n > 0:
                    m = i32((warp & 3) * 16 + (lane >> 2))
                    limit = i32(low - 2 * (lane & 3) + ((m * BY_G) >> 16 if packed else m))
                    limit8 = i32(low - 2 * (lane & 3) + (((m + 8) * BY_G) >> 16 if packed else m + 8))
                    slot = base & 1
                    mbar_wait_covered(k_full + slot * 8, (base >> 1) & 1)
                    s = s_wait(qk(q_at, k_s + slot * KEY_BYTES))
                    free(k_free + slot * 8, lane)
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
                        free(k_free + slot * 8, lane)
                        if gated and i == n - 1:
                            mbar_arrive_lane0(q_read + wg * 8, lane)
                        if i * BN + BN - 1 > low:
                            s = mask(s, limit - i * BN, limit8 - i * BN)
                        s, state = softmax(s, state)
                        o = o_wait(o, p, s)
                        free(v_free + before * 8, lane)
                        o = rescale(o, state)
                        p = pack(s)
                    at = i32(base + n - 1)
                    slot = at & 1
                    mbar_wait_covered(v_full + slot * 8, (at >> 1) & 1)
                    tail = i32(uniform(lds_i32(told + 24)) - (n - 1) * BN)
                    if tail < BN:                                         # what lies behind is masked, but may be NaN
                        clear_rows(v_s + slot * KEY_BYTES, tail, tid & 127)
                        named_sync(wg + 1, 128)
                    o = pv(o, p, v_s + slot * KEY_BYTES)
                    if gated:
                        mbar_wait_covered(g_full + wg * 8, turn & 1)
                        gates = sigmoids(spot, lane & 7, lane >> 4)       # while the last P V runs
                        o = o_wait_gated(o, p, gates)
                        free(v_free + slot * 8, lane)
                        inverse = inverses(state)
                        gated_finish(o, inverse, spot, lane & 7, lane >> 4, gates)
                        gates = more_sigmoids(spot, lane & 7, lane >> 4)
                        more_gated_finish(o, inverse, spot, lane & 7, lane >> 4, gates)
                    else:
                        o = o_wait_last(o, p)
                        free(v_free + slot * 8, lane)
                        named_sync(wg + 1, 128)                           # the others have read Q, too
                        finish(o, inverses(state), spot, lane & 7, lane >> 4)
                    cuda.syncwarp()
                    # A row of the tile at a time, 512 bytes: only rows that are this tile's.
                    row0 = lds_i32(told) + wg * span
                    to = out + u64(lds_i32(told + 12) * (D * 2) + lane * 16)
                    source = i32(q_at + (lane >> 3) * (WG_ROWS * 128))
                    for j in range(0, hw.opaque(16), 4):                  # a loop, or its addresses take registers
                        for u in range(4):
                            m = i32((warp & 3) * 16 + j + u)
                            r = i32((m * BY_G) >> 16 if packed else m)
                            hw.copy_out(i32(r < rows), source + m * 128 + (((lane & 7) ^ (m & 7)) << 4),
                                     to + u64(row0 + r) * u64(out_stride) + u64((m - r * G if packed else 0) * (D * 2)))
                    fence_async()
                if lane == 0:
                    pass_over(k_full, k_free, v_full, v_free, base, n, all_n)
                if gated and n == 0:                                      # no rows: only keep step
                    mbar_arrive_lane0(q_read + wg * 8, lane)
                    mbar_wait_covered(g_full + wg * 8, turn & 1)
                named_sync(wg + 1, 128)
                if tid & 127 == 0:
                    mbar_arrive(q_free + wg * 8)
                base = i32(base + all_n)
                turn = i32(turn + 1)
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
