"""Opening exports: what is read, and every refusal, each naming its file and field or tensor."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jev.checkpoint import checkpoint
from jev.checkpoint.checked_json import CheckpointError
from jev.checkpoint.checkpoint import PINNED, Head, ModelConfig, check_dims, open_export
from jev.checkpoint.demo import demo_config, write_demo_checkpoint
from jev.checkpoint.weight_files import read_header, read_headers, text_tensors
from jev_kernels import bf16
from tests.export_inputs import F, L, edit_json, save, save_raw, write_json

MANIFEST, WEIGHTS, INDEX = "open_jev_export.json", "model.safetensors", "model.safetensors.index.json"
K_NORM = "layers.3.self_attn.k_norm.weight"


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("export") / "demo"
    write_demo_checkpoint(path)
    return path


@pytest.fixture
def export(demo, tmp_path) -> Path:
    """A copy of the demo export that a test may damage."""
    return Path(shutil.copytree(demo, tmp_path / "demo"))


def refuses(path: Path, *words: str, **arguments) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_export(path, **arguments)
    for word in words:
        assert word in str(caught.value)


# --- what an export holds


def test_an_export_is_read(demo):
    export = open_export(demo)
    assert export.path == demo and export.demo and export.tokenizer_file == demo / "tokenizer.json"
    assert export.model_names == {"open-jev-demo", "open-jev", "jev-latest"}
    assert {name: x.shape for name, x in export.tensors.items()} == export.config.tensor_shapes()
    assert export.head.weight.dtype == np.float32 and export.head.weight.shape == (export.config.hidden_size,)
    assert list(export.manifest.head_weight) == export.head.weight.tolist()


def test_tensors_are_read_only_views_of_the_file(demo):
    tensors = open_export(demo).tensors
    entries = read_header(demo / WEIGHTS)
    data = (demo / WEIGHTS).read_bytes()
    for name, x in tensors.items():
        assert x.dtype == np.uint16 and not x.flags.writeable and not x.flags.owndata
        assert x.tobytes() == data[entries[name].start:entries[name].start + entries[name].size]


@pytest.mark.parametrize("limit", [1, 512, 16384])
def test_the_saved_length_can_be_replaced(demo, limit):
    assert open_export(demo).manifest.max_length == 4096
    assert open_export(demo, max_length=limit).manifest.max_length == limit


@pytest.mark.parametrize("limit", [0, -1, 16385, True, 12.0])
def test_a_length_out_of_range_is_refused(demo, limit):
    refuses(demo, "max_length", max_length=limit)


def test_prefixes_are_stripped_and_other_parts_ignored(export):
    tensors = {name: ("BF16", np.array(x)) for name, x in open_export(export).tensors.items()}
    others = ("lm_head.weight", "model.lm_head.weight", "model.visual.merger.norm.weight", "visual.x", "mtp.fc.weight")
    outside = {name: ("F32", np.zeros(3, np.float32)) for name in others}
    expected = open_export(export).tensors
    for prefix in ("model.", "model.language_model."):
        save(export / WEIGHTS, {prefix + name: x for name, x in tensors.items()} | outside)
        found = open_export(export).tensors
        assert list(found) == list(expected)
        assert all(np.array_equal(found[name], tensors[name][1]) for name in expected)


def shard(export: Path, pieces: int = 3) -> dict[str, str]:
    """Split the export's single file into shards with an index; returns tensor -> shard."""
    tensors = {name: ("BF16", np.array(x)) for name, x in open_export(export).tensors.items()}
    names = [f"model-{i + 1:05d}-of-{pieces:05d}.safetensors" for i in range(pieces)]
    placed = {tensor: names[i % pieces] for i, tensor in enumerate(tensors)}
    for name in names:
        save(export / name, {t: x for t, x in tensors.items() if placed[t] == name})
    write_json(export / INDEX, {"metadata": {}, "weight_map": placed})
    (export / WEIGHTS).unlink()
    return placed


def test_shards_are_read_through_their_index(export, demo):
    shard(export)
    one, many = open_export(demo).tensors, open_export(export).tensors
    assert list(one) == list(many) and all(np.array_equal(one[name], many[name]) for name in one)


# --- the pinned checkpoints


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


