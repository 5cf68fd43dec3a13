"""What the Hopper attention does in registers between two barriers, and the instructions that it alone needs.

A warpgroup (128 threads) holds a 64 x N float32 tile in N/2 registers a thread. With g = lane / 4, t = lane % 4 and a
warp's 16 rows, registers 4j and 4j + 1 are row g, columns 8j + 2t and 8j + 2t + 1; registers 4j + 2 and 4j + 3 are the
same columns of row g + 8. In Python such a tile is a tuple, and every step takes and returns tuples, so that all of it
stays in registers and the order of the asynchronous steps is the order of the data flow.

    S [64, BN]    scores of a key tile, then their exponentials        BN/2 registers
    O [64, 256]   running output                                       128
    P [64, BN]    the exponentials as BF16 pairs, wgmma's A operand     BN/4
    R             (max, max, sum, sum, factor, factor) of rows g and g + 8; sums are this thread's part
    G [64, 128]   r(sigmoid(gate)), half the columns, as BF16 pairs in the order of O      32

Source: PTX ISA 9.7.15 (wgmma, its fragments and shared-memory descriptors); FlashAttention-3 for the overlap.
"""
from __future__ import annotations

import math

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from jev_kernels.ptx.device import LL, f32, i32, prefetch_tensormap, ptx, tma_load, tma_multicast, u64, void  # noqa: F401

D = 256                     # head dim
PANELS = D // 64            # a 128B-swizzled shared tile is a row of panels [rows][64 columns = 128 bytes]
WG_ROWS = 64                # query rows of a warpgroup
F32, I32 = LL[f32], LL[i32]

# ---------------------------------------------------------------- instructions
# Registers move between warpgroups: 168 x 384 threads at entry, then 224 x 256 + 56 x 128.
consumer_registers = ptx("consumer_registers", void, (), "setmaxnreg.inc.sync.aligned.u32 224;", "")
producer_registers = ptx("producer_registers", void, (), "setmaxnreg.dec.sync.aligned.u32 56;", "")
#                              dst  map  col  head row  bar  policy
load_3d = ptx("load_3d", void, (i32, u64, i32, i32, i32, i32, u64),
              "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
              " [$0], [$1, {$2, $3, $4}], [$5], $6;", "r,l,r,r,r,r,l")
prefetch_3d = ptx("prefetch_3d", void, (u64, i32, i32, i32),         # the same into L2
                  "cp.async.bulk.prefetch.tensor.3d.L2.global.tile [$0, {$1, $2, $3}];", "l,r,r,r")
first_true = ptx("first_true", i32, (i32,),          # the first lane whose operand is not 0, or -1
                 "{ .reg .pred p; .reg .b32 m; setp.ne.s32 p, $1, 0; vote.sync.ballot.b32 m, p, 0xffffffff;"
                 " brev.b32 m, m; bfind.shiftamt.u32 $0, m; }", "=r,r")
running_sum = ptx("running_sum", i32, (i32,),        # over the lanes up to this one
                  "{ .reg .pred p; .reg .b32 s, t; mov.b32 s, $1; " + " ".join(
                      f"shfl.sync.up.b32 t|p, s, {n}, 0, 0xffffffff; @p add.s32 s, s, t;" for n in (1, 2, 4, 8, 16))
                  + " mov.b32 $0, s; }", "=r,r")
copy_out = ptx("copy_out", void, (i32, i32, u64),    # (whether, from, to): 16 bytes, shared to device memory
               "{ .reg .pred p; .reg .b32 a, b, c, d; setp.ne.s32 p, $0, 0; @p ld.shared.v4.b32 {a, b, c, d}, [$1];"
               " @p st.global.v4.b32 [$2], {a, b, c, d}; }", "r,r,l")
clear16 = ptx("clear16", void, (i32,), "{ .reg .b32 z; mov.b32 z, 0; st.shared.v4.b32 [$0], {z, z, z, z}; }", "r")
opaque = ptx("opaque", i32, (i32,), "mov.b32 $0, $1;", "=r,r")        # a value that the compiler cannot know


# ---------------------------------------------------------------- register tiles
def _unpack(b, tup):
    return [b.extract_value(tup, i) for i in range(len(tup.type))]


