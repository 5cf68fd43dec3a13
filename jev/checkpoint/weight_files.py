"""The safetensors files of a model folder: headers checked to the byte, tensors checked against a configuration, mapped.

Tensors outside the text backbone that a full model carries (``visual.*``, ``lm_head.*``, ``mtp.*``) are ignored. Any
other unexpected tensor is refused: a leftover LoRA matrix, a bias or a layer too many means that these are not the
weights that the configuration describes.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jev.checkpoint.checked_json import CheckpointError, Fields, read_json, refuse_broken_link, unique_keys
from jev.checkpoint.config import CONFIG_FILE, ModelConfig

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PREFIXES = ("model.language_model.", "model.", "")
OUTSIDE_TEXT = ("visual.", "lm_head.", "mtp.")


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: ``size`` bytes at byte ``start`` of ``path``."""

    path: Path
    dtype: str  # safetensors' name, such as "BF16"
    shape: tuple[int, ...]
    start: int
    size: int


_ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2,
               "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file, after checking that they tile its data exactly, without gap or overlap.

    Layout: 8 bytes little-endian length of the header, the header in JSON, then the data; ``data_offsets`` are relative
    to the data. Raises CheckpointError naming the file and the tensor.
    """
    try:
        with open(path, "rb") as file:
            file_size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if file_size < 8 or not 2 <= length <= min(file_size - 8, 100_000_000):
                raise CheckpointError(f"{path}: is not a complete safetensors file ({file_size} bytes)")
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the safetensors header is not valid JSON: {error}") from None
    fields = Fields(f"{path}", header)
    entries: dict[str, TensorEntry] = {}
    for name in header:
        if name == "__metadata__":
            continue
        entry = Fields(f"{path}: {name}", header[name])
        dtype, shape, offsets = entry.text("dtype"), entry.get("shape"), entry.get("data_offsets")
        if dtype not in _ITEM_BYTES:
            raise entry.refuse("dtype", f"unknown type {dtype!r:.40}")
        if not _naturals(shape):
            raise entry.refuse("shape", f"expected a list of integers, found {shape!r:.60}")
        if not _naturals(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= file_size - 8 - length:
            raise entry.refuse("data_offsets", f"{offsets!r:.60} do not lie within the file's "
                                               f"{file_size - 8 - length} bytes of data: is it truncated?")
        size = offsets[1] - offsets[0]
        if size != math.prod(shape) * _ITEM_BYTES[dtype]:
            raise entry.refuse("data_offsets", f"span {size} bytes, but {dtype} {shape} does not")
        if (8 + length + offsets[0]) % _ITEM_BYTES[dtype] and dtype == "BF16":
            raise entry.refuse("data_offsets", "BF16 data at an odd byte")
        entries[name] = TensorEntry(path, dtype, tuple(shape), 8 + length + offsets[0], size)
    end = 8 + length
    for name, tensor in sorted(entries.items(), key=lambda item: (item[1].start, item[1].size)):
        if tensor.start != end:
            raise fields.refuse(name, "leaves a gap or overlaps another tensor")
        end += tensor.size
    if end != file_size:
        raise CheckpointError(f"{path}: {file_size - end} bytes after the last tensor")
    return entries


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def read_headers(folder: Path) -> dict[str, TensorEntry]:
    """Every tensor of a model folder under its name in the files: ``model.safetensors``, or the shards of an index.

    Raises CheckpointError naming the missing shard, or the tensor about which index and shard disagree.
    """
    single, index_path = folder / WEIGHTS_FILE, folder / INDEX_FILE
    for path in (single, index_path):
        refuse_broken_link(path)
    if single.exists() and index_path.exists():
        raise CheckpointError(f"{folder}: has both {WEIGHTS_FILE} and {INDEX_FILE}: which holds the weights?")
    if single.exists():
        return read_header(single)
    if not index_path.exists():
        raise CheckpointError(f"{folder}: has neither {WEIGHTS_FILE} nor {INDEX_FILE}")
    index = Fields(str(index_path), Fields(str(index_path), read_json(index_path)).get("weight_map"))
    shards: dict[str, dict[str, TensorEntry]] = {}
    for name in index.data:
        shard = index.text(name)
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise index.refuse(name, f"{shard!r:.80} is not the name of a safetensors file")
        if shard not in shards:
            refuse_broken_link(folder / shard)
            if not (folder / shard).exists():
                raise CheckpointError(f"{folder / shard}: this shard is missing ({INDEX_FILE} needs it for {name})")
            shards[shard] = read_header(folder / shard)
        if name not in shards[shard]:
            raise index.refuse(name, f"is not in {shard}")
    for shard, entries in shards.items():
        for name in entries:
            if index.data.get(name) != shard:
                raise CheckpointError(f"{folder / shard}: {name}: {INDEX_FILE} does not place it in this shard")
    return {name: shards[shard][name] for name, shard in index.data.items()}


def text_tensors(folder: Path, config: ModelConfig, dtypes: Collection[str] = ("BF16",)) -> dict[str, TensorEntry]:
    """The text backbone's tensors of a model folder by bare name, checked against the configuration, in its order.

    Raises CheckpointError for a tensor that is missing, repeated, unknown, of another shape or not of ``dtypes``.
    """
    found: dict[str, TensorEntry] = {}
    expected = config.tensor_shapes()
    for full_name, entry in read_headers(folder).items():
        name = full_name[len(next(p for p in PREFIXES if full_name.startswith(p))):]
        if name.startswith(OUTSIDE_TEXT):
            continue
        if name not in expected:
            raise CheckpointError(f"{entry.path}: {full_name}: is not a tensor of the {config.num_layers}-layer text "
                                  f"backbone that {CONFIG_FILE} describes")
        if name in found:
            raise CheckpointError(f"{entry.path}: {full_name}: is also in {found[name].path.name} as another {name}")
        if entry.dtype not in dtypes:
            raise CheckpointError(f"{entry.path}: {full_name}: expected {' or '.join(dtypes)}, found {entry.dtype}")
        if entry.shape != expected[name]:
            raise CheckpointError(f"{entry.path}: {full_name}: expected shape {list(expected[name])}, "
                                  f"found {list(entry.shape)}")
        found[name] = entry
    for name in expected:
        if name not in found:
            raise CheckpointError(f"{folder}: {name}: this tensor is missing from the weights")
    return {name: found[name] for name in expected}


def map_tensors(entries: Mapping[str, TensorEntry]) -> dict[str, np.ndarray]:
    """Read-only uint16 views of BF16 tensors over one memory map per file; pages are read when touched."""
    maps: dict[Path, mmap.mmap] = {}
    arrays = {}
    for name, entry in entries.items():
        if entry.path not in maps:
            with open(entry.path, "rb") as file:
                maps[entry.path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        flat = np.frombuffer(maps[entry.path], np.dtype("<u2"), entry.size // 2, entry.start)
        arrays[name] = flat.reshape(entry.shape)
    return arrays
