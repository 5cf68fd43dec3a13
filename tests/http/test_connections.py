"""Connections over real sockets: refusals before the body, clients that are slow, too many or half gone."""

from __future__ import annotations

import errno
import json
import logging
import socket
import threading
import time
from contextlib import ExitStack

import pytest

from jev.http import channel as channel_module
from jev.server import Refusal, _Waitress
from tests.fakes import eventually
from tests.test_server import application, raw, read_all

ECHO_TYPE = [("Content-Type", "text/plain")]


def echo(environ, start_response):
    """Answers with the length of the body."""
    length = b"%d" % len(environ["wsgi.input"].read())
    start_response("200 OK", [*ECHO_TYPE, ("Content-Length", str(len(length)))])
    return [length]


class Guarded:
    """`echo` for requests with a key; the others are refused by their heads."""

    def __init__(self):
        self.served, self.refused = 0, 0

    def refuse_head(self, head):
        if "AUTHORIZATION" in head.headers:
            return None
        self.refused += 1
        return Refusal(401, [("Content-Type", "application/json"), ("X-Request-Id", "a")], b'{"error": "no key"}')

    def __call__(self, environ, start_response):
        self.served += 1
        assert environ["jev.head_accepted"]
        return echo(environ, start_response)


def channels(server):
    return list(server._waitress.active_channels.values())


def get(server, target: str = "/") -> bytes:
    return read_all(raw(server, f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()))


@pytest.fixture
def seconds(monkeypatch):
    """seconds(HEAD_SECONDS=0.5, ...): limits for this test."""
    def seconds(**limits):
        for name, value in limits.items():
            monkeypatch.setattr(channel_module, name, value)
    return seconds


# ---------------------------------------------------------------------------------------------------------------------
# Refused by the head


@pytest.mark.parametrize("lines", [
    b"Content-Length: 50000000\r\n", b"Transfer-Encoding: chunked\r\n", b"Content-Length: 9\r\nExpect: 100-continue\r\n"])
def test_a_refusal_does_not_wait_for_the_body(lines):
    app = Guarded()
    with application(app) as (server, _), raw(server, b"POST / HTTP/1.1\r\n" + lines + b"\r\n") as sock:
        got = read_all(sock)                                # the server closes, and nothing was sent but the head
        assert got.startswith(b"HTTP/1.1 401 Unauthorized\r\n") and got.endswith(b'\r\n\r\n{"error": "no key"}')
        assert b"Connection: close\r\n" in got and b"X-Request-Id: a\r\n" in got and got.count(b"HTTP/1.1") == 1
    assert (app.served, app.refused) == (0, 1)


def test_a_client_that_sends_a_large_body_first_still_gets_its_refusal(monkeypatch):
    kept = []
    monkeypatch.setattr("jev.http.parser.Spool.append", lambda spool, data: kept.append(len(data)))
    with application(Guarded()) as (server, _):
        for lines, body in ((b"Content-Length: 20000000\r\n", bytes(20_000_000)),
                            (b"Transfer-Encoding: chunked\r\n", b"fffff\r\n" + bytes(0xfffff) + b"\r\n0\r\n\r\n")):
            with raw(server, b"POST / HTTP/1.1\r\n" + lines + b"\r\n") as sock:
                sock.sendall(body)
                assert read_all(sock).startswith(b"HTTP/1.1 401")
        eventually(lambda: not channels(server))
    assert kept == []


def test_after_a_refused_body_that_is_short_the_connection_goes_on():
    app = Guarded()
    with application(app) as (server, _), raw(server, b"") as sock:
        for pieces in ((b"POST / HTTP/1.1\r\nContent-Length: 30\r\n\r\n", b"GET /body HTTP/1.1\r\n\r\n\r\n\r\n\r\n\r\n"),
                       (b"GET / HTTP/1.1\r\n\r\n",)):
            for piece in pieces:
                sock.sendall(piece)
                time.sleep(0.02)
            assert sock.recv(1000).startswith(b"HTTP/1.1 401")
        sock.sendall(b"POST / HTTP/1.1\r\nAuthorization: x\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc")
        assert read_all(sock).endswith(b"\r\n\r\n3")
    assert (app.served, app.refused) == (1, 2)


def test_refusals_and_answers_keep_their_order():
    one = b"POST / HTTP/1.1\r\nAuthorization: x\r\nContent-Length: 2\r\n\r\nab"
    other = b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\nab"
    with application(Guarded()) as (server, _):
        got = read_all(raw(server, one + other + one + other + b"GET / HTTP/1.1\r\nConnection: TE, close\r\n\r\n"))
        assert [part[:3] for part in got.split(b"HTTP/1.1 ")[1:]] == [b"200", b"401", b"200", b"401", b"401"]


def test_a_refused_head_request_has_no_body():
    with application(Guarded()) as (server, _):
        got = read_all(raw(server, b"HEAD / HTTP/1.1\r\nConnection: close\r\n\r\n"))
        assert b"Content-Length: 19\r\n" in got and got.endswith(b"\r\n\r\n")


