"""A request from its first byte to its last: the head, what an application says to it, the body."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from waitress.buffers import OverflowableBuffer
from waitress.parser import HTTPRequestParser, ParsingError, split_uri, unquote_bytes_to_wsgi
from waitress.receiver import FixedStreamReceiver

from jev.http.chunked import ChunkedReceiver
from jev.http.errors import error_body

MAX_HEAD_BYTES = 65536
MAX_LENGTH_DIGITS = 18                  # of a Content-Length
# The application refuses bodies over 4 MiB; this one ends what would fill the disk. Far above the 4 MiB because it
# counts the framing of chunks too.
MAX_BODY_BYTES = 64 * 2**20
# The rest of a refused body of known length up to this is dropped and the connection goes on; a longer one ends it.
MAX_SKIPPED_BYTES = 65536
CONTENT_LENGTH = re.compile(r"[0-9]+", re.ASCII)
ABSOLUTE_TARGET = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://")
# The expressions that bytes of clients meet have one way to match: waitress's try so many that a head of 60 KB takes minutes.
REQUEST_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Z-]+) ([^ \r\n]+) HTTP/([0-9]\.[0-9])")
# A field with the lines that it is folded to.
FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([\t\x20-\x7e\x80-\xff]*(?:\r\n[ \t][\t\x20-\x7e\x80-\xff]*)*)\r\n")

logger = logging.getLogger("jev.http.parser")


class RequestHead(NamedTuple):
    """A request before its body: what an application may refuse it by."""

    method: str
    path: str                       # percent-decoded: what becomes WSGI's PATH_INFO
    target: str                     # as it was sent: what becomes REQUEST_URI
    headers: Mapping[str, str]      # names in upper case with _ for -, as CONTENT_TYPE; repeated fields joined by ", "
    content_length: int | None      # bytes of the body; 0: it has none, None: it comes in chunks of unknown number

    @classmethod
    def of(cls, environ: Mapping[str, Any]) -> RequestHead:
        """The head from a WSGI environment, of whatever server."""
        headers = {key[5:]: value for key, value in environ.items() if key.startswith("HTTP_")}
        headers |= {key: environ[key] for key in ("CONTENT_TYPE", "CONTENT_LENGTH") if environ.get(key)}
        length = None if "TRANSFER_ENCODING" in headers else int(headers.get("CONTENT_LENGTH", 0))
        path = environ["PATH_INFO"]
        return cls(environ["REQUEST_METHOD"], path, environ.get("REQUEST_URI", path), headers, length)


class Refusal(NamedTuple):
    """A complete answer to a request whose body is not wanted. ``headers`` without Content-Length and Connection."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


# An application that decides on heads has such a function as its attribute ``refuse_head``. The server calls it once a
# request, in the thread of the event loop, as soon as the head is there: before 100 Continue is sent and before a byte
# of the body is kept. None: go on; the application is called with the whole request, and with HEAD_ACCEPTED true in
# its WSGI environment. A Refusal: it is sent as it is, in its turn on the connection, the application is not called and
# the body is dropped. It must not block, and logs the refusal itself if it logs requests. A server without bodies, such
# as a test client, does not call it: there the application does, when HEAD_ACCEPTED is missing.
RefuseHead = Callable[[RequestHead], "Refusal | None"]
HEAD_ACCEPTED = "jev.head_accepted"


class _Malformed(Exception):
    """A head that is no HTTP/1.1, or none that this server takes."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Spool(OverflowableBuffer):
    """A request's body. When it cannot be kept (no space, no descriptor) the rest of it is taken in and dropped."""

    failed = False

    def append(self, data: bytes) -> None:
        if self.failed:
            return
        try:
            super().append(data)
        except OSError as error:
            logger.error("a request's body cannot be kept: %s", error.strerror)
            self.close()
            self.buf, self.strbuf, self.failed = None, b"", True

    def close(self) -> None:
        with contextlib.suppress(OSError):      # a file that could not be written is written once more by closing it
            super().close()


