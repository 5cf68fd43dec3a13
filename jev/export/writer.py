"""Writing an export: its weights as a stream, and no folder under its name before everything is on the disk."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from jev.checkpoint import finite
from jev.checkpoint.checked_json import CheckpointError
from jev.checkpoint.config import CONFIG_FILE, ModelConfig
from jev.checkpoint.digests import DIGEST_FILE, to_text
from jev.checkpoint.manifest import MANIFEST_FILE, Manifest
from jev.checkpoint.weight_files import INDEX_FILE, WEIGHTS_FILE
from jev.export.pieces import drop_cache, naming
from jev.export.signals import undisturbed

SHARD_BYTES = 5 * 10**9
UNFINISHED = ".unfinished"


def write_export(path: str | Path, config_json: Mapping[str, Any],
                 tensors: Iterable[tuple[str, Iterable[np.ndarray]]], manifest: Manifest, files: Mapping[str, bytes], *,
                 shard_bytes: int = SHARD_BYTES, replace_existing: bool = False,
                 progress: Callable[[int], None] | None = None) -> None:
    """Write an export, streaming its weights; ``path`` appears only once everything is on the disk.

    tensors: bare name and little-endian uint16 pieces, whose bytes follow each other, for every tensor of
        ``config_json`` in the order of ``ModelConfig.tensor_shapes``; consumed one piece at a time. A piece must stay as it
        is until the next but one is asked for: another thread hashes it.
    files: name -> contents of the tokenizer's files, ``tokenizer.json`` among them.
    shard_bytes: the most bytes of tensors in one file (a larger tensor gets a file of its own).
    progress: called with the number of bytes after each piece.

    Work goes to ``<path>.unfinished`` beside ``path``; it is removed on an error, and on a signal whose handler raises,
    as are folders made above it. One left by a killed process is
    refused, never reused: which of its bytes reached the disk is unknown. Raises CheckpointError for an existing path,
    leftovers, a disk too small (before the first byte), tensors other than those of the configuration, or one that holds
    a NaN or an infinity. ``SHA256SUMS`` gets the digests of all files, made of what is written while it is written.
    """
    path, work = check_target(path, replace_existing)
    config = ModelConfig.from_json(config_json)
    small = {CONFIG_FILE: json.dumps(config_json, indent=2).encode(), **files}
    plan = plan_shards(config.tensor_shapes(), shard_bytes)
    total = sum(2 * math.prod(shape) for shard in plan for shape in shard.values())
    new = [folder for folder in path.parents if not os.path.lexists(folder)]  # deepest first
    disk = new[-1].parent if new else path.parent
    needed, free = total + sum(map(len, files.values())) + 16 * 2**20, shutil.disk_usage(disk).free
    if free < needed:
        raise CheckpointError(f"{disk}: the export needs {needed / 1e9:.2f} GB of disk, {free / 1e9:.2f} GB are free")
    path.parent.mkdir(parents=True, exist_ok=True)
    work.mkdir()
    try:
        names = [WEIGHTS_FILE]
        if len(plan) > 1:
            names = [f"model-{i + 1:05d}-of-{len(plan):05d}.safetensors" for i in range(len(plan))]
            index = {"metadata": {"total_size": total},
                     "weight_map": {tensor: name for name, shard in zip(names, plan) for tensor in shard}}
            small[INDEX_FILE] = json.dumps(index, indent=2).encode()
        for name, contents in small.items():
            _write(work / name, contents)
        stream = iter(tensors)
        digests = {name: _write_shard(work / name, shard, stream, progress) for name, shard in zip(names, plan)}
        if next(stream, None) is not None:
            raise CheckpointError(f"{path}: more tensors than the configuration has")
        last = json.dumps(manifest.to_json(), allow_nan=False).encode() + b"\n"
        digests |= {name: sha256(contents).hexdigest() for name, contents in (*small.items(), (MANIFEST_FILE, last))}
        _write(work / DIGEST_FILE, to_text(digests).encode())
        _write(work / f"{MANIFEST_FILE}.new", last)
        os.replace(work / f"{MANIFEST_FILE}.new", work / MANIFEST_FILE)
        _sync_folder(work)
        if replace_existing and os.path.lexists(path):
            shutil.rmtree(path)
        os.rename(work, path)
        for folder in (path.parent, *(folder.parent for folder in new)):
            _sync_folder(folder)
    except BaseException:
        with undisturbed():
            shutil.rmtree(work, ignore_errors=True)
            with suppress(OSError):  # not empty: somebody else uses it
                for folder in new:
                    folder.rmdir()
        raise


def check_target(path: str | Path, replace_existing: bool = False) -> tuple[Path, Path]:
    """(absolute ``path``, folder to work in beside it). Raises CheckpointError if either exists already."""
    path = Path(os.path.abspath(path))
    work = path.with_name(path.name + UNFINISHED)
    if os.path.lexists(path) and not replace_existing:
        raise CheckpointError(f"{path}: already exists; choose another folder")
    if os.path.lexists(work):
        raise CheckpointError(f"{work}: an earlier export stopped half-way, or one is running; once none is, "
                              "remove this folder and start again")
    return path, work


def plan_shards(shapes: Mapping[str, tuple[int, ...]], shard_bytes: int) -> list[dict[str, tuple[int, ...]]]:
    """Tensors of each file, in order: as many as fit into ``shard_bytes``, at least one."""
    shards: list[dict[str, tuple[int, ...]]] = []
    room = -1
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        if size > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = shape
        room -= size
    return shards


def _sync_folder(path: Path) -> None:
    """Make the names in a folder as durable as the files; file systems that know no such thing are let be."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with naming(path):
            os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(folder)


def _write(path: Path, contents: bytes) -> None:
    with naming(path), open(path, "xb") as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())


def _write_shard(path: Path, shapes: Mapping[str, tuple[int, ...]], stream: Iterator[tuple[str, Iterable[np.ndarray]]],
                 progress: Callable[[int], object] | None) -> str:
    """Write one safetensors file; its SHA-256 in hex, computed beside the writing by a thread of its own."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + 2 * math.prod(shape)]}
        end = header[name]["data_offsets"][1]
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    raw = len(raw).to_bytes(8, "little") + raw
    digest = sha256()
    with naming(path), open(path, "xb") as file, ThreadPoolExecutor(1, "jev-sha256") as hasher:
        file.write(raw)
        hashed = hasher.submit(digest.update, raw)
        for name, shape in shapes.items():
            given, pieces = next(stream, (None, ()))
            if given != name:
                raise CheckpointError(f"{path}: expected tensor {name}, was given {given}")
            left = size = math.prod(shape)
            for piece in pieces:
                if piece.dtype != np.dtype("<u2"):
                    raise CheckpointError(f"{path}: {name}: expected uint16 (BF16 bits), was given {piece.dtype}")
                piece = np.ascontiguousarray(piece).reshape(-1)
                bad = finite.first_not_finite(piece[:max(left, 0)])
                if bad is not None:
                    found = finite.describe(name, size - left + bad, int(piece[bad]), shape)
                    raise CheckpointError(f"{found}, which no export may hold")
                hashed.result()                 # a piece is hashed while it is written and the next one is made
                hashed = hasher.submit(digest.update, piece.data)
                file.write(piece.data)
                left -= piece.size
                if progress:
                    progress(piece.nbytes)
            if left:
                raise CheckpointError(f"{path}: {name}: {2 * left} bytes short of shape {list(shape)}")
        file.flush()
        os.fsync(file.fileno())
        drop_cache(file)
        hashed.result()
    return digest.hexdigest()
