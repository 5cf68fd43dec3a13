"""Making exports without torch: the merge against PEFT's recorded bits, the writer, and everything refused beforehand.

The three places that need torch or transformers are replaced here; tests/parity/test_export_parity.py runs them.
"""

from __future__ import annotations

import configparser
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jev.checkpoint import checkpoint, weight_files
from jev.checkpoint.checked_json import CheckpointError
from jev.checkpoint.checkpoint import open_export
from jev.checkpoint.demo import write_demo_checkpoint
from jev.checkpoint.weight_files import read_header
from jev.export import export
from jev.export.export import bf16_pieces, export_merged, known_revision, read_matrix, write_export
from jev.model.numpy_backbone import NumpyBackbone
from jev_kernels import bf16
from tests import export_inputs
from tests.export_inputs import CONFIG, SOURCE, TEXT_CONFIG, edit_json, save

DATA = Path(__file__).parents[1] / "data"
WEIGHT = tuple(np.linspace(-1, 1, 64, dtype=np.float32).tolist())
ADAPTER = "adapter/adapter_model.safetensors"
Q_A = "base_model.model.layers.1.self_attn.q_proj.lora_A.weight"


def fused_matmul(b: np.ndarray, a: np.ndarray) -> np.ndarray:
    """float32 b @ a, products added in order with one rounding each (in float64, then float32), on any machine."""
    total = np.zeros((b.shape[0], a.shape[1]), np.float32)
    for k in range(b.shape[1]):
        total = (b[:, k:k + 1].astype(np.float64) * a[k:k + 1] + total).astype(np.float32)
    return total


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("inputs")
    export_inputs.write_base(path / "base")
    export_inputs.write_checkpoint(path / "checkpoint")
    (path / "checkpoint" / "head.pt").touch()
    return path


@pytest.fixture
def folder(inputs, tmp_path, monkeypatch) -> Path:
    """A folder with base/ and checkpoint/, and a package that pins that checkpoint and needs no torch."""
    monkeypatch.setattr(checkpoint, "PINNED", (*checkpoint.PINNED, SOURCE))
    monkeypatch.setattr(export, "torch_matmul", fused_matmul)
    monkeypatch.setattr(export, "read_head", lambda path, width: (list(WEIGHT), 0.5))
    monkeypatch.setattr(export, "chat_frame", lambda base: ("<user>", "<end>"))
    return Path(shutil.copytree(inputs, tmp_path / "work"))


def run(folder: Path, out: str = "out", **arguments) -> Path:
    export_merged(folder / "base", folder / "checkpoint", folder / out, **arguments)
    return folder / out


def refuses(folder: Path, *words: str, **arguments) -> None:
    """The export is refused with all of ``words``, and leaves nothing behind."""
    before = sorted(folder.iterdir())
    with pytest.raises(CheckpointError) as caught:
        run(folder, **arguments)
    for word in words:
        assert word in str(caught.value)
    assert sorted(folder.iterdir()) == before


# --- the result


@pytest.mark.parametrize("variant", ["float32", "bfloat16", "rslora"])
def test_every_tensor_has_the_bits_of_pefts_merge(folder, variant):
    case = json.loads((DATA / "export_merge.json").read_text())[variant]
    shutil.rmtree(folder / "checkpoint" / "adapter")
    export_inputs.write_checkpoint(folder / "new", **case["settings"])
    shutil.move(folder / "new" / "adapter", folder / "checkpoint" / "adapter")
    tensors = open_export(run(folder)).tensors
    assert {name: hashlib.sha256(x.tobytes()).hexdigest() for name, x in tensors.items()} == case["sha256"]


