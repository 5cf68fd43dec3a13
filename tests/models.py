"""Tiny seeded models for tests: a configuration and BF16 tensors with the names and shapes of a checkpoint."""
from __future__ import annotations

import numpy as np

from jev.checkpoint.config import ModelConfig
from jev_kernels import bf16

L, F = "linear_attention", "full_attention"
CONFIGS = {
    # one head of everything; plain
    "plain": dict(hidden_size=64, intermediate_size=96, layer_types=(L, F), num_attention_heads=2, num_key_value_heads=2,
                  head_dim=32, rotary_dim=8, linear_num_key_heads=2, linear_num_value_heads=2),
    # grouped key/value heads and value heads, as in the 27B
    "grouped": dict(hidden_size=96, intermediate_size=160, layer_types=(L, L, L, F), num_attention_heads=6,
                    num_key_value_heads=1, head_dim=64, rotary_dim=16, linear_num_key_heads=2, linear_num_value_heads=6),
    # full attention first, two groups, odd widths
    "mixed": dict(hidden_size=56, intermediate_size=88, layer_types=(F, L, F, L), num_attention_heads=4,
                  num_key_value_heads=2, head_dim=32, rotary_dim=8, linear_num_key_heads=1, linear_num_value_heads=2),
}


def config(name: str, **changes) -> ModelConfig:
    """One of CONFIGS as a ModelConfig."""
    fields = dict(linear_key_head_dim=32, linear_value_head_dim=32, conv_kernel=4, vocab_size=101, rms_norm_eps=1e-6,
                  rope_theta=1e4)
    return ModelConfig(**{**fields, **CONFIGS[name], **changes})


def shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint, prefix stripped."""
    h, inter, d = c.hidden_size, c.intermediate_size, c.head_dim
    out = {"embed_tokens.weight": (c.vocab_size, h), "norm.weight": (h,)}
    for i, kind in enumerate(c.layer_types):
        at = f"layers.{i}."
        out |= {at + "input_layernorm.weight": (h,), at + "post_attention_layernorm.weight": (h,),
                at + "mlp.gate_proj.weight": (inter, h), at + "mlp.up_proj.weight": (inter, h),
                at + "mlp.down_proj.weight": (h, inter)}
        if kind == F:
            a = at + "self_attn."
            out |= {a + "q_proj.weight": (2 * d * c.num_attention_heads, h),
                    a + "k_proj.weight": (d * c.num_key_value_heads, h), a + "v_proj.weight": (d * c.num_key_value_heads, h),
                    a + "o_proj.weight": (h, d * c.num_attention_heads),
                    a + "q_norm.weight": (d,), a + "k_norm.weight": (d,)}
        else:
            a = at + "linear_attn."
            heads = c.linear_num_value_heads
            out |= {a + "in_proj_qkv.weight": (c.conv_dim, h), a + "in_proj_z.weight": (c.value_dim, h),
                    a + "in_proj_b.weight": (heads, h), a + "in_proj_a.weight": (heads, h),
                    a + "conv1d.weight": (c.conv_dim, 1, c.conv_kernel), a + "A_log": (heads,), a + "dt_bias": (heads,),
                    a + "norm.weight": (c.linear_value_head_dim,), a + "out_proj.weight": (h, c.value_dim)}
    return out


def tensors(c: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Seeded BF16 weights (uint16): matrices that keep the scale of what they multiply, norms near their usual values."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, shape in shapes(c).items():
        if name.endswith("A_log"):
            x = np.log(rng.uniform(0.01, 16, shape))
        elif name.endswith("dt_bias"):
            x = np.ones(shape)
        elif "linear_attn.norm" in name:
            x = 1 + 0.1 * rng.standard_normal(shape)
        elif "norm" in name:
            x = 0.1 * rng.standard_normal(shape)
        elif "conv1d" in name:
            x = 0.5 * rng.standard_normal(shape)
        elif "embed" in name:
            x = rng.standard_normal(shape)
        else:
            x = rng.standard_normal(shape) * 1.5 * shape[-1] ** -0.5
        out[name] = bf16.from_float32(x.astype(np.float32))
    return out


def sequences(rng: np.random.Generator, vocabulary: int, lengths) -> list[np.ndarray]:
    """Random token sequences of the given lengths."""
    return [rng.integers(0, vocabulary, n).astype(np.int32) for n in lengths]
