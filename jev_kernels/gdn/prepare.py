"""Gated delta rule on Hopper, first of two kernels: the WY representation of each chunk of 64 tokens, which does not depend
on the state.

Per chunk and value head, with k, q the BF16 inputs, rk, rq = rsqrt(sum of squares + 1e-6) (rq also / sqrt(128)) and
c the running sum of log2(e) g over the chunk:

    A         = strict lower of  beta_i (k_i . k_j) rk_i rk_j 2^(c_i - c_j)
    A_inv     = (I + A)^-1 diag(beta)                                            of the WY representation
    A_qk      = lower of  (q_i . k_j) rq_i rk_j 2^(c_i - c_j)                    attention inside the chunk
    k_scale   = -rk 2^c        q_scale = rq 2^c        v_scale = rk 2^(c_last - c)        decay = 2^c_last

Normalisation and decay are factors of rows, so k k^T and q k^T have the inputs themselves as operands: exact products,
float32 sums, computed once for the value heads that share a key head. A_inv, A_qk and the blocks inside the inverse are
float16 (11 bits, as TF32, and clamped at 65504); the diagonal 16 x 16 blocks are inverted in float32.

A persistent kernel: a CTA takes items, (chunk, group of value heads of one key head), in order, and fetches the next
one's q, k, g and beta while it works. A group has at most three heads, and one where a few chunks leave CTAs idle. The
first item of a CTA is its own number.

A sequence alone occupies 2 HV multiprocessors with its scan. There the scan follows this kernel chunk by chunk
(``gdn.flags``): CTAs on as many multiprocessors, and one more, leave after a few items (one on 132
multiprocessors, up to 8,768 tokens) and make room for it; the others do the rest meanwhile, ahead of it. Items beyond the
first are then drawn by ticket. Who leaves is decided by the multiprocessor's number, and only speed depends on that: CTA
0 always stays, and takes what nobody else does.

The workspace of a (chunk, value head) is laid out as WORKSPACE says, and copied into shared memory by the scan as it is.
A_inv and A_qk are packed triangular tiles, lower, in 16 x 16 blocks: of the upper block rows (tokens 0-31) columns 0-1,
of the lower ones columns 0-3, so twelve blocks, two of them zeros. A block is four 8 x 8 matrices in row-major order,
each 128 contiguous bytes: wgmma's layout without swizzle, and free of bank conflicts for ldmatrix. (wgmmas whose
accumulators are overlapping ranges of different size make ptxas serialise everything, C7511: hence the two zero blocks.)
"""
from __future__ import annotations

import numpy as np
from numba import cuda
from numba.cuda import types

from jev_kernels import pool
from jev_kernels.gdn.flags import FIRST, TICKETS, V_BLOCKS
from jev_kernels.ptx import (
    cp16,
    cp_wait_all,
    div_u32,
    ex2,
    f32,
    generated,
    high16,
    i32,
    ldg,
    ldg_bf16,
    ldg_i32,
    lds,
    lds2,
    lds4,
    lds_i32,
    ldsm,
    ldsm_t,
    low16,
    mma,
    mma16,
    pack16,
    pdl_launch,
    pdl_wait,
    ptx,
    rsqrt,
    smem_addr,
    stg,
    stg_u32,
    stg_u32x4,
    sts,
    sts2,
    sts_lo16,
    sts_u32,
    transpose8,
    u32,
    u64,
    void,
)
from jev_kernels.ptx.flags import fence_global, raise_flag, take_ticket
from jev_kernels.ptx.shared_layout import SharedLayout, block_bytes

D = 128                       # head dims, keys and values
C = pool.CHUNK                # tokens of a chunk
LOG2E = 1.4426950408889634
EPS = 1e-6
SM_SCALE = D ** -0.5          # of q
FLOOR = -150.0                # log2 of a decay that is zero in float32: keeps -inf and huge sums out of c_i - c_j
THREADS = 256
RESIDENT = 3                  # CTAs that fit an SM
CHUNKS_PER_ITEM = 8           # chunks that the scan walks while a CTA here makes an item
NO_LIMIT = 1 << 30            # of items of a CTA that stays

