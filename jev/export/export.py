"""Making an export: base weights plus LoRA, one tensor at a time, in the bits that PEFT's own merge gives.

The reference way loads the whole model and calls ``merge_and_unload(safe_merge=True)``: 110 GB of RAM for 27B. Here
each tensor is read from the base's shards, merged if the adapter has it, rounded, written and forgotten; what is in
memory at once is one LoRA target in float32, well under 2 GB for 27B.

What PEFT does to a BF16 weight W on a CPU, and in which precision (``peft.tuners.lora.layer.Linear``; the adapter is
float32 whatever its file holds, see ``cast_adapter_dtype``):

    delta = (B @ A) * float32(scaling)      float32; scaling = alpha / r
    W'    = r(W + r(delta))                 r rounds to BF16; the sum itself is float32

``B @ A`` is done by the same torch operation on the same shapes. All the rest is elementwise IEEE arithmetic with one
correct answer, so NumPy does it. (For ranks up to 128 the bits of ``B @ A`` were seen to depend on neither thread
count nor alignment nor library: products are added in order of r, by fused multiply-add.)

Which revision ``--base`` and ``--checkpoint`` are is never guessed. It is known for a snapshot folder of the Hugging
Face cache (``.../snapshots/<revision>``), for what ``hf download --local-dir`` wrote (``.cache/huggingface/download``
beside it, which names the commit of each file), or from a file ``revision`` in the folder that holds the commit.

torch and transformers come with the extra ``export`` and are imported only when needed.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jev.arguments import Parser
from jev.checkpoint.checked_json import CheckpointError, Fields, read_json
from jev.checkpoint.checkpoint import (
    MANIFEST_FILE,
    MAX_LENGTH_LIMIT,
    PINNED,
    TOKENIZER_FILE,
    Manifest,
    ModelConfig,
    check_dims,
    pinned,
)
from jev.checkpoint.weight_files import CONFIG_FILE, INDEX_FILE, PREFIXES, WEIGHTS_FILE, TensorEntry, read_header, text_tensors
from jev_kernels import bf16

SHARD_BYTES = 5 * 10**9
PIECE_BYTES = 8 * 2**20  # of a tensor, read and written at a time
UNFINISHED = ".unfinished"
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TOKENIZER_FILES = (TOKENIZER_FILE, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                   "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json")
TARGETS = {"full_attention": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
           "linear_attention": ("linear_attn.in_proj_qkv", "linear_attn.out_proj")}
TARGET_NAMES = frozenset(module.split(".")[1] for modules in TARGETS.values() for module in modules)
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter/adapter_config.json", "adapter/adapter_model.safetensors"
CHECKPOINT_FILES = ("model.json", "head.pt", "temperature.json", ADAPTER_CONFIG, ADAPTER_WEIGHTS)
# Settings of PEFT that change what a merge means; a plain LoRA has none of them.
UNSUPPORTED = ("use_dora", "use_qalora", "use_bdlora", "lora_bias", "fan_in_fan_out", "rank_pattern", "alpha_pattern",
               "modules_to_save", "layer_replication", "target_parameters", "trainable_token_indices",
               "megatron_config", "alora_invocation_tokens", "arrow_config", "velora_config", "monteclora_config",
               "kasa_config")


# ---------------------------------------------------------------------------------------------------------------------
# Inputs


def known_revision(folder: Path, files: Iterable[str], repo: str) -> str:
    """The commit of Hugging Face repository ``repo`` that ``folder`` holds; ``files`` are looked up one by one.

    Raises CheckpointError if nothing says which, if files come from different commits, or for another repository.
    """
    resolved = folder.resolve()
    roots = (resolved, *resolved.parents[:3])  # the checkpoint lies in a subfolder of its repository
    for root in roots:
        if root.parent.name == "snapshots" and _is_commit(root.name):
            cache = root.parent.parent.name
            if cache.startswith("models--") and cache != "models--" + repo.replace("/", "--"):
                raise CheckpointError(f"{folder}: is a snapshot of {cache[8:].replace('--', '/')}, expected {repo}")
            return root.name
    note = folder / "revision"
    if note.is_file():
        revision = note.read_text("utf-8", "replace").strip()
        if not _is_commit(revision):
            raise CheckpointError(f"{note}: expected a commit of 40 hex digits, found {revision!r:.60}")
        return revision
    for root in roots:
        records = root / ".cache/huggingface/download" / resolved.relative_to(root)
        if records.is_dir():
            return _recorded_revision(folder, records, files)
    raise CheckpointError(f"{folder}: its revision is unknown: fetch it with `hf download {repo} --revision <commit> "
                          f"--local-dir <folder>`, or write the commit that it holds into {note}")


def _recorded_revision(folder: Path, records: Path, files: Iterable[str]) -> str:
    """The one commit in the first lines of what `hf download` noted about ``files``."""
    commits: dict[str, str] = {}
    for file in files:
        record = records / f"{file}.metadata"
        lines = record.read_text("utf-8", "replace").splitlines() if record.is_file() else []
        if not lines or not _is_commit(lines[0]):
            raise CheckpointError(f"{folder / file}: its revision is unknown: {record} does not name a commit")
        commits.setdefault(lines[0], file)
    if len(commits) > 1:
        (one, first), (two, second) = sorted(commits.items())[:2]
        raise CheckpointError(f"{folder}: {first} is of revision {one}, but {second} of {two}: download it again")
    return next(iter(commits))


def _is_commit(text: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{40}", text) is not None


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
    # A string is a pattern over module names; then the matrices below decide alone.
    if isinstance(targets, list) and not set(map(str, targets)) <= TARGET_NAMES:
        raise f.refuse("target_modules", f"{sorted(set(map(str, targets)) - TARGET_NAMES)} are not among "
                                         f"{sorted(TARGET_NAMES)}")
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
        if module not in wanted:
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
            for piece in read_pieces(entry):
                if not np.isfinite(bf16.to_float32(piece) if entry.dtype == "BF16" else piece).all():
                    raise CheckpointError(f"{entry.path}: lora_{side} of {name} is not finite")


def read_head(path: Path, width: int) -> tuple[list[float], float]:
    """(weight of ``width`` numbers, bias) from ``head.pt``, which is unpickled without running any code of its own.

    Raises CheckpointError for anything but {"weight": finite [1, width], "bias": finite [1]}.
    """
    torch = _import("torch")
    try:
        head = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:  # torch raises what its zip reader and unpickler happen to raise
        kind = type(error).__name__
        raise CheckpointError(f"{path}: is not a file of plain tensors: {kind}: {error!s:.200}") from None
    found = []
    for name, shape in (("weight", (1, width)), ("bias", (1,))):
        tensor = head.get(name) if isinstance(head, dict) else None
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != shape:
            raise CheckpointError(f"{path}: {name}: expected a tensor {list(shape)}, "
                                  f"found {list(getattr(tensor, 'shape', [])) or type(tensor).__name__}")
        if not torch.isfinite(tensor.float()).all():
            raise CheckpointError(f"{path}: {name}: is not finite")
        found.append(tensor.float().reshape(-1).tolist())
    return found[0], found[1][0]


def chat_frame(base: Path) -> tuple[str, str]:
    """What the tokenizer's chat template puts before and after one user message: generation prompt, thinking off."""
    transformers = _import("transformers")
    marker = "\x00message\x00"
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(base, local_files_only=True)
        chat = tokenizer.apply_chat_template([{"role": "user", "content": marker}], tokenize=False,
                                             add_generation_prompt=True, enable_thinking=False)
    except Exception as error:  # files of many formats, and a template that is a program
        raise CheckpointError(f"{base}: the chat template cannot be applied: {error!s:.300}") from None
    if chat.count(marker) != 1:
        raise CheckpointError(f"{base}: the chat template shows the message {chat.count(marker)} times, not once")
    prefix, suffix = chat.split(marker)
    return prefix, suffix


