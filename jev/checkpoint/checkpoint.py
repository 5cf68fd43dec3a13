"""What the worker loads: pinned checkpoints, the export manifest, the decision head and memory-mapped weights.

An export is a folder::

    config.json                     the text model's configuration
    tokenizer.json                  (and whatever other tokenizer files the base has)
    model.safetensors               all weights in BF16; or model-0000n-of-0000m.safetensors shards
    model.safetensors.index.json    with shards only: tensor name -> shard
    open_jev_export.json            the manifest, written last: its presence says that the export is finished

``open_export`` checks all of it before any weight is used and refuses with a ``CheckpointError`` that names the file
and the field or tensor. Weights are BF16 bit patterns in ``uint16`` arrays over read-only memory maps: NumPy has no
BF16, and nothing here needs torch.

The files of the weights are read in ``jev.checkpoint.weight_files``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jev.checkpoint.checked_json import CheckpointError, Fields, read_json
from jev.checkpoint.weight_files import CONFIG_FILE, map_tensors, text_tensors
from jev_kernels import bf16
from jev_kernels.reference import INTERLEAVE

FORMAT = "open-jev-text-merged/1"
MANIFEST_FILE = "open_jev_export.json"
TOKENIZER_FILE = "tokenizer.json"
MAX_LENGTH_LIMIT = 16384
DEMO_MODEL_ID = "open-jev-demo"
LAYER_KINDS = ("linear_attention", "full_attention")


# ---------------------------------------------------------------------------------------------------------------------
# Pinned checkpoints


@dataclass(frozen=True)
class Pinned:
    """One released Open-Jev checkpoint: where it comes from, the names it answers to, and the backbone it expects."""

    title: str
    model_id: str
    base_revision: str
    checkpoint_repo: str
    checkpoint_revision: str
    alias: str
    dims: Mapping[str, int]  # ModelConfig attribute -> value

    def names(self) -> frozenset[str]:
        """What a request may put in ``model``."""
        return frozenset({self.model_id, "open-jev", "jev-latest", self.alias})


def _dims(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, key_heads: int, value_heads: int):
    return {"hidden_size": hidden, "intermediate_size": intermediate, "num_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "linear_num_key_heads": key_heads,
            "linear_num_value_heads": value_heads, "head_dim": 256, "rotary_dim": 64, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "conv_kernel": 4}


PINNED = (
    Pinned("Open-Jev-27B-v1.1", "Qwen/Qwen3.8-27B", "1d4bf0f2ff6012fd82039f2fa52739d0dd7c60c0",
           "ZefanCai/Open-Jev-27B-v1.1", "28cf73067d5b337860bbef3c85b8b82ba8730956", "open-jev-27b-v1.1",
           _dims(5120, 17408, 64, 24, 4, 16, 48)),
    Pinned("Open-Jev-9B", "Qwen/Qwen3.5-9B", "c202236235762e1c871ad0ccb60c8ee5ba337b9a",
           "ZefanCai/Open-Jev-9B", "47e966881e489511c0c7f5633a9e1960a676a551", "open-jev-9b",
           _dims(4096, 12288, 32, 16, 4, 16, 32)),
)
# The demo checkpoint (jev/demo_checkpoint.py) has no release and no fixed dimensions.
DEMO = Pinned("Open-Jev demo", DEMO_MODEL_ID, "demo", "", "demo", DEMO_MODEL_ID, {})


def pinned(model_id: str) -> Pinned | None:
    """The pinned checkpoint whose base is ``model_id``, or None."""
    return next((p for p in PINNED if p.model_id == model_id), None)


# ---------------------------------------------------------------------------------------------------------------------
# Configuration


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions of a Qwen3.5 / Qwen3.8 text backbone (names as in Transformers' Qwen3_5TextConfig, shortened)."""

    hidden_size: int
    intermediate_size: int
    layer_types: tuple[str, ...]  # each "linear_attention" or "full_attention"
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int  # leading dimensions of a head that RoPE turns
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    conv_kernel: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        return 2 * self.key_dim + self.value_dim

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str = CONFIG_FILE) -> ModelConfig:
        """Read a ``config.json``: a text configuration, or a full one with the text part under ``text_config``.

        RoPE's settings may sit in ``rope_parameters`` or at the top; layers in ``layer_types`` or, as every n-th being
        full attention, ``full_attention_interval``. Raises CheckpointError naming ``where`` and the field.
        """
        top = Fields(where, data)
        f = Fields(f"{where}: text_config", top.get("text_config")) if "text_config" in data else top
        for fields, kinds in ((top, ("qwen3_5", "qwen3_5_text")), (f, ("qwen3_5_text",) if f is not top else ())):
            if kinds and fields.data.get("model_type", kinds[0]) not in kinds:
                raise fields.refuse("model_type", f"expected {' or '.join(kinds)}, "
                                                  f"found {fields.data['model_type']!r:.60}")
        for field, only in (("hidden_act", "silu"), ("attention_bias", False), ("attn_output_gate", True)):
            if f.data.get(field, only) != only:
                raise f.refuse(field, f"only {only!r} is supported, found {f.data[field]!r:.60}")
        rope = f.data.get("rope_parameters")
        rope = f if rope is None else Fields(f"{f.where}: rope_parameters", {**f.data, **Fields(f.where, rope).data})
        if rope.data.get("rope_type", "default") != "default":
            raise rope.refuse("rope_type", f"only 'default' is supported, found {rope.data['rope_type']!r:.60}")
        head_dim = f.integer("head_dim")
        # Transformers' default for this family. min: a number too large for an integer is refused like any above 1.
        share = rope.number("partial_rotary_factor") if "partial_rotary_factor" in rope.data else 0.25
        rotary_dim = int(head_dim * min(share, 2.0))
        config = cls(
            hidden_size=f.integer("hidden_size"), intermediate_size=f.integer("intermediate_size"),
            layer_types=_layer_types(f), num_attention_heads=f.integer("num_attention_heads"),
            num_key_value_heads=f.integer("num_key_value_heads"), head_dim=head_dim,
            rotary_dim=rotary_dim,
            linear_num_key_heads=f.integer("linear_num_key_heads"),
            linear_num_value_heads=f.integer("linear_num_value_heads"),
            linear_key_head_dim=f.integer("linear_key_head_dim"),
            linear_value_head_dim=f.integer("linear_value_head_dim"),
            conv_kernel=f.integer("linear_conv_kernel_dim"), vocab_size=f.integer("vocab_size"),
            rms_norm_eps=f.number("rms_norm_eps"), rope_theta=rope.number("rope_theta"))
        if config.intermediate_size % INTERLEAVE:
            raise f.refuse("intermediate_size", f"{config.intermediate_size} is not a multiple of {INTERLEAVE}")
        if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
            raise rope.refuse("partial_rotary_factor", f"turns {rotary_dim} of {head_dim} dimensions")
        for heads, groups in (("num_attention_heads", "num_key_value_heads"),
                              ("linear_num_value_heads", "linear_num_key_heads")):
            if getattr(config, heads) % getattr(config, groups):
                raise f.refuse(heads, f"{getattr(config, heads)} is not a multiple of {groups}, "
                                      f"{getattr(config, groups)}")
        return config

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name (without prefix) -> shape of every tensor of the text backbone, in the order they are written."""
        h, inner, d = self.hidden_size, self.intermediate_size, self.head_dim
        q, kv = self.num_attention_heads * d, self.num_key_value_heads * d
        value_heads = self.linear_num_value_heads
        mixers = {
            "full_attention": {
                "self_attn.q_proj.weight": (2 * q, h), "self_attn.k_proj.weight": (kv, h),
                "self_attn.v_proj.weight": (kv, h), "self_attn.o_proj.weight": (h, q),
                "self_attn.q_norm.weight": (d,), "self_attn.k_norm.weight": (d,)},
            "linear_attention": {
                "linear_attn.in_proj_qkv.weight": (self.conv_dim, h),
                "linear_attn.in_proj_z.weight": (self.value_dim, h),
                "linear_attn.in_proj_b.weight": (value_heads, h), "linear_attn.in_proj_a.weight": (value_heads, h),
                "linear_attn.conv1d.weight": (self.conv_dim, 1, self.conv_kernel), "linear_attn.A_log": (value_heads,),
                "linear_attn.dt_bias": (value_heads,), "linear_attn.norm.weight": (self.linear_value_head_dim,),
                "linear_attn.out_proj.weight": (h, self.value_dim)}}
        shared = {"input_layernorm.weight": (h,), "post_attention_layernorm.weight": (h,),
                  "mlp.gate_proj.weight": (inner, h), "mlp.up_proj.weight": (inner, h),
                  "mlp.down_proj.weight": (h, inner)}
        shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (self.vocab_size, h)}
        for i, kind in enumerate(self.layer_types):
            shapes.update({f"layers.{i}.{name}": shape for name, shape in (mixers[kind] | shared).items()})
        return shapes | {"norm.weight": (h,)}


def _layer_types(f: Fields) -> tuple[str, ...]:
    layers = f.integer("num_hidden_layers")
    if f.data.get("layer_types") is None:
        interval = f.integer("full_attention_interval")
        return tuple(LAYER_KINDS[(i + 1) % interval == 0] for i in range(layers))
    kinds = f.data["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in LAYER_KINDS for kind in kinds):
        raise f.refuse("layer_types", f"expected {layers} of {' or '.join(LAYER_KINDS)}")
    return tuple(kinds)


# ---------------------------------------------------------------------------------------------------------------------
# Manifest and head


@dataclass(frozen=True)
class Manifest:
    """``open_jev_export.json``: which checkpoint this is, how to phrase a prompt, and the head's numbers."""

    model_id: str
    base_revision: str
    checkpoint_revision: str
    temperature: float
    max_length: int  # tokens of one prompt
    chat_prefix: str
    chat_suffix: str
    head_weight: tuple[float, ...]
    head_bias: float
    demo: bool = False
    format: str = FORMAT

    @classmethod
    def from_json(cls, data: Any, where: str = MANIFEST_FILE) -> Manifest:
        """Check every field but the width of the head. Raises CheckpointError naming ``where`` and the field."""
        f = Fields(where, data)
        if f.text("format") != FORMAT:
            raise f.refuse("format", f"expected {FORMAT!r}, found {data['format']!r:.60}")
        demo = data.get("demo", False)
        if type(demo) is not bool or demo != (f.text("model_id") == DEMO_MODEL_ID):
            raise f.refuse("demo", f"must be true for {DEMO_MODEL_ID} and absent for all else, found {demo!r:.60}")
        source = DEMO if demo else pinned(f.text("model_id"))
        if source is None:
            raise f.refuse("model_id", f"expected {' or '.join(p.model_id for p in PINNED)}, "
                                       f"found {data['model_id']!r:.60}")
        for field in ("base_revision", "checkpoint_revision"):
            if f.text(field) != getattr(source, field):
                raise f.refuse(field, f"{source.title} is pinned to {getattr(source, field)}, "
                                      f"found {data[field]!r:.60}")
        weight = f.get("head_weight")
        if not isinstance(weight, list) or not weight or any(type(w) not in (int, float) for w in weight):
            raise f.refuse("head_weight", "expected a list of numbers")
        for i, value in enumerate([*weight, f.get("head_bias")]):
            name = f"head_weight[{i}]" if i < len(weight) else "head_bias"
            # Beyond float32's range a number would become infinite in the head.
            if type(value) not in (int, float) or not abs(value) <= 3.4028234663852886e38:
                raise f.refuse(name, f"expected a finite float32 number, found {value!r:.60}")
        return cls(data["model_id"], data["base_revision"], data["checkpoint_revision"], f.number("temperature"),
                   f.integer("max_length", 1, MAX_LENGTH_LIMIT), f.text("chat_prefix"), f.text("chat_suffix"),
                   tuple(map(float, weight)), float(data["head_bias"]), demo)

    def to_json(self) -> dict[str, Any]:
        """The object that ``from_json`` reads; ``demo`` appears in a demo's manifest only."""
        fields = {"format": self.format, **asdict(self)}
        return {name: value for name, value in fields.items() if name != "demo" or value}


