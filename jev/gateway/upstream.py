"""The gateway's side of one worker: connections that keep time, answers that are read whole and strictly.

urllib3 supplies the connections: name resolution, TLS, telling a dropped one from a good one. Its pools and its requests
are left aside: they normalise the target, and their time-outs are per read, so that a worker sending one byte a second
would never be late. Here a socket carries one deadline for the whole exchange, and a request's head is a line for each
header.

Nothing is sent twice. `exchange` separates the two ways in which a request fails: `Unreachable` means that no byte
of it left this process, and only then may another worker have it; after the first byte the failure is final,
because the worker may have run it.
"""

from __future__ import annotations

import errno
import http.client
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import BinaryIO
from urllib.parse import urlsplit

from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError

CONNECT_SECONDS = 5.0
# Waitress closes a silent connection after 120 s. Letting go of ours well before keeps us from sending a request
# into a connection that the worker is just closing, which could not be repeated.
IDLE_SECONDS = 30.0
# How often a waiting exchange looks whether its client is still there.
GLANCE_SECONDS = 0.25
BLOCK_BYTES = 256 * 1024

HOP_BY_HOP = frozenset(
    "connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer trailers "
    "transfer-encoding upgrade".split()
)
MAX_HEADERS, MAX_LINE_BYTES = 100, 65536
STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9][0-9])(?: ([\t\x20-\x7e\x80-\xff]*))?")
TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


# Conditions of this process, not of the worker: no descriptor, port or memory is left for one more connection.
OUT_OF_SOCKETS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))


class Failure(Exception):
    """What clients are told. `reason` is for the log: more exact, and without anything that a client sent."""

    @property
    def reason(self) -> str:
        cause = _root(self.__cause__)
        if isinstance(cause, OSError) or type(cause) in FIXED_WORDS:
            return f"{self}: {' '.join(str(cause).split())}"
        return str(self)


class Unreachable(Failure):
    """No connection to the worker: nothing of the request was sent."""


class OutOfSockets(Failure):
    """This process cannot open a connection, to whatever worker: nothing of the request was sent."""


class ExchangeFailed(Failure):
    """The request was sent, at least in part, and no usable answer came back."""


# Errors with a text of this module or a fixed one. A ValueError may quote a header, and with it a key.
FIXED_WORDS = (http.client.HTTPException, http.client.BadStatusLine, http.client.IncompleteRead)


def _root(error: BaseException | None) -> BaseException | None:
    """The system's error under urllib3's, or the error itself."""
    inner = error
    while inner is not None and not isinstance(inner, OSError):
        inner = inner.__cause__ or inner.__context__
    return inner or error


class ClientGone(Exception):
    """The client left before its answer was there; the exchange with the worker was cut off."""


@dataclass(frozen=True)
class Answer:
    """A worker's whole response, hop-by-hop headers and framing removed, the body as it came (still encoded)."""

    status: int
    reason: str
    headers: list[tuple[str, str]]
    body: bytes


