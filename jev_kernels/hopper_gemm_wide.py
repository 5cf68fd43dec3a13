"""Our own GEMM for more than 128 rows on Hopper: y = r(x W^T) in one running sum, every multiprocessor busy.

    x [M, K] tokens, rows ``ldx`` apart      W [N, K] weights, contiguous      y [M, N], rows ``ldy`` apart

Between 129 and some 1,000 rows the product is a few hundred tiles for 132 multiprocessors: 272 tiles would take three
rounds of which the third does 6 % of the work. Splitting a tile's K among several blocks evens that out, but adds the
parts in another order, so the bits would change. Here a tile is split too, and the order is kept: the block that does
the later part starts from the accumulators of the block that did the earlier part.

  - All tiles' K steps in a row are cut into equal ranges, one for each cluster of two blocks. A cluster starts with the
    *last* tile of its range, of which it does the first part, and leaves the accumulators for its successor; then come
    whole tiles; the tail of its first tile comes last, when the predecessor's part is long done. Nobody waits.
  - Weights sit on wgmma's M side, 64 rows a warpgroup, ``groups`` of them; tokens on its N side, so that a tile has any
    multiple of 16 tokens up to 256 and little padding. The two blocks of a cluster have neighbouring weight tiles and
    the same tokens: each loads half of x's tile and multicasts it.
  - A producer warp fills the ring with TMA, across tile boundaries; the ring protocol is that of ``hopper_gemm.py``.
  - The result is transposed in registers (movmatrix) and stored 32 bytes a token and warp.

Hand-over between blocks: float32 accumulators in ``scratch`` and one flag a warp, set after a fence and cleared by the
warp that has read it, so a launch finds all flags clear. Launches that share scratch must not overlap: they are ordered
by the stream, and under programmatic dependent launch nothing is written before the wait for the previous kernel.

Source: PTX ISA; the idea of equal K ranges is Stream-K (Osama et al., 2023), with the order of addition kept.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from llvmlite import ir
from numba import cuda
from numba.cuda import types
from numba.cuda.extending import intrinsic

from jev_kernels import device
from jev_kernels.hopper_gemm import F32, I32, I64, SMEM_LIMIT, TensorMaps, make_wgmma
from jev_kernels.launch import Kernel, address
from jev_kernels.ptx import (cluster_sync, cta_rank, evict_first, evict_last, i32, mbar_arrive_at, mbar_expect,
                             mbar_fence, mbar_init, mbar_wait, pdl_launch, pdl_wait, ptx, smem_addr, tma_load,
                             tma_multicast, u64, uniform, void)

# Tokens of a tile, by consumer warpgroups: wgmma's largest n; and what ptxas compiles into the 128 registers that a
# thread of four warpgroups starts with.
MAX_TOKENS = {2: 256, 3: 192}
CLUSTER = 2
MAX_BLOCKS = 2 * 72                     # for the size of scratch: more multiprocessors than a Hopper GPU shows
REGISTERS = {2: (40, 232), 3: (32, 160)}                # producer, consumers, for 2 or 3 consumer warpgroups

evict_normal = ptx("evict_normal", u64, (), "createpolicy.fractional.L2::evict_normal.b64 $0, 1.0;", "=l")
raise_flag = ptx("raise_flag", void, (u64, i32),                            # (flag, lane): the whole warp has saved
                 "{ .reg .pred p; bar.warp.sync 0xffffffff; fence.acq_rel.gpu; setp.eq.s32 p, $1, 0;"
                 " @p st.relaxed.gpu.global.u32 [$0], 1; }", "l,r")
await_flag = ptx("await_flag", void, (u64,),
                 "{ .reg .pred p; .reg .b32 v;"
                 " W: ld.acquire.gpu.global.u32 v, [$0]; setp.eq.u32 p, v, 0; @p bra W; }", "l")
lower_flag = ptx("lower_flag", void, (u64, i32),                            # (flag, lane): the whole warp has read
                 "{ .reg .pred p; bar.warp.sync 0xffffffff; setp.eq.s32 p, $1, 0;"
                 " @p st.relaxed.gpu.global.u32 [$0], 0; }", "l,r")


@dataclass(frozen=True)
class Config:
    """``groups`` consumer warpgroups of 64 weight rows a block, ``tokens`` of a tile (a multiple of 16)."""
    groups: int
    tokens: int

    @property
    def weights(self) -> int:
        """Weight rows of a block's tile."""
        return self.groups * 64

    @property
    def stage_bytes(self) -> int:
        return (self.weights + self.tokens) * 128

    @property
    def stages(self) -> int:
        return (SMEM_LIMIT - 1024 - 8) // (self.stage_bytes + 16)

    @property
    def smem(self) -> int:
        return self.stages * (self.stage_bytes + 16) + 8 + 1024

    @property
    def threads(self) -> int:
        return (self.groups + 1) * 128

    def tiles(self, m: int, n: int) -> int:
        """Tiles of a pair of blocks."""
        return -(-m // self.tokens) * -(-n // (CLUSTER * self.weights))

    def grid(self, m: int, n: int, multiprocessors: int = 132) -> int:
        """Blocks: two for each tile, or all multiprocessors where there are more tiles than that."""
        return CLUSTER * min(self.tiles(m, n), multiprocessors // CLUSTER)


def choose(m: int, groups: int) -> Config:
    """As few token tiles as possible, of equal width."""
    tiles = -(-m // MAX_TOKENS[groups])
    return Config(groups, -(-m // (16 * tiles)) * 16)


def segments(tiles: int, steps: int, cluster: int, clusters: int) -> list[tuple[int, int, int]]:
    """(tile, first K step, end) that a cluster does, in its order: what the kernel works out, stated in Python.

    With at least as many tiles as clusters a tile has at most two parts, and a part that goes on from another's sums is
    its cluster's last, while the part before it is its cluster's first.
    """
    first, end = tiles * steps * cluster // clusters, tiles * steps * (cluster + 1) // clusters
    parts = []
    while end > first:
        tile = (end - 1) // steps
        start = max(first, tile * steps)
        parts.append((tile, start - tile * steps, end - tile * steps))
        end = start
    return parts


def refusal(m: int, n: int, k: int, groups: int, compute_capability=(9, 0), multiprocessors: int = 132) -> str | None:
    """Why this kernel does not do y [m, n] = x [m, k] W [n, k]^T, or None when it does."""
    if tuple(compute_capability) != (9, 0):
        return f"wgmma needs compute capability 9.0, this GPU has {compute_capability[0]}.{compute_capability[1]}"
    if m < 1 or n < 8 or n % 8 or k < 64 or k % 64:
        return f"N must be a multiple of 8 and K one of 64: {m} x {n} x {k}"
    config = choose(m, groups)
    if multiprocessors > MAX_BLOCKS or config.tiles(m, n) * (k // 64) * (multiprocessors // CLUSTER) >= 1 << 31:
        return f"too large: {m} x {n} x {k}"
    return None


# ---------------------------------------------------------------- the tile of accumulators
def make_tile(tokens, threads):
    """(save, load, store) for a 64 x tokens float32 tile of a warpgroup held as a UniTuple of tokens/2 registers.

    Registers 4j, 4j+1 are weight row g = lane / 4, tokens 8j+2t, 8j+2t+1 (t = lane % 4); 4j+2, 4j+3 weight row g+8.
    ``threads`` of a block share a slot of scratch, four registers of each side by side.
    """
    regs = tokens // 2
    acc = types.UniTuple(types.float32, regs)
    step = threads * 16

    def unpack(builder, tup):
        return [builder.extract_value(tup, i) for i in range(regs)]

    @intrinsic
    def save(typingctx, d, at):
        def codegen(context, builder, sig, args):
            v = unpack(builder, args[0])
            fn = ir.FunctionType(ir.VoidType(), [I64, F32, F32, F32, F32])
            for q in range(regs // 4):
                asm = ir.InlineAsm(fn, f"st.global.v4.f32 [$0+{q * step}], {{$1,$2,$3,$4}};", "l,f,f,f,f,~{memory}",
                                   side_effect=True)
                builder.call(asm, [args[1], *v[4 * q:4 * q + 4]])
            return context.get_dummy_value()
        return types.void(acc, u64), codegen

    @intrinsic
    def load(typingctx, at, saved):
        """What was saved at ``at``, or zeros where ``saved`` is 0. Predicated: with a branch here ptxas serialises the
        wgmmas that follow (C7515)."""
        def codegen(context, builder, sig, args):
            fn = ir.FunctionType(ir.LiteralStructType([F32] * 4), [I64, I32])
            v = []
            for q in range(regs // 4):
                asm = ir.InlineAsm(fn, "{ .reg .pred p; setp.ne.s32 p, $5, 0; mov.f32 $0, 0f00000000;"
                                   " mov.f32 $1, 0f00000000; mov.f32 $2, 0f00000000; mov.f32 $3, 0f00000000;"
                                   f" @p ld.global.cg.v4.f32 {{$0,$1,$2,$3}}, [$4+{q * step}]; }}",
                                   "=&f,=&f,=&f,=&f,l,r,~{memory}", side_effect=True)
                out = builder.call(asm, args)
                v += [builder.extract_value(out, i) for i in range(4)]
            return context.make_tuple(builder, acc, v)
        return acc(u64, i32), codegen

    @intrinsic
    def store(typingctx, d, at, pitch, lo_tokens, hi_tokens):
        """at: y at (token g, weight 2t) of the tile; pitch: bytes of 8 rows of y; tokens that exist from g on, for the
        lower and the upper 8 weights (0 where the weights do not exist)."""
        def codegen(context, builder, sig, args):
            v = unpack(builder, args[0])
            at = args[1]
            fn = ir.FunctionType(ir.VoidType(), [I64, I32, I32, F32, F32, F32, F32])
            for j in range(regs // 4):
                asm = ir.InlineAsm(
                    fn, "{ .reg .pred p, q; .reg .b32 a, b; cvt.rn.bf16x2.f32 a, $4, $3; cvt.rn.bf16x2.f32 b, $6, $5;"
                    " movmatrix.sync.aligned.m8n8.trans.b16 a, a; movmatrix.sync.aligned.m8n8.trans.b16 b, b;"
                    f" setp.gt.s32 p, $1, {8 * j}; setp.gt.s32 q, $2, {8 * j};"
                    " @p st.global.b32 [$0], a; @q st.global.b32 [$0+16], b; }", "l,r,r,f,f,f,f,~{memory}",
                    side_effect=True)
                builder.call(asm, [at, args[3], args[4], *v[4 * j:4 * j + 4]])
                at = builder.add(at, args[2])
            return context.get_dummy_value()
        return types.void(acc, u64, u64, i32, i32), codegen

    return save, load, store


# ---------------------------------------------------------------- the kernel
SIGNATURE = types.void(u64, u64, u64, i32, i32, i32, i32, u64, u64)


@functools.lru_cache(None)
def kernel(config: Config) -> Kernel:
    """The kernel of a configuration. Arguments: addresses of the tensor maps of x and W, address of y, M, N, K,
    elements between rows of y, addresses of scratch and of its flags."""
    GROUPS, TOKENS, STAGES = config.groups, config.tokens, config.stages
    BW = config.weights
    WS = BW * 128                           # bytes of a slice of W; a multiple of 1024
    SB = config.stage_bytes
    HALF = TOKENS // 2                      # token rows that each block of the pair loads; whole 8-row swizzle atoms
    WARPS = GROUPS * 4                      # consumers; the producer is warp WARPS
    ARRIVALS = WARPS * CLUSTER
    SLOT = GROUPS * 128 * (TOKENS // 2) * 4                     # bytes of scratch a block
    _, mma, drain, _ = make_wgmma(TOKENS, 1, 0, 0)
    save, load, store = make_tile(TOKENS, GROUPS * 128)
    small, large = REGISTERS[GROUPS]
    fewer = ptx("fewer", void, (), f"setmaxnreg.dec.sync.aligned.u32 {small};", "")
    more = ptx("more", void, (), f"setmaxnreg.inc.sync.aligned.u32 {large};", "")

    def hopper_gemm_wide(x_map, w_map, y, M, N, K, ldy, scratch, flags):
        ring = (smem_addr(cuda.shared.array(0, types.uint8)) + 1023) & ~1023
        full = ring + STAGES * SB
        empty = full + STAGES * 8
        tid = cuda.threadIdx.x
        warp = uniform(tid >> 5)
        lane = tid & 31
        rank = cta_rank()
        steps = i32(K >> 6)
        pairs = i32((N + CLUSTER * BW - 1) // (CLUSTER * BW))
        tiles = i32(pairs * ((M + TOKENS - 1) // TOKENS))
        cluster = i32(cuda.blockIdx.x >> 1)
        clusters = i32(cuda.gridDim.x >> 1)
        first = i32(tiles * steps * cluster // clusters)                  # this cluster's range of all K steps
        end = i32(tiles * steps * (cluster + 1) // clusters)
        if tid == 0:
            for s in range(STAGES):
                mbar_init(full + s * 8, 1)
                mbar_init(empty + s * 8, ARRIVALS)
            mbar_init(empty + STAGES * 8, ARRIVALS)
            mbar_fence()
        cluster_sync()
        pdl_launch()

        stage = i32(0)
        if warp >= WARPS:
            fewer()
            if tid == WARPS * 32:
                once, again = evict_first(), evict_last()
                if M > TOKENS:                                            # W is read again for the next tile of tokens
                    once = evict_normal()
                phase = i32(1)                                            # a fresh barrier's previous phase is over
                lap = i32(0)
                while end > first:
                    tile = i32((end - 1) // steps)
                    start = max(first, i32(tile * steps))
                    k = i32(start - tile * steps)
                    stop = i32(end - tile * steps)
                    w_row = ((tile % pairs) * CLUSTER + rank) * BW
                    x_row = (tile // pairs) * TOKENS + rank * HALF
                    if lap == 0:
                        # First lap: weights do not depend on the previous kernel, x does.
                        lap = min(i32(STAGES), i32(stop - k))
                        for s in range(lap):
                            mbar_expect(full + s * 8, SB)
                            tma_load(ring + s * SB, w_map, (k + s) * 64, w_row, full + s * 8, once)
                        pdl_wait()
                        for s in range(lap):
                            tma_multicast(ring + s * SB + WS + rank * (HALF * 128), x_map, (k + s) * 64, x_row,
                                          full + s * 8, 3, again)
                        k = i32(k + lap)
                        stage = lap
                        if stage == STAGES:
                            stage = i32(0)
                            phase = i32(0)
                    while k < stop:
                        mbar_wait(empty + stage * 8, phase)
                        bar = full + stage * 8
                        mbar_expect(bar, SB)
                        tma_load(ring + stage * SB, w_map, k * 64, w_row, bar, once)
                        tma_multicast(ring + stage * SB + WS + rank * (HALF * 128), x_map, k * 64, x_row, bar, 3, again)
                        k = i32(k + 1)
                        stage = i32(stage + 1)
                        if stage == STAGES:
                            stage = i32(0)
                            phase = i32(phase ^ 1)
                    end = start
        else:
            more()
            # Consumers touch x only through the ring, and write only after a slice of it: after the producer's wait.
            a_first = ring + (warp >> 2) * (64 * 128)
            b_first = ring + WS
            phase = i32(0)
            before = i32(STAGES)                                          # at first a barrier that nobody waits for
            own = scratch + u64(cuda.blockIdx.x) * u64(SLOT) + u64(tid * 16)
            own_flag = flags + u64((cuda.blockIdx.x * WARPS + warp) * 4)
            while end > first:
                tile = i32((end - 1) // steps)
                start = max(first, i32(tile * steps))
                k = i32(start - tile * steps)
                stop = i32(end - tile * steps)
                flag = own_flag - u64(CLUSTER * WARPS * 4)
                if k > 0:
                    await_flag(flag)
                acc = load(own - u64(CLUSTER * SLOT), k)                  # zeros, or go on from the predecessor's sums
                if k > 0:
                    lower_flag(flag, lane)
                while k < stop:
                    mbar_wait(full + stage * 8, phase)
                    acc = mma(acc, a_first + stage * SB, b_first + stage * SB)
                    if lane < CLUSTER:                                    # the previous stage has been read
                        mbar_arrive_at(empty + before * 8, lane)
                    before = stage
                    k = i32(k + 1)
                    stage = i32(stage + 1)
                    if stage == STAGES:
                        stage = i32(0)
                        phase = i32(phase ^ 1)
                acc = drain(acc)
                if stop == steps:
                    weight = ((tile % pairs) * CLUSTER + rank) * BW + warp * 16 + (lane & 3) * 2
                    token = (tile // pairs) * TOKENS + (lane >> 2)
                    left = i32(min((tile // pairs + 1) * TOKENS, M) - token)
                    at = y + u64(token) * u64(ldy * 2) + u64(weight * 2)
                    store(acc, at, u64(ldy * 16), left if weight < N else 0, left if weight + 8 < N else 0)
                else:
                    save(acc, own)
                    raise_flag(own_flag, lane)
                end = start
        cluster_sync()                      # a block must not exit while the other still signals its barriers

    return Kernel(hopper_gemm_wide, SIGNATURE, threads=config.threads, smem=config.smem, cluster=CLUSTER)


# ---------------------------------------------------------------- host
class Scratch:
    """Accumulators handed over between blocks, and their flags. For launches of one stream."""

    def __init__(self, stream):
        slot = max(groups * 128 * (tokens // 2) * 4 for groups, tokens in MAX_TOKENS.items())
        flags = MAX_BLOCKS * 4 * max(MAX_TOKENS)
        self.arena = device.Arena(MAX_BLOCKS * slot + device.array_bytes(flags, np.int32), "GEMM scratch")
        self.flags = self.arena.take(flags, np.int32)
        self.sums = self.arena.take(MAX_BLOCKS * slot // 4, np.float32)
        device.fill(self.flags, 0, stream)
        stream.synchronize()


class Plan:
    """y[:rows] = r(x[:rows] W^T) bound to its arrays; see ``hopper_gemm.Plan``."""

    def __init__(self, groups: int, x, weight, y, rows: int, maps: TensorMaps, scratch: Scratch,
                 multiprocessors: int = 132):
        (n, k) = weight.shape
        reason = refusal(rows, n, k, groups, multiprocessors=multiprocessors)
        if reason:
            raise ValueError(f"hopper_gemm_wide does not do {n} x {k} at {rows} rows: {reason}")
        self.name = f"own:{groups}"
        self.config = config = choose(rows, groups)
        self.kernel = kernel(config)
        self.grid = config.grid(rows, n, multiprocessors)
        self.arguments = (maps.get(address(x), rows, k, x.strides[0] // 2, config.tokens // 2),
                          maps.get(address(weight), n, k, weight.strides[0] // 2, config.weights),
                          address(y), rows, n, k, y.strides[0] // 2, address(scratch.sums), address(scratch.flags))
        self._keep = (x, weight, y, maps, scratch)

    def __call__(self, stream, pdl: bool = False) -> None:
        self.kernel(stream, self.grid, *self.arguments, pdl=pdl)


def kernels() -> dict:
    """Some configurations for the resource budget: {name: (Kernel, [cc], registers at entry, spilled bytes)}."""
    return {f"hopper_gemm_wide_{groups * 64}x{tokens}": (kernel(Config(groups, tokens)), [(9, 0, "a")],
                                                         65536 // ((groups + 1) * 128) // 8 * 8, 0)
            for groups, tokens in ((2, 144), (2, 208), (2, 256), (3, 144), (3, 192))}
