"""JSON objects of a checkpoint, read field by field: every refusal names the file and the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jev.errors import JevError


class CheckpointError(JevError, ValueError):
    """A checkpoint or export that must not be served; the message says what is wrong and in which file."""


class Fields:
    """Reads typed fields of one JSON object; every refusal names the file and the field."""

    def __init__(self, where: str, data: Any) -> None:
        if not isinstance(data, dict):
            raise CheckpointError(f"{where}: expected a JSON object")
        self.where, self.data = where, data

    def refuse(self, field: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {field}: {problem}")

    def get(self, field: str) -> Any:
        if field not in self.data:
            raise self.refuse(field, "is missing")
        return self.data[field]

    def text(self, field: str) -> str:
        value = self.get(field)
        if not isinstance(value, str):
            raise self.refuse(field, f"expected a string, found {value!r:.60}")
        if not _is_text(value):         # JSON can write half a character; no file name, tokenizer or log can
            raise self.refuse(field, f"expected text, found a lone surrogate in {value!r:.60}")
        return value

    def integer(self, field: str, low: int = 1, high: int = 2**31 - 1) -> int:
        value = self.get(field)
        if type(value) is not int or not low <= value <= high:
            raise self.refuse(field, f"expected an integer in {low}..{high}, found {value!r:.60}")
        return value

    def number(self, field: str) -> float:
        value = self.get(field)
        if type(value) not in (int, float) or not 0 < value <= 1.7976931348623157e308:
            raise self.refuse(field, f"expected a finite positive number, found {value!r:.60}")
        return float(value)

    def float32(self, field: str) -> float:
        """A positive number that a kernel takes as float32: none that would become zero or infinite there."""
        value = self.number(field)
        if not 1.1754943508222875e-38 <= value <= 3.4028234663852886e38:
            raise self.refuse(field, f"expected a positive float32 number, found {value!r:.60}")
        return value


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def refuse_broken_link(path: Path) -> None:
    """Raise CheckpointError where ``path`` is a link to nothing, as in a cache that was copied without what its links mean."""
    if path.is_symlink() and not path.exists():
        raise CheckpointError(f"{path}: is a link to a file that is not there")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For ``object_pairs_hook``: the object, or ValueError for one with a repeated key."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a repeated key")
    return found


def read_json(path: Path) -> Any:
    """Parse a small JSON file; repeated keys are refused. Raises CheckpointError naming the file."""
    try:
        return json.loads(path.read_bytes(), object_pairs_hook=unique_keys)
    except OSError as error:
        refuse_broken_link(path)
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON: {error}") from None
