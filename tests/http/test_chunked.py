"""The chunked coding: what is taken, what is refused, and at what cost."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings, strategies as st
from waitress.buffers import OverflowableBuffer

from jev.http.chunked import MAX_SIZE_LINE, MAX_TRAILER, ChunkedReceiver

LIMIT = 1 << 20


def receive(pieces, limit: int = LIMIT) -> tuple[ChunkedReceiver, int]:
    """The receiver after these pieces, and how many of their bytes it took."""
    receiver, taken = ChunkedReceiver(OverflowableBuffer(1 << 19), limit), 0
    for piece in pieces:
        consumed = receiver.received(piece)
        taken += consumed
        if receiver.completed or receiver.error:
            break
        assert consumed == len(piece)
    return receiver, taken


def content(receiver: ChunkedReceiver) -> bytes:
    return receiver.getfile().read()


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in zip(places, places[1:])]


extensions = st.sampled_from([b"", b"", b";a", b";a=b", b';a="b\\"c";d'])
trailers = st.sampled_from([b"", b"", b"X: y\r\n", b"A: 1\r\nB:\r\n"])


@settings(deadline=None)
@given(st.lists(st.tuples(st.binary(min_size=1, max_size=40), extensions, st.booleans()), max_size=8), trailers,
       st.lists(st.integers(0, 10**6), max_size=30), st.binary(max_size=8))
def test_any_split_of_the_bytes_gives_the_same_body(chunks, trailer, cuts, rest):
    stream = b"".join((b"%X" if upper else b"%04x") % len(data) + extension + b"\r\n" + data + b"\r\n"
                      for data, extension, upper in chunks) + b"0\r\n" + trailer + b"\r\n"
    receiver, taken = receive(split(stream + rest, cuts))
    assert receiver.completed and receiver.error is None and taken == len(stream)
    assert content(receiver) == b"".join(data for data, _, _ in chunks)


@settings(deadline=None)
@given(st.lists(st.integers(0, 10**6), max_size=10), st.integers(0, 40), st.integers(0, 255))
def test_any_split_of_damaged_bytes_ends_alike(cuts, place, byte):
    stream = bytearray(b"5\r\nhello\r\n3;x\r\nyou\r\n0\r\nA: b\r\n\r\n")
    stream[place % len(stream)] = byte
    whole, _ = receive([bytes(stream)])
    parts, _ = receive(split(bytes(stream), cuts))
    assert (whole.completed, whole.error is None) == (parts.completed, parts.error is None)
    assert not whole.completed or content(whole) == content(parts)


@pytest.mark.parametrize("stream", [
    b"0x2\r\nab\r\n", b"+2\r\nab\r\n", b"0_2\r\nab\r\n", b"-2\r\nab\r\n", b" 2\r\nab\r\n", b"2 \r\nab\r\n", b"\r\n2\r\nab\r\n",
    b"2\nab\n", b"2\rab\r\n", b"2\r\r\nab", b"2\r\nabc\r\n", b"2\r\nab\n", b"2\r\nab0\r\n\r\n", b"2;=\r\nab\r\n", b"2;a b\r\nab\r\n",
    b"00000000000000000\r\n\r\n", b"0\r\nno field\r\n\r\n", b"0\r\nA: b\n\r\n", "٢\r\nab\r\n".encode()])
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_framing_that_is_not_that_of_the_rfc_is_an_error(stream, step):
    receiver, _ = receive([stream[i:i + step] for i in range(0, len(stream), step)])
    assert receiver.error is not None and receiver.error.code == 400 and not receiver.completed


@pytest.mark.parametrize("stream, limit", [
    (b"1" * 10**6, MAX_SIZE_LINE), (b"1;" + b"a" * 10**6, MAX_SIZE_LINE), (b"0\r\nA: " + b"b" * 10**6, MAX_TRAILER),
    (b"0\r\n" + b"A: b\r\n" * 10**5, MAX_TRAILER)])
@pytest.mark.parametrize("step", [1, 8192])
def test_lines_have_a_limit(stream, limit, step):
    receiver, taken = receive(stream[i:i + step] for i in range(0, len(stream), step))
    assert receiver.error.code == 400 and taken <= limit + 3


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_the_content_has_a_limit_and_its_framing_does_not_count(step):
    for data, status in ((b"abcd", None), (b"abcde", 413)):
        stream = b"".join(b"1;extension\r\n%c\r\n" % byte for byte in data) + b"0\r\n\r\n"
        receiver, _ = receive([stream[i:i + step] for i in range(0, len(stream), step)], limit=4)
        assert (receiver.error and receiver.error.code) == status
    receiver, taken = receive([b"5\r\n"], limit=4)
    assert receiver.error.code == 413                       # before a byte of it


class Counted(bytes):
    """Bytes that count how many of them are searched and copied."""

    touched = 0

    def find(self, sub, start=0, end=None):
        end = len(self) if end is None else min(end, len(self))
        place = super().find(sub, start, end)
        Counted.touched += (end if place < 0 else place) - start
        return place

    def __getitem__(self, key):
        part = super().__getitem__(key)
        if isinstance(key, slice):
            Counted.touched += len(part)
        return part


class CountedBuffer(OverflowableBuffer):
    appends = 0

    def append(self, data):
        self.appends += 1
        super().append(data)


@pytest.mark.parametrize("chunk", [b"1\r\nx\r\n", b"1;a\r\nx\r\n", b"800\r\n" + bytes(2048) + b"\r\n"])
@pytest.mark.parametrize("step", [1, 8192, 65536])
def test_the_cost_is_in_proportion_to_the_bytes(chunk, step):
    stream = chunk * (60000 // len(chunk)) + b"0\r\n\r\n"
    Counted.touched = 0
    buf = CountedBuffer(1 << 19)
    receiver = ChunkedReceiver(buf, LIMIT)
    blocks = [Counted(stream[i:i + step]) for i in range(0, len(stream), step)]
    for block in blocks:
        receiver.received(block)
    assert receiver.completed and receiver.error is None
    assert Counted.touched <= 3 * len(stream)               # waitress: 4,000 times as many for blocks of 8,192
    assert buf.appends <= len(blocks)                       # not one a chunk


def test_a_line_that_trickles_is_searched_once():
    line = b"1;" + b"a" * (MAX_SIZE_LINE - 4) + b"\r\n"
    Counted.touched = 0
    receiver = ChunkedReceiver(OverflowableBuffer(1 << 19), LIMIT)
    for byte in line:
        receiver.received(Counted([byte]))
    assert receiver.error is None and Counted.touched <= 3 * len(line)
    assert not re.search(rb".", content(receiver))
