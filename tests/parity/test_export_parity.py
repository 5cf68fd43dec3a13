"""Exports against the reference way, live: load with Transformers, merge with PEFT, save. Every tensor, bit for bit."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from jev.checkpoint import pinned, weight_files
from jev.checkpoint.checked_json import CheckpointError
from jev.checkpoint.config import ModelConfig
from jev.checkpoint.config_fields import unknown_fields
from jev.checkpoint.demo import CHAT_PREFIX, CHAT_SUFFIX
from jev.checkpoint.manifest import Manifest
from jev.checkpoint.opening import open_export
from jev.checkpoint.pinned import Pinned
from jev.contract import parse_request
from jev.export import command, lora, merge, pieces
from jev.export.inputs import chat_frame, read_head
from jev.model.numpy_backbone import NumpyBackbone
from jev.processor import Processor
from tests.export_inputs import F, L, edit_json, write_json, write_tokenizer

pytestmark = pytest.mark.parity
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "out_proj"]
TEXT = {"vocab_size": 1024, "num_hidden_layers": 4, "head_dim": 256, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 1e7,
                                                          "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}}
MODELS = {
    # grouped heads in the proportions of 27B (6 : 1 and 3 : 1)
    "wide": TEXT | {"hidden_size": 320, "intermediate_size": 448, "num_attention_heads": 6, "num_key_value_heads": 1,
                    "linear_num_key_heads": 1, "linear_num_value_heads": 3, "layer_types": [L, L, L, F]},
    # and of 9B (4 : 1 and 2 : 1), full attention first
    "mixed": TEXT | {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 1,
                     "linear_num_key_heads": 2, "linear_num_value_heads": 4, "layer_types": [F, L, F, L]},
}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "num_position_embeddings": 16}
REQUEST = json.dumps({"state": "The parcel left the depot on Tuesday.", "questions": {
    "queue": {"type": "choice", "instructions": "Which queue?", "criteria": {"air": None, "road": "three days"}},
    "late": {"type": "noul", "instructions": "Is it late?"}}}).encode()


def make_base(folder: Path, text: dict, seed: int, shard: str = "1MB", exact: str = "") -> Pinned:
    """A seeded model with its vision part, as released, in BF16 but for tensors whose name ends in ``exact``."""
    torch.manual_seed(seed)
    config = Qwen3_5Config(text_config=text, vision_config=VISION | {"out_hidden_size": text["hidden_size"]})
    model = Qwen3_5ForConditionalGeneration(config)
    for p in model.parameters():
        if p.dim() == 1:
            p.data += 0.1 * torch.randn_like(p)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size=shard)
    if exact:
        for path in folder.glob("*.safetensors"):
            state = {n: torch.randn(x.shape) if n.endswith(exact) else x for n, x in load_file(path).items()}
            save_file(state, path, {"format": "pt"})
    write_tokenizer(folder)
    dims = {"hidden_size": text["hidden_size"], "num_layers": 4, "num_attention_heads": text["num_attention_heads"]}
    (folder / "revision").write_text("b" * 40)
    return Pinned("Test", "tests/base", "b" * 40, "tests/checkpoint", "c" * 40, "test", dims)


def language_model(base: Path):
    full = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.bfloat16, device_map={"": "cpu"},
                                                       attn_implementation="sdpa", local_files_only=True)
    return full.model.language_model


def make_checkpoint(folder: Path, base: Path, seed: int, rank: int, alpha: int, dtype=torch.float32, std=0.05, **more):
    """A checkpoint as training leaves it: PEFT's adapter around the language model, and a head."""
    torch.manual_seed(100 + seed)
    model = get_peft_model(language_model(base), LoraConfig(r=rank, lora_alpha=alpha, target_modules=TARGETS, **more))
    for name, p in model.named_parameters():
        if "lora_" in name:
            p.data = torch.randn(p.shape).mul(std).to(dtype)
    model.save_pretrained(folder / "adapter")
    width = model.config.hidden_size
    torch.save({"weight": torch.randn(1, width), "bias": torch.randn(1)}, folder / "head.pt")
    write_json(folder / "model.json", {"model_id": "tests/base", "revision": "b" * 40, "max_length": 4096,
                                       "lora_rank": rank})
    write_json(folder / "temperature.json", {"temperature": 2.5})
    (folder / "revision").write_text("c" * 40)


