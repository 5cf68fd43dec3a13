"""Waitress with a graceful shutdown: SIGTERM stops admission, answers what was admitted, closes idle connections and returns.

Waitress itself stops by exception and drops whatever runs. Here its event loop is turned one round at a time, so that
between two rounds the server can see whether the last admitted answer is out. Until then it listens: the application
refuses decisions and says on ``/health`` that it is ending, which a refused connection would not. Then it closes its
listener and the connections that owe nobody an answer. Responses sent while draining carry ``Connection: close``.

One thread serves one request from its arrival to its answer: the thread that turned the event loop when the request
came in. It hands the loop to an idle one first, so no thread has to wake up between a request's last byte and its
first line of work, which takes 0.1 ms and more. There are more threads than places in the queue, so that a full worker
still says 503 and answers ``/health`` at once.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import logging
import queue
import resource
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from waitress import wasyncore
from waitress.adjustments import Adjustments
from waitress.server import TcpWSGIServer
from waitress.task import ThreadedTaskDispatcher

from jev.http.channel import Channel
from jev.http.parser import HEAD_ACCEPTED, Refusal, RefuseHead, RequestHead
from jev.threads import OutOfThreads, starting

__all__ = ["HEAD_ACCEPTED", "Refusal", "RefuseHead", "RequestHead", "Server", "bind", "url"]
logger = logging.getLogger("jev.server")

SPARE_THREADS = 17                      # beyond the queue's places: the event loop, refusals, /health, /v1/models
CONNECTIONS = 4096                      # open at a time, idle ones included, if the system lets us
LEAST_CONNECTIONS = 64                  # even if it does not
OTHER_DESCRIPTORS = 512
ROUND_SECONDS = 1.0
DRAIN_ROUND_SECONDS = 0.02
EVICTED_AT_ONCE = 64                    # connections at most, an eighth of all, when there is no room for a new one
FULL_SECONDS = 0.1                      # without accepting, when all connections wait for answers of ours
OUT_OF_DESCRIPTORS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


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

    def start_new_thread(self, target: Callable[[int], None], thread_no: int) -> None:
        try:
            super().start_new_thread(target, thread_no)
        except RuntimeError:
            self.threads.discard(thread_no)
            raise

    def idle(self) -> int:
        """Threads with nothing to do. Called with the lock held."""
        return int(len(self.threads) - self.stop_count - self.active_count)

    def add_task(self, task: Channel) -> None:
        if threading.get_ident() != self.loop.leader:
            super().add_task(task)
            return
        with self.lock:                                 # whoever leads looks here after each turn: nobody has to wake up
            self.queue.append(task)


class _Waitress(TcpWSGIServer):
    """Waitress's listener. At the limit of connections, its own or the system's, it makes room: those whose clients owe most
    are closed."""

    channel_class = Channel
    draining = False
    _next_check = _full_until = 0.0
    _wanted = False                     # somebody waits to be accepted, and there is no room

    def check_connections(self) -> None:
        """End what lasts too long and make room. Between two rounds of the event loop, never within one: it would take
        its events for a connection that was closed for those of a new one with the same descriptor."""
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + ROUND_SECONDS
            for channel in list(self.active_channels.values()):
                channel.check(now)
        if self._wanted:
            self._wanted = False
            self._make_room(now)

    def readable(self) -> bool:
        return self.accepting and time.monotonic() >= self._full_until

    def handle_accept(self) -> None:
        if len(self.active_channels) >= self.adj.connection_limit:
            self._wanted = True
            return
        try:
            accepted = self.accept()
        except OSError as error:
            self._wanted = error.errno in OUT_OF_DESCRIPTORS
            if not self._wanted:
                logger.warning("a connection could not be accepted: %s", error.strerror)
            return
        if accepted is not None:
            sock, address = accepted
            with contextlib.suppress(OSError):          # it has left already, which reading will tell
                self.set_socket_options(sock)
            self.channel_class(self, sock, address, self.adj, map=self._map)

    def _make_room(self, now: float) -> None:
        owing = ((debt, channel) for channel in list(self.active_channels.values())
                 if (debt := channel.debt(now)) is not None)
        count = len(self.active_channels)
        evicted = heapq.nlargest(min(EVICTED_AT_ONCE, max(1, count // 8)), owing, key=lambda pair: pair[0])
        for _, channel in evicted:
            channel.handle_close()
        if evicted:
            logger.warning("%d connections are open, as many as may be: closed %d that waited for their clients",
                           count, len(evicted))
        else:
            self._full_until = now + FULL_SECONDS

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


class Drained(Protocol):
    """What stands behind an application: an Engine, or the gateway's Workers."""

    on_lost: Callable[[], None]         # called when it can answer nothing more

    @property
    def pending(self) -> int:
        """Requests that were admitted and are not answered yet."""

    def drain(self) -> None:
        """Admit nothing more."""


