"""The digests of an export: ``SHA256SUMS`` beside its files, in the format of ``sha256sum``.

A file of its own, so that the manifest stays what every reader of the format knows, and covered by it like the others;
in a common format, so that ``sha256sum -c SHA256SUMS`` checks a copy on a host without this package. SHA-256 because
processors compute it at 1 to 2 GB/s a core, the standard library has it, and files are hashed side by side: a faster
hash would wait for the disk.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from jev.checkpoint.checked_json import CheckpointError, refuse_broken_link

DIGEST_FILE = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *]([^/\x00]+)")


def to_text(digests: Mapping[str, str]) -> str:
    """The lines of ``SHA256SUMS``, by file name."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))


def read_digests(folder: Path) -> dict[str, str] | None:
    """File name -> SHA-256 in lower-case hex, or None for an export without digests.

    Raises CheckpointError for a file that cannot be read, a line of another form, or a name that comes twice.
    """
    path = folder / DIGEST_FILE
    try:
        lines = path.read_text("utf-8").splitlines()
    except FileNotFoundError:
        refuse_broken_link(path)
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise CheckpointError(f"{path}: is not UTF-8 text") from None
    digests: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if not match or match[2] in digests:
            raise CheckpointError(f"{path}: line {number}: expected a SHA-256 digest and the name of a file, each once")
        digests[match[2]] = match[1].lower()
    return digests