# ---------------------------------------------------------------------------------------------------------------------
# As RFC 9112 has it


@pytest.mark.parametrize("head", [
    b"POST / HTTP/1.0\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"POST / HTTP/2.0\r\nConnection: keep-alive\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n",
    b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked, chunked\r\n\r\n", b"POST http://[::1/ HTTP/1.1\r\n\r\n",
    b"POST / HTTP/1.1\r\nContent-Length: " + b"9" * 4301 + b"\r\n\r\n"])
def test_what_follows_an_ambiguous_head_is_never_a_request(head, caplog):
    targets = []

    def app(environ, start_response):
        targets.append(environ["PATH_INFO"])
        return echo(environ, start_response)

    with application(app) as (server, _), raw(server, head + b"0\r\n\r\nGET /smuggled HTTP/1.1\r\n\r\n") as sock:
        got = read_all(sock)
        host, port = sock.getsockname()
        address = f"{host}:{port}"
    assert got.count(b"Content-Length: ") == 1 and b"Connection: close" in got and "/smuggled" not in targets
    status = got.split(b" ")[1]
    assert status in ((b"200",) if b"Content-Length: 3" in head else (b"505",) if b"/2.0" in head else (b"400",))
    assert address not in caplog.text and "127.0.0.1" not in caplog.text
    assert status == b"200" or json.loads(got.partition(b"\r\n\r\n")[2])["detail"]["error_type"] == "invalid_request_error"


@pytest.mark.parametrize("extra", [b"", b"Content-Length: 0\r\n"])
def test_expecting_to_continue_without_a_body_is_answered(extra):
    with application(echo) as (server, _):
        got = read_all(raw(server, b"GET / HTTP/1.1\r\nExpect: 100-continue\r\nConnection: close\r\n" + extra + b"\r\n"))
        assert got.startswith(b"HTTP/1.1 200")


class Waiting:
    """Answers once ``release`` is set; ``gone`` tells whether the client of the request that waits has left."""

    def __init__(self):
        self.release, self.inside, self.gone = threading.Event(), threading.Event(), None

    def __call__(self, environ, start_response):
        self.gone = environ["waitress.client_disconnected"]
        self.inside.set()
        assert self.release.wait(20)
        return echo(environ, start_response)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_client_that_closes_its_sending_side_gets_its_answers(version, count):
    app = Waiting()
    keep = b"Connection: keep-alive\r\n"
    with application(app) as (server, _):
        with raw(server, (b"POST / HTTP/%s\r\n%sContent-Length: 2\r\n\r\nab" % (version, keep)) * count) as sock:
            sock.shutdown(socket.SHUT_WR)
            assert app.inside.wait(10)
            eventually(lambda: len(channels(server)[0].requests) == count)
            if count == 1:                                  # behind more, the end is noticed as they are answered
                eventually(lambda: channels(server)[0].half_closed_since)
            app.release.set()
            got = read_all(sock)
            assert got.count(b"200 OK") == count and got.startswith(b"HTTP/%s 200" % version)
        eventually(lambda: not channels(server))


