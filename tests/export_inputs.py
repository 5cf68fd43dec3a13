"""A tiny base model and checkpoint as they would be downloaded, from seeded NumPy numbers: inputs of an export."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jev.checkpoint.config import ModelConfig
from jev.checkpoint.demo import CHAT_TEMPLATE, demo_tokenizer
from jev.checkpoint.pinned import Pinned
from jev.export.lora import TARGETS
from jev_kernels import bf16

RANK, ALPHA, TEMPERATURE = 4, 6, 2.25
L, F = "linear_attention", "full_attention"
TEXT_CONFIG = {
    "model_type": "qwen3_5_text", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "layer_types": [L, F, L, F], "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4, "vocab_size": 1024, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25,
                        "mrope_section": [2, 1, 1], "mrope_interleaved": True}}
CONFIG = ModelConfig.from_json(TEXT_CONFIG)
SOURCE = Pinned("Tiny", "tests/base", "b" * 40, "tests/checkpoint", "c" * 40, "tiny", {
    "hidden_size": 64, "num_layers": 4, "num_attention_heads": 4, "linear_num_value_heads": 6})


def save(path: Path, tensors: Mapping[str, tuple[str, np.ndarray]], end: bytes = b"") -> None:
    """Write a safetensors file; each tensor is (dtype name, array of its bits)."""
    header, at = {}, 0
    for name, (dtype, array) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    save_raw(path, json.dumps(header).encode(), b"".join(a.tobytes() for _, a in tensors.values()) + end)


def save_raw(path: Path, header: bytes, data: bytes) -> None:
    """Write the parts of a safetensors file as they are, the header padded to 8 bytes."""
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def base_tensors(seed: int) -> dict[str, np.ndarray]:
    """BF16 weights (uint16) of CONFIG by bare name."""
    rng = np.random.default_rng(seed)
    return {name: bf16.from_float32((rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32))
            for name, shape in CONFIG.tensor_shapes().items()}


def adapter_tensors(seed: int) -> dict[str, np.ndarray]:
    """float32 LoRA matrices by PEFT's names."""
    rng = np.random.default_rng([seed, 1])
    shapes = CONFIG.tensor_shapes()
    matrices = {}
    for i, kind in enumerate(CONFIG.layer_types):
        for module in TARGETS[kind]:
            outer, inner = shapes[f"layers.{i}.{module}.weight"]
            name = f"base_model.model.layers.{i}.{module}.lora_"
            matrices[name + "A.weight"] = (0.2 * rng.standard_normal((RANK, inner))).astype(np.float32)
            matrices[name + "B.weight"] = (0.2 * rng.standard_normal((outer, RANK))).astype(np.float32)
    return matrices


def write_base(folder: Path, seed: int = 0) -> None:
    """A base model as downloaded: nested configuration, two shards, an index, parts other than text, tokenizer."""
    folder.mkdir(parents=True)
    tensors = {f"model.language_model.{name}": ("BF16", bits) for name, bits in base_tensors(seed).items()}
    # Some releases keep a few small tensors in float32: loading in BF16 rounds them.
    exact = np.random.default_rng([seed, 2]).standard_normal(6).astype(np.float32)
    tensors["model.language_model.layers.0.linear_attn.A_log"] = ("F32", exact)
    outside = {name: ("BF16", np.zeros((2, 3), np.uint16)) for name in
               ("lm_head.weight", "model.visual.blocks.0.attn.proj.weight", "mtp.fc.weight")}
    names = [*tensors]
    shards = {"model-00001-of-00002.safetensors": {n: tensors[n] for n in names[: len(names) // 2]},
              "model-00002-of-00002.safetensors": {n: tensors[n] for n in names[len(names) // 2:]} | outside}
    for shard, part in shards.items():
        save(folder / shard, part)
    index = {"metadata": {}, "weight_map": {name: shard for shard, part in shards.items() for name in part}}
    write_json(folder / "model.safetensors.index.json", index)
    write_json(folder / "config.json", {"model_type": "qwen3_5", "text_config": TEXT_CONFIG, "vision_config": {}})
    write_tokenizer(folder)
    (folder / "revision").write_text(SOURCE.base_revision + "\n")


def write_tokenizer(folder: Path) -> None:
    """The demo's tokenizer and chat template, as a base model ships them."""
    (folder / "tokenizer.json").write_text(demo_tokenizer().to_str())
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def write_checkpoint(folder: Path, seed: int = 0, dtype: str = "F32", **settings) -> None:
    """A checkpoint as downloaded, but for head.pt, which takes torch. settings: of the adapter's configuration."""
    (folder / "adapter").mkdir(parents=True)
    matrices = {name: (dtype, x if dtype == "F32" else bf16.from_float32(x))
                for name, x in adapter_tensors(seed).items()}
    save(folder / "adapter/adapter_model.safetensors", matrices)
    write_json(folder / "adapter/adapter_config.json", {
        "peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "use_dora": False, "rank_pattern": {},
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "out_proj"]} | settings)
    write_json(folder / "model.json", {"model_id": SOURCE.model_id, "revision": SOURCE.base_revision,
                                       "max_length": 4096, "lora_rank": RANK})
    write_json(folder / "temperature.json", {"temperature": TEMPERATURE})
    (folder / "revision").write_text(SOURCE.checkpoint_revision)


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value))


def edit_json(path: Path, **changes) -> None:
    """Change fields of a JSON object in place; None removes the field."""
    value = {**json.loads(path.read_text()), **changes}
    write_json(path, {name: x for name, x in value.items() if x is not None})