def reference_export(base: Path, adapter: Path, out: Path) -> None:
    """The reference way, as the contract describes it; the tensors only."""
    model = PeftModel.from_pretrained(language_model(base), adapter).merge_and_unload(safe_merge=True)
    model.save_pretrained(out, max_shard_size="1MB")


def bits(folder: Path) -> dict[str, bytes]:
    state = {}
    for path in folder.glob("*.safetensors"):
        state |= load_file(path)
    assert {x.dtype for x in state.values()} == {torch.bfloat16}
    return {name: x.view(torch.int16).numpy().tobytes() for name, x in state.items()}


@pytest.mark.parametrize("model, seed, base, adapter", [
    ("wide", 0, {}, {"rank": 16, "alpha": 32}),
    ("mixed", 1, {}, {"rank": 8, "alpha": 8, "std": 0.3}),
    ("mixed", 2, {"shard": "5GB"}, {"rank": 64, "alpha": 16, "dtype": torch.bfloat16}),
    ("wide", 3, {"exact": ("A_log", "linear_attn.norm.weight")}, {"rank": 3, "alpha": 7, "dtype": torch.float16}),
    ("mixed", 4, {"exact": "q_proj.weight"}, {"rank": 12, "alpha": 5, "use_rslora": True}),
    ("wide", 5, {}, {"rank": 1, "alpha": 1, "std": 1e-4}),
])
def test_every_tensor_is_bit_equal_to_the_reference(tmp_path, monkeypatch, model, seed, base, adapter):
    source = make_base(tmp_path / "base", MODELS[model], seed, **base)
    make_checkpoint(tmp_path / "checkpoint", tmp_path / "base", seed, **adapter)
    monkeypatch.setattr(pinned, "PINNED", (source,))
    monkeypatch.setattr(pieces, "PIECE_BYTES", 4096)
    command.export_merged(tmp_path / "base", tmp_path / "checkpoint", tmp_path / "out", shard_bytes=10**6)
    reference_export(tmp_path / "base", tmp_path / "checkpoint" / "adapter", tmp_path / "reference")
    ours, theirs = bits(tmp_path / "out"), bits(tmp_path / "reference")
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if ours[name] != theirs[name]] == []
    before = bits_of_base(tmp_path / "base")
    targets = [name for name in theirs if name.split(".")[-2] in TARGETS]
    assert len(targets) == 4 * MODELS[model]["layer_types"].count(F) + 2 * MODELS[model]["layer_types"].count(L)
    assert all(theirs[name] != before[name] for name in targets)  # the adapter was really applied, in both


def bits_of_base(base: Path) -> dict[str, bytes]:
    return {name: x.detach().view(torch.int16).numpy().tobytes() for name, x in language_model(base).named_parameters()}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> tuple[Path, Pinned]:
    folder = tmp_path_factory.mktemp("inputs")
    source = make_base(folder / "base", MODELS["mixed"], 7)
    make_checkpoint(folder / "checkpoint", folder / "base", 7, rank=16, alpha=32)
    return folder, source


@pytest.fixture
def folder(inputs, monkeypatch) -> Path:
    monkeypatch.setattr(pinned, "PINNED", (inputs[1],))
    return inputs[0]


