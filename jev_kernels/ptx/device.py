"""The intrinsics behind ``jev_kernels.ptx`` on a real GPU. Kernels import them from there.

Every statement is volatile with a memory clobber unless it is ``pure``: LLVM then keeps such statements in program
order, which barriers, asynchronous copies and wgmma need.
"""
from __future__ import annotations

import math

from llvmlite import ir
from numba import cuda
from numba.cuda import types
from numba.cuda.core import targetconfig
from numba.cuda.extending import intrinsic

from jev_kernels.ptx import generated
from jev_kernels.ptx.waits import until

f32, i32, u16, u32, i64, u64, void = (
    types.float32, types.int32, types.uint16, types.uint32, types.int64, types.uint64, types.void)
LL = {f32: ir.FloatType(), i32: ir.IntType(32), u32: ir.IntType(32), i64: ir.IntType(64), u64: ir.IntType(64),
      u16: ir.IntType(16), void: ir.VoidType()}


def ptx(name, ret, args, text, constraints, pure=False, sim=None, since=(0, 0)):
    """An intrinsic ``name(*args) -> ret`` that emits ``text``.

    ret and each of args is a scalar type or a (type, n) pair: n registers, a tuple in Python. Operands are numbered
    results first. Numba casts arguments to ``args`` by itself. sim: a Python function that stands for the instruction
    under the simulator, which uses ``sim.ptx.ptx`` in place of this. since: the first compute capability that has it;
    a statement without a result is left out below (the hints of programmatic dependent launch, on sm_80).
    """
    def flat(t):
        return [t[0]] * t[1] if isinstance(t, tuple) else [] if t is void else [t]

    def numba_type(t):
        return types.UniTuple(*t) if isinstance(t, tuple) else t

    outs, ins = flat(ret), [r for a in args for r in flat(a)]
    if not outs:
        out_ll = ir.VoidType()
    elif len(outs) == 1:
        out_ll = LL[outs[0]]
    else:
        out_ll = ir.LiteralStructType([LL[o] for o in outs])

    def codegen(context, builder, sig, values):
        if ret is void and targetconfig.ConfigStack().top().compute_capability < since:
            return context.get_dummy_value()
        ops = []
        for a, v in zip(args, values):
            ops += [builder.extract_value(v, i) for i in range(a[1])] if isinstance(a, tuple) else [v]
        fn = ir.FunctionType(out_ll, [LL[r] for r in ins])
        cons = constraints if pure else ",".join(filter(None, [constraints, "~{memory}"]))
        out = builder.call(ir.InlineAsm(fn, text, cons, side_effect=not pure), ops)
        if ret is void:
            return context.get_dummy_value()
        if isinstance(ret, tuple):
            return context.make_tuple(builder, sig.return_type, [builder.extract_value(out, i) for i in range(ret[1])])
        return out

    parameters = "".join(f", a{i}" for i in range(len(args)))
    return intrinsic(generated.function(f"def {name}(typingctx{parameters}):\n    return signature, codegen\n",
                                        signature=numba_type(ret)(*map(numba_type, args)), codegen=codegen))


# ---------------------------------------------------------------- addresses
@intrinsic
def smem_addr(typingctx, array):
    """int32 address in the shared window of a shared array's first element."""
    def codegen(context, builder, sig, args):
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        fn = ir.FunctionType(LL[u64], [LL[u64]])
        asm = ir.InlineAsm(fn, "cvta.to.shared.u64 $0, $1;", "=l,l", side_effect=False)
        return builder.trunc(builder.call(asm, [builder.ptrtoint(data, LL[u64])]), LL[i32])
    return i32(array), codegen


@intrinsic
def gmem_addr(typingctx, array):
    """uint64 device address of a global array's first element."""
    def codegen(context, builder, sig, args):
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, LL[u64])
    return u64(array), codegen


# ---------------------------------------------------------------- matrices of a warp (sm_80), see ``ptx.fragments``
# D[16x8] += A[16x16] B[16x8], float32 accumulators
_MMA = " {$0,$1,$2,$3}, {$8,$9,$10,$11}, {$12,$13}, {$4,$5,$6,$7};"
mma = ptx("mma", (f32, 4), ((f32, 4), (u32, 4), u32, u32),
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" + _MMA,
          "=f,=f,=f,=f,f,f,f,f,r,r,r,r,r,r", pure=True)
