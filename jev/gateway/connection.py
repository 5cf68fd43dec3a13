"""Connections to a worker: looking up its name, trying its addresses and moving bytes, all before one deadline.

Nothing of the system keeps such a deadline. Its resolver has none, a socket's time-out is for one call, so that a peer
sending one byte a second is never late, and addresses tried in turn take a time-out each.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, TypeVar, cast

from jev.threads import starting

# How often whoever waits looks whether it is still for anybody.
GLANCE_SECONDS = 0.25
# The head start of an address before the next one is tried beside it: RFC 8305 recommends it.
HEAD_START_SECONDS = 0.25
# Conditions of this process, not of a worker: no descriptor, port or memory is left for one more connection.
OUT_OF_SOCKETS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))

Gone = Callable[[], bool]
Address = tuple[Any, ...]         # an item of socket.getaddrinfo
Lookup = Future["list[Address]"]


if TYPE_CHECKING:
    _Base = socket.socket
else:
    _Base = object              # a mixin in front of two kinds of sockets

T = TypeVar("T")


class _Timed(_Base):
    """A socket whose reads and writes share one deadline, and which stops waiting once `gone()` is true."""

    deadline: float = 0.0       # time.monotonic()
    gone: Gone

    def _wait(self, call: Callable[[Any], T], argument: Any, in_vain: Callable[[], bool] = lambda: False) -> T:
        while True:
            seconds = _left(self.deadline, GLANCE_SECONDS)
            if self.gettimeout() != seconds:  # setting it costs a system call
                self.settimeout(seconds)
            try:
                return call(argument)
            except TimeoutError:
                _check(self.gone)
                if in_vain():
                    raise BrokenPipeError(errno.EPIPE, "answered before all was sent") from None

    def answered(self) -> bool:
        raise NotImplementedError

    def recv(self, size: int) -> bytes:                                 # type: ignore[override]
        return self._wait(super().recv, size)

    def sendall(self, data: bytes) -> None:                             # type: ignore[override]
        """Raises BrokenPipeError when the peer takes no more: it closed the connection, or has answered instead."""
        view = memoryview(data)
        while view:
            view = view[self._wait(super().send, view, self.answered) :]

    def reset(self) -> None:
        """Close so that the peer knows at once that nobody waits for its answer; an orderly end might be that of one
        direction."""
        with contextlib.suppress(OSError):
            self.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def idle(self) -> bool:
        """Nothing to read: neither closed by the peer nor out of step with it."""
        poll = select.poll()
        poll.register(self, select.POLLIN)
        return not poll.poll(0)


class Socket(_Timed, socket.socket):
    def answered(self) -> bool:
        """The peer has begun a final answer, or closed; an interim one (102, say) asks for the rest of a request."""
        if self.idle():
            return False
        start = socket.socket.recv(self, 10, socket.MSG_PEEK)
        return not start or len(start) == 10 and start[9:] != b"1"


class TLSSocket(_Timed, ssl.SSLSocket):        # type: ignore[misc]
    def answered(self) -> bool:
        """Not to be known: what there is to read may be TLS's own."""
        return False


class Resolver:
    """The addresses of one host, looked up anew for each connection.

    The system's resolver knows no deadline, so a thread asks it, which exists from the start: one, however long that
    takes and however many wait for it. An address written as such needs neither.
    """

    def __init__(self, host: str, port: int) -> None:
        self._name = (host, port)
        self._lock = threading.Lock()
        self._lookup: Lookup | None = None                              # under way
        self._lookups: queue.SimpleQueue[Lookup | None] = queue.SimpleQueue()
        self._fixed: list[Address] | None = None
        try:
            self._fixed = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except socket.gaierror:
            with starting("the thread that looks up names"):
                threading.Thread(target=self._work, name="jev-frontend-resolver", daemon=True).start()

    def addresses(self, deadline: float, gone: Gone) -> list[Address]:
        """As socket.getaddrinfo has them. Raises OSError: socket.gaierror, or TimeoutError at the deadline."""
        if self._fixed is not None:
            return self._fixed
        with self._lock:
            lookup = self._lookup
            if lookup is None:
                lookup = self._lookup = Future()
                self._lookups.put(lookup)
        while not wait([lookup], _left(deadline, GLANCE_SECONDS)).done:
            _check(gone)
        return lookup.result()

    def _work(self) -> None:
        while (lookup := self._lookups.get()) is not None:
            try:
                found: list[Address] = socket.getaddrinfo(*self._name, type=socket.SOCK_STREAM)
                error = None
            except Exception as raised:
                error = raised
            with self._lock:
                self._lookup = None
            if error is None:
                lookup.set_result(found)
            else:
                lookup.set_exception(error)

    def close(self) -> None:
        """End the thread, once the system lets it."""
        self._lookups.put(None)


def connect(addresses: Iterable[Address], deadline: float, gone: Gone) -> Socket:
    """A socket connected to that of `addresses` (as of socket.getaddrinfo) which is there first.

    They are tried in order, the next as soon as one failed or its head start is over, so that a dead address costs a
    quarter of a second where another lives. Raises OSError: TimeoutError at the deadline, else what the system
    said last; of a condition of this process only when that is all it said.
    """
    waiting = deque(addresses)
    trying: dict[int, Socket] = {}
    errors: list[OSError] = []
    poll = select.poll()
    try:
        while waiting or trying:
            if waiting:
                try:
                    sock = _begin(waiting.popleft())
                except OSError as error:
                    errors.append(error)
                    continue
                trying[sock.fileno()] = sock
                poll.register(sock, select.POLLOUT)
            until = min(deadline, time.monotonic() + HEAD_START_SECONDS) if waiting else deadline
            while trying and (left := until - time.monotonic()) > 0:
                for descriptor, _ in poll.poll(1000 * min(left, GLANCE_SECONDS)):
                    poll.unregister(descriptor)
                    sock = trying.pop(descriptor)
                    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    if not code:
                        return sock
                    sock.close()
                    errors.append(OSError(code, os.strerror(code)))
                _check(gone)
            if trying:
                _left(deadline)
    finally:
        for sock in trying.values():
            sock.close()
    raise next((error for error in reversed(errors) if error.errno not in OUT_OF_SOCKETS), errors[-1])


def _begin(found: Address) -> Socket:
    family, kind, protocol, _, address = found
    sock = Socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = sock.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, os.strerror(code))
    except BaseException:
        sock.close()
        raise
    return sock


def tls_context() -> ssl.SSLContext:
    """Trusts what the system, or SSL_CERT_FILE, trusts."""
    context = ssl.create_default_context()
    context.sslsocket_class = TLSSocket
    context.set_alpn_protocols(["http/1.1"])
    return context


def secure(sock: Socket, context: ssl.SSLContext, host: str, deadline: float) -> TLSSocket:
    """TLS over a connection, with a certificate for `host`. Raises OSError, of which ssl.SSLError is one."""
    try:
        sock.settimeout(_left(deadline))
        # An end without TLS's own goodbye is an error: it may cut off an answer that ends with its connection.
        return cast(TLSSocket, context.wrap_socket(sock, server_hostname=host, suppress_ragged_eofs=False))
    finally:
        sock.close()            # nothing is left in it when it was wrapped


def _left(deadline: float, most: float = float("inf")) -> float:
    """Seconds until the deadline, but `most`. Raises TimeoutError when it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("deadline passed")
    return min(left, most)


def _check(gone: Gone) -> None:
    if gone():
        raise ConnectionAbortedError("the client left")
