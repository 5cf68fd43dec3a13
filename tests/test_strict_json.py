from __future__ import annotations

import json
import math
import time

import pytest
from hypothesis import example, given, strategies as st

from jev.strict_json import MAX_DEPTH, MAX_INTEGER_DIGITS, StrictJSONError, excerpt, parse, render

MIB = 1 << 20
text = st.text(st.characters(codec="utf-8"), max_size=8)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4), max_leaves=20
)


def refusal(body: bytes) -> StrictJSONError:
    with pytest.raises(StrictJSONError) as caught:
        parse(body)
    assert len(caught.value.msg) < 200
    str(caught.value).encode("utf-8")
    return caught.value


@given(values, st.sampled_from([None, 1]), st.booleans())
def test_every_json_value_comes_back(value, indent, ascii):
    parsed = parse(json.dumps(value, indent=indent, ensure_ascii=ascii).encode("utf-8"))
    assert parsed == value
    assert render(parsed) == render(value)


@given(values)
def test_rendering_is_open_jevs(value):
    expected = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
    assert render(value) == expected


@given(st.binary(max_size=40))
@example(b"")
@example(b"\xef\xbb\xbf{}")
def test_any_bytes_are_a_value_or_a_refusal(body):
    try:
        parse(body)
    except StrictJSONError as error:
        assert isinstance(error.path, tuple)


@given(values, st.data())
def test_a_damaged_text_is_a_value_or_a_refusal(value, data):
    body = bytearray(json.dumps(value).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body)))
        body[at : at + data.draw(st.integers(0, 2))] = data.draw(st.sampled_from(
            [b"", b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"\\ud800", b"NaN", b"1e999", b"\xff", b"-", b"0"]
        ))
    try:
        parse(bytes(body))
    except StrictJSONError:
        pass


@pytest.mark.parametrize(
    "body, path",
    [
        (b'{"a": 1, "a": 2}', ("a",)),
        (b'{"a": 1, "\\u0061": 2}', ("a",)),
        (b'{"x": [0, {"y": {"k": 1, "l": 2, "k": 3}}]}', ("x", 1, "y", "k")),
        (b'[{"a": {"b": 1, "b": 1}, "a": 2}]', (0, "a")),
        (b'{"": 1, "": 2}', ("",)),
    ],
)
def test_repeated_keys_are_named_by_their_path(body, path):
    error = refusal(body)
    assert (error.path, error.type) == (path, "json_repeated_key")


@pytest.mark.parametrize(
    "number", ["NaN", "Infinity", "-Infinity", "1e309", "-1e309", "1e99999999999", "9" * 400 + ".0"]
)
def test_numbers_outside_a_double_are_refused_where_they_are(number):
    error = refusal(b'{"a": [1, {"b": %s}]}' % number.encode())
    assert (error.path, error.type) == (("a", 1, "b"), "json_number")


@pytest.mark.parametrize(
    "number", ["1.7976931348623157e308", "-1.7976931348623157e308", "5e-324", "1e-400", "-0.0", "0e999"]
)
def test_numbers_within_a_double_are_accepted(number):
    value = parse(number.encode())
    assert math.isfinite(value) and value == float(number)
    assert math.copysign(1, value) == math.copysign(1, float(number))