mma16 = ptx("mma16", (f32, 4), ((f32, 4), (u32, 4), u32, u32),                    # the same with float16 operands
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" + _MMA,
            "=f,=f,=f,=f,f,f,f,f,r,r,r,r,r,r", pure=True)
mma_tf32 = ptx("mma_tf32", (f32, 4), ((f32, 4), (u32, 4), u32, u32),
               "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32" + _MMA,
               "=f,=f,=f,=f,f,f,f,f,r,r,r,r,r,r", pure=True)
tf32 = ptx("tf32", u32, (f32,), "cvt.rna.tf32.f32 $0, $1;", "=r,f", pure=True)
ldsm = ptx("ldsm", (u32, 4), (i32,),
           "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];", "=r,=r,=r,=r,r")
ldsm_t = ptx("ldsm_t", (u32, 4), (i32,),
             "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0,$1,$2,$3}, [$4];", "=r,=r,=r,=r,r")
# Four or two 8 x 8 matrices, transposed on the way; rows' addresses as for ldsm (of two: lanes 0 to 15). sm_90
stsm4_t = ptx("stsm4_t", void, (i32, u32, u32, u32, u32),
              "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1,$2,$3,$4};", "r,r,r,r,r")
stsm2_t = ptx("stsm2_t", void, (i32, u32, u32), "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [$0], {$1,$2};", "r,r,r")
transpose8 = ptx("transpose8", u32, (u32,), "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r")

# ---------------------------------------------------------------- conversions and fast functions
pack = ptx("pack", u32, (f32, f32), "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", pure=True)   # first in the low half
pack16 = ptx("pack16", u32, (f32, f32),                                              # float16, clamped
             "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;", "=r,f,f", pure=True)
low = ptx("low", f32, (u32,), "shl.b32 $0, $1, 16;", "=f,r", pure=True)                     # BF16 pair -> float32
high = ptx("high", f32, (u32,), "and.b32 $0, $1, 0xffff0000;", "=f,r", pure=True)
low16 = ptx("low16", f32, (u32,), "{ .reg .b16 a, b; mov.b32 {a, b}, $1; cvt.f32.f16 $0, a; }", "=f,r", pure=True)
high16 = ptx("high16", f32, (u32,), "{ .reg .b16 a, b; mov.b32 {a, b}, $1; cvt.f32.f16 $0, b; }", "=f,r", pure=True)
mul_bf16x2 = ptx("mul_bf16x2", u32, (u32, u32), "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", pure=True)       # sm_90
to_bf16 = ptx("to_bf16", u16, (f32,), "cvt.rn.bf16.f32 $0, $1;", "=h,f", pure=True)        # see jev_kernels.bf16
from_bf16 = ptx("from_bf16", f32, (u16,), "mov.b32 $0, {0, $1};", "=f,h", pure=True)
bits_f32 = ptx("bits_f32", u32, (f32,), "mov.b32 $0, $1;", "=r,f", pure=True)               # float32 -> its bits
f32_bits = ptx("f32_bits", f32, (u32,), "mov.b32 $0, $1;", "=f,r", pure=True)               # bits -> float32
ex2 = ptx("ex2", f32, (f32,), "ex2.approx.ftz.f32 $0, $1;", "=f,f", pure=True)
rcp = ptx("rcp", f32, (f32,), "rcp.approx.ftz.f32 $0, $1;", "=f,f", pure=True)
rsqrt = ptx("rsqrt", f32, (f32,), "rsqrt.approx.f32 $0, $1;", "=f,f", pure=True)
div_u32 = ptx("div_u32", i32, (i32, i32), "div.u32 $0, $1, $2;", "=r,r,r", pure=True)   # i32 // i32 is div.s64: slow
fma = ptx("fma", f32, (f32, f32, f32), "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", pure=True)
mul_rn = ptx("mul_rn", f32, (f32, f32), "mul.rn.f32 $0, $1, $2;", "=f,f,f", pure=True)      # never contracted to fma
add_rn = ptx("add_rn", f32, (f32, f32), "add.rn.f32 $0, $1, $2;", "=f,f,f", pure=True)


# Decorates a function that kernels call. LLVM inlines it, which compiles many times faster than ``inline="always"``
# (inlining of Numba's own representation). Numba compiles it once for all compute capabilities, so what depends on them
# (pdl_wait, pdl_launch) belongs into kernels.
device_function = cuda.jit(device=True, forceinline=True)


@device_function
def exp(x):
    """exp of a float32, at most 2 ulp off, subnormal results kept. (``math.exp`` is float64 under the simulator.)"""
    return f32(math.exp(f32(x)))


