"""Waitress with an end: SIGTERM stops admission, answers what was admitted, closes idle connections and returns.

Waitress itself stops by exception and drops whatever runs. Here its event loop is turned one round at a time, so that
between two rounds the server can close its listener and those connections that owe nobody an answer. Responses sent
while draining carry ``Connection: close``.

One thread serves one request from its arrival to its answer: the thread that turned the event loop when the request
came in. It hands the loop to an idle one first, so no thread has to wake up between a request's last byte and its
first line of work, which takes 0.1 ms and more. There are more threads than places in the queue, so that a full worker
still says 503 and answers ``/health`` at once.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import resource
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from waitress import wasyncore
from waitress.adjustments import Adjustments
from waitress.buffers import OverflowableBuffer
from waitress.channel import HTTPChannel
from waitress.parser import HTTPRequestParser
from waitress.server import TcpWSGIServer
from waitress.task import ThreadedTaskDispatcher, WSGITask
from waitress.utilities import Error

from jev.settings import Settings

if TYPE_CHECKING:            # the gateway runs this server too, and has no engine to load
    from jev.engine import Engine

logger = logging.getLogger("jev.server")

SPARE_THREADS = 17                      # beyond the queue's places: the event loop, refusals, /health, /v1/models
CONNECTIONS = 4096                      # open at a time, idle ones included, if the system lets us
LEAST_CONNECTIONS = 64                  # even if it does not
OTHER_DESCRIPTORS = 512
ROUND_SECONDS = 1.0
DRAIN_ROUND_SECONDS = 0.02
# The application refuses bodies over 4 MiB in JSON; this one ends what would fill the disk, in waitress's plain text.
# Far above the 4 MiB because it counts the framing of chunks too.
MAX_BODY_BYTES = 64 * 2**20


class _NoRoom(Error):
    code = 503
    reason = "Service Unavailable"


class _Spool(OverflowableBuffer):
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


class _Parser(HTTPRequestParser):
    def parse_header(self, header_plus: bytes) -> None:
        super().parse_header(header_plus)
        if self.body_rcv is not None:
            self.body_rcv.buf = _Spool(self.adj.inbuf_overflow)

    def received(self, data: bytes) -> int:
        consumed = super().received(data)
        if self.completed and not self.error and self.body_rcv is not None and self.body_rcv.buf.failed:
            self.error = _NoRoom("no room for the body of this request")
        return consumed


class _Task(WSGITask):
    def build_response_header(self) -> bytes:
        if self.channel.server.draining:
            self.set_close_on_finish()
        return super().build_response_header()

    def write(self, data: bytes) -> None:
        if self.wrote_header or not self.complete or not self.has_body or self.content_length != len(data):
            super().write(data)
            return
        # Our responses are one block of known length: head and body leave together, and the client wakes up once.
        self.channel.write_soon(self.build_response_header() + data)
        self.wrote_header = True
        self.content_bytes_written = len(data)


class _Channel(HTTPChannel):
    parser_class = _Parser
    task_class = _Task

    def service(self) -> None:
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

    def writable(self) -> bool:
        """Not while a thread of ours is sending: it sees to what is left itself. The loop could only spin meanwhile, and
        keep that thread from the interpreter lock, milliseconds long."""
        if not self.outbuf_lock.acquire(False):
            # With so much left the sender waits for the loop, which it wakes while it still holds the lock.
            return self.total_outbufs_len > self.adj.outbuf_high_watermark
        self.outbuf_lock.release()
        return super().writable()

    def idle(self) -> bool:
        """Nothing is being computed or sent. A request that has not arrived completely counts for nothing."""
        return not (self.requests or self.total_outbufs_len or self.close_when_flushed)


class _Loop:
    """The event loop as one of waitress's tasks: the thread that has it *leads*, by calls of ``turn``.

    When a request is complete the leader puts the loop back in front of the queue and serves the request itself, if
    another thread is idle and can lead on. So the loop is always turned, and where all other threads are busy requests
    wait in the queue as they do in waitress.
    """

    def __init__(self, threads: _Threads, turn: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        """failed: told what ``turn`` raised; nobody leads after that."""
        self._threads, self._turn, self._failed = threads, turn, failed
        self._open = False                                      # threads may lead
        self._under_way = False                                 # one leads, or the loop is in the queue
        self._ended = threading.Condition(threads.lock)         # it is not any more
        self.leader: int | None = None                          # identity of the thread that leads

    def begin(self) -> None:
        """Let the threads turn the loop from now on."""
        with self._threads.lock:
            self._open = self._under_way = True
            self._put_back()

    def rest(self) -> None:
        """Let no thread turn the loop once more, but for the turn that is under way. For signal handlers too: no lock."""
        self._open = False

    def end(self, wake: Callable[[], None]) -> None:
        """Let no thread turn the loop any more; returns when none does. wake: ends a ``turn`` that waits."""
        self.rest()
        with self._threads.lock:
            while self._under_way:
                wake()
                self._ended.wait(ROUND_SECONDS)

    def service(self) -> None:
        """Lead until there is a request for this thread to serve, and serve it; or until the loop is to rest."""
        self.leader = threading.get_ident()
        task = None
        try:
            while self._open:
                with self._threads.lock:
                    if self._threads.queue and self._threads.idle():
                        task = self._threads.queue.popleft()
                        break
                self._turn()
        except BaseException as error:                  # whatever it is, the server must not go on deaf
            self.rest()
            self._failed(error)
        finally:
            with self._threads.lock:
                self.leader = None
                self._put_back()
        if task is not None:
            task.service()

    def _put_back(self) -> None:
        if self._open:
            self._threads.queue.appendleft(self)
        else:
            self._under_way = False
            self._ended.notify_all()
        self._threads.queue_cv.notify(len(self._threads.queue))     # for the loop, and for what else has come in


class _Threads(ThreadedTaskDispatcher):
    """The threads that serve requests and turn the event loop."""

    def __init__(self, turn: Callable[[], None], failed: Callable[[BaseException], None]) -> None:
        super().__init__()
        self.loop = _Loop(self, turn, failed)

    def idle(self) -> int:
        """Threads with nothing to do. Called with the lock held."""
        return len(self.threads) - self.stop_count - self.active_count

    def add_task(self, task: _Channel) -> None:
        if threading.get_ident() != self.loop.leader:
            super().add_task(task)
            return
        with self.lock:                                 # whoever leads looks here after each turn: nobody has to wake up
            self.queue.append(task)


class _Waitress(TcpWSGIServer):
    channel_class = _Channel
    draining = False

    def close_listener(self) -> None:
        """Take in the connections that already wait, then refuse new ones."""
        for _ in range(self.adj.backlog):
            if not select.select([self.socket], [], [], 0)[0]:
                break
            self.handle_accept()
        self.accepting = False
        self.del_channel()
        self.socket.close()


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet: a port that is taken is noticed before anything is loaded.

    Raises OSError.
    """
    family, kind, proto, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError:
        sock.close()
        raise
    return sock


