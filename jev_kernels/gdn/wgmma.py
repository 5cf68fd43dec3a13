"""wgmma with the first operand in registers: 64 x N products of a warpgroup on register arrays, and their simulation.

Tiles live in ``cuda.local.array``s, indexed by constants only, so that they are registers. With g = lane / 4,
t = lane % 4 and a warp's 16 rows of the 64:
    float32 d: d[4j], d[4j + 1] are row g, columns 8j + 2t and 8j + 2t + 1; d[4j + 2], d[4j + 3] the same of row g + 8;
    packed pairs a, four registers a k16 step: row g at k = 2t, row g + 8; the same two at k + 8.
So packing d pair by pair gives an a.

Source: PTX ISA 9.7.15 (wgmma, its fragments and shared-memory descriptors).
"""
from __future__ import annotations

from numba.cuda.core import config

if config.ENABLE_CUDASIM:
    import threading

    import numpy as np

    from jev_kernels.sim.simulator import collective
else:
    from llvmlite import ir
    from numba.cuda.extending import intrinsic

    from jev_kernels.ptx.device import LL, f32, i32, void


def _registers(context, builder, typ, value, n):
    """Pointers to the elements of a cuda.local.array (registers, once LLVM has promoted it)."""
    data = context.make_array(typ)(context, builder, value).data
    return [builder.gep(data, [ir.Constant(LL[i32], i)]) for i in range(n)]


def _operand(dtype, registers):
    """64 x 16 matrix of one k16 step, from four registers of each of 128 threads."""
    pairs = np.array(registers, np.uint32).reshape(4, 8, 4, 2, 2)              # warp, g, t, k half, row half
    low, high = (_float(dtype, h) for h in (pairs & 0xFFFF, pairs >> 16))
    x = np.stack([low, high], -1)                                              # ..., column of the pair
    return x.transpose(0, 4, 1, 3, 2, 5).reshape(64, 16)


def _float(dtype, bits):
    if dtype == "bf16":
        return (bits << np.uint32(16)).view(np.float32)
    return bits.astype(np.uint16).view(np.float16).astype(np.float32)


def _shared_cells(addr, n, lbo, sbo, swizzle, trans):
    """Which 16-bit cells of shared memory are the 16 x n matrix at addr, as the descriptor says."""
    k, c = np.meshgrid(np.arange(16), np.arange(n), indexing="ij")
    if trans:
        at = addr + c // 64 * lbo + k // 8 * sbo + k % 8 * 128 + c % 64 * 2
    elif swizzle:
        at = addr + c // 8 * sbo + c % 8 * 128 + k * 2
    else:
        at = addr + k // 8 * lbo + c // 8 * sbo + c % 8 * 16 + k % 8 * 2
    if swizzle:
        at = at ^ (at >> 3 & 0x70)
    return at // 2


