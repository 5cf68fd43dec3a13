"""Which revision a folder holds."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from jev.checkpoint.checked_json import CheckpointError
from jev.checkpoint.opening import open_export
from jev.export.command import CHECKPOINT_FILES
from jev.export.revision import known_revision
from tests.export.exporting import refuses, run
from tests.export_inputs import SOURCE


def metadata(root: Path, files: dict[str, str]) -> None:
    """What `hf download --local-dir` notes about files (path in the repository -> commit)."""
    for file, commit in files.items():
        path = root / ".cache/huggingface/download" / f"{file}.metadata"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{commit}\n{'e' * 40}\n1712656091.123\n")


def test_a_revision_file(folder, tmp_path):
    assert known_revision(folder / "base", (), SOURCE.model_id) == "b" * 40
    for name, repo in (("base", SOURCE.model_id), ("checkpoint", SOURCE.checkpoint_repo)):
        kept = (folder / name / "revision").read_text()
        (folder / name / "revision").write_text("a" * 40)
        refuses(folder, str(folder / name), "a" * 40, repo, kept.strip())
        (folder / name / "revision").write_text("main")
        refuses(folder, "revision", "40 hex digits", "main")
        (folder / name / "revision").unlink()
        refuses(folder, str(folder / name), "revision is unknown", "hf download", repo)
        (folder / name / "revision").write_text(kept)


def test_a_download_into_a_folder(folder):
    base, repository = folder / "base", folder / "repository"
    (base / "revision").unlink()
    files = {f.name: SOURCE.base_revision for f in base.iterdir()}
    metadata(base, files)
    repository.mkdir()
    os.rename(folder / "checkpoint", folder / "repository" / "package")
    (folder / "checkpoint").symlink_to(folder / "repository" / "package")  # a subfolder of the repository, linked
    (repository / "package" / "revision").unlink()
    metadata(repository, {f"package/{file}": SOURCE.checkpoint_revision for file in CHECKPOINT_FILES})
    open_export(run(folder))
    shutil.rmtree(folder / "out")
    shard = "model-00002-of-00002.safetensors"
    metadata(base, {shard: "a" * 40})
    refuses(folder, shard, "a" * 40, "b" * 40, "download it again")
    (base / ".cache/huggingface/download" / f"{shard}.metadata").unlink()
    refuses(folder, shard, "unknown")
    metadata(base, dict.fromkeys(files, "a" * 40))
    refuses(folder, str(base), "a" * 40, "b" * 40)
    metadata(base, files)
    metadata(repository, {"package/head.pt": "d" * 40})
    refuses(folder, "head.pt", "d" * 40, "c" * 40)


def test_a_snapshot_of_the_cache(tmp_path):
    path = tmp_path / "models--Qwen--Qwen3.5-9B" / "snapshots" / ("1" * 40) / "package" / "checkpoint"
    path.mkdir(parents=True)
    assert known_revision(path, ("model.json",), "Qwen/Qwen3.5-9B") == "1" * 40
    (tmp_path / "link").symlink_to(path.parents[1])
    assert known_revision(tmp_path / "link", (), "Qwen/Qwen3.5-9B") == "1" * 40
    with pytest.raises(CheckpointError, match="snapshot of Qwen/Qwen3.5-9B, expected Qwen/Qwen3.8-27B"):
        known_revision(path, (), "Qwen/Qwen3.8-27B")
