"""Tensors read from their files a piece at a time, so that memory does not grow with them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jev.checkpoint.checked_json import CheckpointError
from jev.checkpoint.weight_files import TensorEntry
from jev_kernels import bf16

PIECE_BYTES = 8 * 2**20  # of a tensor, read and written at a time


def read_pieces(entry: TensorEntry) -> Iterator[np.ndarray]:
    """The elements of a tensor in order, flat, in pieces of at most PIECE_BYTES; float32, or uint16 for BF16.

    Read, not mapped, into fresh memory, and dropped from the page cache afterwards: neither grows with the file.
    """
    dtype = np.dtype({"BF16": "<u2", "F16": "<f2", "F32": "<f4"}[entry.dtype])
    with naming(entry.path), open(entry.path, "rb", buffering=0) as file:
        file.seek(entry.start)
        for at in range(0, entry.size, PIECE_BYTES):
            piece = np.empty(min(PIECE_BYTES, entry.size - at) // dtype.itemsize, dtype)
            view = piece.data.cast("B")
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