class Limits(Protocol):
    """The settings that a Server needs, of the worker or of the gateway."""

    @property
    def queue(self) -> int: ...

    @property
    def drain_seconds(self) -> float: ...


class Server:
    """Serves a WSGI ``app`` on a bound socket until ``stop``. ``run`` is called once, by one thread.

    ``app.refuse_head``, a RefuseHead, may refuse requests before their bodies are read.
    engine: ``drain()`` has the app refuse what it admits, ``pending`` counts what it has admitted and not answered.
    Raises OutOfThreads.
    """

    def __init__(self, app: Callable[..., Any], engine: Drained, settings: Limits, sock: socket.socket) -> None:
        self.engine = engine
        self.drain_seconds = settings.drain_seconds
        self.url = url(sock)
        self._stopping = self._abandon = False
        self._map: dict[int, Any] = {}
        # Why to end: None when asked to, or what went wrong. A queue that signal handlers may use.
        self._reasons: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._threads = _Threads(lambda: self._round(ROUND_SECONDS), self._reasons.put)
        threads = settings.queue + SPARE_THREADS
        try:                                    # all of them now: there may be no room for one more when it is needed
            with starting(f"{threads} threads, {SPARE_THREADS} more than the places of --queue {settings.queue}"):
                self._threads.set_thread_count(threads)
        except OutOfThreads:
            self._threads.shutdown(timeout=1)
            raise
        adjustments = Adjustments(
            sockets=[sock], threads=threads, backlog=1024, ident=None,
            connection_limit=_connection_limit(settings.queue), asyncore_use_poll=True,
            channel_request_lookahead=1,        # keep reading while a request runs: how a disconnect is noticed
            outbuf_overflow=sys.maxsize,        # an answer is whole in memory already: no disk, which may be full
            clear_untrusted_proxy_headers=True)
        adjustments.refuse_head = getattr(app, "refuse_head", None)     # a RefuseHead, for the parser
        adjustments.max_body_bytes = getattr(app, "max_body_bytes", sys.maxsize)
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
        """Serve until stopped, or until the engine is lost. True when everything admitted was answered, whether or not its
        client took it."""
        try:
            self._threads.loop.begin()
            reason = self._reason()
            if reason is not None:
                raise reason
            self._threads.loop.end(self._waitress.pull_trigger)
            return self._drain()
        finally:
            self._threads.loop.end(self._waitress.pull_trigger)
            for channel in self._channels():
                channel.handle_close()
            self._threads.shutdown(timeout=1)
            wasyncore.close_all(self._map)

    def _reason(self) -> BaseException | None:
        """Wait for a reason to end. Once a round, because a signal that comes just before a thread begins to wait does not
        end the wait, and its handler runs after it."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self._reasons.get(timeout=ROUND_SECONDS)

    def _drain(self) -> bool:
        deadline = time.monotonic() + self.drain_seconds
        self.engine.drain()
        self._waitress.draining = True
        if self.engine.pending:
            logger.warning("shutting down once %d admitted requests are answered", self.engine.pending)
        if not self._until(deadline, lambda: not self.engine.pending):
            return self._give_up()
        # Those answers may be on their way yet. What came later is refused and does not count, or whoever asks again and
        # again would keep the server from its end.
        owed = {channel for channel in self._channels() if not channel.idle()}
        if not self._until(deadline, lambda: all(channel.idle() for channel in owed.intersection(self._channels()))):
            return self._give_up()
        self._waitress.close_listener()
        self._round(0)          # requests that have already arrived on open connections are told, not cut off
        if not self._until(deadline, self._close_idle):
            return self._give_up()
        return True

    def _until(self, deadline: float, done: Callable[[], bool]) -> bool:
        """Turn the event loop until ``done()``; False when time or patience ended first."""
        while not done():
            if self._abandon or time.monotonic() >= deadline:
                return False
            self._round(DRAIN_ROUND_SECONDS)
        return True

    def _channels(self) -> list[Channel]:
        return list(self._waitress.active_channels.values())

    def _close_idle(self) -> bool:
        """Close connections on which nothing is owed; whether none is left, nor anything admitted."""
        for channel in self._channels():
            if channel.idle():
                channel.handle_close()
        return not self._channels() and not self.engine.pending

    def _give_up(self) -> bool:
        """What run returns when the time is over: True if all that is left are answers that their clients do not take."""
        self._close_idle()
        channels = self._channels()
        unanswered = max(self.engine.pending, sum(bool(channel.requests) for channel in channels))
        if unanswered:
            logger.error("gave up on %d requests", unanswered)
        elif channels:
            logger.warning("%d answers not taken by their clients", len(channels))
        return not unanswered

    def _round(self, seconds: float) -> None:
        self._waitress.check_connections()
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