# --- configuration


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
    assert "rope_parameters" not in flat and "partial_rotary_factor" not in flat  # the caller's object is left alone


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
    ({"rms_norm_eps": float("nan")}, ["rms_norm_eps", "nan"]),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, ["rope_parameters", "rope_type", "yarn"]),
    ({"rope_parameters": {"rope_type": "default"}}, ["rope_parameters", "rope_theta", "is missing"]),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 2}}, ["partial_rotary_factor", "512 of 256"]),
    ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1e308}}, ["partial_rotary_factor"]),
    ({"rope_parameters": 7}, ["object"]),
])
def test_configurations_that_are_refused(export, changes, words):
    edit_json(export / "config.json", **changes)
    refuses(export, "config.json", *words)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"a": 1, "a": 2}', b"\xff{}", b"[" * 100000])
@pytest.mark.parametrize("name", ["config.json", MANIFEST])
def test_files_that_are_not_a_json_object(export, name, content):
    (export / name).write_bytes(content)
    refuses(export, name)


def test_a_missing_file(export):
    (export / "tokenizer.json").unlink()
    refuses(export, "tokenizer.json", "missing")
    (export / "config.json").unlink()
    refuses(export, "config.json")


# --- manifest


def test_what_is_not_an_export(demo, export, tmp_path):
    refuses(tmp_path / "nowhere", "no such export folder")
    refuses(demo / MANIFEST, "no such export folder")
    (export / MANIFEST).unlink()
    refuses(export, str(export), "plain base model", "unfinished", MANIFEST)
    (tmp_path / "empty").mkdir()
    refuses(tmp_path / "empty", "not an export")


LARGE = dict(model_id=PINNED[0].model_id, base_revision=PINNED[0].base_revision,
             checkpoint_revision=PINNED[0].checkpoint_revision, demo=None)


@pytest.mark.parametrize("changes, words", [
    ({"format": "open-jev-text-merged/2"}, ["format", "open-jev-text-merged/1"]),
    ({"format": None}, ["format", "is missing"]),
    ({"demo": None}, ["demo"]),
    ({"demo": "yes"}, ["demo"]),
    ({"model_id": "Qwen/Qwen3.5-4B", "demo": None}, ["model_id", "Qwen/Qwen3.8-27B", "Qwen/Qwen3.5-4B"]),
    (LARGE | {"demo": True}, ["demo"]),
    (LARGE | {"base_revision": "0" * 40}, ["base_revision", PINNED[0].base_revision, "0" * 40]),
    (LARGE | {"base_revision": PINNED[1].base_revision}, ["base_revision"]),
    (LARGE | {"base_revision": None}, ["base_revision", "is missing"]),
    (LARGE | {"checkpoint_revision": "main"}, ["checkpoint_revision", "main"]),
    ({"base_revision": "other"}, ["base_revision"]),
    ({"temperature": 0}, ["temperature", "positive"]),
    ({"temperature": -1.5}, ["temperature"]),
    ({"temperature": "2"}, ["temperature"]),
    ({"temperature": True}, ["temperature"]),
    ({"temperature": float("inf")}, ["temperature", "inf"]),
    ({"temperature": 10**400}, ["temperature"]),
    ({"max_length": 0}, ["max_length", "1..16384"]),
    ({"max_length": 16385}, ["max_length"]),
    ({"max_length": 4096.0}, ["max_length"]),
    ({"chat_prefix": None}, ["chat_prefix", "is missing"]),
    ({"chat_suffix": 3}, ["chat_suffix"]),
    ({"head_weight": [0.5] * 255}, ["head_weight", "expected 256 numbers, found 255"]),
    ({"head_weight": []}, ["head_weight"]),
    ({"head_weight": "x"}, ["head_weight"]),
    ({"head_weight": [0.5] * 254 + [float("nan"), 0.5]}, ["head_weight[254]", "nan"]),
    ({"head_weight": [0.5] * 255 + [1e39]}, ["head_weight[255]", "float32"]),
    ({"head_weight": [0.5] * 255 + [True]}, ["head_weight"]),
    ({"head_bias": float("-inf")}, ["head_bias", "-inf"]),
    ({"head_bias": None}, ["head_bias", "is missing"]),
    ({"head_bias": "0"}, ["head_bias"]),
])
def test_manifests_that_are_refused(export, changes, words):
    edit_json(export / MANIFEST, **changes)
    refuses(export, MANIFEST, *words)


# --- weights


