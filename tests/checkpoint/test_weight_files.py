"""The files of the weights: single or in shards, checked to the byte."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from jev.checkpoint.checked_json import CheckpointError
from jev.checkpoint.config import ModelConfig
from jev.checkpoint.demo import demo_config
from jev.checkpoint.opening import open_export
from jev.checkpoint.weight_files import read_header, read_headers, text_tensors
from tests.checkpoint.refusals import INDEX, WEIGHTS, refuses
from tests.export_inputs import save, save_raw, write_json

K_NORM = "layers.3.self_attn.k_norm.weight"


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