def end_to_end(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The headers that pass a gateway, in order and with repetitions.

    Dropped are the hop-by-hop ones, those that a `Connection` header names, and Content-Length, which each side
    writes for the body that it sends.
    """
    headers = list(headers)
    dropped = {"content-length", *HOP_BY_HOP}
    for name, value in headers:
        if name.lower() == "connection":
            dropped.update(token.strip().lower() for token in value.split(","))
    return [(name, value) for name, value in headers if name.lower() not in dropped]


class _Timed:
    """A socket whose reads and writes share one deadline, and which stops waiting once `gone()` is true."""

    deadline: float = 0.0
    gone: Callable[[], bool]

    def _wait(self, call: Callable, *args):
        while True:
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("deadline passed")
            seconds = min(left, GLANCE_SECONDS)
            if self.gettimeout() != seconds:  # setting it costs a system call
                self.settimeout(seconds)
            try:
                return call(*args)
            except TimeoutError:
                if self.gone():
                    raise ConnectionAbortedError("the client left") from None

    def recv_into(self, *args):
        return self._wait(super().recv_into, *args)

    def sendall(self, data, flags: int = 0) -> None:
        view = memoryview(data).cast("B")
        while view:
            view = view[self._wait(super().send, view, flags) :]


class _Socket(_Timed, socket.socket):
    pass


class _TLSSocket(_Timed, ssl.SSLSocket):
    pass


class _Response(http.client.HTTPResponse):
    """http.client's response with its head read strictly: a gateway must never lose track of where an answer ends.

    The e-mail parser that http.client uses for headers forgives too much, and takes longer than all the rest.
    """

    def begin(self) -> None:
        if self.headers is not None:
            return
        while (status := self._status_line()) == 100:
            self._header_lines()
        if status < 200:
            raise http.client.HTTPException("an interim status where a final one was due")
        self.headers = self.msg = http.client.HTTPMessage()
        for name, value in self._header_lines():
            self.headers.add_header(name, value)
        codings, lengths, connection = (
            [token.strip(" \t").lower() for value in self.headers.get_all(name, ()) for token in value.split(",")]
            for name in ("Transfer-Encoding", "Content-Length", "Connection"))
        if codings not in ([], ["chunked"]):
            raise http.client.HTTPException("an unknown transfer coding")
        if len(set(lengths)) > 1 or lengths and not (lengths[0].isascii() and lengths[0].isdigit()):
            raise http.client.HTTPException("an invalid Content-Length")
        self.chunked, self.chunk_left = bool(codings), None
        if status in (204, 304):
            self.length, self.chunked = 0, False
        else:
            self.length = int(lengths[0]) if lengths and not self.chunked else None
        until_closed = self.length is None and not self.chunked
        self.will_close = until_closed or "close" in connection or self.version == 10 and "keep-alive" not in connection

    def _status_line(self) -> int:
        match = STATUS_LINE.fullmatch(self._line())
        if match is None:
            raise http.client.BadStatusLine("not an HTTP/1 status line")
        self.version = 10 + int(match[1])
        self.code = self.status = int(match[2])
        self.reason = (match[3] or b"").decode("latin-1")
        return self.status

    def _header_lines(self) -> list[tuple[str, str]]:
        items: list[tuple[str, str]] = []
        while line := self._line():
            text = line.decode("latin-1")
            if line[0] in b" \t" and items:  # a folded line is part of the value before it
                name, value = items.pop()
                items.append((name, value + " " + text.strip(" \t")))
                continue
            name, colon, value = text.partition(":")
            if not colon or not TOKEN.fullmatch(name) or "\r" in value or "\0" in value:
                raise http.client.HTTPException("malformed headers")
            items.append((name, value.strip(" \t")))
            if len(items) > MAX_HEADERS:
                raise http.client.HTTPException("too many headers")
        return items

    def _line(self) -> bytes:
        """The next line without its end."""
        line = self.fp.readline(MAX_LINE_BYTES)
        if not line.endswith(b"\n"):
            raise http.client.HTTPException("a line that is too long, or no line at all")
        return line[:-2] if line.endswith(b"\r\n") else line[:-1]

    def _read_next_chunk_size(self) -> int:
        size = super()._read_next_chunk_size()
        if size < 0:  # http.client would take it for "everything until the end"
            raise http.client.HTTPException("an invalid chunk size")
        return size


class _Connection(HTTPConnection):
    def _new_conn(self) -> socket.socket:
        return _Socket(fileno=super()._new_conn().detach())


class Worker:
    """One worker: its address, its idle connections, and how many requests it has in hand."""

    def __init__(self, url: str) -> None:
        """`url` is a checked `http[s]://host[:port][/prefix]`; see `jev.gateway.settings.parse_backends`."""
        parts = urlsplit(url)
        self.name = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self.prefix = parts.path.rstrip("/")
        self.host = parts.hostname or ""
        default = 443 if parts.scheme == "https" else 80
        self.port = parts.port or default
        # As others know it: without the dot that ends a full name, and without a zone, which is this machine's own.
        host = f"[{self.host.partition('%')[0]}]" if ":" in self.host else self.host.rstrip(".")
        self._host_header = host if self.port == default else f"{host}:{self.port}"
        self.outstanding = 0
        self.healthy = True
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._tls = ssl.create_default_context()
            self._tls.sslsocket_class = _TLSSocket
        self._idle: list[tuple[float, HTTPConnection]] = []
        self._lock = threading.Lock()

    def exchange(
        self,
        method: str,
        target: str,
        headers: list[tuple[str, str]],
        body: BinaryIO | None,
        length: int,
        deadline: float,
        limit: int,
        gone: Callable[[], bool] = lambda: False,
    ) -> Answer:
        """Send one request and return the whole answer, at most `limit` bytes of body, before `deadline`.

        `headers` are end to end; `body` is read from its position, `length` bytes. `deadline` is a
        `time.monotonic()` value. Raises Unreachable, OutOfSockets, ExchangeFailed or ClientGone.
        """
        connection = self._connection(deadline)
        sock = connection.sock
        sock.deadline, sock.gone = deadline, gone
        reusable = False
        try:
            sent = self._send(sock, method, target, headers, body, length)
            answer, ends = self._receive(sock, method, limit)
            reusable = sent and not ends
            return answer
        except (OSError, HTTPError, http.client.HTTPException, ValueError) as error:
            if gone():
                raise ClientGone from None
            if time.monotonic() >= deadline:
                raise ExchangeFailed("the worker did not answer in time") from error
            raise ExchangeFailed(f"no usable answer from the worker ({type(error).__name__})") from error
        finally:
            if reusable:
                self._keep(connection)
            else:
                connection.close()

    def _send(self, sock, method, target, headers, body, length) -> bool:
        """False when the worker stopped reading: it may have answered already (413, say), so that is read next."""
        lines = [f"{method} {self.prefix}{target} HTTP/1.1", f"Host: {self._host_header}"]
        lines += [f"{name}: {value}" for name, value in headers]
        if length or method == "POST":
            lines.append(f"Content-Length: {length}")
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        try:
            # The head and what there is of the body leave together, and the worker wakes up once.
            sock.sendall(head + (body.read(BLOCK_BYTES) if length else b""))
            while length and (block := body.read(BLOCK_BYTES)):
                sock.sendall(block)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    @staticmethod
    def _receive(sock, method, limit) -> tuple[Answer, bool]:
        """The answer, and whether the connection ends with it."""
        response = _Response(sock, method=method)
        try:
            response.begin()
            if (response.length or 0) > limit:
                raise ExchangeFailed("the worker's answer is too large")
            blocks, size = [], 0
            while block := response.read(min(BLOCK_BYTES, limit + 1 - size)):
                size += len(block)
                if size > limit:
                    raise ExchangeFailed("the worker's answer is too large")
                blocks.append(block)
            if response.length:
                raise http.client.IncompleteRead(b"", response.length)
            headers = end_to_end(response.headers.items())
            return Answer(response.status, response.reason, headers, b"".join(blocks)), response.will_close
        finally:
            response.close()

    def _connection(self, deadline: float) -> HTTPConnection:
        with self._lock:
            fresh_since = time.monotonic() - IDLE_SECONDS
            stale = [c for since, c in self._idle if since < fresh_since]
            self._idle = [(since, c) for since, c in self._idle if since >= fresh_since]
            while self._idle:
                _, connection = self._idle.pop()
                if connection.is_connected:  # nothing to read: neither closed by the worker nor out of step
                    break
                stale.append(connection)
            else:
                connection = None
        for old in stale:
            old.close()
        return connection or self._connect(deadline)

    def _connect(self, deadline: float) -> HTTPConnection:
        left = deadline - time.monotonic()
        timeout = max(0.001, min(CONNECT_SECONDS, left))
        if self._tls is None:
            connection = _Connection(self.host, self.port, timeout=timeout)
        else:
            connection = HTTPSConnection(self.host, self.port, timeout=timeout, ssl_context=self._tls)
        try:
            connection.connect()
        except (OSError, HTTPError) as error:
            connection.close()
            if getattr(_root(error), "errno", None) in OUT_OF_SOCKETS:
                raise OutOfSockets("no more connections to workers can be opened now") from error
            raise Unreachable(f"no connection to the worker ({type(error).__name__})") from error
        return connection

    def _keep(self, connection: HTTPConnection) -> None:
        with self._lock:
            self._idle.append((time.monotonic(), connection))

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()
