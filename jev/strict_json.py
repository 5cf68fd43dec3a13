"""JSON as the contract wants it: parsing that refuses what it refuses, and Open-Jev's rendering.

`parse` reads with the standard library's C scanner. What the scanner lets through but the contract does not
(a repeated key, NaN, a number over the range of a double) is left in the tree as a marker by the scanner's hooks; a
walk, taken only when there is something to find, then tells where it is. Lone surrogates are found by the same walk.

Integers keep every digit up to 4,300 of them, the most that Python (and so the reference service) converts by default.
A longer one is refused rather than rounded: Python could neither print it in a response nor, before 3.12, read it in
less than quadratic time.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

MAX_DEPTH = 127
MAX_INTEGER_DIGITS = 4300
EXCERPT = 48

_BOM = b"\xef\xbb\xbf"
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")

# +1 where a container opens, -1 where one closes, by byte.
_NESTING = np.zeros(256, np.int8)
_NESTING[list(b"[{")] = 1
_NESTING[list(b"]}")] = -1

_render = json.JSONEncoder(ensure_ascii=False, sort_keys=True).encode


class StrictJSONError(ValueError):
    """A body that is not JSON as the contract wants it.

    path: keys and indices that lead to the trouble; for a syntax error, the offset in the body alone.
    msg:  a sentence that quotes no more than a short excerpt.
    type: a short machine-readable name.
    """

    def __init__(self, path: tuple[str | int, ...], msg: str, type: str):
        super().__init__(msg)
        self.path, self.msg, self.type = path, msg, type


class _Refused:
    """Stands in the parsed tree for a value that must be refused. `key` is the repeated key, if that is the reason."""

    __slots__ = ("key", "msg", "type")

    def __init__(self, msg: str, type: str, key: str | None = None):
        self.msg, self.type, self.key = msg, type, key


def excerpt(text: str, limit: int = EXCERPT) -> str:
    """The first `limit` characters of text, marked where it is cut, with lone surrogates escaped so that it encodes."""
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def render(value: Any) -> str:
    """Open-Jev's text of a value: a string is itself, anything else is JSON with sorted keys and no ASCII escapes."""
    return value if isinstance(value, str) else _render(value)


def parse(body: bytes) -> Any:
    """The value of a JSON text in UTF-8: dict, list, str, int, float, bool or None. Linear in the body's length.

    Raises StrictJSONError for text that is not UTF-8 or starts with a byte-order mark, syntax errors, keys repeated in
    one object, NaN and infinities, numbers that overflow a double, integers of more than 4,300 digits, lone
    surrogates in keys or values, and nesting deeper than 127.
    """
    if body.startswith(_BOM):
        raise StrictJSONError((0,), "the body starts with a byte-order mark; send plain UTF-8", "json_encoding")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        msg = f"the body is not UTF-8: byte 0x{body[error.start]:02x} at offset {error.start}"
        raise StrictJSONError((error.start,), msg, "json_encoding") from None
    _check_depth(body)

    refused: list[_Refused] = []

    def refuse(*reason: str) -> _Refused:
        refused.append(_Refused(*reason))
        return refused[-1]

    def parse_object(pairs: list[tuple[str, Any]]) -> Any:
        members = dict(pairs)
        if len(members) == len(pairs):
            return members
        key = _repeated(pairs)
        return refuse(f"the key {excerpt(key)!r} is repeated", "json_repeated_key", key)

    def parse_int(digits: str) -> Any:
        if len(digits) <= MAX_INTEGER_DIGITS + digits.startswith("-"):
            try:
                return int(digits)
            except ValueError:  # an environment that sets a lower limit than Python's default
                pass
        msg = f"an integer of {len(digits.lstrip('-'))} digits; at most {MAX_INTEGER_DIGITS} are accepted"
        return refuse(msg, "json_number")

    def parse_float(digits: str) -> Any:
        number = float(digits)
        return number if math.isfinite(number) else refuse(f"{excerpt(digits)} overflows a double", "json_number")

    def parse_constant(name: str) -> Any:
        return refuse(f"{name} is not JSON", "json_number")

    try:
        value = json.loads(
            text,
            object_pairs_hook=parse_object,
            parse_int=parse_int,
            parse_float=parse_float,
            parse_constant=parse_constant,
        )
    except json.JSONDecodeError as error:
        offset = len(text[: error.pos].encode("utf-8"))
        msg = f"not JSON: {excerpt(error.msg, 80)}, line {error.lineno} column {error.colno}"
        raise StrictJSONError((offset,), msg if text else "the body is empty", "json_invalid") from None

    # Strict UTF-8 has no surrogates, so that only an escape can bring one in.
    surrogates = _ESCAPED_SURROGATE.search(body) is not None
    if refused or surrogates:
        _raise_first(value, surrogates)
    return value


def _repeated(pairs: list[tuple[str, Any]]) -> str:
    """The first key that occurs a second time."""
    seen: set[str] = set()
    return next(key for key, _ in pairs if key in seen or seen.add(key))        # type: ignore[func-returns-value]


def _check_depth(body: bytes) -> None:
    """Refuses nesting deeper than MAX_DEPTH before the scanner, which recurses, sees it.

    Up to the first syntax error the count is the scanner's own depth; the scanner never goes further.
    """
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    # Escapes are blanked so that the quotes left are the ones that open and close strings.
    codes = np.frombuffer(body.replace(b"\\\\", b"  ").replace(b'\\"', b"  "), np.uint8)
    outside = (np.cumsum(codes == ord('"'), dtype=np.uint8) & 1) == 0  # wraps at 256, which keeps the parity
    deep = np.cumsum(_NESTING[codes] * outside, dtype=np.int32) > MAX_DEPTH
    offset = int(deep.argmax())
    if deep[offset]:
        line = body.count(b"\n", 0, offset) + 1
        column = len(body[body.rfind(b"\n", 0, offset) + 1 : offset].decode("utf-8")) + 1
        msg = f"nested deeper than {MAX_DEPTH} levels, line {line} column {column}"
        raise StrictJSONError((offset,), msg, "json_depth")


def _raise_first(root: Any, surrogates: bool) -> None:
    """Raises for the first marker, or (where `surrogates`) the first string with a lone surrogate, in document order.

    Keeps one iterator for each open container, at most MAX_DEPTH of them, and the keys that lead to it.
    """
    path: list[str | int] = []  # starts with a key for the root itself, which `fail` leaves out
    open_containers: list[Iterator[tuple[str | int, Any]]] = [iter([("", root)])]

    def fail(msg: str, type: str, *last: str | int) -> None:
        raise StrictJSONError((*path, *last)[1:], msg, type)

    while open_containers:
        for key, value in open_containers[-1]:
            if surrogates and isinstance(key, str) and _SURROGATE.search(key):
                fail(f"the key '{excerpt(key)}' has a lone surrogate", "json_surrogate")
            if isinstance(value, _Refused):
                fail(value.msg, value.type, key, *([] if value.key is None else [value.key]))
            if isinstance(value, str):
                if surrogates and _SURROGATE.search(value):
                    fail("a string has a lone surrogate", "json_surrogate", key)
            elif isinstance(value, (dict, list)):
                path.append(key)
                open_containers.append(iter(value.items()) if isinstance(value, dict) else iter(enumerate(value)))
                break
        else:
            open_containers.pop()
            if path:
                path.pop()
