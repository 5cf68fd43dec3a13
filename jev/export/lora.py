"""The LoRA adapter of a checkpoint: its settings and matrices, checked against the model that they change."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jev.checkpoint.checked_json import CheckpointError, Fields, read_json
from jev.checkpoint.config import ModelConfig
from jev.checkpoint.finite import place
from jev.checkpoint.weight_files import PREFIXES, TensorEntry, read_header
from jev.export.pieces import read_pieces
from jev_kernels import bf16

TARGETS = {"full_attention": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
           "linear_attention": ("linear_attn.in_proj_qkv", "linear_attn.out_proj")}
TARGET_NAMES = frozenset(module.split(".")[1] for modules in TARGETS.values() for module in modules)
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter/adapter_config.json", "adapter/adapter_model.safetensors"
# Settings of PEFT that change what a merge means; a plain LoRA has none of them.
UNSUPPORTED = ("use_dora", "use_qalora", "use_bdlora", "lora_bias", "fan_in_fan_out", "rank_pattern", "alpha_pattern",
               "modules_to_save", "layer_replication", "target_parameters", "trainable_token_indices",
               "megatron_config", "alora_invocation_tokens", "arrow_config", "velora_config", "monteclora_config",
               "kasa_config")


@dataclass(frozen=True)
class Adapter:
    """A plain LoRA over every target of the language model: bare weight name -> (A [r, in], B [out, r])."""

    scaling: float
    pairs: Mapping[str, tuple[TensorEntry, TensorEntry]]


def read_adapter(checkpoint: Path, config: ModelConfig, rank: int) -> Adapter:
    """Check the adapter's settings, and that its matrices cover the targets of ``config`` exactly. Reads no weights.

    rank: ``lora_rank`` of model.json. Raises CheckpointError naming the setting or the matrix.
    """
    path = checkpoint / ADAPTER_CONFIG
    f = Fields(str(path), read_json(path))
    if f.text("peft_type") != "LORA":
        raise f.refuse("peft_type", f"expected 'LORA', found {f.data['peft_type']!r:.60}")
    if f.integer("r") != rank:
        raise f.refuse("r", f"is {f.data['r']}, but lora_rank of model.json is {rank}")
    alpha = f.number("lora_alpha")
    targets = f.get("target_modules")
    if not isinstance(targets, (list, str)):
        raise f.refuse("target_modules", f"expected names or a pattern, found {targets!r:.60}")
    # A string is a pattern over module names; then the matrices below decide alone.
    if isinstance(targets, list) and not set(map(str, targets)) <= TARGET_NAMES:
        raise f.refuse("target_modules", f"{sorted(set(map(str, targets)) - TARGET_NAMES)} are not among "
                                         f"{sorted(TARGET_NAMES)}")
    if f.data.get("use_rslora") not in (None, False, True):
        raise f.refuse("use_rslora", f"expected true or false, found {f.data['use_rslora']!r:.60}")
    for field in UNSUPPORTED:
        if f.data.get(field):
            raise f.refuse(field, f"only plain LoRA can be merged, found {f.data[field]!r:.60}")
    if f.data.get("bias", "none") != "none":
        raise f.refuse("bias", f"expected 'none', found {f.data['bias']!r:.60}")
    # Other ways to start training (PiSSA, OLoRA, ...) change the base weights, and PEFT repeats that on loading.
    if f.data.get("init_lora_weights", True) not in (True, False, "gaussian"):
        raise f.refuse("init_lora_weights", f"changes the base weights: {f.data['init_lora_weights']!r:.60}")
    shapes = config.tensor_shapes()
    wanted = {f"layers.{i}.{module}" for i, kind in enumerate(config.layer_types) for module in TARGETS[kind]}
    matrices: dict[tuple[str, str], TensorEntry] = {}
    for name, entry in read_header(checkpoint / ADAPTER_WEIGHTS).items():
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_([AB])\.weight", name)
        full = match[1] if match else ""
        module = full[len(next(p for p in PREFIXES if full.startswith(p))):]
        if match is None or module not in wanted:
            raise CheckpointError(f"{entry.path}: {name}: is not a LoRA matrix of {', '.join(sorted(TARGET_NAMES))} "
                                  f"in one of the language model's {config.num_layers} layers")
        outer, inner = shapes[f"{module}.weight"]
        shape = (rank, inner) if match[2] == "A" else (outer, rank)
        if entry.dtype not in ("F32", "BF16", "F16") or entry.shape != shape:
            raise CheckpointError(f"{entry.path}: {name}: expected floating point {list(shape)}, "
                                  f"found {entry.dtype} {list(entry.shape)}")
        if (module, match[2]) in matrices:
            raise CheckpointError(f"{entry.path}: {name}: there are two of it under different prefixes")
        matrices[module, match[2]] = entry
    for module in sorted(wanted):
        for side in "AB":
            if (module, side) not in matrices:
                raise CheckpointError(f"{checkpoint / ADAPTER_WEIGHTS}: lora_{side} of {module} is missing")
    scaling = alpha / math.sqrt(rank) if f.data.get("use_rslora") else alpha / rank
    return Adapter(scaling, {f"{m}.weight": (matrices[m, "A"], matrices[m, "B"]) for m in wanted})


def check_factors(adapter: Adapter) -> None:
    """Read every LoRA matrix once. Raises CheckpointError naming one that holds a number that is not finite."""
    for name, pair in adapter.pairs.items():
        for side, entry in zip("AB", pair):
            at = 0
            for piece in read_pieces(entry):
                good = np.isfinite(bf16.to_float32(piece) if entry.dtype == "BF16" else piece)
                if not good.all():
                    where = place(at + int(good.argmin()), entry.shape)
                    raise CheckpointError(f"{entry.path}: lora_{side} of {name} is not finite at {where}")
                at += piece.size