def test_wrong_tensors_are_refused_by_name(export):
    good = {name: ("BF16", np.array(x)) for name, x in open_export(export).tensors.items()}

    def damaged(*words, without=(), **changes):
        save(export / WEIGHTS, {n: x for n, x in good.items() if n not in without}
             | {name.replace("__", "."): x for name, x in changes.items()})
        refuses(export, *words)

    bits = good[K_NORM][1]
    damaged(K_NORM, "missing", without=[K_NORM])
    for dtype, array in (("F16", bits), ("F32", bits.astype(np.float32)), ("U16", bits)):
        damaged(K_NORM, "BF16", dtype, WEIGHTS, **{K_NORM: (dtype, array)})
    for shape in ((128,), (256, 1), (257,)):
        damaged(K_NORM, "[256]", str(list(shape)), WEIGHTS, **{K_NORM: ("BF16", np.zeros(shape, np.uint16))})
    damaged("layers.8.input_layernorm.weight", "8-layer", **{"layers.8.input_layernorm.weight": ("BF16", bits)})
    damaged("layers.0.self_attn.q_norm.weight", **{"layers.0.self_attn.q_norm.weight": ("BF16", bits)})
    damaged("lora_A", **{"layers.3.self_attn.q_proj.lora_A.weight": ("BF16", bits)})
    damaged(f"model.{K_NORM}", "also", **{f"model.{K_NORM}": ("BF16", bits)})


def test_missing_and_contradictory_shards(export, demo):
    placed = shard(export)
    index = json.loads((export / INDEX).read_text())
    first, second = sorted(set(placed.values()))[:2]
    where = {name: next(t for t, s in placed.items() if s == name) for name in (first, second)}

    def with_map(*words, **changes):
        write_json(export / INDEX, {"weight_map": {n: s for n, s in (index["weight_map"] | changes).items() if s}})
        refuses(export, *words)

    with_map(where[first], second, **{where[first]: second})
    with_map(where[first], first, INDEX, **{where[first]: None})
    with_map(INDEX, "absent.weight", **{"absent.weight": first})
    for name in ("../model.safetensors", "/etc/passwd", "sub/model.safetensors", "weights.bin"):
        with_map(INDEX, where[first], "not the name", **{where[first]: name})
    with_map(INDEX, where[first], **{where[first]: 7})
    write_json(export / INDEX, {})
    refuses(export, INDEX, "weight_map")
    write_json(export / INDEX, index)
    open_export(export)
    (export / second).unlink()
    refuses(export, second, "missing")
    shutil.copy(demo / WEIGHTS, export / WEIGHTS)
    refuses(export, WEIGHTS, INDEX, "both")
    (export / INDEX).unlink()
    (export / WEIGHTS).unlink()
    refuses(export, WEIGHTS, INDEX, "neither")


def header(**entries) -> bytes:
    return json.dumps(entries).encode()


def entry(start, end, dtype="BF16", shape=None):
    return {"dtype": dtype, "shape": [(end - start) // 2] if shape is None else shape, "data_offsets": [start, end]}


@pytest.mark.parametrize("raw, data, words", [
    (header(a=entry(0, 8)), b"12345678X", ["1 bytes after the last tensor"]),
    (header(a=entry(0, 8)), b"1234567", ["a", "data_offsets", "truncated"]),
    (header(a=entry(0, 8), b=entry(6, 14)), b"x" * 14, ["b", "overlaps"]),
    (header(a=entry(0, 8), b=entry(10, 14)), b"x" * 14, ["b", "gap"]),
    (header(a=entry(2, 8)), b"x" * 8, ["a", "gap"]),
    (header(a=entry(0, 8, shape=[5])), b"x" * 8, ["a", "8 bytes"]),
    (header(a=entry(0, 8, shape=[-4])), b"x" * 8, ["a", "shape"]),
    (header(a=entry(0, 8, shape=[4.0])), b"x" * 8, ["a", "shape"]),
    (header(a=entry(0, 8, shape=4)), b"x" * 8, ["a", "shape"]),
    (header(a=entry(0, 8, shape=[2**62, 2**62])), b"x" * 8, ["a", "8 bytes"]),
    (header(a=entry(0, 8, dtype="BF17")), b"x" * 8, ["a", "dtype", "BF17"]),
    (header(a=entry(0, 8, dtype=3)), b"x" * 8, ["a", "dtype"]),
    (header(a={"dtype": "BF16", "shape": [4], "data_offsets": [0]}), b"x" * 8, ["a", "data_offsets"]),
    (header(a={"dtype": "BF16", "shape": [4], "data_offsets": [8, 0]}), b"x" * 8, ["a", "data_offsets"]),
    (header(a={"dtype": "BF16", "shape": [4]}), b"x" * 8, ["a", "data_offsets", "is missing"]),
    (header(a=entry(0, 1, "U8", [1]), b=entry(1, 3)), b"xyz", ["b", "odd byte"]),
    (header(a=3), b"", ["a", "object"]),
    (b"[]", b"", ["object"]),
    (b"{", b"", ["JSON"]),
    (b"\xff\xfe", b"", ["JSON"]),
    (b'{"a": 1, "a": 2}', b"", ["JSON", "repeated"]),
    (b"[" * 50000, b"", ["JSON"]),
])
def test_safetensors_headers_that_are_refused(tmp_path, raw, data, words):
    path = tmp_path / "x.safetensors"
    save_raw(path, raw, data)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    for word in (str(path), *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 8, b"\xff" * 64, (9).to_bytes(8, "little") + b"{}",
                                     (0).to_bytes(8, "little")])
def test_files_too_short_for_their_header(tmp_path, content):
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="not a complete safetensors file"):
        read_header(tmp_path / "x.safetensors")