@device_function
def log1p(x):
    """log(1 + x) of a float32, at most 2 ulp off."""
    return f32(math.log1p(f32(x)))


# ---------------------------------------------------------------- loads and stores
lds = ptx("lds", f32, (i32,), "ld.shared.f32 $0, [$1];", "=f,r")
lds_i32 = ptx("lds_i32", i32, (i32,), "ld.shared.s32 $0, [$1];", "=r,r")
lds2 = ptx("lds2", (f32, 2), (i32,), "ld.shared.v2.f32 {$0,$1}, [$2];", "=f,=f,r")
lds4 = ptx("lds4", (f32, 4), (i32,), "ld.shared.v4.f32 {$0,$1,$2,$3}, [$4];", "=f,=f,=f,=f,r")
sts = ptx("sts", void, (i32, f32), "st.shared.f32 [$0], $1;", "r,f")
sts2 = ptx("sts2", void, (i32, f32, f32), "st.shared.v2.f32 [$0], {$1,$2};", "r,f,f")
sts_u32 = ptx("sts_u32", void, (i32, u32), "st.shared.b32 [$0], $1;", "r,r")
sts_lo16 = ptx("sts_lo16", void, (i32, u32), "{ .reg .b16 a, b; mov.b32 {a, b}, $1; st.shared.b16 [$0], a; }", "r,r")
ldg = ptx("ldg", f32, (u64,), "ld.global.f32 $0, [$1];", "=f,l")
ldg_i32 = ptx("ldg_i32", i32, (u64,), "ld.global.s32 $0, [$1];", "=r,l")
ldg_bf16 = ptx("ldg_bf16", f32, (u64,), "{ .reg .b16 a; ld.global.b16 a, [$1]; mov.b32 $0, {0, a}; }", "=f,l")
ldg2 = ptx("ldg2", (f32, 2), (u64,), "ld.global.v2.f32 {$0,$1}, [$2];", "=f,=f,l")
ldg_u32x4 = ptx("ldg_u32x4", (u32, 4), (u64,), "ld.global.v4.b32 {$0,$1,$2,$3}, [$4];", "=r,=r,=r,=r,l")
ldg_u16 = ptx("ldg_u16", u16, (u64,), "ld.global.b16 $0, [$1];", "=h,l")
# Read once: past L1, so that what is read often (weights, tables) stays there.
ldg_u32x4_once = ptx("ldg_u32x4_once", (u32, 4), (u64,),
                     "ld.global.L1::no_allocate.v4.b32 {$0,$1,$2,$3}, [$4];", "=r,=r,=r,=r,l")
# Constant for the kernel's whole life, also under programmatic dependent launch: weights and tables, no activations.
ldc_u32x4 = ptx("ldc_u32x4", (u32, 4), (u64,), "ld.global.nc.v4.b32 {$0,$1,$2,$3}, [$4];", "=r,=r,=r,=r,l")
ldg_u16_if = ptx("ldg_u16_if", u16, (u64, i32),                    # 0, and no access, unless $2 > 0
                 "{ .reg .pred p; setp.gt.s32 p, $2, 0; mov.b16 $0, 0; @p ld.global.b16 $0, [$1]; }", "=h,l,r")
stg_u16_if = ptx("stg_u16_if", void, (u64, u16, i32),
                 "{ .reg .pred p; setp.gt.s32 p, $2, 0; @p st.global.b16 [$0], $1; }", "l,h,r")
stg_bf16x2_if = ptx("stg_bf16x2_if", void, (u64, f32, f32, i32, i32),   # two floats as BF16, where $3 > $4
                    "{ .reg .pred p; .reg .b32 v; setp.gt.s32 p, $3, $4; cvt.rn.bf16x2.f32 v, $2, $1;"
                    " @p st.global.b32 [$0], v; }", "l,f,f,r,r")