def test_what_an_export_holds(folder):
    result = open_export(run(folder, max_length=777))
    m = result.manifest
    assert (m.model_id, m.base_revision, m.checkpoint_revision) == ("tests/base", "b" * 40, "c" * 40)
    assert (m.temperature, m.max_length, m.chat_prefix, m.chat_suffix) == (2.25, 777, "<user>", "<end>")
    assert m.head_weight == WEIGHT and m.head_bias == 0.5 and not result.demo
    assert result.model_names == {"tests/base", "open-jev", "jev-latest", "tiny"}
    saved = json.loads((result.path / "open_jev_export.json").read_text())
    assert set(saved) == {"format", "model_id", "base_revision", "checkpoint_revision", "temperature", "max_length",
                          "chat_prefix", "chat_suffix", "head_weight", "head_bias"}
    config = json.loads((result.path / "config.json").read_text())
    assert config["model_type"] == "qwen3_5_text" and result.config == CONFIG
    assert config["rope_parameters"] == TEXT_CONFIG["rope_parameters"]
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (result.path / name).read_bytes() == (folder / "base" / name).read_bytes()
    assert {f.name for f in result.path.iterdir()} == {
        "config.json", "model.safetensors", "open_jev_export.json", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja"}
    assert sorted(f.name for f in folder.iterdir()) == ["base", "checkpoint", "out"]


def test_the_configuration_says_what_transformers_would_fill_in(folder):
    """Settings in older places, or left to defaults, are written where every reader of the format looks."""
    text = {name: x for name, x in TEXT_CONFIG.items() if name not in ("layer_types", "rope_parameters", "hidden_act")}
    text |= {"full_attention_interval": 2, "rope_theta": 1e4}
    edit_json(folder / "base" / "config.json", text_config=text)
    config = json.loads((run(folder) / "config.json").read_text())
    assert config["layer_types"] == TEXT_CONFIG["layer_types"] and config["hidden_act"] == "silu"
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    assert config["max_position_embeddings"] >= 16384 and open_export(folder / "out").config == CONFIG


def test_only_targets_change(folder):
    base = export_inputs.base_tensors(0)
    changed = {name for name, x in open_export(run(folder)).tensors.items() if not np.array_equal(x, base[name])}
    assert changed == {f"layers.{i}.{m}.weight" for i, kind in enumerate(CONFIG.layer_types)
                       for m in export.TARGETS[kind]} | {"layers.0.linear_attn.A_log"}


def test_a_base_in_one_file_gives_the_same(folder):
    expected = run(folder, "sharded")
    index = folder / "base" / "model.safetensors.index.json"
    tensors = {}
    for shard in {*json.loads(index.read_text())["weight_map"].values()}:
        data = (folder / "base" / shard).read_bytes()
        for name, e in read_header(folder / "base" / shard).items():
            bits = np.frombuffer(data, np.uint16 if e.dtype == "BF16" else np.float32, offset=e.start,
                                 count=int(np.prod(e.shape)))
            tensors[name] = (e.dtype, bits.reshape(e.shape))
        (folder / "base" / shard).unlink()
    index.unlink()
    save(folder / "base" / "model.safetensors", tensors)
    assert (run(folder, "single") / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()


@pytest.mark.parametrize("piece", [2, 64, 10_000])
def test_the_size_of_pieces_does_not_matter(folder, monkeypatch, piece):
    expected = run(folder, "whole")
    monkeypatch.setattr(export, "PIECE_BYTES", piece * 4)
    if piece == 2:  # every piece is a system call: one layer's worth of tensors is enough
        entries = read_header(folder / "base/model-00001-of-00002.safetensors")
        name = "model.language_model.layers.0.linear_attn.conv1d.weight"
        assert np.concatenate([*bf16_pieces(entries[name])]).tobytes() == \
            open_export(expected).tensors["layers.0.linear_attn.conv1d.weight"].tobytes()
        return
    assert (run(folder) / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()


def test_shards_keep_to_their_size_and_have_an_index(folder):
    one = open_export(run(folder, "one"))
    limit = 150_000
    many = open_export(run(folder, "many", shard_bytes=limit))
    assert list(one.tensors) == list(many.tensors)
    assert all(np.array_equal(one.tensors[name], x) for name, x in many.tensors.items())
    shards = sorted(many.path.glob("*.safetensors"))
    count = len(shards)
    assert [s.name for s in shards] == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    for path in shards:
        entries = read_header(path)
        assert len(entries) > 1 or path == shards[0]  # the embedding fills one
        assert sum(e.size for e in entries.values()) <= limit
    index = json.loads((many.path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in one.tensors.values())
    assert set(index["weight_map"].values()) == {s.name for s in shards}


def test_a_tensor_larger_than_a_shard_gets_its_own(folder):
    result = open_export(run(folder, shard_bytes=1))
    assert len(list(result.path.glob("*.safetensors"))) == len(result.tensors)


def test_files_can_be_read_by_the_safetensors_library(folder):
    from safetensors import safe_open
    path = run(folder) / "model.safetensors"
    with safe_open(path, "numpy") as file:
        assert set(file.keys()) == set(CONFIG.tensor_shapes()) and file.metadata() == {"format": "pt"}


def test_scores_of_the_demo_are_those_of_transformers(tmp_path):
    """float64 to the accuracy of Transformers' (whose norms are float32), BF16 within its own distance from that."""
    write_demo_checkpoint(tmp_path / "demo")
    demo = open_export(tmp_path / "demo")
    cases = json.loads((DATA / "export_scores.json").read_text())
    ids = [np.array(case["ids"], np.int32) for case in cases]
    hidden = np.array([case["hidden"] for case in cases])
    exact = NumpyBackbone(demo, precision="float64").hidden(ids)[0]
    assert np.abs(exact - hidden).max() < 2e-5
    weight = demo.head.weight.astype(np.float64)
    assert np.abs(exact @ weight + demo.head.bias - [case["score"] for case in cases]).max() < 1e-4
    rounded = NumpyBackbone(demo).hidden(ids)[0]
    distance = np.linalg.norm(bf16.to_float32(rounded) - hidden, axis=1) / np.linalg.norm(hidden, axis=1)
    theirs = np.array([case["bf16_distance"] for case in cases])
    assert (distance / theirs).mean() < 1.15 and (distance / theirs).max() < 1.5
    scores = demo.head.score(rounded)
    assert np.abs(scores - [case["score"] for case in cases]).max() < 0.25


# --- refused before a byte is written


def test_an_existing_output(folder):
    (folder / "out").mkdir()
    refuses(folder, str(folder / "out"), "already exists")
    (folder / "out").rmdir()
    (folder / "out").symlink_to(folder / "nowhere")
    refuses(folder, "already exists")


def test_leftovers_of_a_killed_export(folder):
    (folder / "out.unfinished").mkdir()
    (folder / "out.unfinished" / "model-00001-of-00011.safetensors").touch()
    refuses(folder, "out.unfinished", "half-way", "remove")
    assert (folder / "out.unfinished" / "model-00001-of-00011.safetensors").exists()
    shutil.rmtree(folder / "out.unfinished")
    open_export(run(folder))


@pytest.mark.parametrize("limit", [0, 16385, -5])
def test_a_bad_length(folder, limit):
    refuses(folder, "--max-length", "1..16384", str(limit), max_length=limit)


def test_missing_folders(folder):
    for name in ("base", "checkpoint"):
        os.rename(folder / name, folder / "away")
        refuses(folder, str(folder / name), "no such folder")
        os.rename(folder / "away", folder / name)


@pytest.mark.parametrize("file, changes, words", [
    ("model.json", {"model_id": "Qwen/Qwen3.5-4B"}, ["model_id", "Qwen/Qwen3.8-27B", "Qwen/Qwen3.5-4B"]),
    ("model.json", {"model_id": None}, ["model_id", "is missing"]),
    ("model.json", {"revision": "a" * 40}, ["revision", "b" * 40, "a" * 40]),
    ("model.json", {"lora_rank": None}, ["lora_rank", "is missing"]),
    ("model.json", {"lora_rank": "4"}, ["lora_rank"]),
    ("model.json", {"lora_rank": 8}, ["adapter_config.json", "r", "is 4", "8"]),
    ("temperature.json", {"temperature": 0}, ["temperature", "positive"]),
    ("temperature.json", {"temperature": float("nan")}, ["temperature", "nan"]),
    ("temperature.json", {"temperature": None}, ["temperature", "is missing"]),
    ("adapter/adapter_config.json", {"peft_type": "IA3"}, ["peft_type", "IA3"]),
    ("adapter/adapter_config.json", {"r": None}, ["r: is missing"]),
    ("adapter/adapter_config.json", {"lora_alpha": None}, ["lora_alpha: is missing"]),
    ("adapter/adapter_config.json", {"lora_alpha": 0}, ["lora_alpha", "positive"]),
    ("adapter/adapter_config.json", {"lora_alpha": "16"}, ["lora_alpha"]),
    ("adapter/adapter_config.json", {"r": 8}, ["r: is 8", "4"]),
    ("adapter/adapter_config.json", {"target_modules": ["q_proj", "up_proj"]}, ["target_modules", "up_proj"]),
    ("adapter/adapter_config.json", {"target_modules": None}, ["target_modules", "is missing"]),
    ("adapter/adapter_config.json", {"use_dora": True}, ["use_dora"]),
    ("adapter/adapter_config.json", {"rank_pattern": {"q_proj": 8}}, ["rank_pattern"]),
    ("adapter/adapter_config.json", {"alpha_pattern": {"q_proj": 8}}, ["alpha_pattern"]),
    ("adapter/adapter_config.json", {"modules_to_save": ["norm"]}, ["modules_to_save"]),
    ("adapter/adapter_config.json", {"bias": "lora_only"}, ["bias", "lora_only"]),
    ("adapter/adapter_config.json", {"init_lora_weights": "pissa"}, ["init_lora_weights", "pissa"]),
])
def test_checkpoints_that_are_refused(folder, file, changes, words):
    edit_json(folder / "checkpoint" / file, **changes)
    refuses(folder, Path(file).name if "lora_rank" not in changes else "", *words)


@pytest.mark.parametrize("file", ["model.json", "temperature.json", "adapter/adapter_config.json", ADAPTER])
def test_a_checkpoint_without_a_file(folder, file):
    (folder / "checkpoint" / file).unlink()
    refuses(folder, file)


def test_adapters_that_do_not_fit(folder):
    good = {name: ("F32", x) for name, x in export_inputs.adapter_tensors(0).items()}
    path = folder / "checkpoint" / ADAPTER

    def damaged(*words, without=(), **changes):
        save(path, {n: x for n, x in (good | changes).items() if n not in without})
        refuses(folder, ADAPTER, *words)

    a = good[Q_A][1]
    damaged("lora_A", "layers.1.self_attn.q_proj", "missing", without=[Q_A])
    damaged("lora_B", "layers.0.linear_attn.out_proj", "missing",
            without=["base_model.model.layers.0.linear_attn.out_proj.lora_B.weight"])
    for other in ("base_model.model.layers.1.mlp.up_proj.lora_A.weight",       # not a target
                  "base_model.model.layers.0.self_attn.q_proj.lora_A.weight",  # not in this kind of layer
                  "base_model.model.layers.4.linear_attn.out_proj.lora_A.weight",
                  "base_model.model.visual.blocks.0.attn.proj.lora_A.weight",
                  "base_model.model.layers.1.self_attn.q_proj.lora_magnitude_vector",
                  "base_model.model.layers.1.self_attn.q_proj.base_layer.weight", "x"):
        damaged(other, "is not a LoRA matrix", **{other: ("F32", a)})
    damaged(Q_A, "[4, 64]", "[8, 64]", **{Q_A: ("F32", np.zeros((8, 64), np.float32))})
    damaged(Q_A, "I64", **{Q_A: ("I64", np.zeros((4, 64), np.int64))})
    damaged("different prefixes", **{Q_A.replace("model.layers", "model.model.layers"): ("F32", a)})
    path.write_bytes(path.read_bytes()[:-1])
    refuses(folder, ADAPTER, "truncated")


@pytest.mark.parametrize("prefix", ["base_model.model.model.", "base_model.model.model.language_model."])
def test_an_adapter_trained_on_a_wrapped_model(folder, prefix):
    expected = run(folder, "plain")
    save(folder / "checkpoint" / ADAPTER, {name.replace("base_model.model.", prefix): ("F32", x)
                                           for name, x in export_inputs.adapter_tensors(0).items()})
    edit_json(folder / "checkpoint" / "adapter/adapter_config.json", target_modules=r".*(q_proj|in_proj_qkv)")
    assert (run(folder) / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()


@pytest.mark.parametrize("value, where", [(np.nan, "A"), (np.inf, "A"), (np.inf, "B"), (3e38, "B")])
def test_a_delta_that_is_not_finite(folder, value, where):
    tensors = export_inputs.adapter_tensors(0)
    tensors[Q_A.replace("lora_A", f"lora_{where}")][2, 3] = value
    tensors[Q_A][3] = 10
    save(folder / "checkpoint" / ADAPTER, {name: ("F32", x) for name, x in tensors.items()})
    refuses(folder, "layers.1.self_attn.q_proj.weight", "not finite", ADAPTER)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("side", "AB")
def test_factors_that_are_not_finite_are_found_before_writing(folder, monkeypatch, dtype, value, side):
    tensors = export_inputs.adapter_tensors(0)
    tensors[Q_A.replace("lora_A", f"lora_{side}")][-1, -1] = value
    convert = {"F32": np.asarray, "F16": np.float16, "BF16": bf16.from_float32}[dtype]
    save(folder / "checkpoint" / ADAPTER, {name: (dtype, convert(x)) for name, x in tensors.items()})
    monkeypatch.setattr(export, "write_export", lambda *a, **k: pytest.fail("writing began"))
    refuses(folder, f"lora_{side} of layers.1.self_attn.q_proj.weight is not finite", ADAPTER)


def test_a_sum_that_is_not_finite(folder, monkeypatch):
    monkeypatch.setattr(export, "torch_matmul", lambda b, a: np.full((b.shape[0], a.shape[1]), 3e38, np.float32) / 1.5)
    shard = folder / "base" / "model-00001-of-00002.safetensors"
    name = "model.language_model.layers.0.linear_attn.in_proj_qkv.weight"
    at = read_header(shard)[name].start
    data = bytearray(shard.read_bytes())
    data[at:at + 2] = (0x7F7F).to_bytes(2, "little")  # the largest finite BF16
    shard.write_bytes(data)
    refuses(folder, "layers.0.linear_attn.in_proj_qkv.weight", "not finite after merging")


def test_bases_that_are_refused(folder):
    base = folder / "base"
    config = json.loads((base / "config.json").read_text())
    for changes, words in (({"hidden_size": 128}, ["hidden_size", "64", "128"]),
                           ({"num_hidden_layers": 3, "layer_types": TEXT_CONFIG["layer_types"][:3]}, ["num_layers"]),
                           ({"linear_num_value_heads": 2}, ["linear_num_value_heads", "6", "2"]),
                           ({"model_type": "llama"}, ["model_type", "llama"])):
        edit_json(base / "config.json", text_config=TEXT_CONFIG | changes)
        refuses(folder, "config.json", *words)
    export_inputs.write_json(base / "config.json", config)
    os.rename(base / "tokenizer.json", folder / "tokenizer.json")
    refuses(folder, "tokenizer.json", "missing")
    os.rename(folder / "tokenizer.json", base / "tokenizer.json")
    for shard in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        os.rename(base / shard, folder / shard)
        refuses(folder, shard, "missing")
        os.rename(folder / shard, base / shard)
    data = (base / shard).read_bytes()
    (base / shard).write_bytes(data[:-10])
    refuses(folder, shard)
    (base / shard).write_bytes(data)
    open_export(run(folder))


def test_too_little_disk(folder, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 10**5))
    monkeypatch.setattr(export, "bf16_pieces", lambda entry: pytest.fail("read before the disk was checked"))
    refuses(folder, "GB of disk", "are free")
    refuses(folder, f"{folder}: ", "GB of disk", out="new/folders/out")


# --- which revision a folder holds


def metadata(root: Path, files: dict[str, str]) -> None:
    """What `hf download --local-dir` notes about files (path in the repository -> commit)."""
    for file, commit in files.items():
        path = root / ".cache/huggingface/download" / f"{file}.metadata"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{commit}\n{'e' * 40}\n1712656091.123\n")


def test_a_revision_file(folder, tmp_path):
    assert known_revision(folder / "base", (), SOURCE.model_id) == "b" * 40
    for name, repo in (("base", SOURCE.model_id), ("checkpoint", SOURCE.checkpoint_repo)):
        kept = (folder / name / "revision").read_text()
        (folder / name / "revision").write_text("a" * 40)
        refuses(folder, str(folder / name), "a" * 40, repo, kept.strip())
        (folder / name / "revision").write_text("main")
        refuses(folder, "revision", "40 hex digits", "main")
        (folder / name / "revision").unlink()
        refuses(folder, str(folder / name), "revision is unknown", "hf download", repo)
        (folder / name / "revision").write_text(kept)


def test_a_download_into_a_folder(folder):
    base, repository = folder / "base", folder / "repository"
    (base / "revision").unlink()
    files = {f.name: SOURCE.base_revision for f in base.iterdir()}
    metadata(base, files)
    repository.mkdir()
    os.rename(folder / "checkpoint", folder / "repository" / "package")
    (folder / "checkpoint").symlink_to(folder / "repository" / "package")  # a subfolder of the repository, linked
    (repository / "package" / "revision").unlink()
    metadata(repository, {f"package/{file}": SOURCE.checkpoint_revision for file in export.CHECKPOINT_FILES})
    open_export(run(folder))
    shutil.rmtree(folder / "out")
    shard = "model-00002-of-00002.safetensors"
    metadata(base, {shard: "a" * 40})
    refuses(folder, shard, "a" * 40, "b" * 40, "download it again")
    (base / ".cache/huggingface/download" / f"{shard}.metadata").unlink()
    refuses(folder, shard, "unknown")
    metadata(base, dict.fromkeys(files, "a" * 40))
    refuses(folder, str(base), "a" * 40, "b" * 40)
    metadata(base, files)
    metadata(repository, {"package/head.pt": "d" * 40})
    refuses(folder, "head.pt", "d" * 40, "c" * 40)


def test_a_snapshot_of_the_cache(tmp_path):
    path = tmp_path / "models--Qwen--Qwen3.5-9B" / "snapshots" / ("1" * 40) / "package" / "checkpoint"
    path.mkdir(parents=True)
    assert known_revision(path, ("model.json",), "Qwen/Qwen3.5-9B") == "1" * 40
    (tmp_path / "link").symlink_to(path.parents[1])
    assert known_revision(tmp_path / "link", (), "Qwen/Qwen3.5-9B") == "1" * 40
    with pytest.raises(CheckpointError, match="snapshot of Qwen/Qwen3.5-9B, expected Qwen/Qwen3.8-27B"):
        known_revision(path, (), "Qwen/Qwen3.8-27B")


# --- reading and writing


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_matrices_are_read_exactly(tmp_path, dtype):
    x = np.random.default_rng(0).standard_normal((7, 33)).astype(np.float32)
    stored = {"F32": x, "F16": x.astype(np.float16), "BF16": bf16.from_float32(x)}[dtype]
    value = bf16.to_float32(stored) if dtype == "BF16" else stored.astype(np.float32)
    save(tmp_path / "x.safetensors", {"x": (dtype, stored)})
    entry = read_header(tmp_path / "x.safetensors")["x"]
    assert np.array_equal(read_matrix(entry), value)
    assert np.array_equal(np.concatenate([*bf16_pieces(entry)]).reshape(7, 33), bf16.from_float32(value))


def test_a_file_cut_while_it_is_read(tmp_path):
    save(tmp_path / "x.safetensors", {"x": ("BF16", np.zeros(100, np.uint16))})
    entry = read_header(tmp_path / "x.safetensors")["x"]
    os.truncate(tmp_path / "x.safetensors", entry.start + 50)
    with pytest.raises(CheckpointError, match="ended while it was read"):
        read_matrix(entry)


def manifest() -> checkpoint.Manifest:
    return checkpoint.Manifest(checkpoint.DEMO_MODEL_ID, "demo", "demo", 1.0, 10, "", "", WEIGHT, 0.0, demo=True)


def good_stream():
    return ((name, [x]) for name, x in export_inputs.base_tensors(0).items())


FILES = {"tokenizer.json": b"{}"}


@pytest.mark.parametrize("stream, words", [
    (lambda: list(good_stream())[:-1], ["norm.weight", "None"]),
    (lambda: list(good_stream())[1:], ["embed_tokens.weight", "layers.0"]),
    (lambda: [*good_stream(), ("extra", [])], ["more tensors"]),
    (lambda: [(n, [x[:-1]]) for n, x in good_stream_arrays()], ["embed_tokens.weight", "short"]),
    (lambda: [(n, [x, x]) for n, x in good_stream_arrays()], ["embed_tokens.weight", "short"]),
    (lambda: [(n, [x.astype(np.float32)]) for n, x in good_stream_arrays()], ["embed_tokens.weight", "float32"]),
])
def test_the_writer_takes_exactly_the_tensors_of_the_configuration(tmp_path, stream, words):
    with pytest.raises(CheckpointError) as caught:
        write_export(tmp_path / "out", TEXT_CONFIG, stream(), manifest(), FILES)
    for word in words:
        assert word in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def good_stream_arrays():
    return export_inputs.base_tensors(0).items()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), RuntimeError("x")])
def test_an_interrupted_export_leaves_nothing(tmp_path, error):
    def stream():
        for i, item in enumerate(good_stream()):
            if i == 20:
                assert (tmp_path / "out.unfinished").is_dir() and not (tmp_path / "out").exists()
                raise error
            yield item
    with pytest.raises(type(error)):
        write_export(tmp_path / "out", TEXT_CONFIG, stream(), manifest(), FILES)
    assert list(tmp_path.iterdir()) == []


def test_folders_made_for_an_export_that_fails_go_too(tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="more tensors"):
        write_export(tmp_path / "there/new/folders/out", TEXT_CONFIG, [*good_stream(), ("x", [])], manifest(), FILES)
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]


