"""One connection: what it brings, what it is owed and what it owes, and how it ends."""

from __future__ import annotations

import logging
import socket
import sys
import time
import traceback
from http.client import responses
from typing import Any

from waitress.channel import HTTPChannel
from waitress.task import WSGITask

from jev.http.parser import HEAD_ACCEPTED, MAX_SKIPPED_BYTES, Parser

HEAD_SECONDS = 20.0                     # from a head's first byte to its last
BODY_SECONDS = 20.0                     # that a body may take in any case, and beyond them
BODY_BYTES_PER_SECOND = 4096            # as long as it comes at this rate on average, framing included
IDLE_SECONDS = 120.0                    # without a request, or without taking more of an answer
# After an answer to a request whose body was not read. A close at once would be a reset, which may take the answer with
# it while the client still sends (RFC 9112, section 9.6).
LINGER_SECONDS = 20.0
DRAIN_LINGER_SECONDS = 1.0              # while the server ends
LINGER_BYTES = 64 * 2**20
LINGER_BLOCK = 65536
# After the end of what a client sends: whether it has closed its connection or only that direction, TCP does not say.
# An interim response, which every client of HTTP/1.1 ignores, makes a closed one send a reset.
HALF_CLOSED_PROBE_SECONDS = 0.5
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"

logger = logging.getLogger("jev.http.channel")


class Task(WSGITask):
    """One answer, of the application or a refusal."""

    wrote_header: bool

    def execute(self) -> None:
        refusal = self.request.refusal
        if refusal is None:
            super().execute()
            return
        self.status = f"{refusal.status} {responses.get(refusal.status, '')}"
        self.complete, self.content_length = True, len(refusal.body)
        self.response_headers += [*refusal.headers, ("Content-Length", str(len(refusal.body)))]
        self.write(b"" if self.request.command == "HEAD" else refusal.body)

    def get_environment(self) -> dict[str, Any]:
        environ: dict[str, Any] = super().get_environment()
        environ[HEAD_ACCEPTED] = self.channel.adj.refuse_head is not None
        return environ

    def build_response_header(self) -> bytes:
        if self.channel.server.draining:
            self.set_close_on_finish()
        header: bytes = super().build_response_header()
        return header

    def write(self, data: bytes) -> None:
        if self.wrote_header or not self.complete or not self.has_body or self.content_length != len(data):
            super().write(data)
            return
        # Our responses are one block of known length: head and body leave together, and the client wakes up once.
        self.channel.write_soon(self.build_response_header() + data)
        self.wrote_header = True
        self.content_bytes_written = len(data)