def url(sock: socket.socket) -> str:
    """http://host:port of a bound socket; a wildcard address is shown as this machine's loopback."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class Server:
    """Serves a WSGI ``app`` on a bound socket until ``stop``. ``run`` is called once, by one thread."""

    def __init__(self, app: Callable, engine: Engine, settings: Settings, sock: socket.socket) -> None:
        self.engine = engine
        self.drain_seconds = settings.drain_seconds
        self.url = url(sock)
        self._stopping = self._abandon = False
        self._map: dict[int, Any] = {}
        # Why to end: None when asked to, or what went wrong. A queue that signal handlers may use.
        self._reasons: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._threads = _Threads(lambda: self._round(ROUND_SECONDS), self._reasons.put)
        self._threads.set_thread_count(settings.queue + SPARE_THREADS)
        adjustments = Adjustments(
            sockets=[sock], threads=settings.queue + SPARE_THREADS, backlog=1024, ident=None,
            connection_limit=_connection_limit(settings.queue), asyncore_use_poll=True,
            channel_request_lookahead=1,        # keep reading while a request runs: how a disconnect is noticed
            outbuf_overflow=sys.maxsize,        # an answer is whole in memory already: no disk, which may be full
            max_request_body_size=MAX_BODY_BYTES, clear_untrusted_proxy_headers=True)
        adjustments.send_bytes = 1              # send from the thread that has the answer, not from the event loop
        self._waitress = _Waitress(
            app, self._map, True, sock, dispatcher=self._threads, adj=adjustments, bind_socket=False,
            sockinfo=(sock.family, sock.type, sock.proto, sock.getsockname()))
        engine.on_lost = self._end

    def stop(self) -> None:
        """Begin to drain; a second call gives up on what is still running. For any thread and for signal handlers."""
        self._abandon = self._stopping
        self._stopping = True
        self._threads.loop.rest()                    # what arrives from now on finds the engine draining
        self._reasons.put(None)

    def _end(self) -> None:
        """Drain, unless that has begun: no forward can succeed any more, so it is soon over."""
        if not self._stopping:
            self.stop()

    def run(self) -> bool:
        """Serve until stopped, or until the engine is lost. True when everything admitted was answered, whether or not its client took it."""
        try:
            self._threads.loop.begin()
            reason = self._reasons.get()
            if reason is not None:
                raise reason
            self._threads.loop.end(self._waitress.pull_trigger)
            return self._drain()
        finally:
            self._threads.loop.end(self._waitress.pull_trigger)
            for channel in list(self._waitress.active_channels.values()):
                channel.handle_close()
            self._threads.shutdown(timeout=1)
            wasyncore.close_all(self._map)

    def _drain(self) -> bool:
        deadline = time.monotonic() + self.drain_seconds
        self.engine.drain()
        self._waitress.draining = True
        if self.engine.pending:
            logger.warning("shutting down once %d admitted requests are answered", self.engine.pending)
        self._waitress.close_listener()
        self._round(0)          # requests that have already arrived on open connections are told, not cut off
        while True:
            for channel in list(self._waitress.active_channels.values()):
                if channel.idle():
                    channel.handle_close()
            channels = list(self._waitress.active_channels.values())
            if not channels and not self.engine.pending:
                return True
            if self._abandon or time.monotonic() >= deadline:
                unanswered = max(self.engine.pending, sum(bool(channel.requests) for channel in channels))
                if unanswered:
                    logger.error("gave up on %d requests", unanswered)
                else:
                    logger.warning("%d answers not taken by their clients", len(channels))
                return not unanswered
            self._round(DRAIN_ROUND_SECONDS)

    def _round(self, seconds: float) -> None:
        wasyncore.loop(timeout=seconds, use_poll=True, map=self._map, count=1)


def _connection_limit(queue: int) -> int:
    """CONNECTIONS, or what the limit on open files allows after raising it as far as an ordinary process may.

    A connection may take two descriptors, its socket and a spooled body; a gateway's places take one more each, towards
    a worker; weights, devices and logs need some too.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * CONNECTIONS + queue + OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return CONNECTIONS
    return max(LEAST_CONNECTIONS, min(CONNECTIONS, (soft - queue - OTHER_DESCRIPTORS) // 2))