@dataclass(frozen=True, eq=False)
class Head:
    """The decision head: ``float32(sum(float64(w) * float64(h))) + bias``, ``weight`` float32 [h], ``bias`` float32."""

    weight: np.ndarray
    bias: np.float32

    def score(self, hidden: np.ndarray) -> np.ndarray:
        """BF16 hidden states, uint16 [n, h] -> raw scores, float32 [n].

        The products are exact in float64, and each row is summed alone in one fixed order (NumPy's pairwise order over
        a contiguous row), so a score has the same bits whatever rows stand beside it; BLAS does not promise that.
        """
        if hidden.dtype != np.uint16 or hidden.ndim != 2 or hidden.shape[1] != self.weight.size:
            raise ValueError(f"hidden: expected uint16 [n, {self.weight.size}], found {hidden.dtype} {hidden.shape}")
        weight = self.weight.astype(np.float64)
        scores = np.empty(len(hidden), np.float32)
        for i, row in enumerate(hidden):
            scores[i] = np.add.reduce(bf16.to_float32(row) * weight)
        return scores + self.bias


# ---------------------------------------------------------------------------------------------------------------------
# Exports


@dataclass(frozen=True, eq=False)
class Export:
    """An export that passed every check of ``open_export``."""

    path: Path
    config: ModelConfig
    manifest: Manifest  # max_length is the limit in force, after an override
    head: Head
    model_names: frozenset[str]
    demo: bool
    tokenizer_file: Path
    tensors: Mapping[str, np.ndarray]  # bare name -> uint16 over a memory map, in the order of tensor_shapes()


