"""The lane layout of every instruction in ``jev_kernels.ptx``. tests/gpu/test_ptx.py runs the same tests on a GPU."""
from __future__ import annotations

import numpy as np
import pytest
from numba import cuda
from numba.cuda import types

from jev_kernels import bf16, ptx
from jev_kernels.ptx import i32, u32, u64
from jev_kernels.runtime.launch import Kernel, address

LANES = np.arange(32)
G, T = LANES // 4, LANES % 4
U32, F32, I32 = types.uint32[:, ::1], types.float32[:, ::1], types.int32[:, ::1]


def run(kernel, *arrays, grid=1):
    """Launch over device copies of ``arrays``; returns the last one."""
    on_device = [cuda.to_device(a) if isinstance(a, np.ndarray) else a for a in arrays]
    kernel(0, grid, *on_device)
    return on_device[-1].copy_to_host()


def random_bf16(rng, *shape):
    return bf16.from_float32(rng.standard_normal(shape).astype(np.float32))


# ---------------------------------------------------------------- matrix fragments
def mma_kernel(a, b, c, d):
    lane = cuda.threadIdx.x
    out = ptx.mma((c[lane, 0], c[lane, 1], c[lane, 2], c[lane, 3]), (a[lane, 0], a[lane, 1], a[lane, 2], a[lane, 3]),
                  b[lane, 0], b[lane, 1])
    for i in range(4):
        d[lane, i] = out[i]


def mma16_kernel(a, b, c, d):
    lane = cuda.threadIdx.x
    out = ptx.mma16((c[lane, 0], c[lane, 1], c[lane, 2], c[lane, 3]), (a[lane, 0], a[lane, 1], a[lane, 2], a[lane, 3]),
                    b[lane, 0], b[lane, 1])
    for i in range(4):
        d[lane, i] = out[i]


def mma_tf32_kernel(a, b, c, d):
    lane = cuda.threadIdx.x
    out = ptx.mma_tf32((c[lane, 0], c[lane, 1], c[lane, 2], c[lane, 3]),
                       (a[lane, 0], a[lane, 1], a[lane, 2], a[lane, 3]), b[lane, 0], b[lane, 1])
    for i in range(4):
        d[lane, i] = out[i]


def accumulator(d):
    """[16, 8] from the four registers of 32 lanes."""
    out = np.empty((16, 8), np.float32)
    out[G, 2 * T], out[G, 2 * T + 1], out[G + 8, 2 * T], out[G + 8, 2 * T + 1] = d.T
    return out


