"""The MLP's activation inside our GEMMs: r(r(silu(gate)) * up) of the sums that a warp holds.

Weights alternate between four of gate and four of up (``reference.INTERLEAVE``). An 8 x 8 tile of sums, wherever it lies in
wgmma's result, then has gates in half of its lanes and the ups that belong to them in the other half, a fixed distance
away; and a lane holds two such tiles (rows g and g + 8). Each half gives one of its tiles to the other: a lane ends with
gate and up of one tile, packed to BF16 as a GEMM would have stored them, and does what ``silu.silu_mul`` does with
them. The bits are those of the GEMM followed by that kernel.
"""
from __future__ import annotations

from jev_kernels.ptx import device_function, generated, pack, shfl_xor_u32, stg_u32, u64
from jev_kernels.rowwise.silu import silu_mul_pair


@device_function
def activate(a, b, c, d, upper, distance):
    """Two results, packed, of sums a, b (of the first tile) and c, d (of the second).

    ``upper``: this lane holds ups, the gates are ``distance`` lanes below; it gets results of the second tile, the
    others those of the first.
    """
    first, second = pack(a, b), pack(c, d)
    other = shfl_xor_u32(first if upper else second, distance)
    return silu_mul_pair(other if upper else first, second if upper else other)


@device_function
def activate_and_store(a, b, c, d, upper, at, live):
    y = activate(a, b, c, d, upper, 2)
    if live:
        stg_u32(at, y)


def make_store(columns: int):
    """store(acc, upper, at, left) for a float32 tile [64 tokens, ``columns`` weights] of a warpgroup (``ptx.fragments``).

    upper: t > 1. at: where this lane's first two results go, those of its row (g + 8 if upper) and of the columns
    2 (t % 2) and one more; the next ones come four columns on. left: columns of y from the first one of the tile on, 0 in
    rows that are not to be written. Written as text: the tuple needs constant indices, and Numba does not unroll.
    """
    lines = ["def store(acc, upper, at, left):\n"]
    lines += [f"    activate_and_store(acc[{4 * j}], acc[{4 * j + 1}], acc[{4 * j + 2}], acc[{4 * j + 3}], upper,"
              f" at + u64({8 * j}), left > {4 * j})\n" for j in range(columns // 8)]
    return device_function(generated.function("".join(lines), activate_and_store=activate_and_store, u64=u64))


def make_activation(tokens: int):
    """activation(acc, upper) -> results of a float32 tile [64 weights, ``tokens`` tokens] of a warpgroup
    (``ptx.fragments``). upper: g > 3.

    Result j is that of column g of the warp's eight, tokens 8j + 2t and 8j + 2t + 1, packed.
    """
    parts = ", ".join(f"activate(acc[{4 * j}], acc[{4 * j + 1}], acc[{4 * j + 2}], acc[{4 * j + 3}], upper, 16)"
                      for j in range(tokens // 8))
    return device_function(generated.function(f"def activation(acc, upper):\n    return ({parts},)\n", activate=activate))
