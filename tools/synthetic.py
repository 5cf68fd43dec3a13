"""Synthetic weights of the real shapes, made on the GPU in about a second: for benchmarks and full-size tests.

Seeded: element i of weight w is a function of (seed, w, i) alone, so any two runs hold the same model. Matrices are
normal with standard deviation 0.02, norms near their usual values, A_log = log U(0.01, 16), dt_bias 1: the values that
Transformers initialises with, spread where a constant would hide a mistake.
"""
from __future__ import annotations

import math

from numba import cuda, float32, int64, types, uint64

from jev.checkpoint.checkpoint import ModelConfig
from jev.model.weights import Spec
from jev_kernels.bf16 import from_f32
from jev_kernels.runtime.launch import Kernel

CONFIGS = {
    "27b": dict(hidden_size=5120, intermediate_size=17408, num_attention_heads=24, num_key_value_heads=4,
                linear_num_key_heads=16, linear_num_value_heads=48, layers=64),
    "9b": dict(hidden_size=4096, intermediate_size=12288, num_attention_heads=16, num_key_value_heads=4,
               linear_num_key_heads=16, linear_num_value_heads=32, layers=32),
}
NORMAL, LOG_UNIFORM, CONSTANT = range(3)


def config(name: str = "27b", layers: int | None = None) -> ModelConfig:
    """The configuration of a pinned checkpoint, cut to ``layers`` layers if given."""
    fields = dict(CONFIGS[name])
    count = layers or fields.pop("layers")
    fields.pop("layers", None)
    kinds = tuple("full_attention" if i % 4 == 3 else "linear_attention" for i in range(count))
    return ModelConfig(layer_types=kinds, head_dim=256, rotary_dim=64, linear_key_head_dim=128, linear_value_head_dim=128,
                       conv_kernel=4, vocab_size=248320, rms_norm_eps=1e-6, rope_theta=1e7, **fields)


def _fill(out, n, seed, kind, mean, std):
    """out[i] = r(mean + std * normal(seed, i)), or r(log U(0.01, 16)), or r(mean): a counter-based generator."""
    step = cuda.gridsize(1)
    for i in range(cuda.grid(1), n, step):
        x = uint64(seed) * uint64(0xD1342543DE82EF95) + uint64(i) * uint64(0x9E3779B97F4A7C15)      # splitmix64
        x = (x ^ (x >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> uint64(27))) * uint64(0x94D049BB133111EB)
        x = x ^ (x >> uint64(31))
        u = (float32(x >> uint64(40)) + float32(0.5)) * float32(2.0 ** -24)
        v = (float32((x >> uint64(16)) & uint64(0xFFFFFF)) + float32(0.5)) * float32(2.0 ** -24)
        value = mean
        if kind == NORMAL:
            value += std * math.sqrt(float32(-2.0) * math.log(u)) * math.cos(float32(2 * math.pi) * v)
        elif kind == LOG_UNIFORM:
            value = math.log(float32(0.01) + float32(15.99) * u)
        out[i] = from_f32(float32(value))


fill = Kernel(_fill, types.void(types.uint16[::1], int64, uint64, types.int32, float32, float32), threads=256)


def distribution(name: str) -> tuple[int, float, float]:
    """(kind, mean, standard deviation) of a weight, by its name in ``jev.model.weights``."""
    if name == "a_log":
        return LOG_UNIFORM, 0.0, 0.0
    if name == "dt_bias":
        return CONSTANT, 1.0, 0.0
    if name == "gdn_norm":
        return NORMAL, 1.0, 0.1
    if name == "conv":
        return NORMAL, 0.0, 0.3
    if "norm" in name:
        return NORMAL, 0.0, 0.1
    return NORMAL, 0.0, 0.02


def write(stream, specs: list[Spec], arrays: dict, seed: int = 0) -> None:
    """Fill the device arrays (key -> contiguous uint16 array of the spec's shape) with the synthetic weights."""
    for number, spec in enumerate(specs):
        array = arrays[spec.key]
        flat = array.reshape(array.size)
        kind, mean, std = distribution(spec.name)
        fill(stream, min(-(-array.size // 256), 132 * 16), flat, array.size, seed * 100003 + number, kind, mean, std)
