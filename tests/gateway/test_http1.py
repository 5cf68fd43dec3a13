"""Responses as RFC 9112 frames them: what is read, what is refused, and whether a connection is used once more."""

from __future__ import annotations

import time

import pytest

from jev.gateway.http1 import BadResponse, end_to_end, read_answer

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def connection(data: bytes, size: int):
    """A connection that delivers the data so many bytes at a time, and then ends."""
    blocks = iter([data[at:at + size] for at in range(0, len(data), size)])
    left = b""

    def receive(most: int) -> bytes:
        nonlocal left
        left = left or next(blocks, b"")
        block, left = left[:most], left[most:]
        return block

    return receive


def read(data: bytes, limit: int = 1000):
    """What is read of it, the same however it arrives."""
    outcomes = []
    for size in (len(data) or 1, *((1, 2, 7) if len(data) < 5000 else (4093,))):
        try:
            answer, reusable = read_answer(connection(data, size), limit)
            outcomes.append((answer.status, answer.reason, answer.headers, answer.body, reusable))
        except BadResponse as error:
            outcomes.append(str(error))
    if any(outcome[-1] is False for outcome in outcomes if isinstance(outcome, tuple)):
        # Bytes beyond a response are seen when they are there with it; later ones, before the next request.
        outcomes = [outcome[:-1] + (False,) if isinstance(outcome, tuple) else outcome for outcome in outcomes]
    assert all(outcome == outcomes[0] for outcome in outcomes), outcomes
    return outcomes[0]


def ok(body: bytes, reusable: bool = True, headers: tuple = (), status: int = 200, reason: str = "OK"):
    return status, reason, list(headers), body, reusable