stg_u16 = ptx("stg_u16", void, (u64, u16), "st.global.b16 [$0], $1;", "l,h")
stg = ptx("stg", void, (u64, f32), "st.global.f32 [$0], $1;", "l,f")
stg2 = ptx("stg2", void, (u64, f32, f32), "st.global.v2.f32 [$0], {$1,$2};", "l,f,f")
stg4 = ptx("stg4", void, (u64, f32, f32, f32, f32), "st.global.v4.f32 [$0], {$1,$2,$3,$4};", "l,f,f,f,f")
# Zeros, and no access, where $5 is 0; past L1, for what another block has written. Predicated, as ptxas serialises wgmmas
# that follow a branch (C7515).
ldg4_if = ptx("ldg4_if", (f32, 4), (u64, i32),
              "{ .reg .pred p; setp.ne.s32 p, $5, 0; mov.f32 $0, 0f00000000; mov.f32 $1, 0f00000000; mov.f32 $2, 0f00000000;"
              " mov.f32 $3, 0f00000000; @p ld.global.cg.v4.f32 {$0,$1,$2,$3}, [$4]; }", "=&f,=&f,=&f,=&f,l,r")
stg_u32 = ptx("stg_u32", void, (u64, u32), "st.global.b32 [$0], $1;", "l,r")
stg_u32x2 = ptx("stg_u32x2", void, (u64, (u32, 2)), "st.global.v2.b32 [$0], {$1,$2};", "l,r,r")
stg_u32x4 = ptx("stg_u32x4", void, (u64, (u32, 4)), "st.global.v4.b32 [$0], {$1,$2,$3,$4};", "l,r,r,r,r")
prefetch_l2 = ptx("prefetch_l2", void, (u64,), "prefetch.global.L2 [$0];", "l")

# ---------------------------------------------------------------- cp.async (sm_80)
cp16 = ptx("cp16", void, (i32, u64, i32), "cp.async.cg.shared.global [$0], [$1], 16, $2;", "r,l,r")   # $2 = 0: zeros
cp_commit = ptx("cp_commit", void, (), "cp.async.commit_group;", "")
cp_wait0 = ptx("cp_wait0", void, (), "cp.async.wait_group 0;", "")
cp_wait1 = ptx("cp_wait1", void, (), "cp.async.wait_group 1;", "")
cp_wait_all = ptx("cp_wait_all", void, (), "cp.async.wait_all;", "")
cp_arrive = ptx("cp_arrive", void, (i32,), "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", "r")

# ---------------------------------------------------------------- mbarriers, clusters, bulk copies (sm_90)
cta_rank = ptx("cta_rank", i32, (), "mov.u32 $0, %cluster_ctarank;", "=r")
cluster_sync = ptx("cluster_sync", void, (), "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;", "")
mbar_init = ptx("mbar_init", void, (i32, i32), "mbarrier.init.shared::cta.b64 [$0], $1;", "r,r")
mbar_fence = ptx("mbar_fence", void, (), "fence.mbarrier_init.release.cluster;", "")
mbar_expect = ptx("mbar_expect", void, (i32, i32), "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", "r,r")
mbar_arrive = ptx("mbar_arrive", void, (i32,), "mbarrier.arrive.shared::cta.b64 _, [$0];", "r")
mbar_wait = ptx("mbar_wait", void, (i32, i32),                     # (barrier, parity); traps after some seconds
                until("mbarrier.try_wait.parity.shared::cta.b64 ready, [$0], $1;"), "r,r")
# The same without a limit, for consumers that have no register to spare for a clock. Only where a producer of the block
# waits, with the limit, for what this thread does after it: then that wait ends this one.
mbar_wait_covered = ptx("mbar_wait_covered", void, (i32, i32),
                        "{ .reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @!p bra W; }", "r,r")
# The same barrier in CTA $1 of the cluster. Do NOT spell out `.release.cluster`: ptxas then puts a MEMBAR.ALL.GPU
# before every arrival. Nothing needs publishing by it: consumers only read, and wgmma.wait_group has said that the
# reads are over.
mbar_arrive_at = ptx("mbar_arrive_at", void, (i32, i32),
                     "{ .reg .b32 a; mapa.shared::cluster.u32 a, $0, $1;"
                     " mbarrier.arrive.shared::cluster.b64 _, [a]; }", "r,r")
mbar_arrive_pair = ptx("mbar_arrive_pair", void, (i32, i32),       # (barrier, lane): lanes 0, 1 arrive in CTAs 0, 1
                       "{ .reg .b32 a; .reg .pred p; setp.lt.s32 p, $1, 2; mapa.shared::cluster.u32 a, $0, $1;"
                       " @p mbarrier.arrive.shared::cluster.b64 _, [a]; }", "r,r")
mbar_arrive_lane0 = ptx("mbar_arrive_lane0", void, (i32, i32),     # (barrier, lane)
                        "{ .reg .pred p; setp.eq.s32 p, $1, 0;"
                        " @p mbarrier.arrive.shared::cta.b64 _, [$0]; }", "r,r")