@pytest.mark.parametrize("limit, file", [(100_000, "model.safetensors"), (50, "config.json")])
def test_a_file_that_cannot_be_written_is_named(tmp_path, limit, file):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(OSError) as caught:
            write_export(tmp_path / "out", TEXT_CONFIG, good_stream(), manifest(), FILES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(caught.value) == f"[Errno 27] File too large: '{tmp_path / 'out.unfinished' / file}'"
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    entry = weight_files.TensorEntry(Path("/proc/self/mem"), "BF16", (4,), 0, 8)  # nothing is mapped at address 0
    with pytest.raises(OSError, match="Input/output error: '/proc/self/mem'"):
        read_matrix(entry)


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    did = []

    def sync(file, real=os.fsync):
        did.append(os.readlink(f"/proc/self/fd/{file}").replace(str(tmp_path), ""))
        real(file)

    def rename(old, new, real=os.rename):
        did.append("rename")
        real(old, new)
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", rename)
    write_export(tmp_path / "new/out", TEXT_CONFIG, good_stream(), manifest(), FILES)
    work = "/new/out.unfinished"
    assert sorted(did[:3]) == [f"{work}/config.json", f"{work}/model.safetensors", f"{work}/tokenizer.json"]
    assert did[3:] == [f"{work}/open_jev_export.json.new", work, "rename", "/new", ""]


def test_the_manifest_comes_last(tmp_path, monkeypatch):
    """At every moment of the writing, whatever exists is refused; ``out`` appears whole."""
    work, seen = tmp_path / "out.unfinished", []

    def check(_):
        seen.append(sorted(f.name for f in work.iterdir()))
        assert not (tmp_path / "out").exists()
        with pytest.raises(CheckpointError, match="unfinished"):
            open_export(work)
    write_export(tmp_path / "out", TEXT_CONFIG, good_stream(), manifest(), FILES, progress=check, shard_bytes=200_000)
    assert len(seen) == len(CONFIG.tensor_shapes()) and not any("open_jev_export.json" in names for names in seen)
    open_export(tmp_path / "out")


def test_progress_counts_every_byte(tmp_path):
    counts = []
    write_export(tmp_path / "out", TEXT_CONFIG, good_stream(), manifest(), FILES, progress=counts.append)
    assert sum(counts) == sum(x.nbytes for x in export_inputs.base_tensors(0).values())


# --- the command


def command(folder: Path, *more: str) -> list[str]:
    return [*(f"--{name}={folder / name}" for name in ("base", "checkpoint", "out")), *more]


def test_the_command(folder, capsys):
    assert export.main(command(folder)) == 0
    output = capsys.readouterr()
    assert str(folder / "out") in output.out and "100%" in output.err
    assert open_export(folder / "out").manifest.max_length == 4096
    assert export.main(command(folder)) == 1
    assert "jev export: " in (error := capsys.readouterr().err) and "already exists" in error


def test_the_command_takes_a_length(folder, handlers):
    assert export.main(command(folder, "--max-length", "16384")) == 0
    assert open_export(folder / "out").manifest.max_length == 16384
    assert {number: signal.getsignal(number) for number in export.ENDING} == handlers


def test_the_command_reports_what_failed(folder, capsys, monkeypatch):
    edit_json(folder / "checkpoint" / "model.json", lora_rank=8)
    assert export.main(command(folder)) == 1
    assert "adapter_config.json" in capsys.readouterr().err
    monkeypatch.setattr(export, "export_merged", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left")))
    assert export.main(command(folder)) == 1 and "No space left" in capsys.readouterr().err
    monkeypatch.setattr(export, "export_merged", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    assert export.main(command(folder)) == 130 and "interrupted" in capsys.readouterr().err


SLOWLY = """
import sys, time
from jev import cli
from jev.checkpoint import checkpoint
from jev.export import export
from tests import export_inputs
from tests.export import test_export

def slowly(entry, real=export.bf16_pieces):
    for piece in real(entry):
        time.sleep(0.2)
        yield piece

checkpoint.PINNED = (export_inputs.SOURCE,)
export.bf16_pieces = slowly
export.torch_matmul = test_export.fused_matmul
export.read_head = lambda path, width: (list(test_export.WEIGHT), 0.5)
export.chat_frame = lambda base: ("", "")
sys.exit(cli.main(["export", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("signals, ignored, status", [
    ([signal.SIGINT], None, [130]), ([signal.SIGTERM, signal.SIGHUP], None, [129, 143]),
    ([signal.SIGHUP, signal.SIGTERM], signal.SIGHUP, [143])])
def test_the_command_ends_on_a_signal_and_leaves_nothing(inputs, tmp_path, signals, ignored, status):
    def prepare():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # of a program in the foreground
        if ignored:
            signal.signal(ignored, signal.SIG_IGN)
    arguments = [f"--base={inputs / 'base'}", f"--checkpoint={inputs / 'checkpoint'}", f"--out={tmp_path / 'new/out'}"]
    child = subprocess.Popen([sys.executable, "-c", SLOWLY, *arguments], cwd=Path(__file__).parents[2], text=True,
                             stderr=subprocess.PIPE, preexec_fn=prepare)
    try:
        until = time.monotonic() + 60
        while not (tmp_path / "new/out.unfinished/model.safetensors").exists() and time.monotonic() < until:
            time.sleep(0.02)
        for number in (signal.SIGSTOP, *signals, signal.SIGCONT):  # all at once
            child.send_signal(number)
        said = child.communicate(timeout=60)[1]
    finally:
        child.kill()
    assert child.returncode in status, said
    assert said.endswith("\njev export: interrupted; nothing unfinished is left\n")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def handlers() -> Iterator[dict[int, object]]:
    """Of signals, as they were before the test; they are put back. In it they are the usual ones, under nohup too."""
    before = {number: signal.getsignal(number) for number in export.ENDING}
    for number in export.ENDING:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


def test_signals_during_the_clean_up_and_after(folder, capsys, monkeypatch, handlers):
    def remove(*a, real=shutil.rmtree, **k):
        for number in export.ENDING:
            os.kill(os.getpid(), number)
        real(*a, **k)
    monkeypatch.setattr(shutil, "rmtree", remove)
    monkeypatch.setattr(export, "torch_matmul", lambda b, a: os.kill(os.getpid(), signal.SIGHUP))
    assert export.main(command(folder)) == 129
    os.kill(os.getpid(), signal.SIGINT)
    assert capsys.readouterr().err.endswith("jev export: interrupted; nothing unfinished is left\n")
    assert not (folder / "out").exists() and not (folder / "out.unfinished").exists()


def test_the_command_says_what_an_interruption_left(folder, capsys, monkeypatch, handlers):
    def interrupted(*a):
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("the signal did not raise")
    monkeypatch.setattr(export, "torch_matmul", interrupted)
    monkeypatch.setattr(shutil, "rmtree", lambda *a, **k: None)
    assert export.main(command(folder)) == 143
    assert f"interrupted; {folder / 'out.unfinished'} is there, unfinished" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--base", "x"], ["--max-length", "many"]])
def test_the_command_needs_its_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        export.main(arguments)
    assert caught.value.code == 2


def test_the_recipe_is_the_command(tmp_path):
    path = Path(export.__file__).parents[2] / "recipe/open_jev/export_merged.py"
    done = subprocess.run([sys.executable, path, "--base=a", "--checkpoint=b", "--out=c"], cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == "jev export: a: no such folder\n"


def test_a_missing_package_is_named(monkeypatch):
    with pytest.raises(CheckpointError, match=r"needs no_such_package: in the checkout, pip install '\.\[export\]'"):
        export._import("no_such_package")


def test_the_extra_is_what_the_export_imports():
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[2] / "setup.cfg")
    extra = re.findall(r"^[\w-]+", setup["options.extras_require"]["export"], re.M)
    assert set(extra) == set(re.findall(r'_import\("(\w+)"\)', Path(export.__file__).read_text()))
