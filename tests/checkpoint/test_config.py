"""Configurations: the forms that are read, the ones that are refused, and the pinned dimensions."""

from __future__ import annotations

import math

import pytest

from jev.checkpoint import config_fields
from jev.checkpoint.checked_json import CheckpointError
from jev.checkpoint.config import ModelConfig, check_dims
from jev.checkpoint.demo import demo_config
from jev.checkpoint.pinned import PINNED
from tests.checkpoint.refusals import MANIFEST, refuses
from tests.export_inputs import F, L, edit_json


def test_a_text_configuration_within_one_is_refused():
    nested = {"model_type": "qwen3_5", "text_config": demo_config() | {"text_config": demo_config() | {"hidden_act": "gelu"}}}
    with pytest.raises(CheckpointError, match="text_config: text_config: "):
        ModelConfig.from_json(nested)


def test_configuration_forms():
    flat = demo_config()
    config = ModelConfig.from_json(flat)
    assert config.layer_types == (L, L, L, F) * 2 and config.rotary_dim == 64 and config.rope_theta == 1e7
    assert (config.key_dim, config.value_dim, config.conv_dim) == (256, 768, 1280)
    assert ModelConfig.from_json({"model_type": "qwen3_5", "text_config": flat, "vision_config": {}}) == config
    rope = flat.pop("rope_parameters")
    assert ModelConfig.from_json(flat | {"rope_theta": rope["rope_theta"], "partial_rotary_factor": 0.25}) == config
    assert ModelConfig.from_json(flat | {"rope_theta": 10000000.0}) == config  # a quarter is the model's default
    interval = {name: x for name, x in flat.items() if name != "layer_types"} | {"full_attention_interval": 4}
    assert ModelConfig.from_json(interval | {"rope_parameters": rope}) == config
    assert ModelConfig.from_json(interval | {"layer_types": None, "rope_theta": 1e7}) == config
    for kind in ({"type": "default"}, {"rope_type": "default", "factor": None}, {"mrope_section": [11, 11, 10]}):
        assert ModelConfig.from_json(flat | {"rope_scaling": kind, "rope_theta": 1e7}) == config
    assert "rope_parameters" not in flat and "partial_rotary_factor" not in flat  # the caller's object is left alone


ROPE = {"rope_theta": 1e7, "partial_rotary_factor": 0.25}


@pytest.mark.parametrize("changes, words", [
    ({"model_type": "qwen3_5_moe_text"}, ["model_type", "qwen3_5_moe_text"]),
    ({"hidden_size": None}, ["hidden_size", "is missing"]),
    ({"hidden_size": 0}, ["hidden_size", "1.."]),
    ({"hidden_size": "256"}, ["hidden_size", "'256'"]),
    ({"hidden_size": True}, ["hidden_size", "True"]),
    ({"num_attention_heads": 3}, ["num_attention_heads", "num_key_value_heads"]),
    ({"intermediate_size": 766}, ["intermediate_size", "766", "multiple of 4"]),
    ({"linear_num_value_heads": 5}, ["linear_num_value_heads", "linear_num_key_heads"]),
    ({"layer_types": [L] * 7}, ["layer_types", "8"]),
    ({"layer_types": ["sliding_attention"] * 8}, ["layer_types", L]),
    ({"layer_types": None}, ["full_attention_interval", "is missing"]),
    ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
    ({"attention_bias": True}, ["attention_bias"]),
    ({"attn_output_gate": False}, ["attn_output_gate"]),
    ({"rms_norm_eps": 0}, ["rms_norm_eps"]),
    ({"rms_norm_eps": 1e-300}, ["rms_norm_eps", "float32", "1e-300"]),      # nothing, to a kernel
    ({"rms_norm_eps": 1e39}, ["rms_norm_eps", "float32"]),
    ({"rope_parameters": {"rope_theta": 1e-300}}, ["rope_theta", "float32"]),
    ({"rope_parameters": {"rope_theta": 1e39}}, ["rope_theta", "float32"]),
    ({"num_hidden_layers": 2**31 - 1, "layer_types": None, "full_attention_interval": 4}, ["num_hidden_layers", "1..1024"]),
    ({"model_type": "qwen3_5_text\ud800"}, ["model_type", "ud800"]),
    ({"rms_norm_eps": float("nan")}, ["rms_norm_eps", "nan"]),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, ["rope_parameters", "rope_type", "yarn"]),
    ({"rope_parameters": {"rope_type": "default"}}, ["rope_parameters", "rope_theta", "is missing"]),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 2}}, ["partial_rotary_factor", "512 of 256"]),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1e308}}, ["partial_rotary_factor"]),
    ({"rope_parameters": 7}, ["object"]),
    ({"rope_scaling": 7}, ["rope_scaling", "object"]),
    ({"rope_parameters": None, "rope_scaling": ROPE | {"rope_type": "linear", "factor": 2}}, ["rope_scaling", "linear"]),
    ({"rope_parameters": None, "rope_scaling": ROPE | {"type": "yarn", "factor": 4.0}}, ["rope_scaling: type", "yarn"]),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, ["rope_scaling: type", "yarn"]),
    ({"rope_scaling": {"rope_type": "default"}}, ["rope_scaling", "rope_parameters"]),
    ({"rope_parameters": ROPE | {"type": "yarn"}}, ["rope_parameters: type", "yarn"]),
    ({"rope_parameters": ROPE | {"rope_type": "default", "type": "linear"}}, ["rope_parameters: type", "linear"]),
    ({"rope_parameters": ROPE | {"rope_type": None}}, ["rope_type", "None"]),
    ({"rope_parameters": ROPE | {"factor": 4.0}}, ["rope_parameters: factor", "4.0"]),
    ({"rope_parameters": ROPE | {"attention_factor": 0.5}}, ["attention_factor"]),
    ({"rope_parameters": ROPE | {"original_max_position_embeddings": 4096}}, ["original_max_position_embeddings"]),
    ({"rope_parameters": {"full_attention": ROPE}}, ["rope_parameters: full_attention"]),
    ({"is_causal": False}, ["is_causal", "False"]),
    ({"sliding_window": 4096}, ["sliding_window", "4096"]),
    ({"mamba_ssm_dtype": "bfloat16"}, ["mamba_ssm_dtype", "bfloat16"]),
    ({"output_gate_type": "sigmoid"}, ["output_gate_type", "sigmoid"]),
    ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config", "fp8"]),
    ({"num_experts": 128}, ["num_experts", "128"]),
    ({"attention_bias": 0}, ["attention_bias", "0"]),
])
def test_configurations_that_are_refused(export, changes, words):
    edit_json(export / "config.json", **changes)
    refuses(export, "config.json", *words)


