"""Our own GEMM for more than 128 rows on Hopper: y = r(x W^T) in one running sum, every multiprocessor busy.

    x [M, K] tokens, rows ``ldx`` apart      W [N, K] weights, contiguous      y [M, N], rows ``ldy`` apart

Or, gated, the MLP's activation of that product, y [M, N / 2]: see ``activation.py``.

The product is a few hundred to a few thousand tiles for 132 multiprocessors: 272 tiles would take three rounds of which
the third does 6 % of the work. Splitting a tile's K among several blocks evens that out, but adds the parts in another
order, so the bits would change. Here tiles are split too, and the order is kept: the block that does the later part
starts from the accumulators of the block that did the earlier part.

  - Clusters of two blocks take whole tiles in rounds, all at the same k, as long as one tile for each or none at all is
    left after the round. What a round reads is then in the L2 cache once for all: x for up to BAND columns of tiles, W for
    the rows of tiles beside them. Under the power limit that decides (one long range for each cluster, with clusters at
    different k, read the same bytes from memory again and took 5 to 10 % longer).
  - The K steps of the tiles that are left, one to two for each cluster, are cut into equal ranges. A cluster starts with
    the *last* tile of its range, of which it does the first part, and leaves the accumulators for its successor; perhaps
    comes a whole tile; the tail of its first tile comes last, when the predecessor's part is done. Nobody waits.
  - Weights sit on wgmma's M side, 64 rows for each of two warpgroups; tokens on its N side, so that a tile has any
    multiple of 16 tokens up to 256 and little padding. The two blocks of a cluster have neighbouring weight tiles and
    the same tokens: each loads half of x's tile and multicasts it.
  - A producer warp fills the ring with TMA, across tile boundaries; the ring protocol is that of ``narrow.py``.
  - Results are transposed on the way to shared memory (stmatrix), 64 tokens at a time, and leave by TMA, which clips at
    the edges of y and runs on under the next tile.

Hand-over between blocks: float32 accumulators in ``scratch`` and one flag a warp, set after a fence and cleared by the
warp that has read it, so a launch finds all flags clear. Launches that share scratch must not overlap: they are ordered
by the stream, and under programmatic dependent launch nothing is written before the wait for the previous kernel.

One H200 at its power limit, us a launch (this / best admitted cuBLASLt), 34816 x 5120: 156 / 155 at 256 rows, 281 / 272
at 512, 435 / 423 at 800, 511 / 497 at 960, 801 / 779 at 1536, 1300 / 1270 at 2432, 1826 / 1783 at 3456. With the
activation (cuBLASLt and ``silu_mul``): 114 / 138 at 144, 168 / 176 at 256, 313 / 313 at 512, 566 / 542 at 960: many rows
keep the tensor cores waiting for it about as long as another kernel takes. N = 5120 has too few tiles. Timing decides
(``selection.py``).

Source: PTX ISA; the idea of equal K ranges is Stream-K (Osama et al., 2023), with the order of addition kept.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import cuda
from numba.cuda import types
from numba.cuda.extending import register_jitable

from jev_kernels.gemm import activation
from jev_kernels.gemm.narrow import ROW_BYTES, SMEM_LIMIT, NamedBarrier, make_product, next_stage
from jev_kernels.ptx import (
    cluster_sync,
    cta_rank,
    device_function,
    evict_first,
    evict_last,
    evict_normal,
    fence_async,
    fewer_registers,
    generated,
    i32,
    ldg4_if,
    mbar_arrive_at,
    mbar_expect,
    mbar_fence,
    mbar_init,
    mbar_wait,
    more_registers,
    named_sync,
    pack,
    pdl_launch,
    pdl_wait,
    smem_addr,
    stg4,
    stsm2_t,
    stsm4_t,
    tma_load,
    tma_multicast,
    tma_store_if,
    tma_stores_done,
    tma_stores_read_but_one_if,
    tma_stores_read_if,
    u64,
    uniform,
)
from jev_kernels.ptx.flags import await_flag, lower_flag_of_warp, raise_flag_of_warp
from jev_kernels.ptx.shared_layout import BARRIER, SWIZZLE_ATOM, SharedLayout, array, barriers, block_bytes
from jev_kernels.runtime import cubin, device, tensor_maps
from jev_kernels.runtime.launch import Kernel, address

GROUPS = 2                              # consumer warpgroups of 64 weight rows (three, up to 192 tokens, were slower)
WEIGHTS = GROUPS * 64                   # weight rows of a block's tile
THREADS = (GROUPS + 1) * 128
MAX_TOKENS = 256                        # of a tile: wgmma's largest n
MIN_STEPS = 5                           # of a part of a split tile
BAND = 8                                # columns of tiles that a round reads x for
TILE_COST = 24                          # what a tile costs beside its tokens, in tokens
CHUNK = 64                              # tokens that a warpgroup transposes and stores at a time
CLUSTER = 2
MAX_BLOCKS = 2 * 72                     # for the size of scratch: more multiprocessors than a Hopper GPU shows


@dataclass(frozen=True)
class Config:
    """``tokens`` of a tile (a multiple of 16, at most 256). gated: y is the MLP's activation of the product."""
    tokens: int
    gated: bool = False

    @property
    def stage(self):
        """A stage of the ring: a slice (64 of k) of W, then of x, in rows of 128 bytes."""
        return SharedLayout(w=array(WEIGHTS, ROW_BYTES, align=SWIZZLE_ATOM),
                            x=array(self.tokens, ROW_BYTES, align=SWIZZLE_ATOM))

    @property
    def columns(self) -> int:
        """Columns of y of a warpgroup."""
        return 32 if self.gated else 64

    @property
    def chunk_bytes(self) -> int:
        """Bytes to transpose a chunk of results in; each warpgroup has two."""
        return CHUNK * self.columns * 2

    @property
    def stages(self) -> int:
        fixed = SWIZZLE_ATOM + BARRIER + GROUPS * 2 * self.chunk_bytes
        return (SMEM_LIMIT - fixed) // (self.stage.nbytes + 2 * BARRIER)

    @property
    def layout(self):
        """``empty`` has one more than stages, for which nobody waits: consumers arrive there before their first stage."""
        return SharedLayout(ring=array(self.stages, self.stage.nbytes, align=SWIZZLE_ATOM),
                            staging=array(GROUPS * 2, self.chunk_bytes, align=SWIZZLE_ATOM),
                            full=barriers(self.stages), empty=barriers(self.stages + 1))

    @property
    def smem(self) -> int:
        """Bytes of dynamic shared memory."""
        return block_bytes(self.layout)

    def tiles(self, m: int, n: int) -> int:
        """Tiles of a pair of blocks."""
        return -(-m // self.tokens) * -(-n // (CLUSTER * WEIGHTS))

    def grid(self, m: int, n: int, multiprocessors: int = 132) -> int:
        """Blocks: two for each tile, or all multiprocessors where there are more tiles than that."""
        return CLUSTER * min(self.tiles(m, n), multiprocessors // CLUSTER)


def choose(m: int, gated: bool = False) -> Config:
    """One tile where it holds all tokens; otherwise the width that costs least, of equals the widest."""
    if m <= MAX_TOKENS:
        return Config(max(-(-m // 16) * 16, 128), gated)
    return Config(min(range(MAX_TOKENS, 127, -16), key=lambda tokens: -(-m // tokens) * (tokens + TILE_COST)), gated)


# ---------------------------------------------------------------- the tile scheduler, for the kernel and in Python
@register_jitable(inline="always")
def tile_coordinates(tile, pairs, columns):
    """(pair of weight tiles, column of token tiles) of a tile: all pairs of BAND columns, then those of the next BAND;
    neighbouring tiles are the columns of one pair."""
    band = i32(tile // (BAND * pairs))
    inside = i32(tile - band * (BAND * pairs))
    width = min(i32(BAND), i32(columns - band * BAND))
    return i32(inside // width), i32(band * BAND + inside % width)


@register_jitable(inline="always")
def split_boundary(total, steps, cluster, clusters):
    """Where the range of a cluster starts among all K steps: equal parts, but no part of a tile shorter than MIN_STEPS
    (handing over sums costs as much time as a few steps)."""
    at = i32(total * cluster // clusters)
    inside = at % steps
    if inside < MIN_STEPS:
        return i32(at - inside)
    if inside > steps - MIN_STEPS:
        return i32(at + steps - inside)
    return at


@register_jitable(inline="always")
def next_work_tile(whole, split_from, first, end, steps, clusters):
    """(tile, its first K step, their end, whole, end): what a cluster does next of its whole tiles whole, whole + clusters,
    ... below ``split_from`` and then, backwards, of its range from first to end of all K steps; and what is left after it."""
    if whole < split_from:
        return whole, i32(0), steps, i32(whole + clusters), end
    tile = i32((end - 1) // steps)
    start = max(first, i32(tile * steps))
    return tile, i32(start - tile * steps), i32(end - tile * steps), whole, start


@register_jitable(inline="always")
def cluster_range(tiles, steps, cluster, clusters):
    """(the first tile that is split, start and end of the cluster's range of the K steps from there on)."""
    split_from = i32(tiles // clusters * clusters)
    if split_from < tiles:
        split_from = i32(split_from - clusters)
    total = i32((tiles - split_from) * steps)
    first = i32(split_from * steps + split_boundary(total, steps, cluster, clusters))
    return split_from, first, i32(split_from * steps + split_boundary(total, steps, cluster + 1, clusters))


def work_tiles(tiles: int, steps: int, cluster: int, clusters: int) -> list[tuple[int, int, int]]:
    """(tile, first K step, end) that a cluster does, in its order.

    There are at least as many tiles as clusters. So a tile that is split has two parts, and the part that goes on from
    another's sums is its cluster's last, while the part before it is the first that its cluster does of split tiles.
    """
    split_from, first, end = cluster_range(tiles, steps, cluster, clusters)
    whole, parts = cluster, []
    while whole < split_from or end > first:
        *part, whole, end = next_work_tile(whole, split_from, first, end, steps, clusters)
        parts.append(tuple(map(int, part)))
    return parts


def refusal(m: int, n: int, k: int, compute_capability=(9, 0), multiprocessors: int = 132) -> str | None:
    """Why this kernel does not do y [m, n] = x [m, k] W [n, k]^T, or None when it does."""
    if tuple(compute_capability) != (9, 0):
        return f"wgmma needs compute capability 9.0, this GPU has {compute_capability[0]}.{compute_capability[1]}"
    if m < 1 or n < 8 or n % 8 or k < 64 or k % 64:
        return f"N must be a multiple of 8 and K one of 64: {m} x {n} x {k}"
    config = choose(m)
    if multiprocessors > MAX_BLOCKS or config.tiles(m, n) * (k // 64) * (multiprocessors // CLUSTER) >= 1 << 31:
        return f"too large: {m} x {n} x {k}"
    return None


# ---------------------------------------------------------------- the tile of accumulators
def make_handover(tokens: int):
    """(save, load) of a float32 tile [64, tokens] of a warpgroup, a tuple, by way of scratch.

    save(tile, at); load(at, saved) -> the tile, or zeros where ``saved`` is 0. The consumers of a block share a slot of
    scratch, four registers of each side by side; at: address of this thread's first four.
    """
    names, step = range(tokens // 8), GROUPS * 128 * 16
    parts = [f"tile[{4 * q}], tile[{4 * q + 1}], tile[{4 * q + 2}], tile[{4 * q + 3}]" for q in names]
    save = "def save(tile, at):\n" + "".join(f"    stg4(at + u64({q * step}), {parts[q]})\n" for q in names)
    load = ("def load(at, saved):\n" + "".join(f"    v{q} = ldg4_if(at + u64({q * step}), saved)\n" for q in names)
            + "    return (" + ", ".join(f"v{q}[{i}]" for q in names for i in range(4)) + ")\n")
    return (device_function(generated.function(save, stg4=stg4, u64=u64)),
            device_function(generated.function(load, ldg4_if=ldg4_if, u64=u64)))


def make_store(tokens: int, gated: bool):
    """store(results, staging, lane_at, barrier, leader, y_map, y_tail, weight, token): a warpgroup's tile of y.

    results: float32 [64, tokens] of a warpgroup, to be rounded, or, gated, what ``activation.make_activation`` gives
    (BF16 pairs of [32, tokens]). staging: address of two chunks; lane_at: offset at which this lane writes its row of one;
    barrier: a named one of the warpgroup; leader: 1 in the thread that stores; y_map, y_tail: tensor maps of y with boxes
    of 64 (32) weights by a whole chunk and by the last; weight, token: the tile's first.
    """
    row_bytes, lines = 64 if gated else 128, []
    for chunk, first in enumerate(range(0, tokens, CHUNK)):
        end, buffer = min(first + CHUNK, tokens), chunk % 2 * CHUNK * row_bytes
        # The buffer is free when all stores, or all but the one before this chunk, have read theirs.
        lines += [f"{'tma_stores_read_but_one_if' if chunk else 'tma_stores_read_if'}(leader)", "named_sync(barrier, 128)"]
        for t in range(first, end, 32 if gated else 16):
            at = f"staging + lane_at + {buffer + (t - first) * row_bytes}"
            if gated:                                                     # the last may be 16 tokens
                some = [f"results[{t // 8 + i}]" for i in range(min(4, (end - t) // 8))]
            else:
                some = [f"pack(results[{t // 2 + 2 * i}], results[{t // 2 + 2 * i + 1}])" for i in range(4)]
            lines.append(f"stsm{len(some)}_t({at}, {', '.join(some)})")
        lines += ["fence_async()", "named_sync(barrier, 128)",
                  f"tma_store_if(leader, {'y_map' if first + CHUNK <= tokens else 'y_tail'}, weight, token + {first},"
                  f" staging + {buffer})"]
    text = ("def store(results, staging, lane_at, barrier, leader, y_map, y_tail, weight, token):\n"
            + "".join(f"    {line}\n" for line in lines))
    return device_function(generated.function(
        text, tma_stores_read_if=tma_stores_read_if, tma_stores_read_but_one_if=tma_stores_read_but_one_if, pack=pack,
        named_sync=named_sync, stsm4_t=stsm4_t, stsm2_t=stsm2_t, fence_async=fence_async, tma_store_if=tma_store_if))


# ---------------------------------------------------------------- the kernel
SIGNATURE = types.void(u64, u64, u64, u64, i32, i32, i32, u64, u64)


@cubin.factory
def kernel(config: Config) -> Kernel:
    """The kernel of a configuration. Arguments: addresses of the tensor maps of x, of W and of y (whole chunks, last
    chunk), M, N, K, addresses of scratch and of its flags."""
    TOKENS, STAGES, STAGE, X_AT = config.tokens, config.stages, config.stage.nbytes, config.stage.x
    STAGING, FULL, EMPTY = config.layout.staging, config.layout.full, config.layout.empty
    HALF = TOKENS // 2                      # token rows that each block of the pair loads; whole 8-row swizzle atoms
    WARPS = GROUPS * 4                      # consumers; the producer is warp WARPS
    ARRIVALS = WARPS * CLUSTER
    SLOT = GROUPS * 128 * (TOKENS // 2) * 4                     # bytes of scratch a block
    BOTH = 3                                # mask of the cluster's blocks
    CONSUMERS = int(NamedBarrier.CONSUMERS)
    _, mma, drain = make_product(TOKENS, 1, 0, 0)
    save, load = make_handover(TOKENS)
    store = make_store(TOKENS, config.gated)
    activated = activation.make_activation(TOKENS)
    GATED, COLUMNS, CHUNK_BYTES = config.gated, config.columns, config.chunk_bytes
    inline = cuda.jit(device=True, inline="always")

    @inline
    def load_x(stage_at, x_map, k, row, rank, full, policy):
        """This block's half of a slice of x, for both."""
        tma_multicast(stage_at + X_AT + rank * (HALF * ROW_BYTES), x_map, k * 64, row, full, BOTH, policy)

    @inline
    def produce(ring, x_map, w_map, M, pairs, columns, steps, rank, whole, split_from, first, end, clusters):
        """Fill the ring, by one thread, across tile boundaries."""
        w_policy, x_policy = evict_first(), evict_last()
        if M > TOKENS:                                                    # W is read again for the next tile of tokens
            w_policy = evict_normal()
        stage = i32(0)
        phase = i32(1)                                                    # a fresh barrier's previous phase is over
        ahead = i32(0)                                                    # stages filled before the first wait
        while whole < split_from or end > first:
            tile, k, stop, whole, end = next_work_tile(whole, split_from, first, end, steps, clusters)
            pair, column = tile_coordinates(tile, pairs, columns)
            w_row = (pair * CLUSTER + rank) * WEIGHTS
            x_row = column * TOKENS + rank * HALF
            if ahead == 0:
                # The first W of every stage does not wait for the previous kernel; x does.
                ahead = min(i32(STAGES), i32(stop - k))
                for s in range(ahead):
                    mbar_expect(ring + FULL + s * 8, STAGE)
                    tma_load(ring + s * STAGE, w_map, (k + s) * 64, w_row, ring + FULL + s * 8, w_policy)
                pdl_wait()
                for s in range(ahead):
                    load_x(ring + s * STAGE, x_map, k + s, x_row, rank, ring + FULL + s * 8, x_policy)
                k = i32(k + ahead)
                stage = ahead
                if stage == STAGES:
                    stage = i32(0)
                    phase = i32(0)
            while k < stop:
                mbar_wait(ring + EMPTY + stage * 8, phase)
                full = ring + FULL + stage * 8
                mbar_expect(full, STAGE)
                tma_load(ring + stage * STAGE, w_map, k * 64, w_row, full, w_policy)
                load_x(ring + stage * STAGE, x_map, k, x_row, rank, full, x_policy)
                k = i32(k + 1)
                stage, phase = next_stage(stage, phase, STAGES)

    @inline
    def write_offset(warp, lane):
        """Where, in a chunk to transpose, this lane writes its row.

        Lane 8q + r writes row (token) r of the q-th 8 x 8 matrix: tokens 0 to 7 of 16 for q < 2, weights 0 to 7 for even
        q. 16-byte pieces of a row are swizzled as TMA expects.
        """
        if GATED:                                                         # rows of 64 bytes, one matrix is eight columns
            return i32(lane * 64 + (((warp & 3) ^ ((lane >> 1) & 3)) << 4))
        piece = (warp & 3) * 2 + ((lane >> 3) & 1)
        return i32(((lane >> 4) * 8 + (lane & 7)) * 128 + ((piece ^ (lane & 7)) << 4))

    @inline
    def take_over(own, own_flag, k, lane):
        """The sums to go on from: the predecessor's where k > 0, or zeros."""
        flag = own_flag - u64(CLUSTER * WARPS * 4)
        if k > 0:
            await_flag(flag, 1)
        tile = load(own - u64(CLUSTER * SLOT), k)
        if k > 0:
            lower_flag_of_warp(flag, lane)
        return tile

    @inline
    def write(tile, staging, lane_at, barrier, leader, y_map, y_tail, weight, token, lane):
        """The epilogue: r(tile), or its activation, into y."""
        if GATED:
            store(activated(tile, (lane & 16) != 0), staging, lane_at, barrier, leader, y_map, y_tail, weight, token)
        else:
            store(tile, staging, lane_at, barrier, leader, y_map, y_tail, weight, token)

    def hopper_gemm_wide(x_map, w_map, y_map, y_tail, M, N, K, scratch, flags):
        ring = (smem_addr(cuda.shared.array(0, types.uint8)) + 1023) & ~1023
        tid = cuda.threadIdx.x
        warp = uniform(tid >> 5)
        lane = tid & 31
        rank = cta_rank()
        steps = i32(K >> 6)
        pairs = i32((N + CLUSTER * WEIGHTS - 1) // (CLUSTER * WEIGHTS))
        columns = i32((M + TOKENS - 1) // TOKENS)
        cluster = i32(cuda.blockIdx.x >> 1)
        clusters = i32(cuda.gridDim.x >> 1)
        split_from, first, end = cluster_range(i32(pairs * columns), steps, cluster, clusters)
        whole = cluster
        if tid == 0:
            for s in range(STAGES):
                mbar_init(ring + FULL + s * 8, 1)
                mbar_init(ring + EMPTY + s * 8, ARRIVALS)
            mbar_init(ring + EMPTY + STAGES * 8, ARRIVALS)
            mbar_fence()
        cluster_sync()
        pdl_launch()

        if warp >= WARPS:
            fewer_registers()
            if tid == WARPS * 32:
                produce(ring, x_map, w_map, M, pairs, columns, steps, rank, whole, split_from, first, end, clusters)
        else:
            more_registers()
            # Consumers touch x only through the ring, and write only after a slice of it: after the producer's wait.
            group = warp >> 2
            w_at = ring + group * (64 * ROW_BYTES)
            own = scratch + u64(cuda.blockIdx.x) * u64(SLOT) + u64(tid * 16)
            own_flag = flags + u64((cuda.blockIdx.x * WARPS + warp) * 4)
            lane_at = write_offset(warp, lane)
            leader = i32(1) if tid & 127 == 0 else i32(0)
            staging = ring + STAGING + group * (2 * CHUNK_BYTES)
            stage = i32(0)
            phase = i32(0)
            before = i32(STAGES)                                          # at first a barrier that nobody waits for
            while whole < split_from or end > first:
                tile, k, stop, whole, end = next_work_tile(whole, split_from, first, end, steps, clusters)
                pair, column = tile_coordinates(tile, pairs, columns)
                sums = take_over(own, own_flag, k, lane)
                while k < stop:
                    mbar_wait(ring + FULL + stage * 8, phase)
                    sums = mma(sums, w_at + stage * STAGE, ring + X_AT + stage * STAGE)
                    if lane < CLUSTER:                                    # the previous stage has been read
                        mbar_arrive_at(ring + EMPTY + before * 8, lane)
                    before = stage
                    k = i32(k + 1)
                    stage, phase = next_stage(stage, phase, STAGES)
                sums = drain(sums)
                if stop == steps:
                    weight = ((pair * CLUSTER + rank) * GROUPS + group) * COLUMNS
                    write(sums, staging, lane_at, CONSUMERS + group, leader, y_map, y_tail, weight, column * TOKENS, lane)
                else:
                    save(sums, own)
                    raise_flag_of_warp(own_flag, lane)
            if leader:
                tma_stores_done()
        cluster_sync()                      # a block must not exit while the other still signals its barriers

    return Kernel(hopper_gemm_wide, SIGNATURE, threads=THREADS, smem=config.smem, cluster=CLUSTER)


# ---------------------------------------------------------------- host
class Scratch:
    """Accumulators handed over between blocks, and their flags. For launches of one stream."""

    def __init__(self, stream):
        slot, flags = GROUPS * 128 * (MAX_TOKENS // 2) * 4, MAX_BLOCKS * 4 * GROUPS
        self.arena = device.Arena(MAX_BLOCKS * slot + device.array_bytes(flags, np.int32), "GEMM scratch")
        self.flags = self.arena.take(flags, np.int32)
        self.sums = self.arena.take(MAX_BLOCKS * slot // 4, np.float32)
        device.fill(self.flags, 0, stream)
        stream.synchronize()


class Plan:
    """y[:rows] = r(x[:rows] W^T), or its activation if gated, bound to its arrays; see ``narrow.Plan``.

    x [>= rows, K], weight [N, K], y [>= rows, N] or, gated, [>= rows, N / 2]. scratch: launches that share it must not overlap.
    """

    name = "own:wide"

    def __init__(self, x, weight, y, rows: int, scratch: Scratch, multiprocessors: int = 132, gated: bool = False):
        (n, k) = weight.shape
        reason = refusal(rows, n, k, multiprocessors=multiprocessors)
        if reason:
            raise ValueError(f"the GEMM for many rows does not do {n} x {k} at {rows} rows: {reason}")
        self.config = config = choose(rows, gated)
        self.kernel = kernel(config)
        self.grid = config.grid(rows, n, multiprocessors)
        y_at, width, ldy, whole = address(y), n // 2 if gated else n, y.strides[0] // 2, min(CHUNK, config.tokens)
        self.arguments = (tensor_maps.matrix(address(x), rows, k, x.strides[0] // 2, config.tokens // 2),
                          tensor_maps.matrix(address(weight), n, k, weight.strides[0] // 2, WEIGHTS),
                          tensor_maps.matrix(y_at, rows, width, ldy, whole, config.columns),
                          tensor_maps.matrix(y_at, rows, width, ldy, config.tokens % CHUNK or whole, config.columns),
                          rows, n, k, address(scratch.sums), address(scratch.flags))
        self._keep = (x, weight, y, scratch)

    def __call__(self, stream, pdl: bool = False) -> None:
        self.kernel(stream, self.grid, *self.arguments, pdl=pdl)


def kernels() -> dict:
    """Every configuration for the resource budget: {name: (Kernel, [cc], registers at entry, spilled bytes)}."""
    return {f"hopper_gemm_wide_{tokens}{'_gated' * gated}":
            (kernel(Config(tokens, gated)), [(9, 0, "a")], 65536 // THREADS // 8 * 8, 0)
            for tokens in range(128, MAX_TOKENS + 1, 16) for gated in (False, True)}