def test_scores_are_those_of_the_reference_export(folder, tmp_path):
    """The command's export and the reference's give the same bits, and Transformers' scores to BF16's accuracy."""
    arguments = [f"--{name}={folder / name}" for name in ("base", "checkpoint")]
    assert command.main([*arguments, f"--out={tmp_path / 'out'}", "--max-length=512"]) == 0
    reference_export(folder / "base", folder / "checkpoint/adapter", tmp_path / "reference")
    write_tokenizer(tmp_path / "reference")
    head = torch.load(folder / "checkpoint/head.pt", weights_only=True)
    manifest = Manifest("tests/base", "b" * 40, "c" * 40, 2.5, 512, CHAT_PREFIX, CHAT_SUFFIX,
                        tuple(head["weight"].reshape(-1).tolist()), head["bias"].item())
    write_json(tmp_path / "reference/open_jev_export.json", manifest.to_json())
    ours, theirs = open_export(tmp_path / "out"), open_export(tmp_path / "reference")
    assert ours.manifest == theirs.manifest and ours.config == theirs.config
    assert ours.tokenizer_file.read_bytes() == (folder / "base/tokenizer.json").read_bytes()
    processor = Processor(ours.tokenizer_file, ours.manifest.chat_prefix, ours.manifest.chat_suffix, 512)
    ids = processor.encode(parse_request(REQUEST, ours.model_names))
    scores = [e.head.score(NumpyBackbone(e).hidden(ids)[0]) for e in (ours, theirs)]
    assert np.array_equal(*scores)
    merged = PeftModel.from_pretrained(language_model(folder / "base"), folder / "checkpoint/adapter")
    merged = merged.merge_and_unload(safe_merge=True).eval()
    with torch.inference_mode():
        for sequence, score in zip(ids, scores[0]):
            hidden = merged(torch.from_numpy(sequence.astype(np.int64))[None]).last_hidden_state[0, -1].double()
            expected = hidden @ head["weight"][0].double() + head["bias"].double()
            # Both round at every operation, each a few per cent of the hidden state off: so the scores differ by about
            # that much of |hidden| |w| / sqrt(width), their spread.
            spread = float(hidden.norm() * head["weight"].norm()) / len(hidden) ** 0.5
            assert abs(score - expected.item()) < 0.1 * spread


def test_the_chat_frame_is_the_templates(folder):
    assert chat_frame(folder / "base") == (CHAT_PREFIX, CHAT_SUFFIX)


@pytest.mark.parametrize("template, words", [
    ("{{ messages[0].content }}{{ messages[0].content }}", "2 times"), ("nothing", "0 times"), ("{% if %}", "applied")])
def test_templates_that_are_refused(tmp_path, template, words):
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    write_json(tmp_path / "config.json", {"model_type": "qwen3_5"})
    with pytest.raises(CheckpointError, match=words):
        chat_frame(tmp_path)


class Attack:
    def __reduce__(self):
        return exec, ("raise SystemExit('code from head.pt was run')",)


@pytest.mark.parametrize("head, words", [
    ({"weight": torch.zeros(1, 255), "bias": torch.zeros(1)}, "weight: expected a tensor .1, 256., found .1, 255."),
    ({"weight": torch.zeros(256), "bias": torch.zeros(1)}, "weight"),
    ({"weight": torch.zeros(1, 256)}, "bias: expected a tensor"),
    ({"weight": torch.zeros(1, 256), "bias": 0.5}, "bias"),
    ({"weight": torch.full((1, 256), float("nan")), "bias": torch.zeros(1)}, "weight: is not finite"),
    ({"weight": torch.zeros(1, 256), "bias": torch.full((1,), float("inf"))}, "bias: is not finite"),
    (torch.zeros(1, 256), "weight"),
    ([1, 2], "weight"),
    ({"weight": torch.zeros(1, 256), "bias": Attack()}, "not a file of plain tensors"),
])
def test_heads_that_are_refused(tmp_path, head, words):
    torch.save(head, tmp_path / "head.pt")
    with pytest.raises(CheckpointError, match=f"head.pt: .*{words}"):
        read_head(tmp_path / "head.pt", 256)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"not a file of torch", pickle.dumps(Attack())])