def _simulated(name, dtype, pieces, lbo, sbo, swizzle, trans, add):
    def product(d, a, addr):
        me = threading.current_thread()

        def compute(members):
            members = sorted(members, key=lambda m: m[0].thread_id)
            if len({int(m[1][2]) for m in members}) > 1:
                raise RuntimeError(f"{name}: threads of a warpgroup give different addresses")
            fresh, cells = set(), []
            for n, d0, a0, off in pieces:
                cells.append(_shared_cells(int(addr) + off, n, lbo, sbo, swizzle, trans))
                x = _operand(dtype, [[int(r) for r in m[1][1][a0:a0 + 4]] for m in members])
                y = x @ _float(dtype, me.block.window.view(np.uint16)[cells[-1]].astype(np.uint32))
                y = y.reshape(4, 2, 8, n // 8, 4, 2).transpose(0, 2, 4, 3, 1, 5).reshape(128, n // 2)
                for row, (_, (to, _, _)) in zip(y, members):
                    if add or d0 in fresh:
                        row = to[d0:d0 + n // 2] + row
                    to[d0:d0 + n // 2] = row
                fresh.add(d0)
            if me.block.races:
                read = np.unique(np.concatenate([c.reshape(-1) for c in cells]))
                numbers = [thread.number for thread, _ in members]
                for w in range(0, 128, 32):
                    me.block.races.begin_reads(me.block.races.products(numbers[w] // 32), numbers[w:w + 32], read)
            return [None] * len(members)
        me.block.meet(me, (name, me.thread_id // 128), 128, (d, a, addr), compute, name)
    return product


def wgmma(name, dtype, d_regs, a_regs, pieces, lbo, sbo, swizzle=False, trans=0, add=True):
    """name(d, a, addr): d (+)= a b for a warpgroup, one commit group, not waited for.

    d: float32 register array; a: uint32 register array, 4 a k16 step; b in shared memory at addr. pieces: one
    instruction each, (n, first register of d, first register of a, byte offset of b). lbo, sbo: byte strides between
    b's core matrices. trans: b is contiguous along n. add=False: the first piece on each range of d overwrites.
    """
    if config.ENABLE_CUDASIM:
        return _simulated(name, dtype, pieces, lbo, sbo, swizzle, trans, add)
    body = [f"{{ .reg .pred p, z; .reg .b32 t, h; .reg .b64 b; setp.eq.u32 p, 0, 0; setp.ne.u32 z, 0, 0;"
            f" mov.u32 h, {sbo >> 4 | (1 << 30 if swizzle else 0)}; wgmma.fence.sync.aligned;"]
    for at, (n, d0, a0, off) in enumerate(pieces):
        d = ", ".join(f"${d0 + i}" for i in range(n // 2))
        a = ", ".join(f"${d_regs + a0 + i}" for i in range(4))
        pred = "z" if not add and all(d0 != other[1] for other in pieces[:at]) else "p"
        body.append(f"add.s32 t, ${d_regs + a_regs}, {off >> 4}; mov.b64 b, {{t, h}};"
                    f" wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype}"
                    f" {{{d}}}, {{{a}}}, b, {pred}, 1, 1, {trans};")
    body.append("wgmma.commit_group.sync.aligned; }")
    text = "\n".join(body)
    cons = ",".join(["=f"] * d_regs + ["r"] * (a_regs + 1) + [str(i) for i in range(d_regs)] * add + ["~{memory}"])

    def codegen(context, builder, sig, args):
        d = _registers(context, builder, sig.args[0], args[0], d_regs)
        a = _registers(context, builder, sig.args[1], args[1], a_regs)
        base = builder.or_(builder.lshr(args[2], ir.Constant(LL[i32], 4)), ir.Constant(LL[i32], lbo >> 4 << 16))
        ops = [builder.load(p) for p in a] + [base] + ([builder.load(p) for p in d] if add else [])
        fn = ir.FunctionType(ir.LiteralStructType([LL[f32]] * d_regs), [o.type for o in ops])
        out = builder.call(ir.InlineAsm(fn, text, cons, side_effect=True), ops)
        for i, p in enumerate(d):
            builder.store(builder.extract_value(out, i), p)
        return context.get_dummy_value()

    scope = {"sig": lambda d, a, addr: void(d, a, i32), "codegen": codegen}
    exec(f"def {name}(typingctx, d, a, addr): return sig(d, a, addr), codegen", scope)
    return intrinsic(scope[name])


def wgmma_wait(name, left, d_sizes, a_sizes):
    """name(d..., a...): wait until at most `left` groups are in flight.

    The d arrays come out as new values, so no use of them moves above the wait; the a arrays are operands of what was
    in flight: naming them keeps their registers.
    """
    if config.ENABLE_CUDASIM:
        def ended(threads):
            races, numbers = threads[0].block.races, [t.number for t in threads]
            races.end_reads(races.products(numbers[0] // 32), numbers, left)
            return [None] * 32

        def waited(*arrays):
            me = threading.current_thread()
            if me.block.races:
                collective("wgmma.wait_group", me, lambda threads: ended(threads))
        return waited
    nd = sum(d_sizes)
    cons = ",".join(["=f"] * nd + [str(i) for i in range(nd)] + ["r"] * sum(a_sizes) + ["~{memory}"])

    def codegen(context, builder, sig, args):
        d, a = [], []
        for i, n in enumerate(d_sizes):
            d += _registers(context, builder, sig.args[i], args[i], n)
        for i, n in enumerate(a_sizes, len(d_sizes)):
            a += _registers(context, builder, sig.args[i], args[i], n)
        ops = [builder.load(p) for p in d + a]
        fn = ir.FunctionType(ir.LiteralStructType([LL[f32]] * nd), [o.type for o in ops])
        asm = ir.InlineAsm(fn, f"wgmma.wait_group.sync.aligned {left};", cons, side_effect=True)
        out = builder.call(asm, ops)
        for i, p in enumerate(d):
            builder.store(builder.extract_value(out, i), p)
        return context.get_dummy_value()

    names = ", ".join(f"x{i}" for i in range(len(d_sizes) + len(a_sizes)))
    scope = {"void": void, "codegen": codegen}
    exec(f"def {name}(typingctx, {names}): return void({names}), codegen", scope)
    return intrinsic(scope[name])
