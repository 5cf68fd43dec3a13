"""Requests from files and pipes: what is a line, what a document, how much is held, and in which order answers come."""

from __future__ import annotations

import io
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from jev.json_lines import in_order, requests

A, B = b'{"state": "a", "questions": {}}\n', b'{"state": "b", "questions": {}}\n'
INLINE = b'{"state": [\n{"a": 1},\n{"b": 2}],\n"questions": {}}'
DOCUMENT = json.dumps({"state": [{"a": 1}, {"b": 2}], "questions": {"q": {}}}, indent=2).encode() + b"\n"


def read(text: bytes, limit: int = 1000) -> list[tuple[int, bytes | None]]:
    return list(requests(io.BytesIO(text), limit))


@pytest.mark.parametrize("text, found", [
    (b"", []), (b"\n \n\r\n", []),
    (A + b"\n" + B, [(1, A), (3, B)]), (A + B.rstrip(), [(1, A), (2, B.rstrip())]),
    (b"\n" + DOCUMENT, [(2, DOCUMENT)]),
    (INLINE, [(1, INLINE)]),
    (b'{"state": [\n{"b": 2}\n],\n"questions": {}}', [(1, b'{"state": [\n{"b": 2}\n],\n"questions": {}}')]),
    (b"{broken\n" + A, [(1, b"{broken\n"), (2, A)]),
    (b"{broken\n\n{broken too\n{and this\n" + A,
     [(1, b"{broken\n"), (3, b"{broken too\n"), (4, b"{and this\n"), (5, A)]),
    (b"{broken\n{broken too\n", [(1, b"{broken\n"), (2, b"{broken too\n")]),
    (b'{broken\n{"state": 1}\n', [(1, b"{broken\n"), (2, b'{"state": 1}\n')]),
    (A + b"{broken\nbroken\n", [(1, A), (2, b"{broken\n"), (3, b"broken\n")]),
    (DOCUMENT[:-2], [(1, DOCUMENT[:-2])])])
def test_lines_and_documents(text, found):
    assert read(text) == found


def test_what_is_too_large_is_not_held():
    assert read(b"x" * 100, 100) == [(1, b"x" * 100)] and read(b"x" * 100 + b"\r\n", 100) == [(1, b"x" * 100 + b"\r\n")]
    assert read(A + b"x" * 200_000 + b"\n" + B, 100) == [(1, A), (2, None), (3, B)]
    assert read(b"x" * 101, 100) == [(1, None)]
    assert read(b"{\n" + b" 1,\n" * 100, 100) == [(1, None)]
    assert read(b"{broken\n" + b"y" * 101 + b"\n" + A, 100) == [(1, b"{broken\n"), (2, None), (3, A)]


def test_a_line_is_answered_before_the_next_has_come():
    reader, writer = os.pipe()
    with ThreadPoolExecutor(2) as pool, open(writer, "wb", buffering=0) as pipe:
        results = in_order(pool, lambda body: body, requests(open(reader, "rb"), 1000), 4)
        pipe.write(A)
        assert next(results) == (1, A, A)
        pipe.write(b"{broken\n" + B)
        assert next(results) == (2, b"{broken\n", b"{broken\n") and next(results) == (3, B, B)
        pipe.close()
        assert list(results) == []


def test_order_holds_and_no_more_than_the_window_is_read_ahead():
    taken, gate = [], threading.Event()

    def source():
        for number in range(100):
            taken.append(number)
            yield number, number

    def run(number: int) -> int:
        assert number or gate.wait(10)
        return -number
    with ThreadPoolExecutor(4) as pool:
        results = in_order(pool, run, source(), 6)
        threading.Timer(0.3, gate.set).start()
        assert next(results) == (0, 0, 0)
        assert len(taken) <= 9
        assert [result for _, _, result in results] == [-n for n in range(1, 100)]


def test_an_error_while_reading_is_raised_after_what_came_before():
    def source():
        yield 1, "a"
        raise OSError("the disk")
    with ThreadPoolExecutor(1) as pool:
        results = in_order(pool, str.upper, source(), 4)
        assert next(results) == (1, "a", "A")
        with pytest.raises(OSError, match="the disk"):
            next(results)
