"""Kernels on fixed inputs, for golden bits (tools/golden_bits.py): every output of every case, in the simulator.

Inputs come from the raw 64-bit words of PCG64, whose stream is fixed, and from integer arithmetic; outputs are rounded once
from float64 wherever the simulator takes a function or a sum from NumPy. So the bits are the same on every machine.

What is compared is rounded to BF16, which hides most of what a changed order of additions does to a float32. So norms get
inputs (``near_ties``) or weights (``tying_weight``) for which many values lie next to a rounding tie: there the last bit of
a float32 decides.

Add a case for a new kernel: a function that yields its outputs, and its name in CASES.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
from numba import cuda

from jev_kernels import bf16
from jev_kernels.attention import portable as attention
from jev_kernels.gdn import conv as gdn_conv
from jev_kernels.rowwise import embed, rms_norm, rope, silu
from tests.kernels import test_attention, test_gdn, test_gemm
from tests.kernels.checks import EPS, Matrix, counts, index, output, wide

Outputs = Iterator[np.ndarray]
TREE = [-1, 0, 1, 2, 1, 4, 5, -1, 7, 3, 9]              # parents: branches at 1 and 3, a second root at 7
CHUNKS = [np.arange(66), np.r_[np.arange(64), 600], np.r_[np.arange(5), 700]]     # a stored state, a branch inside a chunk


class Inputs:
    """Values that are the same everywhere, for ever."""

    def __init__(self, seed: int):
        self.source = np.random.PCG64(seed)

    def integers(self, below: int, *shape: int) -> np.ndarray:
        words = self.source.random_raw(math.prod(shape))
        return ((words >> np.uint64(32)) * np.uint64(below) >> np.uint64(32)).astype(np.int64).reshape(shape)

    def normal(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        """float64 that are nearly normal: sums of four uniform values. scale: best a power of two."""
        words = self.source.random_raw(math.prod(shape))
        total = sum((words >> np.uint64(16 * i) & np.uint64(0xFFFF)).astype(np.int64) for i in range(4))
        return (total - 2 * 0xFFFF).reshape(shape) * (scale * 2.0 ** -15)

    def bf16(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        return bf16.from_float64(self.normal(*shape, scale=scale))


    def spread(self, *shape: int) -> np.ndarray:
        """BF16 of many magnitudes, so that no sum of their squares is exact in float32."""
        return bf16.from_float64(np.ldexp(self.normal(*shape), -self.integers(7, *shape)))


def near_ties(candidates: np.ndarray, n: int) -> np.ndarray:
    """The n heads among candidates (BF16 [heads, width]) with a value of x / rms(x) nearest to a tie of rounding to BF16."""
    x = wide(candidates)
    values = x / np.sqrt(np.mean(x * x, -1, keepdims=True) + EPS)
    steps = np.ldexp(values, 9 - np.frexp(values)[1])   # in halves of a BF16 step: ties are the odd ones
    distance = np.abs(steps - 2 * np.floor(steps / 2) - 1).min(1)
    return candidates[np.argsort(distance, kind="stable")[:n]]


def tying_weight(x: np.ndarray) -> np.ndarray:
    """The weight w (BF16 [width]) that brings x / rms(x) (1 + w) next to ties, for a row x (BF16 [width]).

    A small w moves a value by as little as 2^-17 of it: about a tenth of all values come within an ulp of float32.
    """
    x = wide(x)
    values = x / math.sqrt(math.fsum(x * x) / len(x) + EPS)
    scale = np.ldexp(1.0, 8 - np.frexp(values)[1])
    ties = (np.floor(np.abs(values) * scale) + 0.5) / scale * np.sign(values)
    return bf16.from_float64(np.where(values == 0, 0.0, ties / np.where(values == 0, 1.0, values) - 1))


# ---------------------------------------------------------------- row-wise kernels
def embed_rows() -> Outputs:
    for offset in (0, 1):                               # with 16-byte accesses and without
        inputs = Inputs(1)
        table, ids = Matrix(inputs.bf16(50, 72), offset=offset), inputs.integers(50, 3)
        x = output(3, 72, offset=offset)
        embed.embed(0, table.array, index(ids), x.array, counts(rows=3))
        yield x.read()
        y = output(2, 72)
        embed.gather_rows(0, table.array, index([4, 1]), y.array, counts(rows=50, lasts=2))
        yield y.read()


def norms() -> Outputs:
    inputs = Inputs(2)
    for width, offset in ((1100, 0), (1100, 0), (1100, 1), (264, 0), (264, 0), (5120, 0), (5120, 0)):
        x = inputs.spread(2, width)
        w = cuda.to_device(tying_weight(x[0]))
        y = output(2, width, offset=offset)
        rms_norm.rms_norm(0, Matrix(x, offset=offset).array, w, y.array, counts(rows=2), EPS)
        yield y.read()
        half = cuda.to_device(bf16.from_float64(wide(x) / 2))           # twice that is x
        y, total = output(1, width), output(1, width)
        rms_norm.add_rms_norm(0, half, half, w, y.array, counts(rows=2, lasts=1), EPS, out=total.array, rows=index([0]))
        yield y.read()
        yield total.read()


def huge_norm() -> Outputs:
    """A row whose sum of squares is no float32."""
    inputs = Inputs(3)
    x, w, y = inputs.bf16(2, 300, scale=2.0 ** 100), inputs.bf16(300), output(2, 300)
    rms_norm.rms_norm(0, cuda.to_device(x), cuda.to_device(w), y.array, counts(rows=2), EPS)
    yield y.read()


def gated_norm() -> Outputs:
    for offset in (0, 1):
        inputs = Inputs(4)
        o = near_ties(inputs.spread(5000, 128), 21)
        z, w, y = inputs.bf16(3, 7 * 128, scale=2), bf16.from_float64(1 + inputs.normal(128, scale=0.25)), output(3, 7 * 128)
        rms_norm.gated_rms_norm(0, Matrix(o.reshape(3, -1), offset=offset).array, Matrix(z, offset=offset).array,
                                cuda.to_device(w), y.array, counts(rows=3), EPS)
        yield y.read()


def activation() -> Outputs:
    for offset in (0, 1):
        inputs, rows = Inputs(5), 3
        gate, up, y = inputs.bf16(rows, 19, 4, scale=4), inputs.bf16(rows, 19, 4), output(rows, 76)
        gate_up = np.stack([gate, up], 2).reshape(rows, -1)
        silu.silu_mul(0, Matrix(gate_up, offset=offset).array, y.array, counts(rows=rows))
        yield y.read()


def norm_and_rope() -> Outputs:
    inputs, rows, q_heads, k_heads = Inputs(6), 3, 3, 2
    for _ in range(8):
        heads = inputs.spread(rows, 10, 256)            # 3 of q, 3 gates, 2 of k, 2 of v
        weights = [cuda.to_device(tying_weight(heads[at])) for at in ((0, 0), (1, 7))]
        qkv, angles = Matrix(heads.reshape(rows, -1), capacity=5), inputs.bf16(300, 64)       # cosines and sines of nothing
        rope.qk_rope(0, qkv.array, *weights, cuda.to_device(angles), index([299, 7, 0], 5), counts(rows=rows), q_heads,
                     k_heads, EPS)
        yield qkv.read(5)


# ---------------------------------------------------------------- the delta rule
def convolution() -> Outputs:
    for offset in (0, 1):
        inputs, rows, channels, heads = Inputs(7), len(TREE), 72, 5
        x, w = Matrix(inputs.bf16(rows, channels), offset=offset), inputs.bf16(channels, 4, scale=0.5)
        b, a = (Matrix(inputs.bf16(rows, heads, scale=2), offset=offset) for _ in range(2))
        a_log, dt_bias = inputs.bf16(heads), inputs.bf16(heads, scale=2)
        up, n = index(TREE), counts(rows=rows)
        arrays = [cuda.to_device(v) for v in (w, a_log, dt_bias)]
        y, beta, g = output(rows, channels), output(rows, heads), output(rows, heads, np.float32)
        gdn_conv.gdn_conv_gates(0, x.array, arrays[0], up, b.array, a.array, *arrays[1:], y.array, beta.array, g.array, n)
        for out in (y, beta, g):
            yield out.read()


def delta_rule(hopper: bool, heads: tuple[int, int], sequences: list[np.ndarray]) -> Outputs:
    problem, inputs = test_gdn.Problem(sequences, *heads), Inputs(8)
    rows = problem.pool.n_rows
    problem.qkv[:rows] = inputs.bf16(*problem.qkv[:rows].shape)
    problem.g[:rows] = -np.abs(inputs.normal(rows, heads[1], scale=0.125)).astype(np.float32)
    problem.beta[:rows] = bf16.from_float64((1 + inputs.integers(255, rows, heads[1])) / 256)
    o, states = problem.run(hopper)
    yield o
    yield states


def delta_rule_portable() -> Outputs:
    yield from delta_rule(False, (1, 1), CHUNKS)


def delta_rule_hopper() -> Outputs:
    yield from delta_rule(True, (1, 2), CHUNKS)


def delta_rule_hopper_alone() -> Outputs:
    """One sequence, in which the scan follows the first kernel; two key heads."""
    yield from delta_rule(True, (2, 2), [np.arange(67)])


# ---------------------------------------------------------------- attention
def attend(kind: str, sequences, heads: int, gated: bool = True) -> Outputs:
    problem, inputs = test_attention.Problem(sequences, heads), Inputs(9)
    problem.buffer[:problem.rows] = inputs.bf16(problem.rows, problem.buffer.shape[1], scale=2)
    yield problem.run(kind, gated).reshape(problem.rows, heads, attention.D)


def attention_portable() -> Outputs:
    yield from attend("portable", test_attention.tokens(2, 21, shared=62), 2)


def attention_hopper() -> Outputs:
    yield from attend("hopper", test_attention.tokens(2, 21, shared=62), 2)


def attention_hopper_ungated() -> Outputs:
    """More key tiles than slots in the ring, packed heads."""
    yield from attend("hopper", test_attention.tokens(9, shared=160), 3, gated=False)


# ---------------------------------------------------------------- matrix products
def product(run: Callable, m: int, n: int, k: int) -> Outputs:
    """A product and its activation. Values of many magnitudes: no sum is exact in float32."""
    for gated in (False, True):
        problem, inputs = test_gemm.Problem(m, n, k, gated), Inputs(10)
        problem.x[:m, 16:16 + k], problem.w = inputs.spread(m, k), inputs.spread(n, k)
        yield run(problem)


def gemm_narrow() -> Outputs:
    """Two blocks that share weights; and one for each half of them, with two warpgroups."""
    yield from product(test_gemm.Problem.narrow, 37, 48, 256)
    yield from product(test_gemm.Problem.narrow, 70, 208, 128)


def gemm_wide() -> Outputs:
    """Two tiles of tokens, a last chunk of 16; two columns of weights for two clusters."""
    yield from product(test_gemm.Problem.wide, 140, 272, 128)


CASES: dict[str, Callable[[], Outputs]] = {case.__name__: case for case in (
    embed_rows, norms, huge_norm, gated_norm, activation, norm_and_rope, convolution, delta_rule_portable, delta_rule_hopper,
    delta_rule_hopper_alone, attention_portable, attention_hopper, attention_hopper_ungated, gemm_narrow, gemm_wide)}