class Channel(HTTPChannel):
    """Waitress's connection, which lets no client take what it likes: of time, of memory, or of others' places.

    The clock of a client that owes us bytes runs from ``owing_since``; None: it owes nothing.
    """

    parser_class = Parser
    task_class = Task
    request: Parser | None
    requests: list[Parser]
    sent_continue: bool
    will_close: bool
    close_when_flushed: bool
    connected: bool
    total_outbufs_len: int
    last_activity: float                # time.time()

    def __init__(self, server: Any, sock: socket.socket, addr: Any, adj: Any, map: Any = None) -> None:
        self.owing_since: float | None = None
        self.half_closed_since: float | None = None         # the client sends nothing more, and is owed answers
        self.probed = False
        self.answering = False                              # the current request's answer is being sent, or is sent
        self.lingering_since: float | None = None           # answered and closed on our side; the rest is thrown away
        self._thrown_away = 0
        self._to_skip = 0                                   # bytes of a refused body that come before the next request
        self._unread = False                                # more of such bytes, which end the connection
        super().__init__(server, sock, addr, adj, map)

    # What comes in, in the thread that leads the event loop

    def readable(self) -> bool:
        if self.lingering_since is not None:
            return True
        return self.half_closed_since is None and bool(super().readable())

    def handle_read(self) -> None:
        lingering = self.lingering_since is not None
        try:
            data = self.socket.recv(LINGER_BLOCK if lingering else self.adj.recv_bytes)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.handle_close()
            return
        if lingering:
            self._thrown_away += len(data)
            if not data or self._thrown_away > LINGER_BYTES:
                self.handle_close()
        elif data:
            self.last_activity = time.time()
            self.received(data)
        else:
            self._client_finished()

    def received(self, data: bytes) -> bool:
        """Take in what the client sent: the rest of a request, several, or a part of one."""
        with self.requests_lock:
            if self.will_close or self.close_when_flushed or self._unread:
                return False
            while data:
                if self._to_skip:
                    skipped = min(self._to_skip, len(data))
                    self._to_skip -= skipped
                    data = data[skipped:]
                    if not self._to_skip:
                        self.owing_since = None
                    continue
                if self.request is None:
                    self.request = self.parser_class(self.adj)
                if self.owing_since is None:
                    self.owing_since = time.monotonic()
                request = self.request
                in_head = not request.headers_finished
                consumed = request.received(data)
                if in_head and request.headers_finished:
                    self.owing_since = time.monotonic()     # now for the body
                if request.expect_continue and request.headers_finished and not self.requests and not self.sent_continue:
                    self.send_continue()
                if request.completed:
                    self._completed(request)
                    if self._unread:
                        break
                data = data[consumed:]
        return True

    def _completed(self, request: Parser) -> None:
        """The request is to be answered, after those before it. Called with the lock held."""
        self.request, self.sent_continue = None, False
        if request.empty:                                   # its owing goes on: empty lines can trickle too
            return
        self.owing_since = time.monotonic() if request.to_skip else None
        self._to_skip, self._unread = request.to_skip, request.unread
        self.requests.append(request)
        if len(self.requests) == 1:
            self.server.add_task(self)

    def _client_finished(self) -> None:
        with self.requests_lock:
            if self.request is not None:                    # it will never be whole
                self.request.close()
                self.request = None
            self.owing_since = None
            owed = bool(self.requests)
            if owed:
                self.half_closed_since = time.monotonic()
            elif self.total_outbufs_len:
                self.close_when_flushed = owed = True
        if not owed:
            self.handle_close()

    # What goes out

    def service(self) -> None:
        self.answering = False
        try:
            super().service()
        except BaseException:
            # Waitress logs it and would keep the connection and its request for ever.
            with self.requests_lock:
                for request in self.requests:
                    request.close()
                self.requests = []
                self.will_close = True
            self.server.pull_trigger()
            raise
        with self.requests_lock:
            if self.owing_since is not None:                # nobody had read what came in meanwhile
                self.owing_since = time.monotonic()

    def write_soon(self, data: bytes) -> int:
        self.answering = True
        sent: int = super().write_soon(data)
        return sent

    def writable(self) -> bool:
        """Not while a thread of ours is sending: it sees to what is left itself. The loop could only spin meanwhile, and
        keep that thread from the interpreter lock, milliseconds long."""
        if not self.outbuf_lock.acquire(False):
            # With so much left the sender waits for the loop, which it wakes while it still holds the lock.
            return bool(self.total_outbufs_len > self.adj.outbuf_high_watermark)
        self.outbuf_lock.release()
        if self.half_closed_since is not None and not self.requests:
            self.close_when_flushed = True
        return bool(super().writable())

    def handle_write(self) -> None:
        if self._unread and self.close_when_flushed and not self.will_close and self.lingering_since is None:
            self._flush_exception(self._flush_some)
            if self.total_outbufs_len == 0 and self.connected:
                self._linger()
            return
        super().handle_write()

    def _linger(self) -> None:
        self.close_when_flushed = False
        self.lingering_since = time.monotonic()
        try:
            self.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.handle_close()

    # How it ends

    def idle(self) -> bool:
        """Nothing is being computed or sent. A request that has not arrived completely counts for nothing."""
        if self.lingering_since is not None:
            return time.monotonic() - self.lingering_since > DRAIN_LINGER_SECONDS
        return not (self.requests or self.total_outbufs_len or self.close_when_flushed)

    def debt(self, now: float) -> tuple[int, float] | None:
        """How much the client owes, comparable: the connections that owe most are the first to go when there are too
        many. None: it is we who owe it an answer."""
        if self.requests:
            return None
        if self.lingering_since is not None:
            return 3, now - self.lingering_since
        if self.owing_since is not None:
            return 2, now - self.owing_since
        waiting = time.time() - self.last_activity
        return (0, waiting) if self.total_outbufs_len or self.close_when_flushed else (1, waiting)

    def check(self, now: float) -> None:
        """End what lasts too long. Called by the event loop about once a second; ``now``: time.monotonic()."""
        if self.half_closed_since is not None:
            self._check_half_closed(now, self.half_closed_since)
        if self.requests or self.will_close:
            return
        if self.lingering_since is not None:
            if now - self.lingering_since > LINGER_SECONDS:
                self.handle_close()
        elif self.owing_since is None or self.total_outbufs_len:
            if time.time() - self.last_activity > IDLE_SECONDS:
                self.will_close = True
        elif now > self._deadline(self.owing_since):
            self._overdue()

    def _deadline(self, since: float) -> float:
        request = self.request
        if request is None or not request.headers_finished:
            skipping = MAX_SKIPPED_BYTES / BODY_BYTES_PER_SECOND if self._to_skip else 0.0
            return since + HEAD_SECONDS + skipping
        return since + BODY_SECONDS + request.body_bytes_received / BODY_BYTES_PER_SECOND

    def _overdue(self) -> None:
        with self.requests_lock:
            if self.requests:
                return
            if self.request is None:
                self.will_close = True
                return
            part = "body" if self.request.headers_finished else "head"
            self.request.fail(408, f"the {part} of the request came too slowly")
            self._completed(self.request)

    def _check_half_closed(self, now: float, since: float) -> None:
        """Find out whether the client has gone altogether."""
        if self.probed:
            if self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.handle_close()
            return
        if now - since < HALF_CLOSED_PROBE_SECONDS or not self.outbuf_lock.acquire(False):
            return
        try:
            if self.requests and not self.answering and not self.total_outbufs_len and self.requests[0].version == "1.1":
                self.probed = True
                self.send(INTERIM)
        except (OSError, IndexError):
            self.will_close = True
        finally:
            self.outbuf_lock.release()

    def handle_error(self) -> None:
        """After an error in the event loop: as waitress, but without the client's address and what it sent."""
        kind, _, place = sys.exc_info()
        logger.error("a connection failed: %s at\n%s", getattr(kind, "__name__", kind), "".join(traceback.format_tb(place)))
        self.handle_close()
