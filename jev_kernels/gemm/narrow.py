"""Our own GEMM for few rows on Hopper: y = r(x W^T), BF16 in, float32 accumulation, one rounding.

    x [M <= 128, K] tokens, rows ``ldx`` apart      W [N, K] weights, contiguous      y [M, N], rows ``ldy`` apart

Or, gated, the MLP's activation of that product, y [M, N / 2]: see ``activation.py``.

The job is to stream W from device memory once, at full speed. A block owns a tile of weight rows over ALL of K (no
split-K): every output is one running float32 sum in increasing k, 16 at a time. Measured, and checked again wherever
it is used (``selection.py``): the bits are those of cuBLASLt's non-split kernels, and do not depend on M or on the tile.

  - Tokens sit on wgmma's M side, 64 a warpgroup; weight rows on its N side (any multiple of 8), so N can be cut into
    one tile per multiprocessor. Both operands are read from shared memory.
  - One extra warp is the producer: its lane 0 issues TMA copies of 64-wide K slices (128 bytes a row = one line of the
    128-byte swizzle that wgmma reads) of W and x into a ring of shared-memory stages.
  - x has to reach every multiprocessor, and for small N that costs more than W itself: a 128 x 40 tile takes in 168
    rows per slice, a 64 x 80 tile only 144. ``split`` kernels use the latter: a pair of blocks (a cluster) halves the
    tokens and shares a tile of weights, each loading half of it and multicasting it to both.
  - Programmatic dependent launch: the first W of every stage (27 MB over all blocks, 6 us of memory time) is fetched
    before the wait for the previous kernel. Sending half a ring to two rings more to the L2 cache at that point made a
    chain slower (217, 220, 222 us a layer against 215 without), so nothing more is prefetched.

Ring protocol, per stage
    full  = "the bytes have landed":   1 arrival (the producer's) + the announced transaction bytes
    empty = "everybody has read them": 1 arrival per consumer warp of every block of the cluster

One H200, M = 107, us a launch with programmatic dependent launch (this / best cuBLASLt of the same bits): 5120 x 17408
47.2 / 71.1, 5120 x 6144 18.8 / 20.0, 16480 x 5120 44.1 / 45.4, 34816 x 5120 91.5 / 94.7, 14336 x 5120 38.6 / 40.0;
``tools/bench_gemm.py`` measures again.

Source: PTX ISA (wgmma, cp.async.bulk.tensor, mbarrier), CUDA driver API (tensor maps).
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

from numba import cuda
from numba.cuda import types

from jev_kernels.gemm import activation
from jev_kernels.ptx import (
    cluster_sync,
    cta_rank,
    device_function,
    evict_first,
    evict_last,
    f32,
    fence_async,
    fragments,
    generated,
    i32,
    mbar_arrive_at,
    mbar_expect,
    mbar_fence,
    mbar_init,
    mbar_wait,
    named_sync,
    pdl_launch,
    pdl_wait,
    smem_addr,
    stg_bf16x2_if,
    sts2,
    tma_load,
    tma_multicast,
    u64,
)
from jev_kernels.ptx.shared_layout import BARRIER, SWIZZLE_ATOM, SharedLayout, array, barriers, block_bytes
from jev_kernels.ptx.wgmma import K_MAJOR, along_k, wgmma, wgmma_wait, zeros
from jev_kernels.runtime import cubin, tensor_maps
from jev_kernels.runtime.launch import Kernel, address

MAX_ROWS = 128                          # tokens; above, see wide.py and cuBLASLt
MAX_TILE = 320                          # weight rows of a block: 160 accumulators a thread
SMEM_LIMIT = 227 * 1024
ROW_BYTES = 128                         # of a slice: 64 of k, one line of the 128-byte swizzle


# ---------------------------------------------------------------- the tile of accumulators
def make_product(columns: int, slices: int, a_slice: int, b_slice: int):
    """(zero, mma, drain) for a float32 tile [64, columns] of a warpgroup, a tuple.

    zero(): zeros. mma(tile, a_at, b_at): starts the product over a stage, ``slices`` K slices of 64 that are a_slice and
    b_slice bytes apart, and waits for the product before it: this one runs while the next stage's bytes are awaited.
    drain(tile): waits for the last one.
    """
    registers = columns // 2
    steps = along_k(columns, slices, a_slice, b_slice)
    return (zeros("zero", registers), wgmma("mma", "bf16", registers, K_MAJOR, K_MAJOR, steps, wait=1),
            wgmma_wait("drain", 0, (registers,)))


def make_store(columns: int):
    """store(tile, low, high, low_columns, high_columns): r(tile) [64, columns] of a warpgroup into rows of y.

    low, high: where this lane's first two results go, of its row and of that 8 further on; low_columns, high_columns: columns
    of y from there on, 0 in rows that are not to be written.
    """
    lines = ["def store(tile, low, high, low_columns, high_columns):"]
    for i in range(0, columns // 2, 2):
        row, column = fragments.of_register(i)
        side = "high" if row else "low"
        lines.append(f"    stg_bf16x2_if({side} + u64({2 * column}), tile[{i}], tile[{i + 1}], {side}_columns, {column})")
    return device_function(generated.function("\n".join(lines) + "\n", stg_bf16x2_if=stg_bf16x2_if, u64=u64))


# ---------------------------------------------------------------- which kernel
@dataclass(frozen=True)
class Config:
    """bn weight rows a tile, ``groups`` warpgroups of 64 tokens a block, ``stages`` of the ring of ``slices`` x 64 k each,
    ``cluster`` blocks a cluster. split: the cluster's blocks share one tile of weights and divide the tokens (W is
    multicast); otherwise each has its own weights and all tokens (x is multicast). gated: y is the MLP's activation of the
    product, half as wide (``activation``)."""
    bn: int
    groups: int
    stages: int
    cluster: int = 1
    slices: int = 1
    split: bool = False
    gated: bool = False

    @property
    def w_rows(self) -> int:
        """Rows of W that one block loads per slice."""
        return self.bn // self.cluster if self.split else self.bn

    @property
    def w_box(self) -> int:
        """Rows of one TMA box of W: at most 256, whole 8-row swizzle atoms, a divisor of a block's share."""
        return next(r for r in range(min(self.w_rows, 256) & ~7, 0, -8) if self.w_rows % r == 0)

    @property
    def stage(self):
        """A stage of the ring: slices of x, then of W, in rows of 128 bytes."""
        return SharedLayout(x=array(self.slices, self.groups * 64 * ROW_BYTES, align=SWIZZLE_ATOM),
                            w=array(self.slices, self.bn * ROW_BYTES, align=SWIZZLE_ATOM))

    @property
    def layout(self):
        return SharedLayout(ring=array(self.stages, self.stage.nbytes, align=SWIZZLE_ATOM),
                            full=barriers(self.stages), empty=barriers(self.stages))

    @property
    def smem(self) -> int:
        """Bytes of dynamic shared memory."""
        return block_bytes(self.layout)

    @property
    def threads(self) -> int:
        return self.groups * 128 + 32

    def x_rows(self, m: int) -> int:
        """Rows of x that a block loads = the box of x's tensor map: whole swizzle atoms, m covered by the cluster."""
        return -(-m // (8 * self.cluster)) * 8

    def grid(self, n: int) -> int:
        """Blocks for n weight rows, whole clusters."""
        blocks = -(-n // self.bn) * (self.cluster if self.split else 1)
        return -(-blocks // self.cluster) * self.cluster


def choose(n: int, multiprocessors: int = 132) -> Config:
    """The configuration for n weight rows: one tile per multiprocessor, and as many stages as fit.

    The same for 1 as for 128 tokens: one for at most 64 would be no faster than memory, and one more to compile.
    Clusters stay at 2: an H200 holds 66 clusters of 2 (all 132 multiprocessors) but only 30 of 4.
    """
    bn = -(-n // (multiprocessors * 8)) * 8
    split = bn < 96                                 # small tiles: halve the tokens, double the weights
    if split:
        bn = -(-n // (multiprocessors // 2 * 16)) * 16
    config = Config(bn, 1 if split else 2, 1, 2 if split else 1, 2 if bn < 96 else 1, split)
    return replace(config, stages=(SMEM_LIMIT - SWIZZLE_ATOM) // (config.stage.nbytes + 2 * BARRIER))


def refusal(m: int, n: int, k: int, compute_capability=(9, 0), multiprocessors: int = 132) -> str | None:
    """Why this kernel does not do y [m, n] = x [m, k] W [n, k]^T, or None when it does."""
    if tuple(compute_capability) != (9, 0):
        return f"wgmma needs compute capability 9.0, this GPU has {compute_capability[0]}.{compute_capability[1]}"
    if not 1 <= m <= MAX_ROWS:
        return f"1 to {MAX_ROWS} rows, not {m}"
    if n < 8 or n % 8:
        return f"N must be a multiple of 8, not {n}"
    config = choose(n, multiprocessors)
    if config.bn > MAX_TILE:
        return f"N = {n} is more than {MAX_TILE} weight rows for each of {multiprocessors} multiprocessors"
    if k < 64 or k % (64 * config.slices):
        return f"K must be a multiple of {64 * config.slices}, not {k}"
    return None


# ---------------------------------------------------------------- the kernel
SIGNATURE = types.void(u64, u64, u64, i32, i32, i32, i32, i32)


class NamedBarrier(IntEnum):
    """Hardware barriers of a block beside that of ``syncthreads``."""
    CONSUMERS = 1                           # of the first warpgroup that computes; the next one's is the next


@cuda.jit(device=True, inline="always")
def next_stage(stage, phase, stages):
    """The ring's next stage, and the parity of its barriers' phase."""
    stage = i32(stage + 1)
    if stage == stages:
        stage = i32(0)
        phase = i32(phase ^ 1)
    return stage, phase


@cubin.factory
def kernel(config: Config) -> Kernel:
    """The kernel of a configuration. Arguments: addresses of the tensor maps of x and W, address of y, M, N, K,
    rows of x that each block loads, elements between rows of y."""
    BN, GROUPS, STAGES, CL, SLICES, SPLIT = (config.bn, config.groups, config.stages, config.cluster, config.slices,
                                             config.split)
    X_SLICE = GROUPS * 64 * ROW_BYTES       # bytes of a slice (64 of k)
    W_SLICE = BN * ROW_BYTES
    STAGE, W_AT, FULL, EMPTY = config.stage.nbytes, config.stage.w, config.layout.full, config.layout.empty
    BOX, W_ROWS = config.w_box, config.w_rows
    PRODUCER = GROUPS * 4                   # index of the producer warp
    ARRIVALS = GROUPS * 4 * CL              # one per consumer warp of every block in the cluster
    ALL = (1 << CL) - 1                     # mask of the cluster's blocks
    CONSUMERS = int(NamedBarrier.CONSUMERS)
    GATED = config.gated
    zero, mma, drain = make_product(BN, SLICES, X_SLICE, W_SLICE)
    store = make_store(BN)
    store_gated = activation.make_store(BN)
    inline = cuda.jit(device=True, inline="always")

    @inline
    def load_w(stage_at, w_map, k, row, skip, full, policy):
        """A stage's slices of W: this block's rows from ``row`` on, ``skip`` rows into the tile."""
        for c in range(SLICES):
            for b in range(W_ROWS // BOX):
                at = stage_at + W_AT + c * W_SLICE + (skip + b * BOX) * ROW_BYTES
                if SPLIT and CL > 1:
                    tma_multicast(at, w_map, (k * SLICES + c) * 64, row + b * BOX, full, ALL, policy)
                else:
                    tma_load(at, w_map, (k * SLICES + c) * 64, row + b * BOX, full, policy)

    @inline
    def load_x(stage_at, x_map, k, row, skip, full, policy):
        """... and of x."""
        for c in range(SLICES):
            at = stage_at + c * X_SLICE + skip * ROW_BYTES
            if SPLIT or CL == 1:
                tma_load(at, x_map, (k * SLICES + c) * 64, row, full, policy)
            else:
                tma_multicast(at, x_map, (k * SLICES + c) * 64, row, full, ALL, policy)

    @inline
    def produce(ring, x_map, w_map, steps, weight, rank, x_rows):
        """Fill the ring, by one thread. The first W of every stage does not wait for the previous kernel; x does."""
        read_once, keep = evict_first(), evict_last()
        w_skip = rank * W_ROWS if SPLIT else 0               # this block's part of the shared tile
        w_row = weight + w_skip
        x_skip = 0 if SPLIT else rank * x_rows
        x_row = rank * x_rows
        nbytes = (W_SLICE + (x_rows if SPLIT else CL * x_rows) * ROW_BYTES) * SLICES
        first = min(i32(STAGES), steps)
        for k in range(first):
            mbar_expect(ring + FULL + k * 8, nbytes)
            load_w(ring + k * STAGE, w_map, k, w_row, w_skip, ring + FULL + k * 8, read_once)
        pdl_wait()
        for k in range(first):
            load_x(ring + k * STAGE, x_map, k, x_row, x_skip, ring + FULL + k * 8, keep)
        stage = i32(0)
        phase = i32(0)
        for k in range(first, steps):
            mbar_wait(ring + EMPTY + stage * 8, phase)
            full = ring + FULL + stage * 8
            stage_at = ring + stage * STAGE
            mbar_expect(full, nbytes)
            load_w(stage_at, w_map, k, w_row, w_skip, full, read_once)
            load_x(stage_at, x_map, k, x_row, x_skip, full, keep)
            stage, phase = next_stage(stage, phase, STAGES)

    @inline
    def clear_rest(x_at, rows, thread):
        """Zeros, by a warpgroup, in rows that no copy fills: they are multiplied too, and thrown away, and as zeros they
        cost far less power. rows: those of the group's 64 that are filled."""
        for s in range(STAGES):
            for c in range(SLICES):
                for at in range(rows * ROW_BYTES + thread * 8, 64 * ROW_BYTES, 1024):
                    sts2(x_at + s * STAGE + c * X_SLICE + at, f32(0), f32(0))
        fence_async()

    @inline
    def multiply(ring, x_at, steps, lane):
        """A warpgroup's tile of sums: its 64 tokens, whose first stage is at ``x_at``, by the block's weights."""
        tile = zero()
        before = i32(0)
        stage = i32(0)
        phase = i32(0)
        for k in range(steps):
            mbar_wait(ring + FULL + stage * 8, phase)
            tile = mma(tile, x_at + stage * STAGE, ring + W_AT + stage * STAGE)
            if k > 0 and lane < CL:                          # the previous stage has been read
                mbar_arrive_at(ring + EMPTY + before * 8, lane)
            before = stage
            stage, phase = next_stage(stage, phase, STAGES)
        return drain(tile)

    @inline
    def write(tile, y, ldy, token, row, rows, weight, N, lane):
        """The epilogue: r(tile), or its activation, into y. token: the block's first; row: this lane's of its ``rows``."""
        if GATED:
            upper = (lane & 2) != 0
            if upper:
                row = row + 8
            at = y + u64(((token + row) * ldy + weight // 2 + (lane & 1) * 2) * 2)
            store_gated(tile, upper, at, (N - weight) // 2 if row < rows else 0)
        else:
            col = fragments.column(lane)
            at = y + u64(((token + row) * ldy + weight + col) * 2)
            left = N - weight - col                          # columns of y right of `at`
            store(tile, at, at + u64(ldy * 16), left if row < rows else 0, left if row + 8 < rows else 0)

    def hopper_gemm(x_map, w_map, y, M, N, K, x_rows, ldy):
        # The swizzle repeats every 8 rows = 1024 bytes and is computed on address bits: align to 1024.
        ring = (smem_addr(cuda.shared.array(0, types.uint8)) + 1023) & ~1023
        tid = cuda.threadIdx.x
        warp = tid >> 5
        lane = tid & 31
        rank = cta_rank() if CL > 1 else 0
        weight = (cuda.blockIdx.x // CL if SPLIT else cuda.blockIdx.x) * BN
        token = rank * x_rows if SPLIT else 0
        steps = i32(K // (64 * SLICES))
        if tid == 0:
            for s in range(STAGES):
                mbar_init(ring + FULL + s * 8, 1)
                mbar_init(ring + EMPTY + s * 8, ARRIVALS)
            mbar_fence()
        cluster_sync()                      # nobody signals a barrier that is not initialised yet
        pdl_launch()                        # let the next kernel's blocks move in as ours leave

        if warp == PRODUCER:
            if lane == 0:
                produce(ring, x_map, w_map, steps, weight, rank, x_rows)
        else:
            # Consumers touch x only through the ring, and write y only after its last slice: after the producer's wait.
            group = warp >> 2
            x_at = ring + group * (64 * ROW_BYTES)
            clear_rest(x_at, max(0, min(64, (x_rows if SPLIT else CL * x_rows) - group * 64)), tid & 127)
            named_sync(CONSUMERS + group, 128)
            tile = multiply(ring, x_at, steps, lane)
            write(tile, y, ldy, token, warp * 16 + fragments.row(lane), min(x_rows, M - token) if SPLIT else M, weight, N, lane)
        cluster_sync()                      # a block must not exit while others still signal its barriers

    return Kernel(hopper_gemm, SIGNATURE, threads=config.threads, smem=config.smem, cluster=CL)


# ---------------------------------------------------------------- host
class Plan:
    """y[:rows] = r(x[:rows] W^T), or its activation if gated, bound to its arrays. ``plan(stream, pdl=True)`` launches it.

    x [>= rows, K], weight [N, K], y [>= rows, N] or, gated, [>= rows, N / 2], as ``problem.layout`` checks them. Keep the
    plan (or what keeps it) as long as its graphs. Raises ValueError for a product that ``refusal`` refuses.

        narrow.Plan(x, weight, y, rows=107)(stream)
    """

    name = "hopper"

    def __init__(self, x, weight, y, rows: int, multiprocessors: int = 132, gated: bool = False):
        (n, k) = weight.shape
        ldx, ldy = x.strides[0] // 2, y.strides[0] // 2
        reason = refusal(rows, n, k, multiprocessors=multiprocessors)
        if reason:
            raise ValueError(f"the GEMM for few rows does not do {n} x {k} at {rows} rows: {reason}")
        self.config = config = replace(choose(n, multiprocessors), gated=gated)
        self.kernel = kernel(config)
        self.grid = config.grid(n)
        x_rows = config.x_rows(rows)
        self.arguments = (tensor_maps.matrix(address(x), rows, k, ldx, x_rows),
                          tensor_maps.matrix(address(weight), n, k, weight.strides[0] // 2, config.w_box),
                          address(y), rows, n, k, x_rows, ldy)
        self._keep = (x, weight, y)

    def __call__(self, stream, pdl: bool = False) -> None:
        self.kernel(stream, self.grid, *self.arguments, pdl=pdl)


def kernels() -> dict:
    """Every configuration of the 27B and 9B shapes for the resource budget: {name: (Kernel, [cc], registers, spills)}.

    Registers: 65,536 of a multiprocessor over the threads of the one block that runs there, in steps of 8, at most 255.
    """
    found = {}
    for n, gated in ((16480, False), (14336, False), (5120, False), (34816, False), (34816, True), (12352, False),
                     (10240, False), (4096, False), (24576, False), (24576, True)):
        config = replace(choose(n), gated=gated)
        warps = -(-config.threads // 128) * 4                    # registers are given to warps in fours
        limit = min(255, 65536 // (warps * 32) // 8 * 8)
        name = f"hopper_gemm_{config.bn}x{config.groups * 64}{'_split' * config.split}{'_gated' * config.gated}"
        found[name] = kernel(config), [(9, 0, "a")], limit, 0
    return found
