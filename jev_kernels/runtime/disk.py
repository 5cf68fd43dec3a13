"""Files kept between runs: what was compiled and what was measured."""
from __future__ import annotations

import os
import secrets
from pathlib import Path


def folder() -> Path | None:
    """$XDG_CACHE_HOME/jev, or ~/.cache/jev; None for a user without a home: then nothing is kept.

    Code is run from there, so it never depends on the folder that a program was started in: a path that is not absolute
    counts as unset, as the XDG base directory specification has it.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        base = base if base.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "jev" if base.is_absolute() else None


def write(path: Path, contents: bytes) -> None:
    """Put a file there whole, or leave what was there. Raises OSError. As readable as the process's umask lets it be: a
    folder that one user filled may serve another."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".writing-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            file.write(contents)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
