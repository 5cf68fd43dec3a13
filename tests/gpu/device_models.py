"""Models on the GPU for tests and benchmarks: seeded ones of any width, and the same weights in Transformers."""
from __future__ import annotations

import numpy as np
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextModel

from jev.checkpoint.config import ModelConfig
from jev.model.weights import attention_columns, gdn_columns
from tests.parity_reference import text_config
from tests.torch_ops import gate_and_up


def state_dict(config: ModelConfig, held: dict) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors as views of the stacked weights on the GPU (those that are interleaved on
    one side as copies: q_proj, gate_proj, up_proj)."""
    w = {key: torch.as_tensor(weight.array, device="cuda").view(torch.bfloat16) for key, weight in held.items()}
    out = {"embed_tokens.weight": w["embed"], "norm.weight": w["norm"]}
    h, d = config.hidden_size, config.head_dim
    for i, kind in enumerate(config.layer_types):
        at = f"layers.{i}."
        gate, up = gate_and_up(w[at + "gate_up"], 0)
        out |= {at + "input_layernorm.weight": w[at + "input_norm"],
                at + "post_attention_layernorm.weight": w[at + "post_norm"],
                at + "mlp.gate_proj.weight": gate, at + "mlp.up_proj.weight": up,
                at + "mlp.down_proj.weight": w[at + "down_proj"]}
        p = w[at + "in_proj"]
        if kind == "full_attention":
            c, a = attention_columns(config), at + "self_attn."
            heads = config.num_attention_heads
            q = torch.stack([p[c["q"]].view(heads, d, h), p[c["gate"]].view(heads, d, h)], dim=1).reshape(-1, h)
            out |= {a + "q_proj.weight": q, a + "k_proj.weight": p[c["k"]], a + "v_proj.weight": p[c["v"]],
                    a + "o_proj.weight": w[at + "out_proj"], a + "q_norm.weight": w[at + "q_norm"],
                    a + "k_norm.weight": w[at + "k_norm"]}
        else:
            c, a = gdn_columns(config), at + "linear_attn."
            out |= {a + "in_proj_qkv.weight": p[c["qkv"]], a + "in_proj_z.weight": p[c["z"]], a + "in_proj_b.weight": p[c["b"]],
                    a + "in_proj_a.weight": p[c["a"]], a + "conv1d.weight": w[at + "conv"][:, None],
                    a + "A_log": w[at + "a_log"], a + "dt_bias": w[at + "dt_bias"], a + "norm.weight": w[at + "gdn_norm"],
                    a + "out_proj.weight": w[at + "out_proj"]}
    return out


def transformers_model(config: ModelConfig, held: dict) -> Qwen3_5TextModel:
    """Transformers' BF16 model on the GPU over the same weights."""
    with torch.device("meta"):
        model = Qwen3_5TextModel(text_config(config)).to(torch.bfloat16).eval()
    missing, unexpected = model.load_state_dict(state_dict(config, held), strict=False, assign=True)
    if missing or unexpected:
        raise AssertionError(f"state differs: missing {missing}, unexpected {unexpected}")
    with torch.device("cuda"):                        # buffers (inverse frequencies) are not in the state
        model.rotary_emb = type(model.rotary_emb)(model.config)
    return model


@torch.inference_mode()
def transformers_hidden(model: Qwen3_5TextModel, ids: np.ndarray) -> torch.Tensor:
    """float64 [h]: the last token's final hidden state of one sequence run alone."""
    out = model(input_ids=torch.from_numpy(np.asarray(ids, np.int64))[None].cuda(), use_cache=False)
    return out.last_hidden_state[0, -1].double()
