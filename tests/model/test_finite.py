"""A worker whose warm-up is not finite names the operation, and the tensor if it is one's fault."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest

from jev import cli
from jev.checkpoint.opening import open_export
from jev.checkpoint.weight_files import read_header
from jev.engine import Engine, InferenceError
from jev.model.finite import explain
from jev.model.numpy_backbone import NumpyBackbone
from jev.settings import Settings
from tests import models
from tests.fakes import demo_export

NAN, INFINITY, LARGE = 0x7FC0, 0x7F80, 0x7F7F
CONFIG = models.config("mixed")                 # full attention in layers 0 and 2, the delta rule in 1 and 3
SEQUENCES = models.sequences(np.random.default_rng(0), CONFIG.vocab_size, [7, 9])


def model(changes) -> SimpleNamespace:
    """A tiny export with elements of tensors replaced: name -> (place, bits)."""
    tensors = models.tensors(CONFIG)
    for name, (place, bits) in changes.items():
        tensors[name][place] = bits
    return SimpleNamespace(config=CONFIG, tensors=tensors, manifest=SimpleNamespace(max_length=64))


@pytest.mark.parametrize("name, place, bits, said", [
    ("embed_tokens.weight", (SEQUENCES[0][3], 5), NAN, "embed in embed_tokens with embed"),
    ("layers.0.input_layernorm.weight", (5,), INFINITY, "rms_norm in layers.0 with layers.0.input_norm"),
    ("layers.0.self_attn.v_proj.weight", (3, 4), NAN, "linear in layers.0 with layers.0.in_proj"),
    ("layers.0.self_attn.q_norm.weight", (1,), NAN, "qk_rope in layers.0 with layers.0.q_norm, layers.0.k_norm"),
    ("layers.2.self_attn.o_proj.weight", (55, 127), 0xFFC0, "linear in layers.2 with layers.2.out_proj"),
    ("layers.1.linear_attn.conv1d.weight", (0, 0, 3), NAN, "gdn_conv_gates in layers.1 with layers.1.conv, layers.1.a_log"),
    ("layers.3.linear_attn.A_log", (1,), NAN, "gdn_conv_gates in layers.3"),
    ("layers.1.linear_attn.norm.weight", (31,), NAN, "gated_rms_norm in layers.1 with layers.1.gdn_norm"),
    ("layers.1.post_attention_layernorm.weight", (0,), NAN, "add_rms_norm in layers.1 with layers.1.post_norm"),
    ("layers.2.mlp.up_proj.weight", (87, 55), NAN, "swiglu in layers.2 with layers.2.gate_up"),
    ("layers.3.mlp.down_proj.weight", (0, 87), NAN, "linear in layers.3 with layers.3.down_proj"),
    ("norm.weight", (55,), NAN, "add_rms_norm in norm with norm")])
def test_the_operation_and_the_tensor_are_named(name, place, bits, said):
    export = model({name: (place, bits)})
    reason = explain(export, NumpyBackbone(export), SEQUENCES)
    assert f"is that of {said}" in reason
    assert reason.endswith(f", and {name}{[int(at) for at in place]} is {'infinity' if bits == INFINITY else 'NaN'}")


def test_weights_that_are_finite_may_still_give_what_is_not():
    export = model({})
    for name in ("layers.1.mlp.gate_proj.weight", "layers.1.mlp.up_proj.weight"):
        export.tensors[name][:] = LARGE
    with np.errstate(over="ignore", invalid="ignore"):
        reason = explain(export, NumpyBackbone(export), SEQUENCES)
    assert reason == ("the first result that is not finite is that of swiglu in layers.1 with layers.1.gate_up; "
                      "the weights there are all finite")


def test_nothing_is_said_of_a_forward_that_is_finite():
    export = model({})
    assert explain(export, NumpyBackbone(export), SEQUENCES) is None


def test_operations_without_weights_belong_to_their_layer():
    export = model({})
    backbone = NumpyBackbone(export)
    real, calls = backbone.ops.gated_delta_rule, []

    def broken(*args):
        calls.append(real(*args))
        return calls[-1] * (np.inf if len(calls) == 2 else 1)
    backbone.ops.gated_delta_rule = broken
    reason = explain(export, backbone, SEQUENCES)
    assert reason == ("the first result that is not finite is that of gated_delta_rule in layers.3; "
                      "the weights there are all finite")


@pytest.fixture
def damaged(tmp_path):
    """The demo export with a NaN in a projection of layer 5."""
    export = demo_export(tmp_path)
    path = export.path / "model.safetensors"
    entry = read_header(path)["layers.5.mlp.up_proj.weight"]
    with open(path, "r+b") as file:
        file.seek(entry.start + 2 * 700)
        file.write(NAN.to_bytes(2, "little"))
    return open_export(export.path)


WHY = "swiglu in layers.5 with layers.5.gate_up, and layers.5.mlp.up_proj.weight[2, 188] is NaN"


def test_a_warm_up_that_is_not_finite_says_why(damaged):
    backbone = NumpyBackbone(damaged)
    with pytest.raises(InferenceError, match=re.escape(WHY)):
        Engine(damaged, backbone, Settings())
    assert backbone.model is None               # closed


def test_serve_says_why(damaged, capfd):
    assert cli.main(["serve", "--model", str(damaged.path), "--backend", "numpy", "--port", "0"]) == 1
    said = capfd.readouterr().err
    assert f"jev: the warm-up is not finite: the first result that is not finite is that of {WHY}" in said
    assert "listening" not in said


def test_a_forward_that_cannot_be_repeated_keeps_its_error(damaged, caplog):
    def bound(pool):
        raise RuntimeError("no context")
    backbone = NumpyBackbone(damaged)
    backbone.bound = bound
    with pytest.raises(InferenceError, match="^model inference failed$"):
        Engine(damaged, backbone, Settings())
    assert "no context" in caplog.text
