"""The same tiny models in Transformers: needs torch and transformers, so only ``tests/parity`` and fixtures import it."""
from __future__ import annotations

import numpy as np
import torch
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextModel

from jev.checkpoint.config import ModelConfig


def text_config(c: ModelConfig) -> Qwen3_5TextConfig:
    """Transformers' configuration of a ModelConfig."""
    config = Qwen3_5TextConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers, num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads, head_dim=c.head_dim, rms_norm_eps=c.rms_norm_eps,
        linear_conv_kernel_dim=c.conv_kernel, linear_key_head_dim=c.linear_key_head_dim,
        linear_value_head_dim=c.linear_value_head_dim, linear_num_key_heads=c.linear_num_key_heads,
        linear_num_value_heads=c.linear_num_value_heads, layer_types=list(c.layer_types),
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta,
                         "partial_rotary_factor": c.rotary_dim / c.head_dim,
                         "mrope_section": [c.rotary_dim // 2 - 2 * (c.rotary_dim // 8)] + 2 * [c.rotary_dim // 8]})
    config._attn_implementation = "sdpa"
    return config


def build(c: ModelConfig, tensors: dict[str, np.ndarray], dtype: torch.dtype) -> Qwen3_5TextModel:
    """A Qwen3_5TextModel holding ``tensors`` (uint16 BF16), computing in ``dtype``."""
    model = Qwen3_5TextModel(text_config(c)).eval()
    state = {name: torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16) for name, x in tensors.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    if missing or unexpected:
        raise AssertionError(f"state differs: missing {missing}, unexpected {unexpected}")
    return model.to(dtype)


@torch.inference_mode()
def all_hidden(model: Qwen3_5TextModel, ids: np.ndarray) -> np.ndarray:
    """float64 [T, h]: the final hidden state at every position of one sequence."""
    out = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None], use_cache=False)
    return out.last_hidden_state[0].double().numpy()
