"""The gateway's side of one worker: exchanges of a request for an answer that is read whole before its deadline.

Nothing is sent twice. `Worker.exchange` separates the two ways in which a request fails: `Unreachable` means that no byte
of it left this process, and only then may another worker have it; after the first byte the failure is final,
because the worker may have run it.
"""

from __future__ import annotations

import io
import threading
import time
from dataclasses import dataclass
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from jev.gateway.connection import OUT_OF_SOCKETS, Gone, Resolver, Socket, TLSSocket, connect, secure, tls_context
from jev.gateway.http1 import Answer, BadResponse, Headers, read_answer

CONNECT_SECONDS = 5.0           # of an exchange's time, for name, addresses and TLS together
# Waitress closes a silent connection after 120 s. Letting go of ours well before keeps us from sending a request
# into a connection that the worker is just closing, which could not be repeated.
IDLE_SECONDS = 30.0
BLOCK_BYTES = 256 * 1024


class Failure(Exception):
    """What clients are told. `reason` is for the log: more exact, and without anything that a client sent."""

    @property
    def reason(self) -> str:
        cause = self.__cause__
        return f"{self}: {' '.join(str(cause).split())}" if isinstance(cause, OSError) else str(self)


class Unreachable(Failure):
    """No connection to the worker: nothing of the request was sent."""


class OutOfSockets(Failure):
    """This process cannot open a connection, to whatever worker: nothing of the request was sent."""


class ExchangeFailed(Failure):
    """The request was sent, at least in part, and no usable answer came back."""


class ClientGone(Exception):
    """The client left before its answer was there; the exchange with the worker was cut off."""


@dataclass
class Request:
    """One request on its way, its headers end to end, its body `length` bytes; and how it fared so far."""

    method: str
    target: str
    headers: Headers
    body: BinaryIO | None
    length: int
    gone: Gone                          # nobody waits for the answer any more
    worker: str | None = None           # the one that had it last
    worker_seconds: float = 0.0         # with that one and those before


class Worker:
    """One worker: its address, its idle connections, and how many requests it has in hand."""

    def __init__(self, url: str, limit: int) -> None:
        """`url` is a checked `http[s]://host[:port][/prefix]`; see `jev.gateway.settings.parse_backends`. No answer may
        have more than `limit` bytes of body."""
        parts = urlsplit(url)
        self.name = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self.prefix = parts.path.rstrip("/")
        default = 443 if parts.scheme == "https" else 80
        port = parts.port or default
        host = unquote(parts.hostname or "")
        # As others know it: without the dot that ends a full name, and without a zone, which is this machine's own.
        self._host = host.partition("%")[0] if ":" in host else host.rstrip(".")
        shown = f"[{self._host}]" if ":" in host else self._host
        self.host_header = shown if port == default else f"{shown}:{port}"
        self.outstanding = 0
        self.healthy = True
        self._limit = limit
        self._tls = tls_context() if parts.scheme == "https" else None
        self._resolver = Resolver(host, port)
        self._idle: list[tuple[float, Socket | TLSSocket]] = []
        self._lock = threading.Lock()

    def exchange(self, request: Request, deadline: float) -> Answer:
        """Send a request, its body from where it stands, and return the whole answer before `deadline`.

        `deadline` is a `time.monotonic()` value. Raises Unreachable, OutOfSockets, ExchangeFailed or ClientGone.
        """
        request.worker = self.name
        started = time.monotonic()
        try:
            return self._exchange(request, deadline)
        finally:
            request.worker_seconds += time.monotonic() - started

    def _exchange(self, request: Request, deadline: float) -> Answer:
        sock = self._idle_connection() or self._connect(deadline, request.gone)
        sock.deadline, sock.gone = deadline, request.gone
        answer, reusable = None, False
        try:
            sent = self._send(sock, request)
            answer, persistent = read_answer(sock.recv, self._limit)
            reusable = sent and persistent
            return answer
        except (OSError, BadResponse) as error:
            if request.gone():
                raise ClientGone from None
            if time.monotonic() >= deadline:
                raise ExchangeFailed("the worker did not answer in time") from error
            what = error if isinstance(error, BadResponse) else type(error).__name__
            raise ExchangeFailed(f"no usable answer from the worker ({what})") from error
        finally:
            if reusable:
                with self._lock:
                    self._idle.append((time.monotonic(), sock))
            elif answer is not None:
                sock.close()
            else:
                sock.reset()

    def _send(self, sock: Socket | TLSSocket, request: Request) -> bool:
        """False when the worker stopped reading: it may have answered already (413, say), so that is read next."""
        lines = [f"{request.method} {self.prefix}{request.target} HTTP/1.1", f"Host: {self.host_header}"]
        lines += [f"{name}: {value}" for name, value in request.headers]
        if request.length or request.method == "POST":
            lines.append(f"Content-Length: {request.length}")
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        left, body = request.length, request.body or io.BytesIO()
        try:
            # The head and what there is of the body leave together, and the worker wakes up once.
            block = body.read(BLOCK_BYTES) if left else b""
            sock.sendall(head + block)
            while left := left - len(block):
                block = body.read(BLOCK_BYTES)
                if sock.answered():
                    return False
                sock.sendall(block)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def _idle_connection(self) -> Socket | TLSSocket | None:
        with self._lock:
            fresh_since = time.monotonic() - IDLE_SECONDS
            stale = [sock for since, sock in self._idle if since < fresh_since]
            self._idle = [(since, sock) for since, sock in self._idle if since >= fresh_since]
            found = None
            while self._idle:
                _, sock = self._idle.pop()
                if sock.idle():
                    found = sock
                    break
                stale.append(sock)
        for sock in stale:
            sock.close()
        return found

    def _connect(self, deadline: float, gone: Gone) -> Socket | TLSSocket:
        deadline = min(deadline, time.monotonic() + CONNECT_SECONDS)
        try:
            sock = connect(self._resolver.addresses(deadline, gone), deadline, gone)
            return sock if self._tls is None else secure(sock, self._tls, self._host, deadline)
        except OSError as error:
            if gone():
                raise ClientGone from None
            if error.errno in OUT_OF_SOCKETS:
                raise OutOfSockets("no more connections to workers can be opened now") from error
            raise Unreachable(f"no connection to the worker ({type(error).__name__})") from error

    def close(self) -> None:
        self._resolver.close()
        with self._lock:
            idle, self._idle = self._idle, []
        for _, sock in idle:
            sock.close()