class Parser(HTTPRequestParser):
    """Waitress's parser with RFC 9112's framing, at a cost in proportion to the bytes, however they come in.

    Whatever is wrong becomes a ``refusal``, which answers the request. ``adj.refuse_head`` is a RefuseHead or None,
    ``adj.max_body_bytes`` what goes with it.
    """

    headers: dict[str, str]
    content_length: int
    expect_continue: bool
    completed: bool
    body_bytes_received: int
    body_rcv: ChunkedReceiver | FixedStreamReceiver | None
    command = path = query = request_uri = ""
    url_scheme = "http"
    refusal: Refusal | None = None
    unread = False                      # the connection brings bytes that belong to no request: more of a refused body
    to_skip = 0                         # bytes of the refused body before the connection's next request

    def __init__(self, adj: Any) -> None:
        super().__init__(adj)
        self.header_items: list[tuple[str, str]] = []       # as they were sent, but without folds
        self._head = bytearray()

    def received(self, data: bytes) -> int:
        """Take in ``data``; the number of its bytes that belong to this request, which is ``completed`` or goes on."""
        if self.completed:
            return 0
        return self._receive_body(data) if self.headers_finished else self._receive_head(data)

    def refuse(self, refusal: Refusal) -> None:
        """Complete the request with an answer; for one with a body before that is read."""
        waits = self.expect_continue                        # and may then send the body or not
        self.refusal, self.completed, self.expect_continue = refusal, True, False
        length = 0 if self.body_rcv is None else None if self.chunked or waits else self.content_length
        if length is not None and length <= MAX_SKIPPED_BYTES:
            self.to_skip = length
        else:
            self._end_connection()
        self._drop_body()

    def fail(self, status: int, message: str) -> None:
        """Complete the request with an error after which no other request can be read from the connection."""
        kind = "request_too_large" if status == 413 else "invalid_request_error"
        content = json.dumps(error_body(kind, message)).encode()
        self.refusal, self.completed, self.expect_continue = (
            Refusal(status, [("Content-Type", "application/json")], content), True, False)
        self._end_connection()
        self._drop_body()

    def _end_connection(self) -> None:
        self.headers["CONNECTION"], self.unread = "close", True

    def _drop_body(self) -> None:
        self.close()
        self.body_rcv = None

    def _receive_head(self, data: bytes) -> int:
        seen = len(self._head)
        self._head += data
        end = self._head.find(b"\r\n\r\n", max(seen - 3, 0)) + 4
        if end < 4 or end > MAX_HEAD_BYTES:
            if len(self._head) >= MAX_HEAD_BYTES:
                self.fail(431, f"the head is larger than {MAX_HEAD_BYTES} bytes")
            return len(data)
        head = bytes(self._head[:end]).lstrip()             # empty lines before a request are no error
        self._head.clear()
        if not head:
            self.empty = self.completed = True
            return end - seen
        try:
            self.parse_header(head)
        except _Malformed as error:
            self.fail(error.status, str(error))
        except ParsingError as error:
            self.fail(400, str(error).partition(' "')[0])   # without the line that it quotes
        except ValueError:                                  # of urllib
            self.fail(400, "the request target cannot be parsed")
        self.headers_finished = True
        if not self.completed:
            self._decide()
        return end - seen

    def _decide(self) -> None:
        """What follows from a good head."""
        if self._refused(None if self.chunked else self.content_length):
            return
        if self.body_rcv is None:
            self.completed, self.expect_continue = True, False
        elif self.content_length >= MAX_BODY_BYTES:
            self.fail(413, f"the body is larger than {MAX_BODY_BYTES} bytes")

    def _refused(self, length: int | None) -> bool:
        """Ask the application, and refuse the request if it says so. length: of the body, as far as it is known."""
        if self.adj.refuse_head is None:
            return False
        path = "/" + self.path.lstrip("/") if self.path.startswith("/") else self.path      # as waitress's PATH_INFO
        refusal = self.adj.refuse_head(RequestHead(self.command, path, self.request_uri, self.headers, length))
        if refusal is not None:
            self.refuse(refusal)
        return refusal is not None

    def _receive_body(self, data: bytes) -> int:
        body: Any = self.body_rcv
        consumed: int = body.received(data)
        self.body_bytes_received += consumed
        if body.error:
            self.fail(body.error.code, body.error.body)
        elif self.chunked and self.body_bytes_received >= MAX_BODY_BYTES:
            self.fail(413, f"the body is larger than {MAX_BODY_BYTES} bytes in its chunks")
        elif self.chunked and body.size > self.adj.max_body_bytes and self._refused(body.size):
            pass                                            # the rest need not come, nor be kept
        elif body.completed:
            self.completed, self.expect_continue = True, False
            if body.buf.failed:
                self.fail(503, "no room for the body of this request")
            elif self.chunked:
                self.headers["CONTENT_LENGTH"] = str(len(body))
        return consumed

    def parse_header(self, header_plus: bytes) -> None:
        """The request line and the fields. Raises _Malformed, ParsingError or another ValueError."""
        request_line = REQUEST_LINE.match(header_plus)
        if request_line is None or header_plus[request_line.end():request_line.end() + 2] != b"\r\n":
            raise _Malformed(400, "the request line is not valid")
        at, end, headers = request_line.end() + 2, len(header_plus) - 2, self.headers
        while at < end:
            field = FIELD.match(header_plus, at)
            if field is None:
                raise _Malformed(400, "a header field is not valid")
            at, name = field.end(), field[1].decode("latin-1")
            text = field[2].decode("latin-1").replace("\r\n", "").strip(" \t")
            self.header_items.append((name, text))
            if "_" in name:                                 # WSGI would take it for the name with a hyphen
                continue
            key = name.upper().replace("-", "_")
            if key in headers:
                if key == "HOST":
                    raise _Malformed(400, "Host stands in the head twice")
                text = f"{headers[key]}, {text}"
            headers[key] = text
        method, target, version = request_line.groups()
        if version not in (b"1.0", b"1.1"):
            raise _Malformed(505, "the version of HTTP is neither 1.0 nor 1.1")
        self.command, self.request_uri, self.version = method.decode(), target.decode("latin-1"), version.decode()
        if target.startswith(b"/"):
            path, _, query = target.partition(b"#")[0].partition(b"?")
            self.path, self.query = unquote_bytes_to_wsgi(path), query.decode("latin-1")
        elif ABSOLUTE_TARGET.match(target) or target == b"*" or method == b"CONNECT":
            _, _, self.path, self.query, _ = split_uri(target)
        else:
            raise _Malformed(400, "the request target is neither a path nor a URL")
        self._parse_connection()
        self._parse_framing()

    def _parse_connection(self) -> None:
        """One word for the list, which is all that those who write the answer compare it with."""
        wants = [option.strip(" \t").lower() for option in self.headers.get("CONNECTION", "").split(",")]
        if "close" in wants:
            self.headers["CONNECTION"] = "close"
        elif "keep-alive" in wants:
            self.headers["CONNECTION"] = "keep-alive"

    def _parse_framing(self) -> None:
        """Where the body ends (RFC 9112, section 6)."""
        headers = self.headers
        codings = headers.pop("TRANSFER_ENCODING", None)
        length = headers.get("CONTENT_LENGTH", "0")
        if codings is not None:
            if self.version == "1.0":
                raise _Malformed(400, "Transfer-Encoding stands in a request of HTTP/1.0")
            listed = [coding.strip(" \t").lower() for coding in codings.split(",")]
            if listed.count("chunked") > 1 or "chunked" in listed[:-1] or not codings.strip(" \t"):
                raise _Malformed(400, "Transfer-Encoding is not valid")
            if listed != ["chunked"]:
                raise _Malformed(501, "a transfer coding other than chunked is not implemented")
            if headers.pop("CONTENT_LENGTH", None) is not None:
                headers["CONNECTION"] = "close"             # somebody before us may have seen another end of the body
            self.chunked = True
            self.body_rcv = ChunkedReceiver(Spool(self.adj.inbuf_overflow), MAX_BODY_BYTES)
        elif not CONTENT_LENGTH.fullmatch(length) or len(length) > MAX_LENGTH_DIGITS:
            raise _Malformed(400, "Content-Length is not valid")
        elif int(length):
            self.content_length = int(length)
            self.body_rcv = FixedStreamReceiver(self.content_length, Spool(self.adj.inbuf_overflow))
        self.expect_continue = self.version == "1.1" and headers.get("EXPECT", "").lower() == "100-continue"
