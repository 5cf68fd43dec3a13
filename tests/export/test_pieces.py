"""Reading tensors a piece at a time."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from jev.checkpoint.checked_json import CheckpointError
from jev.checkpoint.opening import open_export
from jev.checkpoint.weight_files import TensorEntry, read_header
from jev.export import pieces
from jev.export.pieces import bf16_pieces, read_matrix
from jev_kernels import bf16
from tests.export.exporting import run
from tests.export_inputs import save


@pytest.mark.parametrize("piece", [2, 64, 10_000])
def test_the_size_of_pieces_does_not_matter(folder, monkeypatch, piece):
    expected = run(folder, "whole")
    monkeypatch.setattr(pieces, "PIECE_BYTES", piece * 4)
    if piece == 2:  # every piece is a system call: one layer's worth of tensors is enough
        entries = read_header(folder / "base/model-00001-of-00002.safetensors")
        name = "model.language_model.layers.0.linear_attn.conv1d.weight"
        assert np.concatenate([*bf16_pieces(entries[name])]).tobytes() == \
            open_export(expected).tensors["layers.0.linear_attn.conv1d.weight"].tobytes()
        return
    assert (run(folder) / "model.safetensors").read_bytes() == (expected / "model.safetensors").read_bytes()


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_matrices_are_read_exactly(tmp_path, dtype):
    x = np.random.default_rng(0).standard_normal((7, 33)).astype(np.float32)
    stored = {"F32": x, "F16": x.astype(np.float16), "BF16": bf16.from_float32(x)}[dtype]
    value = bf16.to_float32(stored) if dtype == "BF16" else stored.astype(np.float32)
    save(tmp_path / "x.safetensors", {"x": (dtype, stored)})
    entry = read_header(tmp_path / "x.safetensors")["x"]
    assert np.array_equal(read_matrix(entry), value)
    assert np.array_equal(np.concatenate([*bf16_pieces(entry)]).reshape(7, 33), bf16.from_float32(value))


def test_a_file_cut_while_it_is_read(tmp_path):
    save(tmp_path / "x.safetensors", {"x": ("BF16", np.zeros(100, np.uint16))})
    entry = read_header(tmp_path / "x.safetensors")["x"]
    os.truncate(tmp_path / "x.safetensors", entry.start + 50)
    with pytest.raises(CheckpointError, match="ended while it was read"):
        read_matrix(entry)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    entry = TensorEntry(Path("/proc/self/mem"), "BF16", (4,), 0, 8)  # nothing is mapped at address 0
    with pytest.raises(OSError, match="Input/output error: '/proc/self/mem'"):
        read_matrix(entry)