def _import(name: str) -> Any:
    try:
        return __import__(name)
    except ImportError as error:
        raise CheckpointError(f"making an export needs {name}: in the checkout, pip install '.[export]' "
                              f"({error})") from None


# ---------------------------------------------------------------------------------------------------------------------
# Tensors, a piece at a time


def read_pieces(entry: TensorEntry) -> Iterator[np.ndarray]:
    """The elements of a tensor in order, flat, in pieces of at most PIECE_BYTES; float32, or uint16 for BF16.

    Read, not mapped, into fresh memory, and dropped from the page cache afterwards: neither grows with the file.
    """
    dtype = np.dtype({"BF16": "<u2", "F16": "<f2", "F32": "<f4"}[entry.dtype])
    with naming(entry.path), open(entry.path, "rb", buffering=0) as file:
        file.seek(entry.start)
        for at in range(0, entry.size, PIECE_BYTES):
            piece = np.empty(min(PIECE_BYTES, entry.size - at) // dtype.itemsize, dtype)
            view = memoryview(piece).cast("B")
            while view:
                got = file.readinto(view)
                if not got:
                    raise CheckpointError(f"{entry.path}: ended while it was read: has it been changed?")
                view = view[got:]
            yield piece.astype(np.float32) if entry.dtype == "F16" else piece
        drop_cache(file, entry.start, entry.size)


def bf16_pieces(entry: TensorEntry) -> Iterator[np.ndarray]:
    """``read_pieces`` as BF16 bits (uint16). Float32 is rounded, as loading a model in BF16 rounds it."""
    for piece in read_pieces(entry):
        yield piece if entry.dtype == "BF16" else bf16.from_float32(piece)


def read_matrix(entry: TensorEntry) -> np.ndarray:
    """A whole matrix as float32, exactly."""
    pieces = [bf16.to_float32(p) if entry.dtype == "BF16" else p for p in read_pieces(entry)]
    return np.concatenate(pieces).reshape(entry.shape)


def torch_matmul(b: np.ndarray, a: np.ndarray) -> np.ndarray:
    """float32 b @ a by the operation that PEFT uses."""
    torch = _import("torch")
    return (torch.from_numpy(b) @ torch.from_numpy(a)).numpy()


def merged_pieces(name: str, base: TensorEntry, adapter: Adapter) -> Iterator[np.ndarray]:
    """BF16 bits of ``r(W + r(B A scaling))`` in flat pieces. Raises CheckpointError for a non-finite delta or sum."""
    a, b = (read_matrix(entry) for entry in adapter.pairs[name])
    with np.errstate(over="ignore", invalid="ignore"):  # non-finite values are looked for below
        delta = torch_matmul(b, a)
        delta *= np.float32(adapter.scaling)
        delta, at = delta.reshape(-1), 0
        for piece in bf16_pieces(base):
            part = delta[at:at + piece.size]
            if not np.isfinite(part).all():
                raise CheckpointError(f"{adapter.pairs[name][0].path}: the LoRA delta of {name} is not finite")
            piece = bf16.from_float32(bf16.to_float32(piece) + bf16.to_float32(bf16.from_float32(part)))
            if (piece & 0x7F80 == 0x7F80).any():
                raise CheckpointError(f"{base.path}: {name} is not finite after merging")
            yield piece
            at += piece.size


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an OSError of reading or writing, which names no file, ``path``."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def drop_cache(file: BinaryIO, start: int = 0, size: int = 0) -> None:
    """Tell the system that these bytes of the file will not be needed again (all of it for size 0)."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), start, size, os.POSIX_FADV_DONTNEED)


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def write_export(path: str | Path, config_json: Mapping[str, Any],
                 tensors: Iterable[tuple[str, Iterable[np.ndarray]]], manifest: Manifest, files: Mapping[str, bytes], *,
                 shard_bytes: int = SHARD_BYTES, replace_existing: bool = False,
                 progress: Callable[[int], None] | None = None) -> None:
    """Write an export, streaming its weights; ``path`` appears only once everything is on the disk.

    tensors: bare name and little-endian uint16 pieces, whose bytes follow each other, for every tensor of
        ``config_json`` in the order of ``ModelConfig.tensor_shapes``; consumed one piece at a time.
    files: name -> contents of the tokenizer's files, ``tokenizer.json`` among them.
    shard_bytes: the most bytes of tensors in one file (a larger tensor gets a file of its own).
    progress: called with the number of bytes after each piece.

    Work goes to ``<path>.unfinished`` beside ``path``; it is removed on an error, and on a signal whose handler raises,
    as are folders made above it. One left by a killed process is
    refused, never reused: which of its bytes reached the disk is unknown. Raises CheckpointError for an existing path,
    leftovers, a disk too small (before the first byte), or tensors other than those of the configuration.
    """
    path, work = check_target(path, replace_existing)
    config = ModelConfig.from_json(config_json)
    plan = _plan_shards(config.tensor_shapes(), shard_bytes)
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
            _write(work / INDEX_FILE, json.dumps(index, indent=2).encode())
        _write(work / CONFIG_FILE, json.dumps(config_json, indent=2).encode())
        for name, contents in files.items():
            _write(work / name, contents)
        stream = iter(tensors)
        for name, shard in zip(names, plan):
            _write_shard(work / name, shard, stream, progress)
        if next(stream, None) is not None:
            raise CheckpointError(f"{path}: more tensors than the configuration has")
        _write(work / f"{MANIFEST_FILE}.new", json.dumps(manifest.to_json(), allow_nan=False).encode() + b"\n")
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


def _plan_shards(shapes: Mapping[str, tuple[int, ...]], shard_bytes: int) -> list[dict[str, tuple[int, ...]]]:
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


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore the signals that ask a program to end. Other threads than the main one get none anyhow."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in ENDING]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


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


def _write_shard(path: Path, shapes: Mapping[str, tuple[int, ...]], stream, progress) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + 2 * math.prod(shape)]}
        end = header[name]["data_offsets"][1]
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with naming(path), open(path, "xb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for name, shape in shapes.items():
            given, pieces = next(stream, (None, ()))
            if given != name:
                raise CheckpointError(f"{path}: expected tensor {name}, was given {given}")
            left = 2 * math.prod(shape)
            for piece in pieces:
                if piece.dtype != np.dtype("<u2"):
                    raise CheckpointError(f"{path}: {name}: expected uint16 (BF16 bits), was given {piece.dtype}")
                left -= file.write(np.ascontiguousarray(piece))
                if progress:
                    progress(piece.nbytes)
            if left:
                raise CheckpointError(f"{path}: {name}: {left} bytes short of shape {list(shape)}")
        file.flush()
        os.fsync(file.fileno())
        drop_cache(file)


# ---------------------------------------------------------------------------------------------------------------------
# The whole export


def export_merged(base: str | Path, checkpoint: str | Path, out: str | Path, max_length: int = 4096,
                  shard_bytes: int = SHARD_BYTES) -> None:
    """Merge a pinned checkpoint into its base and write the export ``out``; everything is checked before that begins.

    base: downloaded base model. checkpoint: folder with model.json, head.pt, temperature.json and adapter/.
    max_length: tokens of a prompt that the worker will accept, 1..16384. Raises CheckpointError.
    """
    base, checkpoint = Path(base), Path(checkpoint)
    check_target(out)
    if not 1 <= max_length <= MAX_LENGTH_LIMIT:
        raise CheckpointError(f"--max-length: expected 1..{MAX_LENGTH_LIMIT} tokens, found {max_length}")
    for folder in (base, checkpoint):
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder")
    model = Fields(str(checkpoint / "model.json"), read_json(checkpoint / "model.json"))
    source = pinned(model.text("model_id"))
    if source is None:
        raise model.refuse("model_id", f"expected {' or '.join(p.model_id for p in PINNED)}, "
                                       f"found {model.data['model_id']!r:.60}")
    if model.text("revision") != source.base_revision:
        raise model.refuse("revision", f"{source.title} was trained on {source.base_revision} of {source.model_id}, "
                                       f"found {model.data['revision']!r:.60}")
    base_json = read_json(base / CONFIG_FILE)
    config = ModelConfig.from_json(base_json, str(base / CONFIG_FILE))
    check_dims(config, source, str(base / CONFIG_FILE))
    tensors = text_tensors(base, config, ("BF16", "F32", "F16"))
    shards = {entry.path.name for entry in tensors.values()}
    files = {name: (base / name).read_bytes() for name in TOKENIZER_FILES if (base / name).is_file()}
    if TOKENIZER_FILE not in files:
        raise CheckpointError(f"{base / TOKENIZER_FILE}: is missing")
    for folder, names, repo, revision in (
            (base, [CONFIG_FILE, *files, *sorted(shards)], source.model_id, source.base_revision),
            (checkpoint, CHECKPOINT_FILES, source.checkpoint_repo, source.checkpoint_revision)):
        found = known_revision(folder, names, repo)
        if found != revision:
            raise CheckpointError(f"{folder}: is revision {found} of {repo}; {source.title} needs {revision}")
    temperature = Fields(str(checkpoint / "temperature.json"), read_json(checkpoint / "temperature.json"))
    adapter = read_adapter(checkpoint, config, model.integer("lora_rank"))
    weight, bias = read_head(checkpoint / "head.pt", config.hidden_size)
    prefix, suffix = chat_frame(base)
    check_factors(adapter)
    manifest = Manifest(source.model_id, source.base_revision, source.checkpoint_revision,
                        temperature.number("temperature"), max_length, prefix, suffix, tuple(weight), bias)
    text = base_json.get("text_config", base_json)
    # What Transformers would fill in is written out: other readers of the format look for it.
    rope = {"rope_type": "default", "rope_theta": config.rope_theta,
            "partial_rotary_factor": config.rotary_dim / config.head_dim}
    config_json = {"hidden_act": "silu", "max_position_embeddings": 32768, **text,
                   "layer_types": list(config.layer_types),
                   "rope_parameters": {**(text.get("rope_parameters") or {}), **rope},
                   "architectures": ["Qwen3_5TextModel"], "model_type": "qwen3_5_text", "dtype": "bfloat16"}
    from tqdm import tqdm
    total = sum(2 * math.prod(entry.shape) for entry in tensors.values())
    with tqdm(total=total, desc=source.title, unit="B", unit_scale=True) as bar:
        stream = ((name, merged_pieces(name, entry, adapter) if name in adapter.pairs else bf16_pieces(entry))
                  for name, entry in tensors.items())
        write_export(out, config_json, stream, manifest, files, shard_bytes=shard_bytes, progress=bar.update)


def main(argv: list[str] | None = None) -> int:
    """``jev export``: returns the exit status."""
    parser = Parser(prog="jev export", description="Merge a pinned Open-Jev checkpoint into its base "
                                     "model and write the folder that the worker serves.")
    parser.add_argument("--base", required=True, type=Path, help="folder of the downloaded base model")
    parser.add_argument("--checkpoint", required=True, type=Path,
                        help="folder with model.json, head.pt, temperature.json and adapter/")
    parser.add_argument("--out", required=True, type=Path, help="folder to make; must not exist")
    parser.add_argument("--max-length", type=int, default=4096,
                        help=f"most tokens of one prompt, up to {MAX_LENGTH_LIMIT} (default: %(default)s)")
    arguments = parser.parse_args(argv)
    with raising_signals():
        try:
            export_merged(arguments.base, arguments.checkpoint, arguments.out, arguments.max_length)
        except (CheckpointError, OSError) as error:
            print(f"jev export: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt as error:
            work = f"{os.path.abspath(arguments.out)}{UNFINISHED}"
            left = f"{work} is there, unfinished: remove it" if os.path.lexists(work) else "nothing unfinished is left"
            print(f"jev export: interrupted; {left}", file=sys.stderr)
            return 128 + (error.number if isinstance(error, Ended) else signal.SIGINT)
    print(f"wrote {arguments.out}")
    return 0


class Ended(KeyboardInterrupt):
    """A signal asked the program to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def raising_signals() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP raise Ended, unless whoever started the program had them ignored (nohup).

    Within a second of one, others do nothing: they often come in twos, and the second would break off the clean-up.
    That stays so afterwards, since the program is about to end; only if there was none, all is as before.
    """
    last = -math.inf

    def end(number: int, frame: object) -> None:
        nonlocal last
        if time.monotonic() - last > 1:
            last = time.monotonic()
            raise Ended(number)
    before = []
    if threading.current_thread() is threading.main_thread():
        before = [(number, signal.signal(number, end)) for number in ENDING
                  if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)]
    try:
        yield
    finally:
        if last == -math.inf:
            for number, handler in before:
                signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
