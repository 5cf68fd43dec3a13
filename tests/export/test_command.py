"""The command: what its result holds, what it refuses before a byte is written, and what it says."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from jev.checkpoint.checked_json import CheckpointError
from jev.checkpoint.opening import open_export
from jev.checkpoint.weight_files import read_header
from jev.export import command
from jev.export.command import main
from jev.export.inputs import import_extra
from jev.export.signals import ENDING
from tests import export_inputs
from tests.export.exporting import ADAPTER, WEIGHT, arguments, refuses, run
from tests.export_inputs import CONFIG, TEXT_CONFIG, edit_json, save


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
        "chat_template.jinja", "SHA256SUMS"}
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
    scaling = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}  # under its older name
    edit_json(folder / "base" / "config.json", text_config=text | {"rope_scaling": scaling, "rope_theta": None})
    config = json.loads((run(folder, "older") / "config.json").read_text())
    assert config["rope_parameters"] == scaling | {"partial_rotary_factor": 0.25} and "rope_scaling" not in config
    assert open_export(folder / "older").config == CONFIG


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
    ("adapter/adapter_config.json", {"target_modules": 7}, ["target_modules", "7"]),
    ("adapter/adapter_config.json", {"use_rslora": "no"}, ["use_rslora", "'no'"]),
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


def test_bases_that_are_refused(folder):
    base = folder / "base"
    config = json.loads((base / "config.json").read_text())
    for changes, words in (({"hidden_size": 128}, ["hidden_size", "64", "128"]),
                           ({"num_hidden_layers": 3, "layer_types": TEXT_CONFIG["layer_types"][:3]}, ["num_layers"]),
                           ({"linear_num_value_heads": 2}, ["linear_num_value_heads", "6", "2"]),
                           ({"model_type": "llama"}, ["model_type", "llama"]),
                           ({"rope_scaling": {"type": "yarn", "factor": 4}}, ["rope_scaling: type", "yarn"]),
                           ({"rope_parameters": {"type": "linear", "factor": 2}}, ["rope_parameters: type", "linear"])):
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
    monkeypatch.setattr(command, "bf16_pieces", lambda entry: pytest.fail("read before the disk was checked"))
    refuses(folder, "GB of disk", "are free")
    refuses(folder, f"{folder}: ", "GB of disk", out="new/folders/out")


def test_the_arguments(folder, capsys):
    assert main(arguments(folder)) == 0
    output = capsys.readouterr()
    assert str(folder / "out") in output.out and "100%" in output.err
    assert open_export(folder / "out").manifest.max_length == 4096
    assert main(arguments(folder)) == 1
    assert "jev export: " in (error := capsys.readouterr().err) and "already exists" in error


def test_the_command_takes_a_length(folder, handlers):
    assert main(arguments(folder, "--max-length", "16384")) == 0
    assert open_export(folder / "out").manifest.max_length == 16384
    assert {number: signal.getsignal(number) for number in ENDING} == handlers


def test_the_command_reports_what_failed(folder, capsys, monkeypatch):
    edit_json(folder / "checkpoint" / "model.json", lora_rank=8)
    assert main(arguments(folder)) == 1
    assert "adapter_config.json" in capsys.readouterr().err
    monkeypatch.setattr(command, "export_merged", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left")))
    assert main(arguments(folder)) == 1 and "No space left" in capsys.readouterr().err
    monkeypatch.setattr(command, "export_merged", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(arguments(folder)) == 130 and "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--base", "x"], ["--max-length", "many"]])
def test_the_command_needs_its_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2


def test_the_recipe_is_the_command(tmp_path):
    path = Path(command.__file__).parents[2] / "recipe/open_jev/export_merged.py"
    done = subprocess.run([sys.executable, path, "--base=a", "--checkpoint=b", "--out=c"], cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == "jev export: a: no such folder\n"


def test_a_missing_package_is_named(monkeypatch):
    with pytest.raises(CheckpointError, match=r"needs no_such_package: in the checkout, pip install '\.\[export\]'"):
        import_extra("no_such_package")


def test_the_extra_is_what_the_export_imports():
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[2] / "setup.cfg")
    extra = re.findall(r"^[\w-]+", setup["options.extras_require"]["export"], re.M)
    assert set(extra) == set(re.findall(r'import_extra\("(\w+)"\)', "".join(
        module.read_text() for module in Path(command.__file__).parent.glob("*.py"))))