TRIANGLE_BYTES = 12 * 512     # of a packed triangular tile: twelve 16 x 16 blocks of float16
# Of a (chunk, value head): what ``prepare`` leaves for the scan. The scales have one float32 for each token.
WORKSPACE = SharedLayout(a_inv=TRIANGLE_BYTES, a_qk=TRIANGLE_BYTES, k_scale=C * 4, q_scale=C * 4, v_scale=C * 4, decay=4)
WORKSPACE_BYTES = -(-WORKSPACE.nbytes // 1024) * 1024

# A copy that the compiler cannot see through: what is computed from it stays inside the loop, out of the registers.
opaque = ptx("opaque", i32, (i32,), "mov.b32 $0, $1;", "=r,r", sim=lambda x: x)
smid = ptx("smid", i32, (), "mov.u32 $0, %smid;", "=r", sim=lambda: np.int32(0))
CHUNKS_AT, RUNS_AT = pool.CHUNKS * 4, pool.RUNS * 4


def heads_at_once(key_heads: int, value_heads: int) -> int:
    """Value heads of an item, at most: the largest divisor of value_heads / key_heads that eight warps can serve."""
    ratio = value_heads // key_heads
    return max(n for n in (1, 2, 3) if ratio % n == 0)


@cuda.jit(device=True, inline="always")
def block_at(i, j):
    """Byte offset of block (i, j), j <= (i | 1), in a packed triangular tile."""
    return ((i >> 1) * 4 + j * 2 + (i & 1)) * 512


def make_solve16():
    """solve16(a, col): column `col` of (I + A)^-1, A strictly lower 16 x 16 float32 at shared address a (64-byte rows).

    Generated as text: Numba has no way to demand that a triangular loop is unrolled, and x has to stay in registers.
    """
    code = ["def solve16(a, col):"]
    for i in range(16):
        code.append(f" x{i} = f32(1) if col == {i} else f32(0)")
        for m in range(0, i, 4):
            code.append(f" t = lds4(a + {i * 64 + m * 4})")
            code += [f" x{i} -= t[{e}] * x{m + e}" for e in range(min(4, i - m))]
    code.append(" return (" + ", ".join(f"x{i}" for i in range(16)) + ")")
    return cuda.jit(device=True, inline="always")(generated.function("\n".join(code) + "\n", f32=f32, lds4=lds4))


solve16 = make_solve16()


@cuda.jit(device=True, inline="always")
def mma_at(acc, n, a, b0, b1):
    """acc[16 x 8 tile n] += a b, BF16."""
    d = mma((acc[4 * n], acc[4 * n + 1], acc[4 * n + 2], acc[4 * n + 3]), a, b0, b1)
    for e in range(4):
        acc[4 * n + e] = d[e]


@cuda.jit(device=True, inline="always")
def strip_product(acc, own, blocks, a_at, b_at, own_at):
    """acc += 16 rows at a_at times 16 `blocks` rows at b_at, own += times 16 rows at own_at; over their 128 columns.

    Steps of 16 columns outside, blocks inside: neighbouring products do not wait for each other.
    """
    for kk in range(8):
        flip = (kk & 3) << 5
        half = (kk >> 2) * 8192
        a = ldsm((a_at ^ flip) + half)
        for n in range(blocks):
            b = ldsm((b_at ^ flip) + (half + n * 2048))
            mma_at(acc, 2 * n, a, b[0], b[1])
            mma_at(acc, 2 * n + 1, a, b[2], b[3])
        b = ldsm((own_at ^ flip) + half)
        mma_at(own, 0, a, b[0], b[1])
        mma_at(own, 1, a, b[2], b[3])


@cuda.jit(device=True, inline="always")
def block_mma(acc, a, at):
    """acc[16 x 16] += A B^T: A in registers, B a block in shared memory."""
    b = ldsm(at)
    for n in range(2):
        d = mma16((acc[4 * n], acc[4 * n + 1], acc[4 * n + 2], acc[4 * n + 3]), a, b[2 * n], b[2 * n + 1])
        for e in range(4):
            acc[4 * n + e] = d[e]


@cuda.jit(device=True, inline="always")
def clear(acc):
    for e in range(8):
        acc[e] = f32(0)


@cuda.jit(device=True, inline="always")
def next_block(inverse, acc, out, b0, b1):
    """acc = sum_l T_lj^T A_il^T  ->  T_ij^T = -acc D_i^T: stored (times beta), and returned as an operand."""
    a = (pack16(-acc[0], -acc[1]), pack16(-acc[2], -acc[3]), pack16(-acc[4], -acc[5]), pack16(-acc[6], -acc[7]))
    clear(acc)
    block_mma(acc, a, inverse)
    # rows of acc are columns of T: scale, then transpose each 8 x 8
    stg_u32(out, transpose8(pack16(acc[0] * b0, acc[1] * b0)))
    stg_u32(out + u64(128), transpose8(pack16(acc[2] * b1, acc[3] * b1)))
    stg_u32(out + u64(256), transpose8(pack16(acc[4] * b0, acc[5] * b0)))
    stg_u32(out + u64(384), transpose8(pack16(acc[6] * b1, acc[7] * b1)))
    return pack16(acc[0], acc[1]), pack16(acc[2], acc[3]), pack16(acc[4], acc[5]), pack16(acc[6], acc[7])


def make_prepare(HK: int, HV: int):
    """The kernel for HK key heads and HV value heads, and its bytes of shared memory."""
    R = heads_at_once(HK, HV)
    PER_KEY = HV // HK                       # value heads that share a key head
    SCANNED = V_BLOCKS * HV + 1                 # multiprocessors that a single sequence's scan wants, and one for CTA 0
    DIAGONAL_STRIDE = 1088                   # bytes from a float32 16 x 16 block to the next: 64 against bank conflicts
    # Of a value head: diagonal blocks of A (float32), the others (float16), inverses of the diagonal ones (float16), the
    # running sum of g as a log2, beta
    HEAD = SharedLayout(diagonal=4 * DIAGONAL_STRIDE, blocks=TRIANGLE_BYTES, inverses=4 * 512, cumulative=C * 4, beta=C * 4)
    HEAD_BYTES = HEAD.nbytes
    # k and q of the chunk, norms of their rows; rows of the chunk after this one, and the item after this one
    SHARED = SharedLayout(k=C * D * 2, q=C * D * 2, heads=R * HEAD_BYTES, rk=C * 4, rq=C * 4, rows=C * 4, next=16)
    Q_BEHIND_K = SHARED.q - SHARED.k
    SMEM = block_bytes(SHARED, 128)

    @cuda.jit(device=True, inline="always")
    def fetch_rows(sm, qkv, stride, hk, tid):
        """q and k of a key head: 16-byte pieces, two 64-column halves of 128-byte rows, pieces xor-ed with the row."""
        c = i32(tid & 15)
        for it in range(4):
            r = (tid >> 4) + it * 16
            src = lds_i32(sm + SHARED.rows + r * 4)
            size = i32(16) if src >= 0 else i32(0)
            at = qkv + u64(i32(max(src, i32(0)) * stride + hk * D + c * 8)) * u64(2)
            dst = sm + (c >> 3) * 8192 + r * 128 + (((c & 7) ^ (r & 7)) << 4)
            cp16(dst, at + u64(HK * D * 2), size)
            cp16(dst + Q_BEHIND_K, at, size)

    @cuda.jit(device=True, inline="always")
    def fetch_gates(sm, g, beta, g_stride, beta_stride, hv, lane):
        """g (as a log2) and beta of this lane's two tokens; an absent token has neither."""
        r0 = lds_i32(sm + SHARED.rows + lane * 8)
        r1 = lds_i32(sm + SHARED.rows + lane * 8 + 4)
        g0 = f32(0)
        g1 = f32(0)
        b0 = f32(0)
        b1 = f32(0)
        if r0 >= 0:
            g0 = max(ldg(g + (u64(r0) * u64(g_stride) + u64(hv)) * u64(4)) * f32(LOG2E), f32(FLOOR))
            b0 = ldg_bf16(beta + (u64(r0) * u64(beta_stride) + u64(hv)) * u64(2))
        if r1 >= 0:
            g1 = max(ldg(g + (u64(r1) * u64(g_stride) + u64(hv)) * u64(4)) * f32(LOG2E), f32(FLOOR))
            b1 = ldg_bf16(beta + (u64(r1) * u64(beta_stride) + u64(hv)) * u64(2))
        return g0, g1, b0, b1

    @cuda.jit(device=True, inline="always")
    def most_items(items, chunks, single_sequence, blocks):
        """Items that this CTA may take. The last ones of a single sequence are left to the CTAs that stay, as many as
        they finish while the scan walks."""
        if items <= blocks:
            return i32(1)
        staying = i32(blocks - SCANNED * RESIDENT)
        if not single_sequence or staying <= 0 or cuda.blockIdx.x == 0 or smid() >= SCANNED:
            return i32(NO_LIMIT)
        rest = i32(items - staying * chunks // CHUNKS_PER_ITEM)
        return div_u32(rest + blocks - 1, blocks) if rest > blocks else i32(1)

    @cuda.jit(device=True, inline="always")
    def item_at(item, items, at_once):
        """(chunk, first value head) of an item; -1 for a chunk where there is no such item."""
        chunk = i32(item // HV) if at_once == 1 else i32(item // (HV // R))
        first = i32(item * at_once - chunk * HV)
        return chunk if item < items else i32(-1), first

    @cuda.jit(device=True, inline="always")
    def sum_decays(sm, warp, lane, at_once, gates, workspaces, chunk, first, chunk_slots, flags):
        """Running sums of g over the chunk, and beta, by a warp for each head; the others zero what the scan needs zeroed."""
        if warp < at_once:
            s = gates[0] + gates[1]
            for shift in range(5):
                o = cuda.shfl_up_sync(0xffffffff, s, 1 << shift)
                if lane >= (1 << shift):
                    s += o
            before = cuda.shfl_up_sync(0xffffffff, s, 1)
            if lane == 0:
                before = f32(0)
            head = sm + SHARED.heads + warp * HEAD_BYTES
            sts2(head + HEAD.cumulative + lane * 8, before + gates[0], s)
            sts2(head + HEAD.beta + lane * 8, gates[2], gates[3])
        else:
            # the two zero blocks of each tile, and the flags of the state stored after this chunk
            for z in range(warp - at_once, 4 * at_once, 8 - at_once):
                at = workspaces + u64((z >> 2) * WORKSPACE_BYTES + ((z >> 1) & 1) * TRIANGLE_BYTES + (z & 1) * 4096 + 1024
                                      + lane * 16)
                stg_u32x4(at, (u32(0), u32(0), u32(0), u32(0)))
            if warp == 7 and lane < V_BLOCKS * at_once:
                slot = ldg_i32(chunk_slots + u64(chunk * 4))
                if slot >= 0:
                    stg_u32(flags + u64(((slot * HV + first) * V_BLOCKS + lane) * 4), u32(0))

    @cuda.jit(device=True, inline="always")
    def multiply_rows(sm, acc, warp, lane, gg, tt):
        """k k^T (warps 0-3) and q k^T (warps 4-7): 16 rows a warp, columns up to the diagonal block; norms of the rows.

        The operands are the BF16 inputs themselves: products are exact, normalisation comes after. Returns the warp's strip of
        rows, this lane's first row, and the factors of its two rows.
        """
        for e in range(32):
            acc[e] = f32(0)
        strip = i32(warp & 3) if warp < 4 else i32(7 - warp)        # a scheduler gets a long and a short one
        # a piece is at (piece ^ row) << 4 of its row, and rows are 128-byte aligned: the k16 step flips two bits
        row7 = i32(lane & 7)
        a_at = sm + (warp >> 2) * Q_BEHIND_K + (strip * 16 + (lane & 15)) * 128 + (((lane >> 4) ^ row7) << 4)
        b_at = sm + (row7 + ((lane >> 4) << 3)) * 128 + ((((lane >> 3) & 1) ^ row7) << 4)
        # own: sums of squares, on the diagonal of this strip's product with itself, in the lane with tt = gg / 2
        own = cuda.local.array(8, f32)
        clear(own)
        own_at = b_at + (warp >> 2) * Q_BEHIND_K + strip * 2048
        if strip == 0:
            strip_product(acc, own, 1, a_at, b_at, own_at)
        elif strip == 1:
            strip_product(acc, own, 2, a_at, b_at, own_at)
        elif strip == 2:
            strip_product(acc, own, 3, a_at, b_at, own_at)
        else:
            strip_product(acc, own, 4, a_at, b_at, own_at)
        n0 = own[1] if gg & 1 else own[0]
        n1 = own[7] if gg & 1 else own[6]
        n0 = cuda.shfl_sync(0xffffffff, n0, (lane & 28) | (gg >> 1))
        n1 = cuda.shfl_sync(0xffffffff, n1, (lane & 28) | (gg >> 1))
        n0 = rsqrt(n0 + f32(EPS))
        n1 = rsqrt(n1 + f32(EPS))
        i0 = i32(strip * 16 + gg)
        if warp >= 4:
            n0 *= f32(SM_SCALE)
            n1 *= f32(SM_SCALE)
        if tt == 0:
            norms = sm + SHARED.rk + (warp >> 2) * 256
            sts(norms + i0 * 4, n0)
            sts(norms + i0 * 4 + 32, n1)
        return strip, i0, n0, n1

    @cuda.jit(device=True, inline="always")
    def apply_decays(sm, acc, warp, lane, gg, tt, strip, i0, at_once, workspaces):
        """A (warps 0-3) into shared memory, A_qk (warps 4-7) into the workspace.

        Left of the diagonal block 2^(c_i - c_j) = 2^(c_i - c_m) 2^(c_m - c_j), m the token before the strip: both at most 1,
        and few of them.
        """
        for h in range(at_once):
            head = sm + SHARED.heads + h * HEAD_BYTES
            c0 = lds(head + HEAD.cumulative + i0 * 4)
            c1 = lds(head + HEAD.cumulative + i0 * 4 + 32)
            cm = lds(head + HEAD.cumulative + max(i32(strip * 16 - 1), i32(0)) * 4)
            f0 = f32(1)
            f1 = f32(1)
            if warp < 4:
                f0 = lds(head + HEAD.beta + i0 * 4)
                f1 = lds(head + HEAD.beta + i0 * 4 + 32)
            e0 = f0 * ex2(c0 - cm)
            e1 = f1 * ex2(c1 - cm)
            tile = workspaces + u64(h * WORKSPACE_BYTES + WORKSPACE.a_qk + lane * 4)
            for n in range(8):
                if (n >> 1) < strip:
                    cj = lds2(head + HEAD.cumulative + (n * 8 + tt * 2) * 4)
                    z0 = ex2(cm - cj[0])
                    z1 = ex2(cm - cj[1])
                    x0 = pack16(acc[4 * n] * e0 * z0, acc[4 * n + 1] * e0 * z1)
                    x1 = pack16(acc[4 * n + 2] * e1 * z0, acc[4 * n + 3] * e1 * z1)
                    at = block_at(strip, n >> 1) + (n & 1) * 128
                    if warp < 4:
                        sts_u32(head + HEAD.blocks + at + lane * 4, x0)
                        sts_u32(head + HEAD.blocks + at + lane * 4 + 256, x1)
                    else:
                        stg_u32(tile + u64(at), x0)
                        stg_u32(tile + u64(at + 256), x1)
                elif (n >> 1) == strip:
                    j = i32((n & 1) * 8 + tt * 2)                    # inside the block
                    cj = lds2(head + HEAD.cumulative + (n * 8 + tt * 2) * 4)
                    i = gg if warp < 4 else i32(gg + 1)              # A_qk keeps the diagonal
                    x0 = acc[4 * n] * f0 * ex2(c0 - cj[0]) if j < i else f32(0)
                    x1 = acc[4 * n + 1] * f0 * ex2(c0 - cj[1]) if j + 1 < i else f32(0)
                    x2 = acc[4 * n + 2] * f1 * ex2(c1 - cj[0]) if j < i + 8 else f32(0)
                    x3 = acc[4 * n + 3] * f1 * ex2(c1 - cj[1]) if j + 1 < i + 8 else f32(0)
                    if warp < 4:
                        to = head + HEAD.diagonal + strip * DIAGONAL_STRIDE + gg * 64 + j * 4
                        sts2(to, x0, x1)
                        sts2(to + 512, x2, x3)
                    else:
                        out = tile + u64(block_at(strip, strip) + (n & 1) * 128)
                        stg_u32(out, pack16(x0, x1))
                        stg_u32(out + u64(256), pack16(x2, x3))

    @cuda.jit(device=True, inline="always")
    def store_scales(sm, tid, at_once, workspaces):
        """The factors of rows, a thread for each token and head."""
        if tid < at_once * 64:
            h = i32(tid >> 6)
            i = i32(tid & 63)
            head = sm + SHARED.heads + h * HEAD_BYTES
            ci = lds(head + HEAD.cumulative + i * 4)
            last = lds(head + HEAD.cumulative + 63 * 4)
            out = workspaces + u64(h * WORKSPACE_BYTES + i * 4)
            rk = lds(sm + SHARED.rk + i * 4)
            stg(out + u64(WORKSPACE.k_scale), -rk * ex2(ci))
            stg(out + u64(WORKSPACE.q_scale), lds(sm + SHARED.rq + i * 4) * ex2(ci))
            stg(out + u64(WORKSPACE.v_scale), rk * ex2(last - ci))
            if i == 63:
                stg(workspaces + u64(h * WORKSPACE_BYTES + WORKSPACE.decay), ex2(last))

    @cuda.jit(device=True, inline="always")
    def invert_diagonal(sm, warp, lane, at_once):
        """The inverses D_i of the 16 x 16 diagonal blocks of I + A, in float32: a thread solves one column."""
        if warp < 2 * at_once:
            head = sm + SHARED.heads + (warp >> 1) * HEAD_BYTES
            blk = i32((warp & 1) * 2 + (lane >> 4))
            col = i32(lane & 15)
            x = solve16(head + HEAD.diagonal + blk * DIAGONAL_STRIDE, col)
            at = head + HEAD.inverses + blk * 512 + (col >> 3) * 128 + (col & 7) * 2
            for i in range(16):
                sts_lo16(at + (i >> 3) * 256 + (i & 7) * 16, pack16(x[i], f32(0)))

    @cuda.jit(device=True, inline="always")
    def invert_blocks(sm, warp, lane, gg, tt, at_once, workspaces):
        """A_inv (here T) by block columns, transposed: T_ij^T = -(sum_l T_lj^T A_il^T) D_i^T; times beta, to the workspace."""
        if warp < 2 * at_once:
            h = i32(warp if warp < at_once else warp - at_once)
            head = sm + SHARED.heads + h * HEAD_BYTES
            tile = workspaces + u64(h * WORKSPACE_BYTES + WORKSPACE.a_inv + lane * 4)
            off = head + HEAD.blocks + lane * 16
            inv = head + HEAD.inverses + lane * 16
            t = cuda.local.array(8, f32)
            clear(t)
            if warp < at_once:                                    # column 0
                b0 = lds(head + HEAD.beta + gg * 4)
                b1 = lds(head + HEAD.beta + gg * 4 + 32)
                t0 = ldsm_t(inv)
                block_mma(t, t0, off + block_at(1, 0))
                t1 = next_block(inv + 512, t, tile + u64(block_at(1, 0)), b0, b1)
                clear(t)
                block_mma(t, t0, off + block_at(2, 0))
                block_mma(t, t1, off + block_at(2, 1))
                t2 = next_block(inv + 1024, t, tile + u64(block_at(2, 0)), b0, b1)
                clear(t)
                block_mma(t, t0, off + block_at(3, 0))
                block_mma(t, t1, off + block_at(3, 1))
                block_mma(t, t2, off + block_at(3, 2))
                next_block(inv + 1536, t, tile + u64(block_at(3, 0)), b0, b1)
            else:                                                 # columns 1 and 2
                b0 = lds(head + HEAD.beta + gg * 4 + 64)
                b1 = lds(head + HEAD.beta + gg * 4 + 96)
                t1 = ldsm_t(inv + 512)
                block_mma(t, t1, off + block_at(2, 1))
                t2 = next_block(inv + 1024, t, tile + u64(block_at(2, 1)), b0, b1)
                clear(t)
                block_mma(t, t1, off + block_at(3, 1))
                block_mma(t, t2, off + block_at(3, 2))
                next_block(inv + 1536, t, tile + u64(block_at(3, 1)), b0, b1)
                b0 = lds(head + HEAD.beta + gg * 4 + 128)
                b1 = lds(head + HEAD.beta + gg * 4 + 160)
                clear(t)
                block_mma(t, ldsm_t(inv + 1024), off + block_at(3, 2))
                next_block(inv + 1536, t, tile + u64(block_at(3, 2)), b0, b1)
        else:                                                     # the diagonal
            for d in range(warp - 2 * at_once, 4 * at_once, 8 - 2 * at_once):
                h = i32(d >> 2)
                j = i32(d & 3)
                head = sm + SHARED.heads + h * HEAD_BYTES
                out = workspaces + u64(h * WORKSPACE_BYTES + WORKSPACE.a_inv + block_at(j, j) + lane * 4)
                x = ldsm(head + HEAD.inverses + j * 512 + lane * 16)
                b = lds2(head + HEAD.beta + (j * 16 + tt * 2) * 4)
                stg_u32(out, pack16(low16(x[0]) * b[0], high16(x[0]) * b[1]))
                stg_u32(out + u64(256), pack16(low16(x[2]) * b[0], high16(x[2]) * b[1]))
                b = lds2(head + HEAD.beta + (j * 16 + tt * 2) * 4 + 32)
                stg_u32(out + u64(128), pack16(low16(x[1]) * b[0], high16(x[1]) * b[1]))
                stg_u32(out + u64(384), pack16(low16(x[3]) * b[0], high16(x[3]) * b[1]))

    def prepare(qkv, g, beta, counts, chunk_rows, chunk_slots, workspace, flags, progress, stride, g_stride, beta_stride):
        """qkv: BF16 rows q|k|v, g float32, beta BF16, with row strides in elements. See the module."""
        shared = i32((smem_addr(cuda.shared.array(0, types.uint8)) + 127) & ~127)
        sm = shared
        tid = i32(cuda.threadIdx.x)
        warp = i32(tid >> 5)
        lane = i32(tid & 31)
        chunks = ldg_i32(counts + u64(CHUNKS_AT))
        single_sequence = ldg_i32(counts + u64(RUNS_AT)) == 1
        blocks = i32(cuda.gridDim.x)
        at_once = i32(1) if chunks * HV <= blocks else i32(R)
        items = i32(chunks * (HV if at_once == 1 else HV // R))
        left = most_items(items, chunks, single_sequence, blocks)
        ticket = i32(cuda.blockIdx.x)            # thread 0: the next item, behind the blocks' first ones
        next_chunk, next_first = item_at(i32(cuda.blockIdx.x), items, at_once)
        if next_chunk >= 0 and tid < 16:
            cp16(sm + SHARED.rows + tid * 16, chunk_rows + u64(next_chunk * 256 + tid * 16), 16)
            cp_wait_all()
        cuda.syncthreads()
        # Inputs are there, and the scan before has read its workspaces and flags. Only now may this call's scan begin: it
        # takes a raised flag for this call's.
        pdl_wait()
        pdl_launch()
        gates = (f32(0), f32(0), f32(0), f32(0))
        if next_chunk >= 0:
            if tid == 0 and single_sequence and left > 1:
                ticket = take_ticket(progress + u64(TICKETS * 4))
            fetch_rows(sm, qkv, stride, next_first // PER_KEY, tid)
            if warp < at_once:
                gates = fetch_gates(sm, g, beta, g_stride, beta_stride, next_first + warp, lane)
        while next_chunk >= 0:
            sm = opaque(shared)
            tid = opaque(i32(cuda.threadIdx.x))
            warp = i32(tid >> 5)
            lane = i32(tid & 31)
            gg = i32(lane >> 2)
            tt = i32(lane & 3)
            chunk = i32(next_chunk)
            first = i32(next_first)                  # value head
            workspaces = workspace + u64(chunk * HV + first) * u64(WORKSPACE_BYTES)
            # running sum of g over the chunk, two tokens a lane; no token's sum may know the next one's g, even to an ulp
            if tid == 0:
                sts_u32(sm + SHARED.next, u32(blocks + ticket if left > 1 else items))
            sum_decays(sm, warp, lane, at_once, gates, workspaces, chunk, first, chunk_slots, flags)
            cp_wait_all()
            cuda.syncthreads()
            next_chunk, next_first = item_at(lds_i32(sm + SHARED.next), items, at_once)
            left = i32(left - 1)
            if next_chunk >= 0:
                if tid == 0 and left > 1:
                    ticket = take_ticket(progress + u64(TICKETS * 4)) if single_sequence else i32(ticket + blocks)
                if tid >= THREADS - 16:                                 # all have read the list
                    cp16(sm + SHARED.rows + (tid & 15) * 16, chunk_rows + u64(next_chunk * 256 + (tid & 15) * 16), 16)

            acc = cuda.local.array(32, f32)
            strip, i0, n0, n1 = multiply_rows(sm, acc, warp, lane, gg, tt)
            cp_wait_all()
            cuda.syncthreads()

            # q and k have been read: the next item's may come.  The norms are the same for all value heads.
            for n in range(8):
                if (n >> 1) <= strip:
                    rj = lds2(sm + SHARED.rk + (n * 8 + tt * 2) * 4)
                    for e in range(2):
                        acc[4 * n + e] *= n0 * rj[e]
                        acc[4 * n + 2 + e] *= n1 * rj[e]
            if next_chunk >= 0:
                fetch_rows(sm, qkv, stride, next_first // PER_KEY, tid)
                if warp < at_once:
                    gates = fetch_gates(sm, g, beta, g_stride, beta_stride, next_first + warp, lane)

            apply_decays(sm, acc, warp, lane, gg, tt, strip, i0, at_once, workspaces)
            store_scales(sm, tid, at_once, workspaces)
            cuda.syncthreads()

            invert_diagonal(sm, warp, lane, at_once)
            cuda.syncthreads()

            invert_blocks(sm, warp, lane, gg, tt, at_once, workspaces)
            if single_sequence:
                fence_global()
            cuda.syncthreads()                                        # the next item overwrites HEAD.cumulative and HEAD.beta
            if single_sequence and tid < V_BLOCKS * at_once:
                raise_flag(progress + u64((FIRST + (chunk * HV + first) * V_BLOCKS + tid) * 4))

    return prepare, SMEM


SIGNATURE = void(*[u64] * 9, i32, i32, i32)