def test_a_half_closed_client_that_waits_is_told_apart_from_one_that_left(seconds):
    seconds(HALF_CLOSED_PROBE_SECONDS=0.0)
    app = Waiting()
    with application(app) as (server, _):
        with raw(server, b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\nab") as sock:
            sock.shutdown(socket.SHUT_WR)
            assert app.inside.wait(10)
            assert sock.recv(len(channel_module.INTERIM)) == channel_module.INTERIM     # which says nothing to a client
            time.sleep(1.2)                                                             # and whoever is there stays
            assert not app.gone()
            app.release.set()
            assert read_all(sock).startswith(b"HTTP/1.1 200")
        app.release.clear()
        app.inside.clear()
        raw(server, b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\nab").close()
        assert app.inside.wait(10)
        eventually(app.gone)
        app.release.set()


# ---------------------------------------------------------------------------------------------------------------------
# Slow clients, and many


@pytest.mark.parametrize("sent, then, part", [
    (b"GET / HTTP/1.1\r\nX: ", b"a", b"head"), (b"\r\n\r\n", b"\r\n\r\n", None), (b"\r\n", b"\r\n", None),
    (b"POST / HTTP/1.1\r\nContent-Length: 100000\r\n\r\n", b"a", b"body"),
    (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n", b"body")])
def test_whatever_trickles_has_a_deadline(seconds, sent, then, part):
    seconds(HEAD_SECONDS=0.5, BODY_SECONDS=0.5)
    with application(echo) as (server, _), raw(server, sent) as sock:
        sock.settimeout(0.1)
        got, started = b"", time.monotonic()
        while time.monotonic() - started < 15:
            try:
                block = sock.recv(1000)
                if not block:
                    break
                got += block
            except TimeoutError:
                sock.sendall(then)
            except ConnectionError:
                break
        assert time.monotonic() - started < 15
        if part is not None:
            assert got.split(b" ")[1] == b"408" and b"the %s of the request came too slowly" % part in got
            assert b"Connection: close" in got
        assert get(server).startswith(b"HTTP/1.1 200")


def test_a_body_that_comes_at_the_least_rate_is_taken(seconds):
    seconds(BODY_SECONDS=0.5, BODY_BYTES_PER_SECOND=1000)
    head = b"POST / HTTP/1.1\r\nContent-Length: 6000\r\nConnection: close\r\n\r\n"
    with application(echo) as (server, _), raw(server, head) as sock:
        for _ in range(12):
            sock.sendall(bytes(500))
            time.sleep(0.15)                                # longer than BODY_SECONDS together, and fast enough
        assert read_all(sock).endswith(b"\r\n\r\n6000")


def test_the_clock_of_a_request_that_waits_for_another_stands_still(seconds):
    seconds(HEAD_SECONDS=0.5)
    app = Waiting()
    with application(app) as (server, _):
        with raw(server, b"GET / HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\nConnection: clo") as sock:
            assert app.inside.wait(10)
            time.sleep(2)
            app.release.set()
            sock.sendall(b"se\r\n\r\n")
            assert read_all(sock).count(b"HTTP/1.1 200") == 2


def test_at_the_limit_of_connections_those_who_owe_most_go_first(monkeypatch, caplog):
    monkeypatch.setattr("jev.server._connection_limit", lambda queue: 20)
    monkeypatch.setattr("jev.server.EVICTED_AT_ONCE", 2)
    caplog.set_level(logging.WARNING, logger="jev.server")
    app = Waiting()
    with application(app) as (server, _), ExitStack() as stack:
        served = stack.enter_context(raw(server, b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n"))
        assert app.inside.wait(10)
        slow = []
        for _ in range(18):
            slow.append(stack.enter_context(raw(server, b"GET / HTTP/1.1\r\nX: ")))
            eventually(lambda: len([c for c in channels(server) if c.owing_since]) == len(slow))
        silent = stack.enter_context(raw(server, b""))
        eventually(lambda: len(channels(server)) == 20)
        late = stack.enter_context(raw(server, b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n"))
        eventually(lambda: "connections are open" in caplog.text)
        app.release.set()
        assert read_all(late).startswith(b"HTTP/1.1 200")
        assert read_all(served).startswith(b"HTTP/1.1 200")
        assert slow[0].recv(1) == b"" == slow[1].recv(1)
        for sock in (slow[2], slow[-1], silent):
            sock.sendall(b"\r\n\r\n" if sock is not silent else b"GET / HTTP/1.1\r\n\r\n")
            assert sock.recv(12) == b"HTTP/1.1 200"
    assert "20 connections are open, as many as may be: closed 2" in caplog.text and "127.0.0.1" not in caplog.text


def test_when_the_system_has_no_descriptor_left_room_is_made_too(monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="jev.server")             # whatever ran in this process before
    accept = _Waitress.accept

    def limited(listener):
        if len(listener.active_channels) >= 6:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(_Waitress, "accept", limited)
    with application(echo) as (server, _), ExitStack() as stack:
        slow = [stack.enter_context(raw(server, b"GET / HTTP/1.1\r\nX: ")) for _ in range(6)]
        eventually(lambda: len([c for c in channels(server) if c.owing_since]) == 6)
        assert get(server).startswith(b"HTTP/1.1 200")
        assert slow[0].recv(1) == b""
        slow[-1].sendall(b"\r\n\r\n")
        assert slow[-1].recv(12) == b"HTTP/1.1 200"
    assert [record.getMessage() for record in caplog.records] == [
        "6 connections are open, as many as may be: closed 1 that waited for their clients"]


def test_connections_that_wait_for_their_answers_are_never_closed_for_others(monkeypatch):
    monkeypatch.setattr("jev.server._connection_limit", lambda queue: 5)
    app = Waiting()
    with application(app) as (server, _), ExitStack() as stack:
        waiting = [stack.enter_context(raw(server, b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")) for _ in range(5)]
        eventually(lambda: len([c for c in channels(server) if c.requests]) == 5)
        late = stack.enter_context(raw(server, b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n"))
        time.sleep(0.3)
        assert len(channels(server)) == 5
        app.release.set()
        assert all(read_all(sock).startswith(b"HTTP/1.1 200") for sock in (*waiting, late))


def test_an_error_in_the_event_loop_is_logged_without_the_client(monkeypatch, caplog):
    def broken(channel, data):
        raise KeyError(data)
    monkeypatch.setattr(channel_module.Channel, "received", broken)
    with application(echo) as (server, _), raw(server, b"hush") as sock:
        assert read_all(sock) == b""
    assert "a connection failed: KeyError" in caplog.text
    assert not any(word in caplog.text for word in ("127.0.0.1", "hush"))
