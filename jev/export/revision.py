"""Which revision ``--base`` and ``--checkpoint`` are. It is never guessed.

It is known for a snapshot folder of the Hugging Face cache (``.../snapshots/<revision>``), for what
``hf download --local-dir`` wrote (``.cache/huggingface/download`` beside it, which names the commit of each file), or
from a file ``revision`` in the folder that holds the commit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from jev.checkpoint.checked_json import CheckpointError


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
