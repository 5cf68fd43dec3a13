"""Opening an export: everything about it is checked before any weight is used.

An export is a folder::

    config.json                     the text model's configuration
    tokenizer.json                  (and whatever other tokenizer files the base has)
    model.safetensors               all weights in BF16; or model-0000n-of-0000m.safetensors shards
    model.safetensors.index.json    with shards only: tensor name -> shard
    SHA256SUMS                      digests of all the others (``jev.checkpoint.verify``); earlier versions wrote none
    open_jev_export.json            the manifest, written last: its presence says that the export is finished

``open_export`` refuses with a ``CheckpointError`` that names the file and the field or tensor. Weights are BF16 bit
patterns in ``uint16`` arrays over read-only memory maps: NumPy has no BF16, and nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jev.checkpoint.checked_json import CheckpointError, read_json, refuse_broken_link
from jev.checkpoint.config import CONFIG_FILE, ModelConfig, check_dims
from jev.checkpoint.manifest import MANIFEST_FILE, MAX_LENGTH_LIMIT, Manifest
from jev.checkpoint.weight_files import map_tensors, text_tensors
from jev.model.head import Head

TOKENIZER_FILE = "tokenizer.json"


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
    for name in (MANIFEST_FILE, TOKENIZER_FILE):
        refuse_broken_link(path / name)
    if not (path / MANIFEST_FILE).exists():
        kind = ("a plain base model or an unfinished export" if (path / CONFIG_FILE).exists() else "not an export")
        raise CheckpointError(f"{path}: {kind}: it has no {MANIFEST_FILE}; make an export with `jev export`")
    manifest = Manifest.from_json(read_json(path / MANIFEST_FILE), str(path / MANIFEST_FILE))
    if max_length is not None:
        if type(max_length) is not int or not 1 <= max_length <= MAX_LENGTH_LIMIT:
            raise CheckpointError(f"max_length: expected 1..{MAX_LENGTH_LIMIT} tokens, found {max_length!r:.60}")
        manifest = replace(manifest, max_length=max_length)
    source = manifest.source
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