def _asm(b, ret, text, constraints, args, volatile=False):
    function = ir.FunctionType(ret, [a.type for a in args])
    return b.call(ir.InlineAsm(function, text, constraints, side_effect=volatile), args)


def _float(x):
    return ir.Constant(F32, x)


def _int(x):
    return ir.Constant(I32, x)


def _fma(b, x, y, z):
    return _asm(b, F32, "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [x, y, z])


def _mul(b, x, y):
    return _asm(b, F32, "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y])      # never contracted to an fma


def _max(b, x, y):
    return _asm(b, F32, "max.f32 $0, $1, $2;", "=f,f,f", [x, y])


def _add(b, x, y):
    return b.fadd(x, y)


def _ex2(b, x):
    return _asm(b, F32, "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x])


def _rcp(b, x):
    return _asm(b, F32, "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x])


def _pack(b, low, high, volatile=False):
    return _asm(b, I32, "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], volatile)


def _tree(b, op, values):
    """All values combined pairwise; the order is fixed by their number."""
    while len(values) > 1:
        values = [op(b, x, y) for x, y in zip(values[::2], values[1::2])] + (values[-1:] if len(values) % 2 else [])
    return values[0]


def _over_quad(b, op, x):
    """x combined over the four lanes that hold one row."""
    for step in (1, 2):
        x = op(b, x, _asm(b, F32, f"shfl.sync.bfly.b32 $0, $1, {step}, 0x1f, 0xffffffff;", "=f,f", [x], True))
    return x


def make_steps(BN: int, scale_log2: float) -> dict:
    """The steps between products, for key tiles of BN rows; scores are multiplied by scale_log2 and exponentials are powers of
    two."""
    NS, NO, NP = BN // 2, D // 2, BN // 4
    S, O, P, R, G = (types.UniTuple(f32, NS), types.UniTuple(f32, NO), types.UniTuple(i32, NP), types.UniTuple(f32, 6),
                     types.UniTuple(i32, NO // 4))
    I2 = types.UniTuple(f32, 2)
    PAIRS = range(D // 32), range(D // 32, D // 16)  # of 16 columns, in each half

    @intrinsic
    def first_state(typingctx):
        def codegen(context, b, sig, args):
            return context.make_tuple(b, R, [_float(-math.inf)] * 2 + [_float(0.0)] * 4)
        return R(), codegen

    @intrinsic
    def mask(typingctx, s, limit, limit8):
        """Keep columns 8j + e <= limit of row g and <= limit8 of row g + 8 (limits count from column 2t)."""
        def codegen(context, b, sig, args):
            out = []
            for i, x in enumerate(_unpack(b, args[0])):
                column = _int(i // 4 * 8 + i % 2)
                out.append(b.select(b.icmp_signed("<=", column, args[1 + i % 4 // 2]), x, _float(-math.inf)))
            return context.make_tuple(b, S, out)
        return S(S, i32, i32), codegen

    SR = types.Tuple((S, R))

    @intrinsic
    def softmax(typingctx, s, state):
        """The exponentials of S and the new state; its factor is what O must be multiplied by.

        The factor is 2^(old base - new base), where a base is the rounded product of a maximum and the scale, as in the
        exponentials: exactly 1 when the maximum stays, so that a tile in which all of a row's keys are masked leaves
        the row as it was, bit for bit."""
        def codegen(context, b, sig, args):
            s, old = _unpack(b, args[0]), _unpack(b, args[1])
            p, new = [None] * NS, [None] * 6
            for row in range(2):
                mine = [i for i in range(NS) if i % 4 // 2 == row]
                top = _max(b, old[row], _over_quad(b, _max, _tree(b, _max, [s[i] for i in mine])))
                base = _mul(b, top, _float(-scale_log2))
                factor = _ex2(b, b.fsub(base, _mul(b, old[row], _float(-scale_log2))))
                for i in mine:
                    p[i] = _ex2(b, _fma(b, s[i], _float(scale_log2), base))
                new[row], new[4 + row] = top, factor
                new[2 + row] = _fma(b, old[2 + row], factor, _tree(b, _add, [p[i] for i in mine]))
            return context.make_tuple(b, SR, [context.make_tuple(b, S, p), context.make_tuple(b, R, new)])
        return SR(S, R), codegen

    @intrinsic
    def pack(typingctx, s):
        """P in wgmma's A layout. Volatile: while the wgmma that reads the old P runs, nothing may define the new one,
        or ptxas serialises every wgmma (warning C7513)."""
        def codegen(context, b, sig, args):
            p = _unpack(b, args[0])
            return context.make_tuple(b, P, [_pack(b, p[2 * i], p[2 * i + 1], True) for i in range(NP)])
        return P(S), codegen

    @intrinsic
    def rescale(typingctx, o, state):
        """O times the factors of the state."""
        def codegen(context, b, sig, args):
            f = [b.extract_value(args[1], 4), b.extract_value(args[1], 5)]
            return context.make_tuple(b, O, [b.fmul(x, f[i % 4 // 2]) for i, x in enumerate(_unpack(b, args[0]))])
        return O(O, R), codegen

    def chunk(b, at, row7, half, pair):
        """This lane's address for the pair'th 16 columns of a swizzled [64 rows][4 panels of 64] tile."""
        spot = b.xor(b.or_(_int(pair % 4 * 2), half), row7)
        return b.add(at, b.add(b.shl(spot, _int(4)), _int(pair // 4 * WG_ROWS * 128)))

    def sigmoids_of(part):
        @intrinsic
        def sigmoids(typingctx, at, row7, half):
            """r(sigmoid(gate)) of the warp's 16 rows, in the part'th half of the columns."""
            def codegen(context, b, sig, args):
                out = []
                for pair in PAIRS[part]:
                    g = _asm(b, ir.LiteralStructType([I32] * 4),
                             "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0,$1,$2,$3}, [$4];",
                             "=r,=r,=r,=r,r,~{memory}", [chunk(b, *args, pair)], True)
                    for x in _unpack(b, g):
                        both = []
                        for bits in (b.shl(x, _int(16)), b.and_(x, _int(-65536))):
                            e = _ex2(b, b.fmul(b.bitcast(bits, F32), _float(-math.log2(math.e))))
                            both.append(_rcp(b, b.fadd(e, _float(1.0))))
                        out.append(_pack(b, *both))
                return context.make_tuple(b, G, out)
            return G(i32, i32, i32), codegen
        return sigmoids

    @intrinsic
    def inverses(typingctx, state):
        """1 / the sums of rows g and g + 8."""
        def codegen(context, b, sig, args):
            return context.make_tuple(b, I2, [_rcp(b, _over_quad(b, _add, b.extract_value(args[0], 2 + row)))
                                              for row in range(2)])
        return I2(R), codegen

    def store(context, b, o, inverse, where, pairs, gate):
        """O times the inverses, rounded, times the gate, rounded, into a swizzled tile."""
        o, inverse = _unpack(b, o), _unpack(b, inverse)
        for n, pair in enumerate(pairs):
            v = [_pack(b, *(b.fmul(o[8 * pair + i + e], inverse[i // 2 % 2]) for e in range(2))) for i in (0, 2, 4, 6)]
            if gate is not None:
                v = [_asm(b, I32, "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [x, b.extract_value(gate, 4 * n + i)])
                     for i, x in enumerate(v)]
            _asm(b, ir.VoidType(), "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1,$2,$3,$4};",
                 "r,r,r,r,r,~{memory}", [chunk(b, *where, pair)] + v, True)
        return context.get_dummy_value()

    @intrinsic
    def finish(typingctx, o, inverse, at, row7, half):
        """Leave the warp's 16 rows of the output in a swizzled tile."""
        def codegen(context, b, sig, args):
            return store(context, b, args[0], args[1], args[2:5], range(D // 16), None)
        return void(O, I2, i32, i32, i32), codegen

    def gated_finish_of(part):
        @intrinsic
        def gated_finish(typingctx, o, inverse, at, row7, half, gate):
            """The same in the part'th half of the columns, gated."""
            def codegen(context, b, sig, args):
                return store(context, b, args[0], args[1], args[2:5], PAIRS[part], args[5])
            return void(O, I2, i32, i32, i32, G), codegen
        return gated_finish

    return {"first_state": first_state, "mask": mask, "softmax": softmax, "pack": pack, "rescale": rescale,
            "inverses": inverses, "finish": finish, "sigmoids": (sigmoids_of(0), sigmoids_of(1)),
            "gated_finish": (gated_finish_of(0), gated_finish_of(1))}
