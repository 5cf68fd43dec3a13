"""Adapters that are read, and those that do not fit the model."""

from __future__ import annotations

import numpy as np
import pytest

from tests import export_inputs
from tests.export.exporting import ADAPTER, Q_A, refuses, run
from tests.export_inputs import edit_json, save


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