def test_heads_that_are_no_files_of_torch(tmp_path, content):
    (tmp_path / "head.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match="head.pt"):
        read_head(tmp_path / "head.pt", 256)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_head(tmp_path / "absent.pt", 256)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_heads_keep_their_numbers(tmp_path, dtype):
    weight, bias = torch.randn(1, 256).to(dtype), torch.randn(1).to(dtype)
    torch.save({"weight": weight, "bias": bias}, tmp_path / "head.pt")
    found = read_head(tmp_path / "head.pt", 256)
    assert found == (weight.float()[0].tolist(), bias.float().item())


def test_a_delta_that_is_not_finite(folder, tmp_path):
    adapter = tmp_path / "checkpoint/adapter"
    adapter.mkdir(parents=True)
    for path in (folder / "checkpoint").glob("*.*"):
        (tmp_path / "checkpoint" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "checkpoint/revision").write_text("c" * 40)
    (adapter / "adapter_config.json").write_bytes((folder / "checkpoint/adapter/adapter_config.json").read_bytes())
    state = load_file(folder / "checkpoint/adapter/adapter_model.safetensors")
    state["base_model.model.layers.3.linear_attn.out_proj.lora_A.weight"][1, 1] = float("nan")
    save_file(state, adapter / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="layers.3.linear_attn.out_proj.weight is not finite"):
        command.export_merged(folder / "base", tmp_path / "checkpoint", tmp_path / "out")
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.unfinished").exists()
    edit_json(adapter / "adapter_config.json", r=None)
    with pytest.raises(CheckpointError, match="r: is missing"):
        command.export_merged(folder / "base", tmp_path / "checkpoint", tmp_path / "out")


@pytest.mark.parametrize("shape", [(12288, 16, 5120), (5120, 32, 6144), (1024, 64, 5120), (16384, 16, 4096)])
def test_the_product_does_not_depend_on_threads(shape):
    """What the module promises of ``B @ A`` on the real shapes, on this machine."""
    outer, rank, inner = shape
    rng = np.random.default_rng(0)
    b, a = (rng.standard_normal(s).astype(np.float32) for s in ((outer, rank), (rank, inner)))
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(merge.torch_matmul(b, a))
    finally:
        torch.set_num_threads(before)
    assert all(np.array_equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("outer, inner, rank", [(12288, 5120, 16), (5120, 6144, 64)])
def test_one_layer_of_the_real_size(tmp_path, outer, inner, rank):
    """PEFT's merge of one q_proj and one out_proj of 27B, against the same from files."""
    torch.manual_seed(outer)
    model = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(inner, outer, bias=False, dtype=torch.bfloat16)})
    model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=3 * rank // 2, target_modules=["q_proj"]))
    layer = model.base_model.model["q_proj"]
    layer.lora_B["default"].weight.data.normal_(0, 0.01)
    save_file({"w": layer.base_layer.weight.data, "a": layer.lora_A["default"].weight.data,
               "b": layer.lora_B["default"].weight.data}, tmp_path / "x.safetensors")
    entries = weight_files.read_header(tmp_path / "x.safetensors")
    ours = merge.merged_pieces("w", entries["w"], lora.Adapter(1.5, {"w": (entries["a"], entries["b"])}))
    merged = model.merge_and_unload(safe_merge=True)["q_proj"].weight.data.view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(np.concatenate([*ours]), merged.reshape(-1))


def test_configurations_of_transformers_are_understood(tmp_path):
    for text in MODELS.values():
        config = Qwen3_5Config(text_config=text, vision_config=VISION)
        config.save_pretrained(tmp_path)
        whole = ModelConfig.from_json(json.loads((tmp_path / "config.json").read_text()))
        config.text_config.save_pretrained(tmp_path)
        alone = ModelConfig.from_json(json.loads((tmp_path / "config.json").read_text()))
        assert whole == alone and whole.layer_types == tuple(text["layer_types"]) and whole.rotary_dim == 64


def test_every_field_of_transformers_configuration_is_in_a_table():
    config = Qwen3_5Config(text_config={"layer_types": [L, F], "num_hidden_layers": 2}).to_dict()
    assert unknown_fields(config) == []
