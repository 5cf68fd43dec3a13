"""The writer: shards, what it takes, and nothing under a name before it is on the disk."""

from __future__ import annotations

import json
import os
import resource

import numpy as np
import pytest

from jev.checkpoint.checked_json import CheckpointError
from jev.checkpoint.opening import open_export
from jev.checkpoint.weight_files import read_header
from jev.export.writer import write_export
from tests import export_inputs
from tests.export.exporting import FILES, good_stream, manifest, run
from tests.export_inputs import CONFIG, TEXT_CONFIG


def test_shards_keep_to_their_size_and_have_an_index(folder):
    one = open_export(run(folder, "one"))
    limit = 150_000
    many = open_export(run(folder, "many", shard_bytes=limit))
    assert list(one.tensors) == list(many.tensors)
    assert all(np.array_equal(one.tensors[name], x) for name, x in many.tensors.items())
    shards = sorted(many.path.glob("*.safetensors"))
    count = len(shards)
    assert [s.name for s in shards] == [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    for path in shards:
        entries = read_header(path)
        assert len(entries) > 1 or path == shards[0]  # the embedding fills one
        assert sum(e.size for e in entries.values()) <= limit
    index = json.loads((many.path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in one.tensors.values())
    assert set(index["weight_map"].values()) == {s.name for s in shards}


def test_a_tensor_larger_than_a_shard_gets_its_own(folder):
    result = open_export(run(folder, shard_bytes=1))
    assert len(list(result.path.glob("*.safetensors"))) == len(result.tensors)


def test_files_can_be_read_by_the_safetensors_library(folder):
    from safetensors import safe_open
    path = run(folder) / "model.safetensors"
    with safe_open(path, "numpy") as file:
        assert set(file.keys()) == set(CONFIG.tensor_shapes()) and file.metadata() == {"format": "pt"}


def good_stream_arrays():
    return export_inputs.base_tensors(0).items()


@pytest.mark.parametrize("stream, words", [
    (lambda: list(good_stream())[:-1], ["norm.weight", "None"]),
    (lambda: list(good_stream())[1:], ["embed_tokens.weight", "layers.0"]),
    (lambda: [*good_stream(), ("extra", [])], ["more tensors"]),
    (lambda: [(n, [x[:-1]]) for n, x in good_stream_arrays()], ["embed_tokens.weight", "short"]),
    (lambda: [(n, [x, x]) for n, x in good_stream_arrays()], ["embed_tokens.weight", "short"]),
    (lambda: [(n, [x.astype(np.float32)]) for n, x in good_stream_arrays()], ["embed_tokens.weight", "float32"]),
])
def test_the_writer_takes_exactly_the_tensors_of_the_configuration(tmp_path, stream, words):
    with pytest.raises(CheckpointError) as caught:
        write_export(tmp_path / "out", TEXT_CONFIG, stream(), manifest(), FILES)
    for word in words:
        assert word in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), RuntimeError("x")])
def test_an_interrupted_export_leaves_nothing(tmp_path, error):
    def stream():
        for i, item in enumerate(good_stream()):
            if i == 20:
                assert (tmp_path / "out.unfinished").is_dir() and not (tmp_path / "out").exists()
                raise error
            yield item
    with pytest.raises(type(error)):
        write_export(tmp_path / "out", TEXT_CONFIG, stream(), manifest(), FILES)
    assert list(tmp_path.iterdir()) == []


def test_folders_made_for_an_export_that_fails_go_too(tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match="more tensors"):
        write_export(tmp_path / "there/new/folders/out", TEXT_CONFIG, [*good_stream(), ("x", [])], manifest(), FILES)
    assert list(tmp_path.rglob("*")) == [tmp_path / "there"]


@pytest.mark.parametrize("limit, file", [(100_000, "model.safetensors"), (50, "config.json")])
def test_a_file_that_cannot_be_written_is_named(tmp_path, limit, file):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(OSError) as caught:
            write_export(tmp_path / "out", TEXT_CONFIG, good_stream(), manifest(), FILES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(caught.value) == f"[Errno 27] File too large: '{tmp_path / 'out.unfinished' / file}'"
    assert list(tmp_path.iterdir()) == []


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    did = []

    def sync(file, real=os.fsync):
        did.append(os.readlink(f"/proc/self/fd/{file}").replace(str(tmp_path), ""))
        real(file)

    def rename(old, new, real=os.rename):
        did.append("rename")
        real(old, new)
    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", rename)
    write_export(tmp_path / "new/out", TEXT_CONFIG, good_stream(), manifest(), FILES)
    work = "/new/out.unfinished"
    assert sorted(did[:3]) == [f"{work}/config.json", f"{work}/model.safetensors", f"{work}/tokenizer.json"]
    assert did[3:] == [f"{work}/SHA256SUMS", f"{work}/open_jev_export.json.new", work, "rename", "/new", ""]


def test_the_manifest_comes_last(tmp_path, monkeypatch):
    """At every moment of the writing, whatever exists is refused; ``out`` appears whole."""
    work, seen = tmp_path / "out.unfinished", []

    def check(_):
        seen.append(sorted(f.name for f in work.iterdir()))
        assert not (tmp_path / "out").exists()
        with pytest.raises(CheckpointError, match="unfinished"):
            open_export(work)
    write_export(tmp_path / "out", TEXT_CONFIG, good_stream(), manifest(), FILES, progress=check, shard_bytes=200_000)
    assert len(seen) == len(CONFIG.tensor_shapes()) and not any("open_jev_export.json" in names for names in seen)
    open_export(tmp_path / "out")


def test_progress_counts_every_byte(tmp_path):
    counts = []
    write_export(tmp_path / "out", TEXT_CONFIG, good_stream(), manifest(), FILES, progress=counts.append)
    assert sum(counts) == sum(x.nbytes for x in export_inputs.base_tensors(0).values())
