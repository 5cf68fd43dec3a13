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
        return value

    def integer(self, field: str, low: int = 1, high: int = 2**31 - 1) -> int:
        value = self.get(field)
        if type(value) is not int or not low <= value <= high:
            raise self.refuse(field, f"expected an integer in {low}..{high}, found {value!r:.60}")
        return value

    def number(self, field: str, positive: bool = True) -> float:
        value = self.get(field)
        good = type(value) in (int, float) and abs(value) <= 1.7976931348623157e308 and (value > 0 or not positive)
        if not good:
            raise self.refuse(field, f"expected a finite{' positive' * positive} number, found {value!r:.60}")
        return float(value)


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
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON: {error}") from None