@pytest.mark.parametrize("digits", [30, 400, MAX_INTEGER_DIGITS])
@pytest.mark.parametrize("sign", ["", "-"])
def test_integers_keep_every_digit(digits, sign):
    number = sign + "1234567890" * (digits // 10)
    assert render(parse(f"[{number}]".encode())) == f"[{number}]"


def test_an_integer_that_python_could_not_print_is_refused():
    assert refusal(b'{"a": -%s}' % (b"7" * (MAX_INTEGER_DIGITS + 1))).path == ("a",)


@pytest.mark.parametrize(
    "body, path",
    [
        (b'"\\ud800"', ()),
        (b'{"a": ["\\udc00\\ud800"]}', ("a", 0)),
        (b'{"a": {"\\uD9ff": 1}}', ("a",)),
        (b'{"a": {"\\uD9ff": 1, "\\uD9ff": 2}}', ("a", "\ud9ff")),
        (b'["\\\\ud800", "\\ud83d\\ud83d\\ude00"]', (1,)),
    ],
)
def test_lone_surrogates_are_refused_where_they_are(body, path):
    assert refusal(body).path == path


def test_surrogate_pairs_and_escaped_backslashes_are_text():
    assert parse(b'["\\ud83d\\ude00", "\\\\ud800"]') == ["\U0001f600", "\\ud800"]


@pytest.mark.parametrize("opening, closing", [("[", "]"), ('{"[": ', "}"), ('["\\\\", "\\"[", ', "]")])
def test_nesting_to_the_limit_and_no_further(opening, closing):
    def nested(depth: int) -> bytes:
        return ("\n" + opening * depth + "0" + closing * depth).encode()

    parse(nested(MAX_DEPTH))
    error = refusal(nested(MAX_DEPTH + 1))
    assert error.type == "json_depth"
    assert f"line 2 column {MAX_DEPTH * len(opening) + 1}" in error.msg
    assert error.path == (MAX_DEPTH * len(opening) + 1,)


def test_brackets_in_strings_do_not_nest():
    assert len(parse(json.dumps(["[{" * 200, '"[' * 200, "\\[" * 200]).encode())) == 3


@pytest.mark.parametrize(
    "body, offset, where",
    [
        (b"{", 1, "line 1 column 2"),
        ('{"é":\n tru}'.encode(), 8, "line 2 column 2"),
        (b"[1] 2", 4, "line 1 column 5"),
        (b"[01]", 2, "line 1 column 3"),
        (b'["\x01"]', 2, "line 1 column 3"),
        (b"", 0, "empty"),
        (b"\xef\xbb\xbf{}", 0, "byte-order mark"),
        ("{}".encode("utf-16"), 0, "not UTF-8"),
        ("{}".encode("utf-16-le"), 1, "line 1 column 2"),
        (b'"\xed\xa0\x80"', 1, "offset 1"),
        (b'"\xc0\xaf"', 1, "offset 1"),
    ],
)
def test_syntax_errors_say_where(body, offset, where):
    error = refusal(body)
    assert error.path == (offset,)
    assert where in error.msg


def test_excerpts_are_short_and_encode():
    assert excerpt("a" * 48) == "a" * 48
    assert excerpt("a" * 49) == "a" * 47 + "…"
    assert excerpt("\ud800") == "\\ud800"


HOSTILE = {
    "open brackets": b"[" * (4 * MIB),
    "open objects": b'{"a":' * (4 * MIB // 5),
    "quotes after brackets": b"[" * 128 + b'"' * (4 * MIB),
    "one long integer": b"1" * (4 * MIB),
    "one long fraction": b"0." + b"7" * (4 * MIB),
    "one long exponent": b"1e" + b"9" * (4 * MIB),
    "integers of the longest kind": b"[" + b",".join([b"9" * MAX_INTEGER_DIGITS] * 970) + b"]",
    "many keys": b"{" + b",".join(b'"%x":1' % i for i in range(400_000)) + b"}",
    "one key many times": b"{" + b",".join([b'"a":1'] * 700_000) + b"}",
    "backslashes": b'["' + b"\\" * (4 * MIB) + b'"]',
    "surrogates": b'["' + b"\\ud800" * 600_000 + b'"]',
    "a surrogate after many strings": b"[" + b'"",' * 1_300_000 + b'"\\ud800"]',
    "a NaN after many numbers": b"[" + b"1," * 2_000_000 + b"NaN]",
    "white space": b" " * (4 * MIB),
    "deep and wide": b"[" + b",".join([b"[" * 126 + b"]" * 126] * 16_000) + b"]",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bodies_take_linear_time(name):
    start = time.process_time()
    try:
        parse(HOSTILE[name])
    except StrictJSONError as error:
        assert len(error.msg) < 200
    assert time.process_time() - start < 5  # a fraction of a second where nothing else runs