@pytest.mark.parametrize("kind", ["mma", "mma16"])
def test_mma_fragments(kind):
    rng = np.random.default_rng(0)
    if kind == "mma":
        a, b, wide = random_bf16(rng, 16, 16), random_bf16(rng, 16, 8), bf16.to_float32
    else:
        a, b = (rng.standard_normal(s).astype(np.float16).view(np.uint16) for s in ((16, 16), (16, 8)))
        wide = lambda x: x.view(np.float16)  # noqa: E731
    c = rng.standard_normal((16, 8)).astype(np.float32)
    pair = lambda m, r, k: m[r, k].astype(np.uint32) | m[r, k + 1].astype(np.uint32) << 16  # noqa: E731
    column = lambda m, k, n: m[k, n].astype(np.uint32) | m[k + 1, n].astype(np.uint32) << 16  # noqa: E731
    fa = np.stack([pair(a, G, 2 * T), pair(a, G + 8, 2 * T), pair(a, G, 2 * T + 8), pair(a, G + 8, 2 * T + 8)], 1)
    fb = np.stack([column(b, 2 * T, G), column(b, 2 * T + 8, G)], 1)
    fc = np.stack([c[G, 2 * T], c[G, 2 * T + 1], c[G + 8, 2 * T], c[G + 8, 2 * T + 1]], 1)
    kernel = Kernel({"mma": mma_kernel, "mma16": mma16_kernel}[kind], types.void(U32, U32, F32, F32), 32)
    got = accumulator(run(kernel, fa, fb, fc, np.full((32, 4), np.nan, np.float32)))
    want = c.astype(np.float64) + wide(a).astype(np.float64) @ wide(b).astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_mma_tf32_fragments():
    rng = np.random.default_rng(1)
    a, b, c = (rng.standard_normal(s).astype(np.float32) for s in ((16, 8), (8, 8), (16, 8)))
    a, b = ((m.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for m in (a, b))
    fa = np.stack([a[G, T], a[G + 8, T], a[G, T + 4], a[G + 8, T + 4]], 1).view(np.uint32)
    fb = np.stack([b[T, G], b[T + 4, G]], 1).view(np.uint32)
    fc = np.stack([c[G, 2 * T], c[G, 2 * T + 1], c[G + 8, 2 * T], c[G + 8, 2 * T + 1]], 1)
    kernel = Kernel(mma_tf32_kernel, types.void(U32, U32, F32, F32), 32)
    got = accumulator(run(kernel, fa, fb, fc, np.full((32, 4), np.nan, np.float32)))
    np.testing.assert_allclose(got, c.astype(np.float64) + a.astype(np.float64) @ b, rtol=1e-5, atol=1e-5)


def ldsm_kernel(src, plain, transposed, moved):
    lane = cuda.threadIdx.x
    tile = cuda.shared.array(256, types.uint32)
    for i in range(8):
        tile[lane * 8 + i] = src[lane, i]
    cuda.syncthreads()
    at = ptx.smem_addr(tile) + i32(lane * 32)                    # rows 32 bytes apart: addresses matter, not order
    p = ptx.ldsm(at)
    t = ptx.ldsm_t(at)
    for i in range(4):
        plain[lane, i] = p[i]
        transposed[lane, i] = t[i]
    moved[lane, 0] = ptx.transpose8(p[0])


def test_ldmatrix_and_movmatrix_layouts():
    rng = np.random.default_rng(2)
    rows = rng.integers(0, 2**16, (32, 16)).astype(np.uint16)
    src = bf16.pack_pairs(rows)
    arrays = [cuda.to_device(a) for a in (src, *(np.zeros((32, n), np.uint32) for n in (4, 4, 1)))]
    Kernel(ldsm_kernel, types.void(U32, U32, U32, U32), 32)(0, 1, *arrays)
    plain, transposed, moved = (a.copy_to_host() for a in arrays[1:])
    matrices = rows[:, :8].reshape(4, 8, 8)                      # matrix m: rows given by lanes 8m .. 8m+7
    for lane in LANES:
        g, t = lane // 4, lane % 4
        for m in range(4):
            assert list(bf16.unpack_pairs(plain[lane, m:m + 1])) == list(matrices[m, g, 2 * t:2 * t + 2])
            assert list(bf16.unpack_pairs(transposed[lane, m:m + 1])) == list(matrices[m, 2 * t:2 * t + 2, g])
        assert moved[lane, 0] == transposed[lane, 0]


# ---------------------------------------------------------------- warps
def warp_kernel(x, bits, out, votes):
    lane = cuda.threadIdx.x
    v = x[lane, 0]
    out[lane, 0] = ptx.shfl_xor(v, 5)
    out[lane, 1] = ptx.shfl_up(v, 3)
    out[lane, 2] = ptx.shfl_down(v, 7)
    out[lane, 3] = ptx.shfl_idx(v, (lane * 5) % 32)
    out[lane, 4] = cuda.shfl_xor_sync(0xffffffff, v, 16)
    b = bits[lane, 0]
    votes[lane, 0] = ptx.shfl_xor_u32(b, 9)
    votes[lane, 1] = ptx.shfl_idx_u32(b, 31 - lane)
    votes[lane, 2] = ptx.ballot(i32(b & u32(1)))
    votes[lane, 3] = u32(ptx.uniform(i32(lane + 3)))
    votes[lane, 4] = u32(ptx.shfl_idx_i32(i32(lane * 2), (lane + 1) % 32))
    votes[lane, 5] = u32(ptx.div_u32(i32(lane * 1000003), 77))
    cuda.syncwarp()


def test_shuffles_and_votes():
    rng = np.random.default_rng(3)
    x = rng.standard_normal((32, 1)).astype(np.float32)
    bits = rng.integers(0, 2**32, (32, 1), dtype=np.uint32)
    arrays = [cuda.to_device(a) for a in (x, bits, np.zeros((32, 5), np.float32), np.zeros((32, 6), np.uint32))]
    Kernel(warp_kernel, types.void(F32, U32, F32, U32), 32)(0, 1, *arrays)
    out, votes = (a.copy_to_host() for a in arrays[2:])
    v, b = x[:, 0], bits[:, 0]
    np.testing.assert_array_equal(out[:, 0], v[LANES ^ 5])
    np.testing.assert_array_equal(out[:, 1], v[np.where(LANES >= 3, LANES - 3, LANES)])
    np.testing.assert_array_equal(out[:, 2], v[np.where(LANES + 7 < 32, LANES + 7, LANES)])
    np.testing.assert_array_equal(out[:, 3], v[LANES * 5 % 32])
    np.testing.assert_array_equal(out[:, 4], v[LANES ^ 16])
    np.testing.assert_array_equal(votes[:, 0], b[LANES ^ 9])
    np.testing.assert_array_equal(votes[:, 1], b[31 - LANES])
    assert set(votes[:, 2]) == {sum(int(n & 1) << i for i, n in enumerate(b))}
    assert set(votes[:, 3]) == {3}
    np.testing.assert_array_equal(votes[:, 4], (LANES + 1) % 32 * 2)
    np.testing.assert_array_equal(votes[:, 5], LANES * 1000003 // 77)


# ---------------------------------------------------------------- conversions
def convert_kernel(x, y, z, packed, out):
    i = cuda.grid(1)
    if i < x.shape[0]:
        a, b, c = x[i, 0], y[i, 0], z[i, 0]
        packed[i, 0] = ptx.pack(a, b)
        packed[i, 1] = ptx.pack16(a, b)
        packed[i, 2] = ptx.tf32(a)
        packed[i, 3] = ptx.mul_bf16x2(ptx.pack(a, b), ptx.pack(b, c))
        packed[i, 4] = u32(ptx.to_bf16(a))
        packed[i, 5] = ptx.bits_f32(a)
        out[i, 0] = ptx.low(ptx.pack(a, b))
        out[i, 1] = ptx.high(ptx.pack(a, b))
        out[i, 2] = ptx.low16(ptx.pack16(a, b))
        out[i, 3] = ptx.high16(ptx.pack16(a, b))
        out[i, 4] = ptx.fma(a, b, c)
        out[i, 5] = ptx.add_rn(ptx.mul_rn(a, b), c)
        out[i, 6] = ptx.ex2(a)
        out[i, 7] = ptx.rcp(a)
        out[i, 8] = ptx.rsqrt(abs(a))
        out[i, 9] = ptx.exp(a)
        out[i, 10] = ptx.log1p(abs(a))
        out[i, 11] = ptx.from_bf16(ptx.to_bf16(b))
        out[i, 12] = ptx.f32_bits(ptx.bits_f32(c))


def test_conversions_and_functions():
    rng = np.random.default_rng(4)
    x, y, z = (rng.standard_normal((128, 1)).astype(np.float32) * 4 for _ in range(3))
    x[:4, 0] = 1.00390625, 1.01171875, -1.00390625, 99        # ties of BF16
    arrays = [cuda.to_device(a) for a in (x, y, z, np.zeros((128, 6), np.uint32), np.zeros((128, 13), np.float32))]
    Kernel(convert_kernel, types.void(F32, F32, F32, U32, F32), 32)(0, 4, *arrays)
    packed, out = (a.copy_to_host() for a in arrays[3:])
    a, b, c = x[:, 0], y[:, 0], z[:, 0]
    ra, rb, rc = bf16.from_float32(a), bf16.from_float32(b), bf16.from_float32(c)
    halves = [np.clip(v, -65504, 65504).astype(np.float16) for v in (a, b)]
    np.testing.assert_array_equal(packed[:, 0], ra | rb.astype(np.uint32) << 16)
    np.testing.assert_array_equal(packed[:, 1], bf16.pack_pairs(np.stack([h.view(np.uint16) for h in halves], 1))[:, 0])
    np.testing.assert_array_equal(packed[:, 2], (a.view(np.uint32) + 0x1000) & np.uint32(0xFFFFE000))
    product = [bf16.from_float32(bf16.to_float32(m) * bf16.to_float32(n)) for m, n in ((ra, rb), (rb, rc))]
    np.testing.assert_array_equal(packed[:, 3], product[0] | product[1].astype(np.uint32) << 16)
    np.testing.assert_array_equal(packed[:, 4], ra)
    np.testing.assert_array_equal(packed[:, 5], a.view(np.uint32))
    np.testing.assert_array_equal(out[:, 0], bf16.to_float32(ra))
    np.testing.assert_array_equal(out[:, 1], bf16.to_float32(rb))
    np.testing.assert_array_equal(out[:, 2], halves[0])
    np.testing.assert_array_equal(out[:, 3], halves[1])
    wide = a.astype(np.float64) * b + c
    np.testing.assert_allclose(out[:, 4], wide, rtol=1.2e-7)
    np.testing.assert_array_equal(out[:, 5], a * b + c)          # NumPy rounds the product and the sum
    for column, want in ((6, 2.0 ** a.astype(np.float64)), (7, 1 / a.astype(np.float64)),
                         (8, abs(a.astype(np.float64)) ** -0.5), (9, np.exp(a.astype(np.float64))),
                         (10, np.log1p(abs(a.astype(np.float64))))):
        keep = want < 3e38
        np.testing.assert_allclose(out[keep, column], want[keep], rtol=1e-6)
    np.testing.assert_array_equal(out[:, 11], bf16.to_float32(rb))
    np.testing.assert_array_equal(out[:, 12], c)


# ---------------------------------------------------------------- memory
def copy_kernel(src, dst, n):
    """Eight values of 16 bits a thread, through registers, shared memory and cp.async."""
    tid = cuda.threadIdx.x
    tile = ptx.smem_addr(cuda.shared.array(0, types.uint8))
    ptx.cp16(tile + tid * 16, src + u64(tid * 16), i32(16) if tid < n else i32(0))
    ptx.cp_commit()
    ptx.cp16(tile + 1024 + tid * 16, src + u64(tid * 16), 16)
    ptx.cp_commit()
    ptx.cp_wait1()
    cuda.syncthreads()
    other = tile + ((tid + 1) % 64) * 16
    v = ptx.lds4(other)
    ptx.stg2(dst + u64(tid * 16), v[0], v[1])
    ptx.stg(dst + u64(tid * 16 + 8), v[2])
    ptx.stg_u32(dst + u64(tid * 16 + 12), ptx.bits_f32(v[3]))
    ptx.cp_wait0()
    w = ptx.ldg_u32x4(src + u64(tid * 16))
    ptx.stg_u32x4(dst + u64(1024 + tid * 16), (w[3], w[2], w[1], w[0]))
    cuda.syncthreads()
    ptx.sts(tile + tid * 16, ptx.ldg_bf16(src + u64(tid * 16)))
    two = ptx.ldg2(src + u64(tid * 16 + 8))
    ptx.sts2(tile + tid * 16 + 8, two[1], two[0])
    ptx.sts_u32(tile + tid * 16 + 4, u32(ptx.lds_i32(tile + 1024 + tid * 16)))
    ptx.sts_lo16(tile + tid * 16, ptx.bits_f32(ptx.lds(tile + 1024 + tid * 16 + 4)))
    w = ptx.ldg_u32x4(src + u64(tid * 16))
    v = ptx.lds2(tile + tid * 16)
    ptx.stg2(dst + u64(2048 + tid * 16), v[0], v[1])
    v = ptx.lds2(tile + tid * 16 + 8)
    ptx.stg2(dst + u64(2048 + tid * 16 + 8), v[0], v[1])


def test_loads_stores_and_cp_async():
    rng = np.random.default_rng(5)
    src = rng.standard_normal((64, 4)).astype(np.float32)
    a, b = cuda.to_device(src), cuda.to_device(np.full((192, 4), np.nan, np.float32))
    Kernel(copy_kernel, types.void(u64, u64, i32), 64, smem=2048)(0, 1, address(a), address(b), 40)
    out = b.copy_to_host().view(np.uint32)
    bits = src.view(np.uint32)
    first = bits.copy()
    first[40:] = 0                                               # cp.async with a size of 0 writes zeros
    np.testing.assert_array_equal(out[:64], np.roll(first, -1, axis=0))
    np.testing.assert_array_equal(out[64:128], bits[:, ::-1])
    first = (bits[:, 0] << 16) & np.uint32(0xFFFF0000) | bits[:, 1] & 0xFFFF
    want = np.stack([first, bits[:, 0], bits[:, 3], bits[:, 2]], 1)
    np.testing.assert_array_equal(out[128:], want)


def pipeline_kernel(src, dst):
    """A producer warp fills a two-stage ring by bulk copies, a consumer warp empties it."""
    tid = cuda.threadIdx.x
    ring = ptx.smem_addr(cuda.shared.array(0, types.uint8))
    full, free = ring + 1024, ring + 1040
    if tid == 0:
        for s in range(2):
            ptx.mbar_init(full + s * 8, 1)
            ptx.mbar_init(free + s * 8, 32)
        ptx.mbar_fence()
    cuda.syncthreads()
    if tid < 32:
        for i in range(5):
            stage = i % 2
            if tid == 0:
                ptx.mbar_wait(free + stage * 8, ((i // 2) & 1) ^ 1)
                ptx.mbar_expect(full + stage * 8, 512)
                ptx.bulk(ring + stage * 512, src + u64(i * 512), 512, full + stage * 8)
    else:
        for i in range(5):
            stage = i % 2
            ptx.mbar_wait(full + stage * 8, (i // 2) & 1)
            v = ptx.lds4(ring + stage * 512 + (tid - 32) * 16)
            ptx.stg2(dst + u64(i * 512 + (tid - 32) * 16), v[3], v[2])
            ptx.stg2(dst + u64(i * 512 + (tid - 32) * 16 + 8), v[1], v[0])
            ptx.mbar_arrive(free + stage * 8)
    ptx.named_sync(1, 64)


def test_mbarrier_ring():
    src = np.random.default_rng(6).standard_normal((5 * 32, 4)).astype(np.float32)
    a, b = cuda.to_device(src), cuda.to_device(np.full_like(src, np.nan))
    Kernel(pipeline_kernel, types.void(u64, u64), 64, smem=1056)(0, 1, address(a), address(b))
    np.testing.assert_array_equal(b.copy_to_host(), src[:, ::-1])