@pytest.mark.parametrize("cut", [1, 2, 1000, 20_000_000])
def test_a_truncated_download_is_refused(export, cut):
    data = (export / WEIGHTS).read_bytes()
    (export / WEIGHTS).write_bytes(data[:-cut])
    refuses(export, WEIGHTS)


def test_headers_agree_with_the_safetensors_library(export, tmp_path):
    from safetensors import safe_open
    from safetensors.numpy import save_file
    arrays = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.arange(5, dtype=np.int64),
              "empty": np.zeros((0, 4), np.float16), "scalar": np.array(3.5, np.float64)}
    save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "np"})
    entries, data = read_header(tmp_path / "x.safetensors"), (tmp_path / "x.safetensors").read_bytes()
    assert entries.keys() == arrays.keys()
    for name, e in entries.items():
        assert e.shape == arrays[name].shape and data[e.start:e.start + e.size] == arrays[name].tobytes()
    with safe_open(export / WEIGHTS, "numpy") as file:  # and it reads what is written here
        assert set(file.keys()) == set(read_header(export / WEIGHTS))


def test_text_tensors_may_be_asked_for_in_other_types(tmp_path):
    config = ModelConfig.from_json(demo_config())
    save(tmp_path / WEIGHTS, {n: ("F32", np.zeros(s, np.float32)) for n, s in config.tensor_shapes().items()})
    assert list(text_tensors(tmp_path, config, ("BF16", "F32"))) == list(config.tensor_shapes())
    assert read_headers(tmp_path).keys() == config.tensor_shapes().keys()
    with pytest.raises(CheckpointError, match=re.escape("embed_tokens.weight: expected BF16, found F32")):
        text_tensors(tmp_path, config)


# --- head


def test_head_scores():
    rng = np.random.default_rng(0)
    weight, bias = rng.standard_normal(5120).astype(np.float32), np.float32(0.375)
    hidden = bf16.from_float32(rng.standard_normal((37, 5120)).astype(np.float32))
    scores = Head(weight, bias).score(hidden)
    exact = [math.fsum(row) for row in bf16.to_float32(hidden).astype(np.float64) * weight.astype(np.float64)]
    assert scores.dtype == np.float32 and scores.shape == (37,)
    # float64 sums of exact products differ from the true sum far below float32's resolution
    assert np.abs(scores - (np.float32(exact) + bias)).max() <= 2 * np.spacing(np.float32(np.abs(exact).max()))
    assert np.mean(scores == np.float32(exact) + bias) > 0.9


def test_a_score_has_the_same_bits_in_any_company():
    rng = np.random.default_rng(1)
    head = Head(rng.standard_normal(256).astype(np.float32), np.float32(-1))
    hidden = bf16.from_float32(rng.standard_normal((64, 256)).astype(np.float32))
    together = head.score(hidden)
    order = rng.permutation(64)
    assert np.array_equal(head.score(hidden[order]), together[order])
    assert np.array_equal(np.concatenate([head.score(hidden[i:i + 1]) for i in range(64)]), together)
    assert np.array_equal(head.score(np.asfortranarray(hidden)), together)
    assert head.score(hidden[:0]).shape == (0,)


@pytest.mark.parametrize("hidden", [np.zeros((2, 255), np.uint16), np.zeros(256, np.uint16), np.zeros((2, 256))])
def test_head_refuses_other_arrays(hidden):
    with pytest.raises(ValueError, match="hidden"):
        Head(np.ones(256, np.float32), np.float32(0)).score(hidden)


def test_non_finite_hidden_states_show_in_the_score():
    hidden = np.full((1, 4), 0x7FC0, np.uint16)
    assert np.isnan(Head(np.ones(4, np.float32), np.float32(0)).score(hidden)).all()


def test_the_module_needs_no_torch():
    code = "import sys, jev.checkpoint.checkpoint; sys.exit(bool({'torch', 'flask', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(checkpoint.__file__).parents[2]).returncode == 0
