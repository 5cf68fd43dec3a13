"""Our own GEMM for few rows on Hopper: y = r(x W^T), BF16 in, float32 accumulation, one rounding.

    x [M <= 128, K] tokens, rows ``ldx`` apart      W [N, K] weights, contiguous      y [M, N], rows ``ldy`` apart

Or, gated, the MLP's activation of that product, y [M, N / 2]: see ``hopper_gemm_gated.py``.

The job is to stream W from device memory once, at full speed. A block owns a slab of weight rows over ALL of K (no
split-K): every output is one running float32 sum in increasing k, 16 at a time. Measured, and checked again wherever
it is used (``gemm.py``): the bits are those of cuBLASLt's non-split kernels, and do not depend on M or on the slab.

  - Tokens sit on wgmma's M side, 64 a warpgroup; weight rows on its N side (any multiple of 8), so N can be cut into
    one slab per multiprocessor. Both operands are read from shared memory.
  - One extra warp is the producer: its lane 0 issues TMA copies of 64-wide K slices (128 bytes a row = one line of the
    128-byte swizzle that wgmma reads) of W and x into a ring of shared-memory stages.
  - x has to reach every multiprocessor, and for small N that costs more than W itself: a 128 x 40 tile takes in 168
    rows per slice, a 64 x 80 tile only 144. ``split`` kernels use the latter: a pair of blocks (a cluster) halves the
    tokens and shares a slab, each loading half of it and multicasting it to both.
  - Programmatic dependent launch: the ring's first lap of W (27 MB over all blocks, 6 us of memory time) is fetched
    before the wait for the previous kernel. Sending half a lap to two laps more to the L2 cache at that point made a
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

from numba import cuda
from numba.cuda import types

from jev_kernels.gemm import activation as hopper_gemm_gated
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
from jev_kernels.ptx.wgmma import K_MAJOR, along_k, wgmma, wgmma_wait, zeros
from jev_kernels.runtime import cubin, tensor_maps
from jev_kernels.runtime.launch import Kernel, address

MAX_ROWS = 128                          # tokens; above, see hopper_gemm_wide.py and cuBLASLt
MAX_SLAB = 320                          # weight rows of a block: 160 accumulators a thread
SMEM_LIMIT = 227 * 1024


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
    """bn weight rows a slab, ``groups`` warpgroups of 64 tokens a block, ``stages`` ring slots of ``slices`` x 64 k,
    ``cluster`` blocks a cluster. split: the cluster's blocks share one slab and divide the tokens (W is multicast);
    otherwise each has its own slab and all tokens (x is multicast). gated: y is the MLP's activation of the product, half
    as wide (``hopper_gemm_gated``)."""
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
    def stage_bytes(self) -> int:
        return self.slices * (self.groups * 64 + self.bn) * 128

    @property
    def smem(self) -> int:
        """The ring, two barriers a stage, and room to start it at a multiple of 1024."""
        return self.stages * (self.stage_bytes + 16) + 1024

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
    """The configuration for n weight rows: one slab per multiprocessor, and as many stages as fit.

    The same for 1 as for 128 tokens: one for at most 64 would be no faster than memory, and one more to compile.
    Clusters stay at 2: an H200 holds 66 clusters of 2 (all 132 multiprocessors) but only 30 of 4.
    """
    bn = -(-n // (multiprocessors * 8)) * 8
    split = bn < 96                                 # small slabs: halve the tokens, double the slab
    if split:
        bn = -(-n // (multiprocessors // 2 * 16)) * 16
    groups = 1 if split else 2
    slices = 2 if bn < 96 else 1
    stage = Config(bn, groups, 1, 2 if split else 1, slices, split).stage_bytes
    return Config(bn, groups, (SMEM_LIMIT - 1024) // (stage + 16), 2 if split else 1, slices, split)


def refusal(m: int, n: int, k: int, compute_capability=(9, 0), multiprocessors: int = 132) -> str | None:
    """Why this kernel does not do y [m, n] = x [m, k] W [n, k]^T, or None when it does."""
    if tuple(compute_capability) != (9, 0):
        return f"wgmma needs compute capability 9.0, this GPU has {compute_capability[0]}.{compute_capability[1]}"
    if not 1 <= m <= MAX_ROWS:
        return f"1 to {MAX_ROWS} rows, not {m}"
    if n < 8 or n % 8:
        return f"N must be a multiple of 8, not {n}"
    config = choose(n, multiprocessors)
    if config.bn > MAX_SLAB:
        return f"N = {n} is more than {MAX_SLAB} weight rows for each of {multiprocessors} multiprocessors"
    if k < 64 or k % (64 * config.slices):
        return f"K must be a multiple of {64 * config.slices}, not {k}"
    return None


# ---------------------------------------------------------------- the kernel
SIGNATURE = types.void(u64, u64, u64, i32, i32, i32, i32, i32)


@cubin.factory
def kernel(config: Config) -> Kernel:
    """The kernel of a configuration. Arguments: addresses of the tensor maps of x and W, address of y, M, N, K,
    rows of x that each block loads, elements between rows of y."""
    BN, GROUPS, STAGES, CL, SLICES, SPLIT = (config.bn, config.groups, config.stages, config.cluster, config.slices,
                                             config.split)
    XS = GROUPS * 64 * 128                  # bytes of one x slice (64-wide K slice = 128 bytes a row)
    WS = BN * 128                           # ... and of one W slice; both multiples of 1024
    SB = config.stage_bytes
    XB = XS * SLICES
    BOX = config.w_box
    WROWS = config.w_rows
    PRODUCER = GROUPS * 4                   # index of the producer warp
    ARRIVALS = GROUPS * 4 * CL              # one per consumer warp of every block in the cluster
    MASK = (1 << CL) - 1
    GATED = config.gated
    zero, mma, drain = make_product(BN, SLICES, XS, WS)
    store = make_store(BN)
    store_gated = hopper_gemm_gated.make_store(BN)

    @cuda.jit(device=True, inline="always")
    def load_w(dst, w_map, k, row, skip, bar, policy):
        for c in range(SLICES):
            for b in range(WROWS // BOX):
                at = dst + XB + c * WS + (skip + b * BOX) * 128
                if SPLIT and CL > 1:
                    tma_multicast(at, w_map, (k * SLICES + c) * 64, row + b * BOX, bar, MASK, policy)
                else:
                    tma_load(at, w_map, (k * SLICES + c) * 64, row + b * BOX, bar, policy)

    @cuda.jit(device=True, inline="always")
    def load_x(dst, x_map, k, row, skip, bar, policy):
        for c in range(SLICES):
            at = dst + c * XS + skip * 128
            if SPLIT or CL == 1:
                tma_load(at, x_map, (k * SLICES + c) * 64, row, bar, policy)
            else:
                tma_multicast(at, x_map, (k * SLICES + c) * 64, row, bar, MASK, policy)

    def hopper_gemm(x_map, w_map, y, M, N, K, x_rows, ldy):
        # The swizzle repeats every 8 rows = 1024 bytes and is computed on address bits: align to 1024.
        ring = (smem_addr(cuda.shared.array(0, types.uint8)) + 1023) & ~1023
        full = ring + STAGES * SB
        empty = full + STAGES * 8
        tid = cuda.threadIdx.x
        warp = tid >> 5
        lane = tid & 31
        rank = cta_rank() if CL > 1 else 0
        slab = (cuda.blockIdx.x // CL if SPLIT else cuda.blockIdx.x) * BN
        token = rank * x_rows if SPLIT else 0
        steps = i32(K // (64 * SLICES))
        if tid == 0:
            for s in range(STAGES):
                mbar_init(full + s * 8, 1)
                mbar_init(empty + s * 8, ARRIVALS)
            mbar_fence()
        cluster_sync()                      # nobody signals a barrier that is not initialised yet
        pdl_launch()                        # let the next kernel's blocks move in as ours leave

        stage = i32(0)
        phase = i32(0)
        if warp == PRODUCER:
            if lane == 0:
                once, again = evict_first(), evict_last()
                w_skip = rank * WROWS if SPLIT else 0            # this block's part of the shared tile
                w_row = slab + w_skip
                x_skip = 0 if SPLIT else rank * x_rows
                x_row = rank * x_rows
                expect = (WS + (x_rows if SPLIT else CL * x_rows) * 128) * SLICES
                # First lap: weights do not depend on the previous kernel, x does.
                lap = min(i32(STAGES), steps)
                for k in range(lap):
                    mbar_expect(full + k * 8, expect)
                    load_w(ring + k * SB, w_map, k, w_row, w_skip, full + k * 8, once)
                pdl_wait()
                for k in range(lap):
                    load_x(ring + k * SB, x_map, k, x_row, x_skip, full + k * 8, again)
                for k in range(lap, steps):
                    mbar_wait(empty + stage * 8, phase)
                    bar = full + stage * 8
                    dst = ring + stage * SB
                    mbar_expect(bar, expect)
                    load_w(dst, w_map, k, w_row, w_skip, bar, once)
                    load_x(dst, x_map, k, x_row, x_skip, bar, again)
                    stage = i32(stage + 1)
                    if stage == STAGES:
                        stage = i32(0)
                        phase = i32(phase ^ 1)
        else:
            # Consumers touch x only through the ring, and write y only after its last slice: after the producer's wait.
            group = warp >> 2
            a_first = ring + group * (64 * 128)
            b_first = ring + XB
            # Rows that no copy fills are multiplied too, and thrown away: as zeros they cost far less power.
            filled = max(0, min(64, (x_rows if SPLIT else CL * x_rows) - group * 64)) * 128
            for s in range(STAGES):
                for c in range(SLICES):
                    for at in range(filled + (tid & 127) * 8, 64 * 128, 1024):
                        sts2(a_first + s * SB + c * XS + at, f32(0), f32(0))
            fence_async()
            named_sync(group + 1, 128)
            acc = zero()
            before = i32(0)
            for k in range(steps):
                mbar_wait(full + stage * 8, phase)
                acc = mma(acc, a_first + stage * SB, b_first + stage * SB)
                if k > 0 and lane < CL:                          # the previous stage has been read
                    mbar_arrive_at(empty + before * 8, lane)
                before = stage
                stage = i32(stage + 1)
                if stage == STAGES:
                    stage = i32(0)
                    phase = i32(phase ^ 1)
            acc = drain(acc)
            row = warp * 16 + fragments.row(lane)                # of this block's tokens
            col = fragments.column(lane)
            rows = min(x_rows, M - token) if SPLIT else M
            if GATED:
                upper = (lane & 2) != 0
                if upper:
                    row = row + 8
                at = y + u64(((token + row) * ldy + slab // 2 + (lane & 1) * 2) * 2)
                store_gated(acc, upper, at, (N - slab) // 2 if row < rows else 0)
            else:
                at = y + u64(((token + row) * ldy + slab + col) * 2)
                left = N - slab - col                            # columns of y right of `at`
                store(acc, at, at + u64(ldy * 16), left if row < rows else 0, left if row + 8 < rows else 0)
        cluster_sync()                      # a block must not exit while others still signal its barriers

    return Kernel(hopper_gemm, SIGNATURE, threads=config.threads, smem=config.smem, cluster=CL)


# ---------------------------------------------------------------- host
class Plan:
    """y[:rows] = r(x[:rows] W^T), or its activation if gated, bound to its arrays. ``plan(stream, pdl=True)`` launches it.

    Arrays as ``gemm.Gemm.linear_plan`` checks them. Keep the plan (or what keeps it) as long as its graphs.
    """

    name = "hopper"

    def __init__(self, x, weight, y, rows: int, multiprocessors: int = 132, gated: bool = False):
        (n, k) = weight.shape
        ldx, ldy = x.strides[0] // 2, y.strides[0] // 2
        reason = refusal(rows, n, k, multiprocessors=multiprocessors)
        if reason:
            raise ValueError(f"hopper_gemm does not do {n} x {k} at {rows} rows: {reason}")
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
