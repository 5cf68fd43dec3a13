"""The merge against PEFT's recorded bits, and sums that are not finite."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from jev.checkpoint.opening import open_export
from jev.checkpoint.weight_files import read_header
from jev.export import command, merge, pieces
from jev.export.lora import TARGETS
from jev_kernels import bf16
from tests import export_inputs
from tests.export.exporting import ADAPTER, Q_A, refuses, run
from tests.export_inputs import CONFIG, save

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("variant", ["float32", "bfloat16", "rslora"])
def test_every_tensor_has_the_bits_of_pefts_merge(folder, variant):
    case = json.loads((DATA / "export_merge.json").read_text())[variant]
    shutil.rmtree(folder / "checkpoint" / "adapter")
    export_inputs.write_checkpoint(folder / "new", **case["settings"])
    shutil.move(folder / "new" / "adapter", folder / "checkpoint" / "adapter")
    tensors = open_export(run(folder)).tensors
    assert {name: hashlib.sha256(x.tobytes()).hexdigest() for name, x in tensors.items()} == case["sha256"]


def test_only_targets_change(folder):
    base = export_inputs.base_tensors(0)
    changed = {name for name, x in open_export(run(folder)).tensors.items() if not np.array_equal(x, base[name])}
    assert changed == {f"layers.{i}.{m}.weight" for i, kind in enumerate(CONFIG.layer_types)
                       for m in TARGETS[kind]} | {"layers.0.linear_attn.A_log"}


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
    monkeypatch.setattr(command, "write_export", lambda *a, **k: pytest.fail("writing began"))
    refuses(folder, f"lora_{side} of layers.1.self_attn.q_proj.weight is not finite at [", ADAPTER)


@pytest.mark.parametrize("tensor, place", [
    ("layers.0.linear_attn.in_proj_qkv.weight", (7, 3)), ("layers.1.mlp.up_proj.weight", (127, 63)),
    ("layers.0.linear_attn.conv1d.weight", (5, 0, 3)), ("embed_tokens.weight", (1023, 0)), ("norm.weight", (63,))])
@pytest.mark.parametrize("bits, kind", [(0x7FC0, "NaN"), (0xFF80, "-infinity"), (0x7F80, "infinity")])
def test_a_base_weight_that_is_not_finite(folder, monkeypatch, tensor, place, bits, kind):
    monkeypatch.setattr(pieces, "PIECE_BYTES", 4096)        # the place counts over pieces
    shard = next(path for path in sorted((folder / "base").glob("*.safetensors"))
                 if f"model.language_model.{tensor}" in read_header(path))
    entry = read_header(shard)[f"model.language_model.{tensor}"]
    at = entry.start + 2 * int(np.ravel_multi_index(place, entry.shape))
    data = bytearray(shard.read_bytes())
    data[at:at + 2] = bits.to_bytes(2, "little")
    shard.write_bytes(data)
    refuses(folder, f"{tensor}{list(place)} is {kind}")


def test_a_sum_that_is_not_finite(folder, monkeypatch):
    monkeypatch.setattr(merge, "torch_matmul", lambda b, a: np.full((b.shape[0], a.shape[1]), 3e38, np.float32) / 1.5)
    shard = folder / "base" / "model-00001-of-00002.safetensors"
    name = "model.language_model.layers.0.linear_attn.in_proj_qkv.weight"
    at = read_header(shard)[name].start
    data = bytearray(shard.read_bytes())
    data[at:at + 2] = (0x7F7F).to_bytes(2, "little")  # the largest finite BF16
    shard.write_bytes(data)
    refuses(folder, "layers.0.linear_attn.in_proj_qkv.weight[0, 0] is infinity", "not finite after merging")