@pytest.mark.parametrize("data, expected", [
    (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab", ok(b"ab")),
    (b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nab", ok(b"ab", reason="")),
    (b"HTTP/1.1 200 \r\nContent-Length: 2\r\n\r\nab", ok(b"ab", reason="")),
    (b"HTTP/1.9 200 OK\r\nContent-Length: 0\r\n\r\n", ok(b"")),                     # as 1.1: RFC 9110, 2.5
    (b"HTTP/1.1 200 OK\nContent-Length: 2\nA: b\n\nab", ok(b"ab", headers=[("A", "b")])),
    (b"HTTP/1.1 200 OK\r\ncontent-LENGTH:2\r\n\r\nab", ok(b"ab")),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nab", ok(b"ab")),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 2 , 2\r\n\r\nab", ok(b"ab")),
    (b"HTTP/1.1 200 OK\r\n\r\nto the end", ok(b"to the end", False)),
    (b"HTTP/1.1 599 \xe9\t!\r\nContent-Length: 0\r\n\r\n", ok(b"", status=599, reason="\xe9\t!")),
    # No body, whatever the headers say.
    (b"HTTP/1.1 204 OK\r\n\r\n", ok(b"", status=204)),
    (b"HTTP/1.1 304 OK\r\nContent-Length: 2\r\n\r\n", ok(b"", status=304)),
    (b"HTTP/1.1 204 OK\r\nTransfer-Encoding: chunked\r\n\r\n", ok(b"", status=204)),
    (b"HTTP/1.1 204 OK\r\nContent-Length: 2\r\n\r\nab", ok(b"", False, status=204)),
    # Whose connection ends with it.
    (b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nab", ok(b"ab", False)),
    (b"HTTP/1.1 200 OK\r\nConnection: keep-alive, , CLOSE\r\nContent-Length: 2\r\n\r\nab", ok(b"ab", False)),
    (b"HTTP/1.1 200 OK\r\nConnection: keep-alive\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", ok(b"", False)),
    (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nab", ok(b"ab", False)),
    (b"HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\nContent-Length: 2\r\n\r\nab", ok(b"ab")),
    (b"HTTP/1.0 200 OK\r\nConnection: keep-alive, close\r\nContent-Length: 0\r\n\r\n", ok(b"", False)),
    (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n\r\nab", ok(b"ab", False)),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nabHTTP/1.1 200 OK\r\n\r\n", ok(b"ab", False)),
    (CHUNKED + b"2\r\nab\r\n0\r\n\r\n\r\n", ok(b"ab", False)),
    # Interim responses.
    (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
     b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab", ok(b"ab")),
    (b"HTTP/1.1 199 X\r\nContent-Length: 9\r\nConnection: close\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nab",
     ok(b"ab")),
    # Chunks.
    (CHUNKED + b"0\r\n\r\n", ok(b"")),
    (CHUNKED + b"2;name=value;x=\"a;b\"\r\nab\r\n00A \r\n0123456789\r\n000;last\r\n\r\n", ok(b"ab0123456789")),
    (CHUNKED + b"2 ; x\r\nab\r\n0\r\nTrailer-One: 1\r\nContent-Length: 7\r\n\r\n", ok(b"ab")),
    (CHUNKED + b"1\r\na\r\n" * 1000 + b"0\r\n\r\n", ok(b"a" * 1000)),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: , CHUNKED ,\r\n\r\n2\r\nab\r\n0\r\n\r\n", ok(b"ab")),
    # Headers pass as they are but for folds; those of the connection do not.
    (b"HTTP/1.1 200 OK\r\nA:  b\t\r\nEmpty:\r\n a!#$%&'*+.^_`|~: \xe9\x85\xa0:\r\nContent-Length: 0\r\n\r\n",
     ok(b"", headers=[("A", "b"), ("Empty", "a!#$%&'*+.^_`|~: \xe9\x85\xa0:")])),
    (b"HTTP/1.1 200 OK\r\nA: b\r\n \t \r\n\tc\r\nContent-Length:\r\n 0\r\n\r\n", ok(b"", headers=[("A", "b c")])),
])
def test_responses_that_are_read(data, expected):
    assert read(data) == expected


HEAD = b"HTTP/1.1 200 OK\r\n"
BROKE_OFF, SIZE, CHUNK_END = "it broke off", "an invalid chunk size", "a chunk that does not end where it says"
STATUS, LENGTH, CODING = "not an HTTP/1 status line", "an invalid Content-Length", "an invalid Transfer-Encoding"
LINE, HEADERS, LARGE = "a line that is too long", "malformed headers", "too large"


@pytest.mark.parametrize("data, why", [
    (b"", BROKE_OFF), (b"HTTP/1.1 200 OK\r\nA: b\r\n", BROKE_OFF), (HEAD + b"Content-Length: 3\r\n\r\nab", BROKE_OFF),
    (b"HTTP/1.1 100 Continue\r\n\r\n", BROKE_OFF),
    (b"\r\n", STATUS), (b"HTTP/2 200 OK\r\n\r\n", STATUS), (b"HTTP/1.10 200 OK\r\n\r\n", STATUS),
    (b"HTTP/0.9 200 OK\r\n\r\n", STATUS), (b"http/1.1 200 OK\r\n\r\n", STATUS), (b"HTTP/1.1  200 OK\r\n\r\n", STATUS),
    (b" HTTP/1.1 200 OK\r\n\r\n", STATUS), (b"HTTP/1.1 20 OK\r\n\r\n", STATUS), (b"HTTP/1.1 2000 OK\r\n\r\n", STATUS),
    (b"HTTP/1.1 099 OK\r\n\r\n", STATUS), (b"HTTP/1.1 600 OK\r\n\r\n", STATUS), (b"HTTP/1.1 +20 OK\r\n\r\n", STATUS),
    (b"HTTP/1.1 2_0 OK\r\n\r\n", STATUS), (b"HTTP/1.1 200 O\0K\r\n\r\n", STATUS), (b"HTTP/1.1 200 O\rK\r\n\r\n", STATUS),
    (b"HTTP/1.1 200 O\x7fK\r\n\r\n", STATUS), (b"<html>\r\n\r\n", STATUS), (b"HTTP/1.1 200 OK" + b"x" * 70000, LINE),
    (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n", "another protocol, for which nobody asked"),
    (b"HTTP/1.1 103 Early Hints\r\nA: b\r\n\r\n" * 3000, LINE),
    # Lengths.
    *[(HEAD + b"Content-Length: " + value + b"\r\n\r\n" + b"a" * 20, LENGTH)
      for value in (b"", b"+2", b"-2", b"0x2", b"2_0", b"2.0", b"2 0", b"\xb2", b"2, 3", b"2,", b"2;", b"2" * 5000, b"two")],
    (HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nabc", LENGTH),
    (HEAD + b"Content-Length: 1001\r\n\r\n", LARGE), (HEAD + b"Content-Length: " + b"9" * 20 + b"\r\n\r\n", LARGE),
    (HEAD + b"\r\n" + b"a" * 1001, LARGE),
    # Codings.
    *[(HEAD + b"Transfer-Encoding: " + value + b"\r\n\r\n0\r\n\r\n", CODING)
      for value in (b"", b",", b"gzip", b"identity", b"gzip, chunked", b"chunked, gzip", b"chunked, chunked",
                    b"\x0bchunked", b"chunked;q=1", b"xchunked")],
    (HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", CODING),
    (HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", CODING),
    (HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", CODING),
    (b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", CODING),
    # Chunks.
    *[(CHUNKED + size + b"\r\nab\r\n0\r\n\r\n", SIZE)
      for size in (b"0x2", b"+2", b"-2", b"0_2", b"2_", b" 2", b"\t2", b"", b";x", b"two", b"2 2", b"2\0", b"2;\0", b"2\r",
                   b"2;\rx", b"\xb2", b"2,", b"0" * 17)],
    (CHUNKED + b"2\nab\r\n0\r\n\r\n", SIZE), (CHUNKED + b"2;" + b"x" * 1024, LINE), (CHUNKED + b"2" * 2000, LINE),
    (CHUNKED + b"2\r\nabc\r\n0\r\n\r\n", CHUNK_END), (CHUNKED + b"2\r\nab0\r\n\r\n", CHUNK_END),
    (CHUNKED + b"2\r\nab\n\n0\r\n\r\n", CHUNK_END), (CHUNKED + b"2\r\nab\r0\r\n\r\n", CHUNK_END),
    (CHUNKED + b"2\r\nab", BROKE_OFF), (CHUNKED + b"2\r\nab\r\n", BROKE_OFF), (CHUNKED + b"2\r\nab\r\n0\r\n", BROKE_OFF),
    (CHUNKED + b"2\r\nab\r\n0", BROKE_OFF), (CHUNKED + b"2\r\nab\r\n0\r\nA: b\r\n", BROKE_OFF),
    (CHUNKED + b"2\r\nab\r\n0\r\nab\r\n\r\n", HEADERS), (CHUNKED + b"3e9\r\n" + b"a" * 1001 + b"\r\n0\r\n\r\n", LARGE),
    (CHUNKED + b"1\r\na\r\n" * 1001, LARGE), (CHUNKED + b"f" * 16 + b"\r\n", LARGE),
    (CHUNKED + b"0\r\n" + b"A: b\r\n" * 101 + b"\r\n", "too many headers"),
    # Headers.
    *[(HEAD + line + b"\r\nContent-Length: 0\r\n\r\n", HEADERS)
      for line in (b" A: b", b"A", b"A b: c", b"A : b", b": b", b"A\t: b", b"A: b\0", b"A: b\rB: c", b"\xe9: b", b"A(: b",
                   b"A: b\r\n c\0")],
    (HEAD + b"A: b\r\n" * 101 + b"\r\n", "too many headers"), (HEAD + b"A: " + b"b" * 70000, LINE),
    (HEAD + (b"A: " + b"b" * 1000 + b"\r\n") * 70 + b"\r\n", LINE), (HEAD + b"A: b\r\n" + b" c\r\n" * 20000 + b"\r\n", LINE),
])
def test_responses_that_are_refused(data, why):
    assert read(data) == why


def test_the_largest_body_is_read():
    for data in (HEAD + b"Content-Length: 1000\r\n\r\n" + b"a" * 1000, HEAD + b"\r\n" + b"a" * 1000,
                 CHUNKED + b"3E8\r\n" + b"a" * 1000 + b"\r\n0\r\n\r\n"):
        assert read(data)[3] == b"a" * 1000


def test_what_reading_costs_grows_with_the_bytes_and_no_faster():
    """The worst heads and a body in chunks of one byte: milliseconds and a second, where squares would take minutes."""
    started = time.process_time()
    for data in (HEAD + b"A:" + b" " * 65000 + b"\0\r\n\r\n", HEAD + b"A: b\r\n" + b" " * 65000 + b"\0\r\n",
                 HEAD + b"A" * 65000, CHUNKED + b"2" + b" " * 1000 + b"\0\r\n"):
        with pytest.raises(BadResponse):
            read_answer(connection(data, 65536), 1000)
    body, _ = read_answer(connection(CHUNKED + b"1\r\na\r\n" * 200_000 + b"0\r\n\r\n", 65536), 1 << 20)
    assert len(body.body) == 200_000
    assert time.process_time() - started < 10


def test_no_more_is_received_than_a_body_needs():
    asked = []
    blocks = iter([HEAD + b"Content-Length: 100\r\n\r\nab", b"c" * 90, b"d" * 8])

    def receive(most):
        asked.append(most)
        return next(blocks)

    assert read_answer(receive, 100)[0].body == b"ab" + b"c" * 90 + b"d" * 8
    assert asked[1:] == [98, 8]


def test_headers_of_a_connection():
    assert end_to_end([("Connection", "X-A, ,close"), ("x-a", "1"), ("X-B", "2"), ("connection", "\tx-B\t"), ("X-C", "3"),
                       ("Content-Length", "3"), ("TE", "x"), ("Proxy-Authentication-Info", "x"), ("close", "x"),
                       ("X-C", "4")]) == [("X-C", "3"), ("X-C", "4")]
