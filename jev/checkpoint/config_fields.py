"""What a configuration may say: every field that Transformers' Qwen3.5 text model reads, and what becomes of it here.

A field either has an effect (IMPLEMENTED), or must have the one value whose arithmetic the kernels do (MUST_EQUAL), or
has no effect on a prefill's hidden states (IGNORED). A field that is in none of the three is not read by Transformers
either; ``jev check`` lists it. Compared with Transformers 5.10.2: ``configuration_qwen3_5``, ``modeling_qwen3_5``,
``configuration_utils``, ``modeling_rope_utils`` and ``masking_utils``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jev.checkpoint.checked_json import Fields

# Read by ``ModelConfig.from_json``.
IMPLEMENTED = frozenset({
    "model_type", "text_config", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "layer_types",
    "full_attention_interval", "num_attention_heads", "num_key_value_heads", "head_dim", "linear_conv_kernel_dim",
    "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads", "rms_norm_eps",
    "rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"})

# Field -> values that mean what is implemented, the first of them being the default.
MUST_EQUAL: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),            # of the MLP, the convolution and the gated norm
    "attention_bias": (False,),         # biases of q, k, v and o
    "attn_output_gate": (True,),        # q_proj holds the gates of attention's output
    "output_gate_type": ("swish", "silu", None),    # ... of the delta rule's output
    "mamba_ssm_dtype": ("float32", None),           # the delta rule's state
    "is_causal": (True, None),          # False: every token sees every other (masking_utils)
    "use_bidirectional_attention": (False, None),
    "use_sliding_window": (False, None),
    "sliding_window": (None,),          # a window on the keys
    "attention_chunk_size": (None,),
    "quantization_config": (None,),     # weights that have to be dequantized
    "fusion_config": (None,),           # weights stored in other shapes
    "is_encoder_decoder": (False, None),
    "num_experts": (0, None),           # a mixture of experts instead of the MLP
    "mlp_only_layers": ([], None),
}

# Field -> why it does not matter.
IGNORED: Mapping[str, str] = {
    **dict.fromkeys(("attention_dropout", "initializer_range", "router_aux_loss_coef", "gradient_checkpointing"),
                    "training only"),
    **dict.fromkeys(("use_cache", "bos_token_id", "eos_token_id", "mtp_num_hidden_layers",
                     "mtp_use_dedicated_embeddings", "tie_word_embeddings"),
                    "generation only: nothing is generated, and the output embedding is not loaded"),
    "pad_token_id": "marks a row of the embedding that training leaves alone",
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings"),
                    "read by scaled RoPE alone, which is refused"),
    **dict.fromkeys(("dtype", "torch_dtype"), "the files say it of each tensor, and that is checked"),
    **dict.fromkeys(("vision_config", "image_token_id", "video_token_id", "vision_start_token_id",
                     "vision_end_token_id", "language_model_only"), "prompts are text"),
    **dict.fromkeys(("output_hidden_states", "output_attentions", "return_dict", "chunk_size_feed_forward",
                     "attn_implementation", "experts_implementation"), "how the same numbers are computed or returned"),
    **dict.fromkeys(("num_labels", "id2label", "label2id", "problem_type"), "heads that are not used"),
    **dict.fromkeys(("architectures", "transformers_version", "name_or_path", "_name_or_path"), "where it comes from"),
}

# Of ``rope_parameters``, or ``rope_scaling`` as it was called. Every other entry belongs to a scaled RoPE.
ROPE_IMPLEMENTED = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
ROPE_IGNORED: Mapping[str, str] = dict.fromkeys(
    ("mrope_section", "mrope_interleaved"), "which position turns a pair: text has the same three for all")


def refuse_unimplemented(f: Fields) -> None:
    """Raise CheckpointError for the first field of ``f`` whose value asks for arithmetic that is not implemented."""
    for field, values in MUST_EQUAL.items():
        value = f.data.get(field, values[0])
        if not any(value == known and isinstance(value, bool) == isinstance(known, bool) for known in values):
            raise f.refuse(field, f"only {values[0]!r} is implemented, found {value!r:.60}")
    for field in ("rope_parameters", "rope_scaling"):
        if f.data.get(field) is not None:
            _refuse_scaled_rope(Fields(f"{f.where}: {field}", f.data[field]))
    if f.data.get("rope_parameters") and f.data.get("rope_scaling"):
        raise f.refuse("rope_scaling", "rope_parameters is there too: only one can count")


def _refuse_scaled_rope(rope: Fields) -> None:
    for field in ("rope_type", "type"):
        if rope.data.get(field, "default") != "default":
            raise rope.refuse(field, f"only 'default' is implemented, found {rope.data[field]!r:.60}")
    for field, value in rope.data.items():
        if field not in ROPE_IMPLEMENTED and field not in ROPE_IGNORED and value is not None:
            raise rope.refuse(field, f"only RoPE that is not scaled is implemented, found {value!r:.60}")


def unknown_fields(data: Mapping[str, Any]) -> list[str]:
    """Names of fields of a ``config.json`` that are in none of the tables, those of its text part included."""
    parts = [("", data)] + ([("text_config.", data["text_config"])] if "text_config" in data else [])
    return [prefix + field for prefix, part in parts for field in part
            if field not in IMPLEMENTED and field not in MUST_EQUAL and field not in IGNORED]