def open_export(path: str | Path, max_length: int | None = None) -> Export:
    """Open the export folder ``path``; ``max_length``, if given, replaces the saved limit (1..16384 tokens).

    Raises CheckpointError for a plain base model, an unfinished export, unknown or mismatched revisions, wrong
    dimensions, a missing, misshapen, unknown or non-BF16 tensor, a bad head or setting.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such export folder")
    if not (path / MANIFEST_FILE).exists():
        kind = ("a plain base model or an unfinished export" if (path / CONFIG_FILE).exists() else "not an export")
        raise CheckpointError(f"{path}: {kind}: it has no {MANIFEST_FILE}; make an export with `jev export`")
    manifest = Manifest.from_json(read_json(path / MANIFEST_FILE), str(path / MANIFEST_FILE))
    if max_length is not None:
        if type(max_length) is not int or not 1 <= max_length <= MAX_LENGTH_LIMIT:
            raise CheckpointError(f"max_length: expected 1..{MAX_LENGTH_LIMIT} tokens, found {max_length!r:.60}")
        manifest = replace(manifest, max_length=max_length)
    source = DEMO if manifest.demo else pinned(manifest.model_id)
    config = ModelConfig.from_json(read_json(path / CONFIG_FILE), str(path / CONFIG_FILE))
    check_dims(config, source, str(path / CONFIG_FILE))
    if len(manifest.head_weight) != config.hidden_size:
        raise CheckpointError(f"{path / MANIFEST_FILE}: head_weight: expected {config.hidden_size} numbers, "
                              f"found {len(manifest.head_weight)}")
    if not (path / TOKENIZER_FILE).is_file():
        raise CheckpointError(f"{path / TOKENIZER_FILE}: is missing")
    tensors = map_tensors(text_tensors(path, config))
    head = Head(np.array(manifest.head_weight, np.float32), np.float32(manifest.head_bias))
    return Export(path, config, manifest, head, source.names(), manifest.demo, path / TOKENIZER_FILE, tensors)


def check_dims(config: ModelConfig, source: Pinned, where: str) -> None:
    """Raise CheckpointError for the first dimension of ``config`` that is not the pinned one."""
    for name, value in source.dims.items():
        if getattr(config, name) != value:
            raise CheckpointError(f"{where}: {name}: {source.title} has {value}, found {getattr(config, name)}")
