"""Heads and framing as RFC 9110 and 9112 have them, and what an application says to a head."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st

from jev.http.parser import MAX_BODY_BYTES, MAX_HEAD_BYTES, MAX_SKIPPED_BYTES, Parser, Refusal

REFUSAL = Refusal(401, [("WWW-Authenticate", "Bearer")], b"{}")


def parse(stream: bytes, step: int = 0, refuse_head=None) -> tuple[Parser, int]:
    """The parser after this stream, in pieces of ``step`` bytes, and how many of its bytes it took."""
    parser, taken = Parser(SimpleNamespace(refuse_head=refuse_head, inbuf_overflow=1 << 19, max_body_bytes=1000)), 0
    for start in range(0, len(stream), step or len(stream)):
        piece = stream[start:start + (step or len(stream))]
        while piece and not parser.completed:
            consumed = parser.received(piece)
            taken += consumed
            piece = piece[consumed:]
    return parser, taken


def head(*lines: str, start: str = "POST /v1/systemone HTTP/1.1") -> bytes:
    return "\r\n".join([start, *lines]).encode("latin-1") + b"\r\n\r\n"


def refused(parser: Parser, status: int) -> None:
    """It is refused with this status, and the connection ends, because nobody knows where the next request begins."""
    assert parser.completed and parser.refusal.status == status and parser.unread
    assert parser.headers["CONNECTION"] == "close"
    assert isinstance(json.loads(parser.refusal.body)["error"], str)


@settings(deadline=None)
@given(st.binary(max_size=60), st.integers(1, 200), st.booleans(), st.binary(max_size=20))
def test_however_it_is_split_a_request_is_the_same(body, step, blank, rest):
    stream = b"\r\n" * blank + head("Host: x", f"Content-Length: {len(body)}") + body
    parser, taken = parse(stream + rest, step)
    assert parser.completed and parser.refusal is None
    assert taken == len(stream) and parser.get_body_stream().read() == body
    assert (parser.command, parser.path, parser.version) == ("POST", "/v1/systemone", "1.1")


@pytest.mark.parametrize("stream, status", [
    (head("Transfer-Encoding: chunked", start="POST / HTTP/1.0"), 400),
    (head("Transfer-Encoding: chunked", "Content-Length: 5", start="POST / HTTP/1.0"), 400),
    (head("Transfer-Encoding: chunked", start="POST / HTTP/2.0"), 505), (head(start="GET / HTTP/1.2"), 505),
    (head(start="GET / HTTP/0.9"), 505), (head(start="GET /"), 400),
    (head("Transfer-Encoding: chunked, chunked"), 400),
    (head("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"), 400),
    (head("Transfer-Encoding: chunked, identity"), 400), (head("Transfer-Encoding:"), 400),
    (head("Transfer-Encoding: gzip, chunked"), 501), (head("Transfer-Encoding: gzip"), 501),
    (head("Transfer-Encoding: \x0bchunked"), 400), (head("Transfer-Encoding: xchunked"), 501),
    (head("Content-Length: " + "1" * 4301), 400), (head("Content-Length: " + "0" * 4300 + "2"), 400),
    (head("Content-Length: 1" + "0" * 17), 413), (head(f"Content-Length: {MAX_BODY_BYTES}"), 413),
    (head("Content-Length: +5"), 400), (head("Content-Length: 5, 5"), 400),
    (head("Content-Length: 5", "Content-Length: 6"), 400),
    (head("Content-Length: \xb2"), 400), (head("Content-Length: "), 400), (head("Content-Length: 0x5"), 400),
    (head(start="GET http://[::1/ HTTP/1.1"), 400), (head(start="GET health HTTP/1.1"), 400),
    (head(start="get / HTTP/1.1"), 400),
    (head(start="GET  / HTTP/1.1"), 400),
    (head("Host: a", "Host: a"), 400), (head("Host : a"), 400), (head(" X: a"), 400), (head("X: a\nY: b"), 400),
    (head("X: a\rY: b"), 400), (head("X: \x00"), 400), (b"\x16\x03\x01\r\n\r\n", 400)])
@pytest.mark.parametrize("step", [0, 1])
def test_a_head_that_cannot_be_trusted_is_refused_and_the_connection_ends(stream, status, step):
    parser, _ = parse(stream + b"GET /next HTTP/1.1\r\n\r\n", step)
    refused(parser, status)


def test_transfer_encoding_beside_content_length_is_read_as_chunks_and_ends_the_connection():
    stream = head("Transfer-Encoding: chunked", "Content-Length: 3") + b"5\r\nhello\r\n0\r\n\r\n"
    parser, taken = parse(stream + b"GET / HTTP/1.1\r\n\r\n")
    assert parser.completed and parser.refusal is None and taken == len(stream)
    assert parser.get_body_stream().read() == b"hello" and parser.headers["CONTENT_LENGTH"] == "5"
    assert parser.headers["CONNECTION"] == "close"


@pytest.mark.parametrize("value, version, word", [
    ("TE, close", "1.1", "close"), ("keep-alive, close", "1.1", "close"), ("Close", "1.0", "close"),
    ("\tclose\t,", "1.1", "close"),
    ("TE, Keep-Alive", "1.0", "keep-alive"), ("keep-alive, close", "1.0", "close"), ("closed", "1.1", "closed")])
def test_connection_is_a_list(value, version, word):
    parser, _ = parse(head(f"Connection: {value}", start=f"GET / HTTP/{version}"))
    assert parser.completed and parser.refusal is None and parser.headers["CONNECTION"] == word
    parser, _ = parse(head(*(f"Connection: {option}" for option in value.split(",")), start=f"GET / HTTP/{version}"))
    assert parser.headers["CONNECTION"].rstrip(", ") == word


@pytest.mark.parametrize("step", [1, 8192])
def test_a_head_has_a_limit(step):
    parser, taken = parse(head("X: " + "y" * 2 * MAX_HEAD_BYTES), step)
    refused(parser, 431)
    assert taken <= MAX_HEAD_BYTES + step
    assert parse(head("X: " + "y" * (MAX_HEAD_BYTES - 100)), step)[0].refusal is None


@pytest.mark.parametrize("stream", [
    b"GET a://" + b"1" * 60000 + b" HTTP/1.x\r\n\r\n", b"GET " + b"a://" * 15000 + b" HTTP/1.x\r\n\r\n",
    b"GET / HTTP/1.1\r\nX:" + b" " * 60000 + b"\0\r\n\r\n", b"GET / HTTP/1.1\r\nX: a" + b"\r\n a" * 15000 + b"\0\r\n\r\n",
    head("Transfer-Encoding: chunked") + b"0\r\nX:" + b" " * 8000 + b"\0\r\n\r\n"])
def test_no_head_or_trailer_costs_more_than_in_proportion_to_its_bytes(stream):
    started = time.process_time()
    parser, _ = parse(stream)
    assert time.process_time() - started < 0.1 and parser.refusal.status == 400


def test_a_field_may_be_folded():
    parser, _ = parse(b"GET / HTTP/1.1\r\nX-Long: one,\r\n\ttwo, \r\n three\r\n \r\nY:\r\n\r\n")
    assert parser.headers == {"X_LONG": "one,\ttwo,  three", "Y": ""}
    assert parser.header_items == [("X-Long", "one,\ttwo,  three"), ("Y", "")]
    refused(parse(b"GET / HTTP/1.1\r\n folded: 1\r\n\r\n")[0], 400)


def test_a_chunked_body_has_a_limit_that_counts_its_framing(monkeypatch):
    monkeypatch.setattr("jev.http.parser.MAX_BODY_BYTES", 1000)
    parser, _ = parse(head("Transfer-Encoding: chunked") + b"1;extension\r\nx\r\n" * 100, 16)
    refused(parser, 413)


@pytest.mark.parametrize("chunks", [b"3e9\r\n", b"1f4\r\n" + bytes(500) + b"\r\n1f5\r\n"])
def test_a_body_in_chunks_is_refused_as_soon_as_it_is_too_long(chunks):
    asked = []

    def refuse_head(head):
        asked.append(head.content_length)
        return None if head.content_length is None else REFUSAL
    parser, _ = parse(head("Transfer-Encoding: chunked") + chunks, refuse_head=refuse_head)
    assert asked == [None, 1001] and parser.refusal is REFUSAL and parser.unread and parser.body_rcv is None


@pytest.mark.parametrize("expects", [True, False])
def test_a_request_without_a_body_waits_for_nothing(expects):
    for extra in ([], ["Content-Length: 0"]):
        parser, _ = parse(head(*extra, *["Expect: 100-continue"] * expects))
        assert parser.completed and not parser.expect_continue


def test_the_application_is_asked_once_as_soon_as_the_head_is_there():
    asked = []
    stream = head("X-A: 1", "x-a: 2", "Content-Length: 4", "Content-Type: a/b", start="PUT //a%20b?c=d HTTP/1.1") + b"body"
    parser, _ = parse(stream, 1, asked.append)
    assert parser.completed and parser.refusal is None and len(asked) == 1
    only, = asked
    assert (only.method, only.path, only.target, only.content_length) == ("PUT", "/a b", "//a%20b?c=d", 4)
    assert only.headers == {"X_A": "1, 2", "CONTENT_LENGTH": "4", "CONTENT_TYPE": "a/b"}
    parse(head("Transfer-Encoding: chunked"), 0, asked.append)
    parse(head(start="GET / HTTP/1.1"), 0, asked.append)
    parse(b"nonsense\r\n\r\n", 0, asked.append)
    assert [h.content_length for h in asked] == [4, None, 0]


@pytest.mark.parametrize("lines, to_skip, ends", [
    ([], 0, False), (["Content-Length: 5"], 5, False), ([f"Content-Length: {MAX_SKIPPED_BYTES}"], MAX_SKIPPED_BYTES, False),
    ([f"Content-Length: {MAX_SKIPPED_BYTES + 1}"], 0, True), (["Transfer-Encoding: chunked"], 0, True),
    (["Content-Length: 5", "Expect: 100-continue"], 0, True)])
def test_a_refused_head_needs_no_body(lines, to_skip, ends):
    parser, _ = parse(head(*lines), 0, lambda head: REFUSAL)
    assert parser.completed and parser.refusal == REFUSAL and parser.body_rcv is None and not parser.expect_continue
    assert (parser.to_skip, parser.unread) == (to_skip, ends) and (parser.headers.get("CONNECTION") == "close") == ends
