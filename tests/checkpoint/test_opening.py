"""Opening exports: what is read, and what is no export at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jev.checkpoint import opening
from jev.checkpoint.opening import open_export
from jev.checkpoint.weight_files import read_header
from tests.checkpoint.refusals import INDEX, MANIFEST, WEIGHTS, refuses


def test_an_export_is_read(demo):
    export = open_export(demo)
    assert export.path == demo and export.demo and export.tokenizer_file == demo / "tokenizer.json"
    assert export.model_names == {"open-jev-demo", "open-jev", "jev-latest"}
    assert {name: x.shape for name, x in export.tensors.items()} == export.config.tensor_shapes()
    assert export.head.weight.dtype == np.float32 and export.head.weight.shape == (export.config.hidden_size,)
    assert list(export.manifest.head_weight) == export.head.weight.tolist()


def test_tensors_are_read_only_views_of_the_file(demo):
    tensors = open_export(demo).tensors
    entries = read_header(demo / WEIGHTS)
    data = (demo / WEIGHTS).read_bytes()
    for name, x in tensors.items():
        assert x.dtype == np.uint16 and not x.flags.writeable and not x.flags.owndata
        assert x.tobytes() == data[entries[name].start:entries[name].start + entries[name].size]


@pytest.mark.parametrize("limit", [1, 512, 16384])
def test_the_saved_length_can_be_replaced(demo, limit):
    assert open_export(demo).manifest.max_length == 4096
    assert open_export(demo, max_length=limit).manifest.max_length == limit


@pytest.mark.parametrize("limit", [0, -1, 16385, True, 12.0])
def test_a_length_out_of_range_is_refused(demo, limit):
    refuses(demo, "max_length", max_length=limit)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"a": 1, "a": 2}', b"\xff{}", b"[" * 100000])
@pytest.mark.parametrize("name", ["config.json", MANIFEST])
def test_files_that_are_not_a_json_object(export, name, content):
    (export / name).write_bytes(content)
    refuses(export, name)


def test_a_missing_file(export):
    (export / "tokenizer.json").unlink()
    refuses(export, "tokenizer.json", "missing")
    (export / "config.json").unlink()
    refuses(export, "config.json")


def test_what_is_not_an_export(demo, export, tmp_path):
    refuses(tmp_path / "nowhere", "no such export folder")
    refuses(demo / MANIFEST, "no such export folder")
    (export / MANIFEST).unlink()
    refuses(export, str(export), "plain base model", "unfinished", MANIFEST)
    (tmp_path / "empty").mkdir()
    refuses(tmp_path / "empty", "not an export")


def test_the_module_needs_no_torch():
    code = "import sys, jev.checkpoint.opening; sys.exit(bool({'torch', 'flask', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(opening.__file__).parents[2]).returncode == 0


@pytest.mark.parametrize("name", [MANIFEST, WEIGHTS, INDEX, "tokenizer.json", "config.json"])
def test_a_link_without_its_file_is_named(export, name):
    (export / name).unlink(missing_ok=True)
    (export / name).symlink_to("../blobs/0123")
    refuses(export, f"{export / name}: ", "is a link to a file that is not there")