@pytest.mark.parametrize("field, value", [
    ("rope_scaling", {"type": "yarn", "factor": 4.0}), ("quantization_config", {"bits": 4}), ("is_causal", False)])
def test_a_full_configuration_is_refused_for_either_part(field, value):
    text = demo_config()
    for data in ({"text_config": text, field: value}, {"text_config": text | {field: value}}):
        with pytest.raises(CheckpointError, match=f"config.json.*: {field}"):
            ModelConfig.from_json(data)


def test_the_tables_of_fields_do_not_overlap_and_know_the_demo():
    tables = (config_fields.IMPLEMENTED, config_fields.MUST_EQUAL, config_fields.IGNORED)
    assert sum(map(len, tables)) == len(set().union(*tables))
    full = {"model_type": "qwen3_5", "text_config": demo_config() | {"use_cache": True}, "vision_config": {}}
    assert config_fields.unknown_fields(full) == []
    full["text_config"]["swin_norm"] = full["temperature"] = 1
    assert config_fields.unknown_fields(full) == ["temperature", "text_config.swin_norm"]


def test_pinned_names_and_dimensions():
    large, small = PINNED
    assert large.names() == {"Qwen/Qwen3.8-27B", "open-jev", "jev-latest", "open-jev-27b-v1.1"}
    assert small.names() == {"Qwen/Qwen3.5-9B", "open-jev", "jev-latest", "open-jev-9b"}
    for source, weights in ((large, 48_696_131_584), (small, 15_873_369_088 - 2 * 248320 * 4096)):
        config = pinned_config(source)
        check_dims(config, source, "config.json")
        shapes = config.tensor_shapes()
        total = sum(2 * math.prod(shape) for name, shape in shapes.items() if name != "embed_tokens.weight")
        assert abs(total - weights) / weights < 0.005
    with pytest.raises(CheckpointError, match="config.json: hidden_size: Open-Jev-9B has 4096, found 5120"):
        check_dims(pinned_config(large), small, "config.json")


def pinned_config(source) -> ModelConfig:
    """The configuration that a pinned base's config.json gives, as far as it is pinned."""
    d = source.dims
    return ModelConfig.from_json({"model_type": "qwen3_5", "text_config": {
        "hidden_size": d["hidden_size"], "intermediate_size": d["intermediate_size"],
        "num_hidden_layers": d["num_layers"], "full_attention_interval": 4, "vocab_size": 248320,
        "num_attention_heads": d["num_attention_heads"], "num_key_value_heads": d["num_key_value_heads"],
        "head_dim": 256, "linear_num_key_heads": d["linear_num_key_heads"],
        "linear_num_value_heads": d["linear_num_value_heads"], "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}}})


def test_an_export_of_a_pinned_checkpoint_must_have_its_dimensions(export):
    for source in PINNED:
        edit_json(export / MANIFEST, model_id=source.model_id, base_revision=source.base_revision,
                  checkpoint_revision=source.checkpoint_revision, demo=None)
        refuses(export, "config.json", "hidden_size", str(source.dims["hidden_size"]), "256")
