"""The chunked transfer coding (RFC 9112, section 7.1), read in time and memory proportional to its bytes."""

from __future__ import annotations

import re
from typing import BinaryIO

from waitress.buffers import OverflowableBuffer
from waitress.rfc7230 import CHUNK_EXT_RE
from waitress.utilities import BadRequest, Error, RequestEntityTooLarge

MAX_SIZE_LINE = 256                     # bytes of a line with a chunk's size, its extensions and its CRLF included
MAX_TRAILER = 8192                      # bytes of the fields after the last chunk, together
SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})\r\n")
SIZE = re.compile(rb"[0-9A-Fa-f]{1,16}")
TRAILER_FIELD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*")


class ChunkedReceiver:
    """Takes in a body piece by piece, in place of waitress's class of this name, and leaves its content in ``buf``.

    ``error``, one of waitress's, says what was wrong; after that, as after ``completed``, nothing more is taken.
    """

    def __init__(self, buf: OverflowableBuffer, limit: int) -> None:
        """limit: bytes that the content may have."""
        self.buf, self.limit = buf, limit
        self.completed = False
        self.error: Error | None = None
        self.size = 0                   # of the content, the chunk that is being read included
        self._remaining = 0             # bytes of this chunk that have not come yet
        self._line = bytearray()        # the beginning of a line whose end has not come yet
        self._longest = MAX_SIZE_LINE   # bytes that this line may have
        self._take_line = self._size_line

    def __len__(self) -> int:
        return len(self.buf)

    def getfile(self) -> BinaryIO:
        file: BinaryIO = self.buf.getfile()
        return file

    def getbuf(self) -> OverflowableBuffer:
        return self.buf

    def received(self, data: bytes) -> int:
        """Take in ``data``; the number of its bytes that belong to this body."""
        at, pieces = 0, []
        while at < len(data) and not self.completed and self.error is None:
            if self._remaining:
                pieces.append(data[at:at + self._remaining])
                at += len(pieces[-1])
                self._remaining -= len(pieces[-1])
            elif self._take_line == self._size_line and not self._line:
                at = self._whole_chunks(data, at, pieces)
                if at < len(data):
                    at = self._more_of_line(data, at)
            else:
                at = self._more_of_line(data, at)
        if pieces:
            self.buf.append(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        return at

    def _whole_chunks(self, data: bytes, at: int, pieces: list[bytes]) -> int:
        """Take in the chunks without extensions that are whole in ``data`` from ``at`` on; the place after them. They
        would come through ``_more_of_line`` too, but a body of tiny chunks four times as slowly."""
        while line := SIZE_LINE.match(data, at):
            size, start = int(line[1], 16), line.end()
            end = start + size
            if not 0 < size <= self.limit - self.size or data[end:end + 2] != b"\r\n":
                break
            pieces.append(data[start:end])
            self.size += size
            at = end + 2
        return at

    def _more_of_line(self, data: bytes, at: int) -> int:
        """Take in ``data`` from ``at`` to the end of the line; the place after it."""
        end = data.find(b"\n", at, at + self._longest - len(self._line)) + 1
        stop = end or min(len(data), at + self._longest - len(self._line))
        self._line += data[at:stop]
        if end:
            line, self._line = bytes(self._line), bytearray()
            if line.endswith(b"\r\n") and b"\r" not in line[:-2]:
                self._take_line(line[:-2])
            else:
                self.error = BadRequest("a line between chunks does not end with CR LF")
        elif len(self._line) >= self._longest:
            self.error = BadRequest("a line between chunks is too long")
        return stop

    def _size_line(self, line: bytes) -> None:
        size, semicolon, extensions = line.partition(b";")
        if not SIZE.fullmatch(size):
            self.error = BadRequest("the size of a chunk is not valid")
        elif not CHUNK_EXT_RE.match(semicolon + extensions):
            self.error = BadRequest("the extension of a chunk is not valid")
        else:
            self._begin_chunk(int(size, 16))

    def _begin_chunk(self, size: int) -> None:
        self.size += size
        if self.size > self.limit:
            self.error = RequestEntityTooLarge(f"the body is larger than {self.limit} bytes")
        elif size:
            self._remaining = size
            self._take_line, self._longest = self._end_of_chunk, 2
        else:
            self._take_line, self._longest = self._trailer_line, MAX_TRAILER

    def _end_of_chunk(self, line: bytes) -> None:
        if line:
            self.error = BadRequest("a chunk is longer than its size")
        self._take_line, self._longest = self._size_line, MAX_SIZE_LINE

    def _trailer_line(self, line: bytes) -> None:
        """Fields after the body are taken in and dropped, which RFC 9112 allows."""
        self._longest -= len(line) + 2
        if not line:
            self.completed = True
        elif not TRAILER_FIELD.fullmatch(line):
            self.error = BadRequest("a field after the last chunk is not valid")
        elif self._longest < 2:
            self.error = BadRequest("the fields after the last chunk are too long")
