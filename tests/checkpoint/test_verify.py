"""Verifying an export: altered, missing and added files, and weights that are not finite, each by name."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from jev import cli
from jev.checkpoint import verify as module
from jev.checkpoint.checked_json import CheckpointError
from jev.checkpoint.digests import DIGEST_FILE, read_digests, to_text
from jev.checkpoint.finite import describe, first_not_finite
from jev.checkpoint.opening import open_export
from jev.checkpoint.verify import verify
from jev.checkpoint.weight_files import read_header
from jev.export.writer import write_export
from jev_kernels import bf16
from tests.checkpoint.refusals import INDEX, MANIFEST, WEIGHTS
from tests.export_inputs import save, write_json

ALL = ("config.json", WEIGHTS, MANIFEST, "tokenizer.json", "tokenizer_config.json")
K_NORM = "layers.3.self_attn.k_norm.weight"


def refusal(path: Path, **arguments) -> str:
    with pytest.raises(CheckpointError) as caught:
        verify(open_export(path), **arguments)
    return str(caught.value)


def put(path: Path, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


def set_weight(export: Path, name: str, place: tuple[int, ...], bits: int) -> None:
    entry = read_header(export / WEIGHTS)[name]
    put(export / WEIGHTS, entry.start + 2 * int(np.ravel_multi_index(place, entry.shape)), bits.to_bytes(2, "little"))


@pytest.fixture
def sharded(demo, tmp_path) -> Path:
    """The demo in several shards."""
    export = open_export(demo)
    write_export(tmp_path / "sharded", json.loads((demo / "config.json").read_text()),
                 ((name, [x]) for name, x in export.tensors.items()), export.manifest,
                 {"tokenizer.json": export.tokenizer_file.read_bytes()}, shard_bytes=4_000_000)
    return tmp_path / "sharded"


# --- digests


def test_an_export_has_the_digest_of_every_file(demo, sharded):
    for folder in (demo, sharded):
        assert read_digests(folder) == {file.name: hashlib.sha256(file.read_bytes()).hexdigest()
                                        for file in folder.iterdir() if file.name != DIGEST_FILE}
    assert len(list(sharded.glob("*.safetensors"))) > 3
    assert set(read_digests(demo)) == set(ALL)


def test_digests_are_what_sha256sum_reads(export):
    command = shutil.which("sha256sum")
    if command is None:
        pytest.skip("needs sha256sum")
    assert subprocess.run([command, "--quiet", "--strict", "-c", DIGEST_FILE], cwd=export).returncode == 0
    put(export / WEIGHTS, 5_000_000, b"\x01\x02")
    assert subprocess.run([command, "--quiet", "--status", "-c", DIGEST_FILE], cwd=export).returncode == 1


def test_what_was_exported_is_verified(demo, sharded):
    whole = verify(open_export(demo))
    assert whole.files == tuple(sorted(ALL)) and whole.others == () and whole.has_digests
    small = verify(open_export(demo), weights=False)
    assert small.files == tuple(sorted(set(ALL) - {WEIGHTS})) and small.others == (WEIGHTS,)
    assert "not verified: model.safetensors (--verify does)" in str(small) and "not" not in str(whole)
    shards = {file.name for file in sharded.glob("*.safetensors")}
    assert shards < set(verify(open_export(sharded)).files)
    assert set(verify(open_export(sharded), weights=False).others) == shards


@pytest.mark.parametrize("where", ["weights", "header", "end"])
def test_two_changed_bytes_are_named(export, where):
    data = bytearray((export / WEIGHTS).read_bytes())
    # In the header: the name of the framework, so that it still says the same of every tensor.
    at = {"weights": 5_000_000, "header": data.index(b'"pt"') + 1, "end": len(data) - 2}[where]
    data[at] ^= 1
    data[at + 1] ^= 1
    (export / WEIGHTS).write_bytes(data)
    said = refusal(export)
    assert str(export / WEIGHTS) in said and "not the file that was exported" in said
    assert hashlib.sha256(data).hexdigest() in said and read_digests(export)[WEIGHTS] in said
    assert verify(open_export(export), weights=False).others == (WEIGHTS,)      # and a start without --verify says so


@pytest.mark.parametrize("name", sorted(set(ALL) - {WEIGHTS}))
def test_small_files_are_verified_at_every_start(export, name):
    (export / name).write_bytes((export / name).read_bytes() + b"\n")
    for weights in (False, True):
        said = refusal(export, weights=weights)
        assert str(export / name) in said and said.count("\n") == 0


def test_every_altered_file_is_told(sharded):
    shards = sorted(sharded.glob("*.safetensors"))
    for path in (shards[1], shards[-1], sharded / "config.json"):
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if path.suffix == ".safetensors" else data + b" ")
    said = refusal(sharded).splitlines()
    assert [line.split(":")[0] for line in said] == [str(sharded / "config.json"), str(shards[1]), str(shards[-1])]


def test_files_without_a_digest_and_digests_without_a_file(export):
    digests = read_digests(export)
    (export / "README").write_text("a file that the worker does not read")
    verify(open_export(export))
    (export / "tokenizer_config.json").unlink()
    assert f"{export / 'tokenizer_config.json'}: cannot be read: No such file" in refusal(export)
    del digests["tokenizer_config.json"], digests[WEIGHTS], digests["tokenizer.json"]
    (export / DIGEST_FILE).write_text(to_text(digests))
    said = refusal(export)
    assert [f"{export / name}: has no digest in SHA256SUMS" in said for name in (WEIGHTS, "tokenizer.json")] == [True] * 2
    assert WEIGHTS not in refusal(export, weights=False)


def test_an_export_without_digests_is_served_with_a_note(export):
    (export / DIGEST_FILE).unlink()
    for weights in (False, True):
        found = verify(open_export(export), weights)
        assert not found.has_digests and found.files == () and set(found.others) == {*ALL[:4]}
        assert "NOTE" in str(found) and DIGEST_FILE in str(found)
    set_weight(export, K_NORM, (17,), bf16.NAN)
    assert f"{K_NORM}[17] is NaN" in refusal(export)       # which needs no digest


@pytest.mark.parametrize("text", [
    "x", f"{'0' * 63}  config.json", f"{'0' * 64} config.json", f"{'0' * 64}  sub/config.json", f"{'0' * 64}  ",
    f"{'0' * 64}  a\n{'1' * 64}  a", "\n"])
def test_digests_of_another_form_are_refused(export, text):
    (export / DIGEST_FILE).write_text(text)
    assert re.search(rf"{DIGEST_FILE}: line [12]: expected", refusal(export))


def test_digests_that_cannot_be_read(export):
    (export / DIGEST_FILE).write_bytes(b"\xff\xfe")
    assert "not UTF-8" in refusal(export)
    (export / DIGEST_FILE).unlink()
    (export / DIGEST_FILE).mkdir()
    assert "cannot be read" in refusal(export)


def test_digests_behind_a_broken_link_are_not_taken_for_none(export):
    (export / DIGEST_FILE).unlink()
    (export / DIGEST_FILE).symlink_to("elsewhere")
    assert "is a link to a file that is not there" in refusal(export)


def test_binary_mode_marks_and_upper_case_are_read(export):
    digests = read_digests(export)
    (export / DIGEST_FILE).write_text("".join(f"{d.upper()} *{n}\n" for n, d in digests.items()))
    assert read_digests(export) == digests


# --- weights that are not finite


@pytest.mark.parametrize("name, place, bits, kind", [
    ("embed_tokens.weight", (0, 0), 0x7FC0, "NaN"), ("embed_tokens.weight", (1279, 255), 0x7F80, "infinity"),
    ("layers.0.linear_attn.conv1d.weight", (1279, 0, 3), 0xFF80, "-infinity"),
    ("layers.2.linear_attn.A_log", (5,), 0xFF81, "NaN"), ("layers.7.mlp.down_proj.weight", (255, 767), 0x7F81, "NaN"),
    ("norm.weight", (255,), 0xFFFF, "NaN")])
def test_a_weight_that_is_not_finite_is_named_with_its_place(export, monkeypatch, name, place, bits, kind):
    monkeypatch.setattr(module, "READ_BYTES", 98_306)       # the place counts over pieces
    (export / DIGEST_FILE).unlink()
    set_weight(export, name, place, bits)
    assert refusal(export) == f"{export / WEIGHTS}: {name}{list(place)} is {kind}"


def test_the_largest_numbers_are_numbers(export):
    (export / DIGEST_FILE).unlink()
    for at, bits in enumerate((0x7F7F, 0xFF7F, 0x0001, 0x8000)):
        set_weight(export, K_NORM, (at,), bits)
    verify(open_export(export))


def test_other_tensors_may_hold_anything(export):
    tensors = {name: ("BF16", np.array(x)) for name, x in open_export(export).tensors.items()}
    save(export / WEIGHTS, {"mtp.fc.weight": ("F32", np.full(3, np.nan, np.float32))} | tensors)
    (export / DIGEST_FILE).unlink()
    verify(open_export(export))


def test_the_first_bad_weight_of_every_shard(sharded):
    (sharded / DIGEST_FILE).unlink()
    placed = json.loads((sharded / INDEX).read_text())["weight_map"]
    for name in ("embed_tokens.weight", "norm.weight"):
        entry = read_header(sharded / placed[name])[name]
        put(sharded / placed[name], entry.start + 4, b"\xc0\x7f")
    said = refusal(sharded)
    assert "embed_tokens.weight[0, 2] is NaN" in said and "norm.weight[2] is NaN" in said and said.count("\n") == 1


def test_finding_what_is_not_finite():
    every = np.arange(1 << 16, dtype=np.uint16)
    bad = [int(bits) for bits in every if first_not_finite(np.array([bits])) is not None]
    assert bad == np.flatnonzero(~np.isfinite(bf16.to_float32(every))).tolist()
    for at in (0, 131071, 131072, 300_000):
        bits = np.zeros(300_001, np.uint16)
        bits[at:] = 0x7F80
        assert first_not_finite(bits) == at
    assert first_not_finite(np.zeros(0, np.uint16)) is None
    assert describe("w", 7, 0xFF80, (2, 4)) == "w[1, 3] is -infinity"


# --- the commands


def test_check_verifies(export, capsys):
    assert cli.main(["check", str(export)]) == 0
    assert "verified config.json, model.safetensors" in capsys.readouterr().out
    put(export / WEIGHTS, 5_000_000, b"\x01\x02")
    assert cli.main(["check", str(export)]) == 1
    output = capsys.readouterr()
    assert output.out == "" and f"jev: {export / WEIGHTS}: is not the file that was exported" in output.err
    write_json(export / "config.json", json.loads((export / "config.json").read_text()) | {"kernel_lag": 3})
    (export / DIGEST_FILE).unlink()
    assert cli.main(["check", str(export)]) == 0
    output = capsys.readouterr().out
    assert "NOTE: not verified" in output and "'kernel_lag' of config.json" in output


@pytest.mark.parametrize("flags, status", [([], 0), (["--verify"], 1)])
def test_a_start_says_what_it_verified(export, tmp_path, capfd, flags, status):
    (tmp_path / "request.json").write_text('{"state": "s", "questions": {"q": {"type": "noul", "instructions": "i"}}}')
    put(export / WEIGHTS, 5_000_000, b"\x01\x02")
    command = ["score", str(tmp_path / "request.json"), "--model", str(export), "--backend", "numpy", *flags]
    assert cli.main(command) == status
    said = capfd.readouterr().err
    if flags:
        assert "model.safetensors: is not the file that was exported" in said
    else:
        assert "files: verified config.json" in said and "not verified: model.safetensors (--verify does)" in said
