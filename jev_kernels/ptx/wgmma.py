"""wgmma: products of a warpgroup (128 threads) on tiles in registers, with the second operand in shared memory.

    d [64, n] += a [64, 16 steps] b [16 steps, n]      bf16 or f16 operands, float32 d

``wgmma`` makes the intrinsic that starts such a product, ``wgmma_wait`` the one that waits for it. Tiles are held as
``ptx.fragments`` says: d in n / 2 float32 registers a thread, a, if in registers, in four of 16-bit pairs a step. In
Python registers are either of

    a tuple (UniTuple)     given and returned: the order of asynchronous steps is that of the data flow
    a cuda.local.array     indexed by constants only, so that it becomes registers; written in place

A product is asynchronous: its d, and what it reads, belong to it until a wait that covers it. The wait takes and gives d,
so that no use of d moves above it, and takes the registers of a, so that they stay what they are. Each product is one
group of wgmma (fence, instructions, commit).

Operands in shared memory are described by ``SharedMatrix``. In the simulator (``sim.wgmma``) the same makers give
functions on arrays.

Source: PTX ISA 9.7.15 (wgmma, its fragments and shared-memory descriptors).
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from numba.cuda.core import config

from jev_kernels.ptx import generated

if config.ENABLE_CUDASIM:
    from jev_kernels.sim import wgmma as simulated
else:
    from llvmlite import ir
    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    from jev_kernels.ptx.device import LL, f32, i32, void

MAX_N = 256                       # of one instruction
ADDRESS_BITS = 0x3FFFF            # of a shared address in a descriptor: in a cluster the bits above are the block's rank


@dataclass(frozen=True)
class SharedMatrix:
    """How an operand lies in shared memory. It is made of core matrices, 8 rows of 16 bytes.

    leading, stride   bytes between core matrices (LBO and SBO of the PTX manual): along k and across it, where k is
                      contiguous without a swizzle; with one, stride is between groups of 8 rows and leading between
                      128-byte columns if transposed, without effect otherwise
    swizzled          in rows of 128 bytes, 16-byte pieces exchanged by the low three bits of the row: as TMA leaves them.
                      Starts at a multiple of 1024 bytes; a step of 16 along k is 32 bytes on (2048 if transposed)
    transposed        contiguous across k: along n (or m), not along k
    """
    leading: int = 16
    stride: int = 1024
    swizzled: bool = True
    transposed: bool = False


K_MAJOR = SharedMatrix()          # 64 of k a row of 128 bytes: what TMA makes of a slice of a row-major matrix


class Step(NamedTuple):
    """One instruction: d [64, n] += a [64, 16] b [16, n].

    n: a multiple of 8, at most 256. d: first register of the tile. a: first register, or bytes behind the operand's address
    if it is in shared memory. b: bytes behind the operand's address.
    """
    n: int
    d: int = 0
    a: int = 0
    b: int = 0


def along_k(n: int, slices: int, a_slice: int, b_slice: int) -> list[Step]:
    """The steps of a product of ``K_MAJOR`` operands over ``slices`` of 64 along k, which are a_slice and b_slice bytes
    apart. A tile wider than an instruction is done by two side by side, in increasing k each."""
    widths = [n] if n <= MAX_N else [n - 128, 128]
    return [Step(w, sum(widths[:i]) // 2, k // 4 * a_slice + k % 4 * 32, k // 4 * b_slice + k % 4 * 32 + sum(widths[:i]) * 128)
            for k in range(4 * slices) for i, w in enumerate(widths)]


def wgmma(name: str, dtype: str, d: int, a: int | SharedMatrix, b: SharedMatrix, steps: Sequence[Step],
          accumulate: bool = True, in_place: bool = False, wait: int | None = None):
    """The intrinsic that starts a product.

        tile = name(tile, a, b_at)          tuples
        tile = name(a, b_at)                tuples, accumulate False
        name(tile, a, b_at)                 in_place: arrays

    dtype: "bf16" or "f16". d: registers of the tile. a: registers of the operand (then the argument is a tuple or an array
    of them), or where it lies (then an int32 address). accumulate: otherwise the first step on each range of d
    overwrites. wait: then wait until at most so many groups are in flight, this one among them.
    """
    if config.ENABLE_CUDASIM:
        return simulated.wgmma(name, dtype, d, a, b, steps, accumulate, in_place, wait)
    shared_a = isinstance(a, SharedMatrix)
    text = _text(dtype, d, a, b, steps, accumulate, wait)
    constraints = ",".join(["=f"] * d + ["r"] * (2 if shared_a else a + 1) + [str(i) for i in range(d)] * accumulate
                           + ["~{memory}"])

    def codegen(context, builder, sig, args):
        *tile, a_given, b_at = args
        *tile_type, a_type, _ = sig.args
        operands = ([_descriptor(builder, a_given, a)] if shared_a else
                    [_load(builder, r) for r in registers(context, builder, a_type, a_given, a)])
        operands.append(_descriptor(builder, b_at, b))
        held = registers(context, builder, tile_type[0], tile[0], d) if tile else []
        operands += [_load(builder, r) for r in held] if accumulate else []
        out = _volatile(builder, [f32] * d, text, constraints, operands)
        if in_place:
            _store(builder, held, out)
            return context.get_dummy_value()
        return context.make_tuple(builder, sig.return_type, out)

    def signature(*given):
        result = void if in_place else types.UniTuple(f32, d)
        return result(*given[:-2], i32 if shared_a else given[-2], i32)

    parameters = "tile, a, b_at" if accumulate or in_place else "a, b_at"
    return intrinsic(generated.function(f"def {name}(typingctx, {parameters}):\n    return signature({parameters}), codegen\n",
                                        signature=signature, codegen=codegen))


def wgmma_wait(name: str, left: int, results: Sequence[int], kept: Sequence[int] = (), in_place: bool = False):
    """The intrinsic that waits until at most ``left`` groups are in flight.

        tile = name(tile, ...kept)          tuples: one tile
        name(tiles..., kept...)             in_place: arrays

    results: registers of each tile; they come out as new values. kept: registers of each further argument, float32 or 32
    bits of anything: a's registers of what is in flight, and values that shall be computed before the wait.
    """
    if config.ENABLE_CUDASIM:
        return simulated.wgmma_wait(name, left, results, kept, in_place)
    if not in_place and len(results) != 1:
        raise ValueError(f"{name}: one tile at a time")
    sizes, n = (*results, *kept), sum(results)

    def codegen(context, builder, sig, args):
        held = [registers(context, builder, t, x, size) for t, x, size in zip(sig.args, args, sizes)]
        kinds = ["f" if t.dtype == f32 else "r" for t, size in zip(sig.args, sizes) for _ in range(size)]
        operands = [_load(builder, r) for some in held for r in some]
        constraints = ["=f"] * n + [str(i) for i in range(n)] + kinds[n:] + ["~{memory}"]
        out = _volatile(builder, [f32] * n, f"wgmma.wait_group.sync.aligned {left};", ",".join(constraints), operands)
        if in_place:
            _store(builder, [r for some in held[:len(results)] for r in some], out)
            return context.get_dummy_value()
        return context.make_tuple(builder, sig.return_type, out)

    def signature(*given):
        return (void if in_place else given[0])(*given)

    parameters = ", ".join(f"x{i}" for i in range(len(sizes)))
    return intrinsic(generated.function(f"def {name}(typingctx, {parameters}):\n    return signature({parameters}), codegen\n",
                                        signature=signature, codegen=codegen))


def zeros(name: str, d: int):
    """The intrinsic name() -> a tile of d float32 zeros, a tuple."""
    if config.ENABLE_CUDASIM:
        return simulated.zeros(d)

    def codegen(context, builder, sig, args):
        return context.make_tuple(builder, sig.return_type, [ir.Constant(LL[f32], 0.0)] * d)

    return intrinsic(generated.function(f"def {name}(typingctx):\n    return tile(), codegen\n",
                                        tile=types.UniTuple(f32, d), codegen=codegen))


# ---------------------------------------------------------------- the text
def _text(dtype, d, a, b, steps, accumulate, wait) -> str:
    """The group as PTX. Operands: d, then a (registers, or the low word of its descriptor), then that of b."""
    shared_a = isinstance(a, SharedMatrix)
    b_low = d + (1 if shared_a else a)
    words = f" mov.u32 hb, {_high_word(b)};" + (f" mov.u32 ha, {_high_word(a)};" if shared_a else "")
    lines = ["{ .reg .pred add, new; .reg .b32 t, ha, hb; .reg .b64 a, b; setp.eq.u32 add, 0, 0; setp.ne.u32 new, 0, 0;"
             + words + " wgmma.fence.sync.aligned;"]
    written, described = set(), None
    for step in steps:
        tile = ", ".join(f"${step.d + i}" for i in range(step.n // 2))
        if shared_a:
            first = "a"
            if step.a != described:
                lines.append(f"add.s32 t, ${d}, {step.a >> 4}; mov.b64 a, {{t, ha}};")
            described = step.a
        else:
            first = "{" + ", ".join(f"${d + step.a + i}" for i in range(4)) + "}"
        scale = "add" if accumulate or step.d in written else "new"
        turned = f", {int(a.transposed)}, {int(b.transposed)}" if shared_a else f", {int(b.transposed)}"
        lines.append(f"add.s32 t, ${b_low}, {step.b >> 4}; mov.b64 b, {{t, hb}};"
                     f" wgmma.mma_async.sync.aligned.m64n{step.n}k16.f32.{dtype}.{dtype} {{{tile}}}, {first}, b, {scale}, 1, 1"
                     f"{turned};")
        written.add(step.d)
    end = "" if wait is None else f" wgmma.wait_group.sync.aligned {wait};"
    return "\n".join([*lines, f"wgmma.commit_group.sync.aligned;{end} }}"])


def _high_word(matrix: SharedMatrix) -> int:
    """Bits 32 to 63 of a descriptor: SBO / 16 and the mode of the swizzle (1: 128 bytes)."""
    return matrix.stride >> 4 | (1 << 30 if matrix.swizzled else 0)


def _descriptor(builder, address, matrix: SharedMatrix):
    """Bits 0 to 31 of a descriptor: address / 16 and LBO / 16."""
    def word(x):
        return ir.Constant(LL[i32], x)
    low = builder.lshr(builder.and_(address, word(ADDRESS_BITS)), word(4))
    return builder.or_(low, word(matrix.leading >> 4 << 16))


# ---------------------------------------------------------------- registers: tuples and arrays
def registers(context, builder, typ, value, n: int) -> list:
    """The n values of a tuple, or pointers to the elements of a cuda.local.array (registers, once LLVM has promoted it)."""
    if isinstance(typ, types.BaseTuple):
        return [builder.extract_value(value, i) for i in range(n)]
    data = context.make_array(typ)(context, builder, value).data
    return [builder.gep(data, [ir.Constant(LL[i32], i)]) for i in range(n)]


def _load(builder, register):
    return builder.load(register) if register.type.is_pointer else register


def _store(builder, held, values) -> None:
    for pointer, value in zip(held, values):
        builder.store(value, pointer)


def _volatile(builder, results, text, constraints, operands) -> list:
    """A statement's results; it stays where it is among other such statements."""
    function = ir.FunctionType(ir.LiteralStructType([LL[r] for r in results]), [o.type for o in operands])
    out = builder.call(ir.InlineAsm(function, text, constraints, side_effect=True), operands)
    return [builder.extract_value(out, i) for i in range(len(results))]