evict_first = ptx("evict_first", u64, (), "createpolicy.fractional.L2::evict_first.b64 $0, 1.0;", "=l")
evict_last = ptx("evict_last", u64, (), "createpolicy.fractional.L2::evict_last.b64 $0, 1.0;", "=l")
evict_normal = ptx("evict_normal", u64, (), "createpolicy.fractional.L2::evict_normal.b64 $0, 1.0;", "=l")
prefetch_tensormap = ptx("prefetch_tensormap", void, (u64,), "prefetch.tensormap [$0];", "l")
_TMA = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
#                                  dst  map  col  row  bar  policy
tma_load = ptx("tma_load", void, (i32, u64, i32, i32, i32, u64),
               _TMA + ".L2::cache_hint [$0], [$1, {$2, $3}], [$4], $5;", "r,l,r,r,r,l")
tma_multicast = ptx("tma_multicast", void, (i32, u64, i32, i32, i32, u16, u64),         # ... mask of CTAs, policy
                    _TMA + ".multicast::cluster.L2::cache_hint [$0], [$1, {$2, $3}], [$4], $5, $6;",
                    "r,l,r,r,r,h,l")
# (whether, map, column, row, from): a box as a group of its own
tma_store_if = ptx("tma_store_if", void, (i32, u64, i32, i32, i32),
                   "{ .reg .pred p; setp.ne.s32 p, $0, 0;"
                   " @p cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [$1, {$2, $3}], [$4];"
                   " @p cp.async.bulk.commit_group; }", "r,l,r,r,r")
# (whether): until all, or all but the latest, of this thread's stores have read shared memory; until they are complete
tma_stores_read_if = ptx("tma_stores_read_if", void, (i32,),
                         "{ .reg .pred p; setp.ne.s32 p, $0, 0; @p cp.async.bulk.wait_group.read 0; }", "r")
tma_stores_read_but_one_if = ptx("tma_stores_read_but_one_if", void, (i32,),
                                 "{ .reg .pred p; setp.ne.s32 p, $0, 0; @p cp.async.bulk.wait_group.read 1; }", "r")
tma_stores_done = ptx("tma_stores_done", void, (), "cp.async.bulk.wait_group 0;", "")
bulk = ptx("bulk", void, (i32, u64, i32, i32),                     # (dst, src, bytes, barrier): contiguous
           "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];", "r,l,r,r")
fence_async = ptx("fence_async", void, (), "fence.proxy.async.shared::cta;", "")   # ordinary accesses <-> TMA, wgmma
fence_global = ptx("fence_global", void, (), "fence.proxy.async.global;", "", since=(9, 0))      # ... in device memory

# ---------------------------------------------------------------- warps, barriers, registers, dependent launches
uniform = ptx("uniform", i32, (i32,), "shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;", "=r,r")   # so ptxas knows it
shfl_idx_i32 = ptx("shfl_idx_i32", i32, (i32, i32), "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=r,r,r")
shfl_xor = ptx("shfl_xor", f32, (f32, i32), "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=f,f,r")
shfl_idx = ptx("shfl_idx", f32, (f32, i32), "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=f,f,r")
shfl_up = ptx("shfl_up", f32, (f32, i32), "shfl.sync.up.b32 $0, $1, $2, 0, 0xffffffff;", "=f,f,r")  # own below lane n
shfl_down = ptx("shfl_down", f32, (f32, i32), "shfl.sync.down.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=f,f,r")
shfl_xor_u32 = ptx("shfl_xor_u32", u32, (u32, i32), "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=r,r,r")
shfl_idx_u32 = ptx("shfl_idx_u32", u32, (u32, i32), "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=r,r,r")
ballot = ptx("ballot", u32, (i32,),
             "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }", "=r,r")
named_sync = ptx("named_sync", void, (i32, i32), "barrier.sync $0, $1;", "r,r")                     # (barrier, threads)
more_registers = ptx("more_registers", void, (), "setmaxnreg.inc.sync.aligned.u32 232;", "")
fewer_registers = ptx("fewer_registers", void, (), "setmaxnreg.dec.sync.aligned.u32 40;", "")
pdl_launch = ptx("pdl_launch", void, (), "griddepcontrol.launch_dependents;", "", since=(9, 0))
pdl_wait = ptx("pdl_wait", void, (), "griddepcontrol.wait;", "", since=(9, 0))
