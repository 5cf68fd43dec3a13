"""Verifying an export: every file against its digest, every weight for being a number, in one reading of each file.

Files are read side by side, a thread each; hashing, looking for NaN and reading release the interpreter lock, so what
limits it is the disk, or a core's SHA-256 where all weights are in one file.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from jev.checkpoint import finite
from jev.checkpoint.checked_json import CheckpointError
from jev.checkpoint.config import CONFIG_FILE
from jev.checkpoint.digests import DIGEST_FILE, read_digests
from jev.checkpoint.manifest import MANIFEST_FILE
from jev.checkpoint.opening import Export
from jev.checkpoint.weight_files import INDEX_FILE, TensorEntry, text_tensors

READ_BYTES = 4 << 20     # at a time; even, so that no piece of a tensor ends within a number
READERS = 8


@dataclass(frozen=True)
class Verified:
    """What ``verify`` found in order. ``others``: files that the worker reads, and that were not compared."""

    files: tuple[str, ...]
    others: tuple[str, ...]
    has_digests: bool

    def __str__(self) -> str:
        if not self.has_digests:
            return f"NOTE: not verified, the export has no {DIGEST_FILE} (earlier versions wrote none)"
        done = f"verified {shortened(self.files)}"
        return f"{done}; not verified: {shortened(self.others)} (--verify does)" if self.others else done


def shortened(names: Sequence[str], most: int = 8) -> str:
    """The names, those in the middle left out where there are many."""
    return ", ".join(names if len(names) <= most else (*names[:most - 2], "...", names[-1]))


def verify(export: Export, weights: bool = True) -> Verified:
    """Compare the files of ``export`` with ``SHA256SUMS``, and look for weights that are not finite; with a progress bar.

    weights: without, the files of the weights are left out and the rest takes an instant. Raises CheckpointError naming
    every file that is altered, missing or without a digest, and the first bad weight of each file.
    """
    digests = read_digests(export.path)
    tensors: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in text_tensors(export.path, export.config).items():
        tensors.setdefault(entry.path.name, {})[name] = entry
    served = {MANIFEST_FILE, CONFIG_FILE, export.tokenizer_file.name, *tensors}
    if (export.path / INDEX_FILE).exists():
        served.add(INDEX_FILE)
    to_read = set(tensors) if digests is None else served | set(digests)
    files = sorted(name for name in to_read if weights or not name.endswith(".safetensors"))
    with tqdm(total=sum(_size(export.path / name) for name in files), desc="verifying", unit="B", unit_scale=True,
              file=sys.stderr, disable=None if weights else True) as bar:
        lock, stop = threading.Lock(), threading.Event()

        def read(name: str) -> list[str]:
            path, digest = export.path / name, None if digests is None else digests.get(name)
            if digests is not None and digest is None:
                return [f"{path}: has no digest in {DIGEST_FILE}"]
            try:
                return _problems(path, digest, tensors.get(name, {}), advance)
            except OSError as error:
                return [f"{path}: cannot be read: {error.strerror or error}"]

        def advance(size: int) -> None:
            if stop.is_set():
                raise InterruptedError("verifying was interrupted")
            with lock:
                bar.update(size)
        pool = ThreadPoolExecutor(min(READERS, os.cpu_count() or 1, len(files) or 1), "jev-verify")
        try:
            problems = [problem for found in pool.map(read, files) for problem in found]
        finally:
            stop.set()                  # an interrupt does not wait for gigabytes
            pool.shutdown(cancel_futures=True)
    if problems:
        raise CheckpointError("\n".join(problems))
    compared = () if digests is None else tuple(files)
    return Verified(compared, tuple(sorted(served - set(compared))), digests is not None)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _problems(path: Path, digest: str | None, tensors: Mapping[str, TensorEntry], advance: Callable[[int], None]) -> list[str]:
    """What is wrong with one file. digest: its SHA-256, if known; tensors: the BF16 tensors in it."""
    sha, bad = hashlib.sha256(), None
    with open(path, "rb", buffering=0) as file:
        for name, start, piece in _pieces(file, tensors):
            if digest is not None:
                sha.update(piece)
            if name and bad is None:
                bits = np.frombuffer(piece, "<u2", len(piece) // 2)
                at = finite.first_not_finite(bits)
                if at is not None:
                    bad = finite.describe(name, start // 2 + at, int(bits[at]), tensors[name].shape)
            advance(len(piece))
    problems = [f"{path}: {bad}"] if bad else []
    if digest is not None and sha.hexdigest() != digest:
        problems.insert(0, f"{path}: is not the file that was exported: its SHA-256 is {sha.hexdigest()}, "
                           f"{DIGEST_FILE} has {digest}")
    return problems


def _pieces(file: io.FileIO, tensors: Mapping[str, TensorEntry]) -> Iterator[tuple[str, int, memoryview]]:
    """A file from its first byte to its last: (tensor or "" between them, byte within it, bytes until the next piece)."""
    buffer, at = memoryview(bytearray(READ_BYTES)), 0
    regions: list[tuple[str, float]] = []
    for name, entry in sorted(tensors.items(), key=lambda item: item[1].start):
        regions += [("", entry.start), (name, entry.start + entry.size)]
    for name, end in (*regions, ("", math.inf)):
        start = at
        while at < end:
            got = _fill(file, buffer[:int(min(READ_BYTES, end - at))])
            if not got:
                return
            yield name, at - start, buffer[:got]
            at += got


def _fill(file: io.FileIO, view: memoryview) -> int:
    """Read until ``view`` is full or the file ends; the bytes read."""
    done = 0
    while done < len(view):
        got = file.readinto(view[done:])
        if not got:
            break
        done += got
    return done
