"""What the gateway makes of workers and clients that misbehave: 502, 504, and never a second attempt."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time

import pytest

from jev.gateway import app as frontend, upstream as frontend_http
from tests.scripted_worker import ScriptedWorker, answer, eventually, gateway, reply

CHUNKED = "Transfer-Encoding: chunked"


@pytest.fixture
def worker():
    with ScriptedWorker() as scripted:
        yield scripted


@pytest.fixture
def gate(worker):
    with gateway(worker.url, max_response_bytes=1000) as running:
        yield running


@pytest.fixture
def short(monkeypatch):
    """A decision may take half a second instead of a minute."""
    monkeypatch.setattr(frontend, "DECISION_SECONDS", 0.5)


def check_error(got, status, error_type):
    assert got.status == status and got.all("Content-Type") == ["application/json"]
    error = json.loads(got.body)
    assert error["detail"] == {"error_type": error_type, "message": error["error"]}


def check_next(worker, gate, attempts=1):
    """The failed request was tried `attempts` times, and the gateway is fit for the next one."""
    frontend.DECISION_SECONDS = 60.0
    assert len(worker.requests) == attempts
    worker.script = answer("200 OK", b"fine")
    assert gate.ask().body == b"fine"


def test_nobody_listens(gate, worker):
    worker.close()
    check_error(gate.ask(), 502, "bad_gateway")
    check_error(gate.health(), 502, "bad_gateway")


def send(data, close=True):
    return lambda sock, request: sock.sendall(data) or close


def reset(sock, request):
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return "cut"


@pytest.mark.parametrize("script", [
    send(b""), reset,
    send(b"HTTP/1.1"), send(b"SSH-2.0-x\r\n"), send(b"HTTP/1.1 999999 X\r\n\r\n"), send(b"\x00" * 100),
    send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX: "), send(b"HTTP/1.1 200 OK\r\nX: y\r\n"),
    send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nno colon here\r\nX: y\r\n\r\nabcde"),
    send(b"HTTP/1.1 200 OK\r\nContent-Length : 5\r\n\r\nabcde", close=False),
    send(b"HTTP/1.1 200 O\rK\r\nContent-Length: 5\r\n\r\nabcde", close=False),
    send(reply("101 Switching Protocols", b"", "Upgrade: x", length=False) + reply()),
    send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabcd"),
    send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef", close=False),
    send(b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nabcde", close=False),
    send(b"HTTP/1.1 200 OK\r\nContent-Length: 0x5\r\n\r\nabcde", close=False),
    send(reply("200 OK", b"abcde", "Transfer-Encoding: gzip", length=False)),
    send(reply("200 OK", b"0\r\n\r\n", "Transfer-Encoding: gzip, chunked", length=False)),
    send(reply("200 OK", b"5\r\nabc", CHUNKED, length=False)),
    send(reply("200 OK", b"5\r\nabcde\r\n", CHUNKED, length=False)),
    send(reply("200 OK", b"-1\r\nabcde\r\n0\r\n\r\n", CHUNKED, length=False), close=False),
    send(reply("200 OK", b"zz\r\nabcde\r\n0\r\n\r\n", CHUNKED, length=False), close=False),
    send(reply("200 OK", b"0x5\r\nabcde\r\n0\r\n\r\n", CHUNKED, length=False), close=False),
    send(reply("200 OK", b"5\r\nabcdeX\n0\r\n\r\n", CHUNKED, length=False), close=False),
    send(reply("200 OK", b"5\r\nabcde\r\n0\r\n", CHUNKED, length=False)),
    send(reply("200 OK", b"0\r\n\r\n", CHUNKED), close=False),
    send(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 500 + b"\r\n"),
    send(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70000 + b"\r\n\r\n"),
    send(reply("200 OK", b"x" * 1001), close=False),
    send(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n", close=False),
    send(reply("200 OK", b"3e9\r\n" + b"x" * 1001 + b"\r\n0\r\n\r\n", CHUNKED, length=False), close=False),
    send(reply("200 OK", b"1\r\nx\r\n" * 1001 + b"0\r\n\r\n", CHUNKED, length=False), close=False),
    send(reply("200 OK", b"x" * 1001, length=False)),
], ids=["closed", "reset", "half a status", "not HTTP", "status too large", "zeros", "half the headers",
        "half the lines",
        "no colon", "space before the colon", "return in the status", "other protocol", "short body", "two lengths",
        "negative length", "hexadecimal length", "unknown coding", "two codings", "half a chunk", "no last chunk",
        "negative chunk", "bad chunk", "0x chunk", "text after a chunk", "no last line", "chunked with a length",
        "500 headers", "long header", "too large", "huge length", "one large chunk",
        "many chunks", "too large until the end"])
def test_no_usable_answer(worker, gate, script):
    worker.script = script
    started = time.monotonic()
    check_error(gate.ask(), 502, "bad_gateway")
    assert time.monotonic() - started < 10
    check_next(worker, gate)


def test_interim_answers_are_read_past(worker, gate):
    interim = b"".join(reply(status, b"", "Link: </x>", length=False) for status in (
        "100 Continue", "102 Processing", "103 Early Hints", "102 Processing"))
    worker.script = lambda sock, request: sock.sendall(interim + reply("200 OK", b"final"))
    got = gate.ask()
    assert (got.status, got.body, got.all("Link")) == (200, b"final", [])
    assert gate.ask().body == b"final" and worker.connections == 1


def test_the_largest_answer_allowed(worker, gate):
    for script in (answer("200 OK", b"x" * 1000), send(reply("200 OK", b"x" * 1000, length=False)),
                   send(reply("200 OK", b"1\r\nx\r\n" * 1000 + b"0\r\n\r\n", CHUNKED, length=False), close=False)):
        worker.script = script
        assert gate.ask().body == b"x" * 1000


def drip(data):
    def script(sock, request):
        for i in range(len(data)):
            sock.sendall(data[i:i + 1])
            time.sleep(0.05)
    return script


def stall(data):
    return lambda sock, request: sock.sendall(data) or time.sleep(20)


@pytest.mark.parametrize("script", [
    stall(b""), stall(b"HTTP/1.1 200 OK\r\nContent-Le"), stall(reply()[:-1]), drip(reply()),
    stall(reply("200 OK", b"3\r\nabc\r\n", CHUNKED, length=False)),
    drip(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + b"x" * 100),
], ids=["before", "in the headers", "in the body", "slow headers", "in the chunks", "slow body"])
def test_too_slow(worker, gate, short, script):
    worker.script = script
    started = time.monotonic()
    check_error(gate.ask(), 504, "gateway_timeout")
    assert 0.45 < time.monotonic() - started < 10
    check_next(worker, gate)


def test_health_has_a_time_of_its_own(worker):
    worker.script = stall(b"")
    with gateway(worker.url, health_timeout_ms=300) as gate:
        started = time.monotonic()
        check_error(gate.health(), 504, "gateway_timeout")
        assert 0.25 < time.monotonic() - started < 10
        check_next(worker, gate)


def test_a_worker_that_does_not_read(worker, gate, short):
    worker.read_body = False
    worker.script = stall(b"")
    check_error(gate.ask(b"x" * 4_000_000), 504, "gateway_timeout")


def test_a_full_backlog(short, monkeypatch):
    monkeypatch.setattr(frontend_http, "CONNECT_SECONDS", 0.2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        waiting = [socket.socket() for _ in range(3)]
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", port))
        with gateway(f"http://127.0.0.1:{port}") as gate:
            check_error(gate.ask(), 502, "bad_gateway")
            monkeypatch.setattr(frontend_http, "CONNECT_SECONDS", 5)
            check_error(gate.ask(), 504, "gateway_timeout")
        [sock.close() for sock in waiting]


def test_a_reused_connection_that_breaks_is_not_tried_again(worker, gate):
    assert gate.ask().status == 200
    worker.script = send(b"")
    check_error(gate.ask(), 502, "bad_gateway")
    assert worker.connections == 1
    check_next(worker, gate, attempts=2)


def test_an_answer_before_the_body_was_read(worker, gate):
    worker.read_body = False

    def script(sock, request):
        sock.sendall(reply("413 Too Large", b"no"))
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 20):
            pass
        return True

    worker.script = script
    got = gate.ask(b"x" * 4_000_000)
    assert (got.status, got.body) == (413, b"no")
    worker.read_body = True
    check_next(worker, gate)


@pytest.mark.parametrize("interim", [b"", reply("103 Early Hints", b"", length=False)], ids=["final", "interim first"])
def test_an_answer_while_the_body_is_sent(worker, gate, interim):
    """The worker neither reads nor closes: there is no reason to wait for it. After an interim answer there is."""
    worker.read_body = False
    done = threading.Event()

    def script(sock, request):
        sock.sendall(interim or reply("413 Too Large", b"no"))
        if interim:
            left = 4_000_000
            while left > 65536:                 # the rest came with the head
                left -= len(sock.recv(min(left, 1 << 20)))
            sock.sendall(reply("200 OK", b"read it all"))
        done.wait(30)
        return True

    worker.script = script
    started = time.monotonic()
    got = gate.ask(b"x" * 4_000_000)
    assert got.body == (b"read it all" if interim else b"no") and time.monotonic() - started < 20
    done.set()


# Clients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leave", ["close", "reset"])
def test_a_client_that_leaves_ends_the_work_for_it(worker, gate, leave):
    worker.script = lambda sock, request: sock.recv(1) or True            # until the gateway hangs up
    sock = gate.connect()
    sock.sendall(b"POST /v1/systemone HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}")
    assert eventually(lambda: len(worker.requests) == 1)
    if leave == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    assert eventually(lambda: not worker.open)
    assert eventually(lambda: gate.gateway.workers.pending == 0)
    check_next(worker, gate)


def test_a_client_that_closes_its_sending_side_gets_its_answer(worker, gate):
    left = threading.Event()
    worker.script = lambda sock, request: left.wait(20) and sock.sendall(reply("200 OK", request.body))
    with gate.connect() as sock:
        sock.sendall(b"POST /v1/systemone HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}")
        sock.shutdown(socket.SHUT_WR)
        assert eventually(lambda: [c for c in gate.gateway._waitress.active_channels.values() if c.half_closed_since])
        left.set()
        got = b"".join(iter(lambda: sock.recv(65536), b""))
    assert got.startswith(b"HTTP/1.1 200") and got.endswith(b"{}")


def test_a_worker_that_nobody_waits_for_is_told_by_a_reset(worker, gate, short):
    ends = []

    def script(sock, request):
        try:
            ends.append(sock.recv(1))
        except ConnectionResetError as error:
            ends.append(error)
        return True

    worker.script = script
    check_error(gate.ask(), 504, "gateway_timeout")
    assert eventually(lambda: len(ends) == 1) and isinstance(ends[0], ConnectionResetError)


@pytest.mark.parametrize("data", [
    b"POST /v1/systemone HTTP/1.1\r\nContent-Length: 1000\r\n\r\n{", b"POST /v1/syst", b"",
    b"POST /v1/systemone HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab"])
def test_a_request_that_breaks_off_is_never_forwarded(worker, gate, data):
    with gate.connect() as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(100) == b""
    assert worker.requests == []


@pytest.mark.parametrize("data", [
    b"\r\n\r\nnonsense\r\n\r\n", b"POST /v1/systemone HTTP/1.1\r\nContent-Length: 1, 2\r\n\r\n{}",
    b"POST /v1/systemone HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/systemone HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"POST /v1/systemone HTTP/1.1\r\nX y\r\n\r\n",
    b"POST /v1/systemone HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n",
    b"POST /v1/systemone HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/systemone HTTP/1.1\r\nX: ".ljust(256 * 1024, b"y"),
    b"POST /v1/systemone HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n"])
def test_broken_requests_are_refused_here(worker, gate, data):
    assert gate.raw(data)[:12] in (b"HTTP/1.1 400", b"HTTP/1.0 400", b"HTTP/1.0 431", b"HTTP/1.1 501", b"HTTP/1.1 413")
    assert worker.requests == []


def test_requests_sent_back_to_back_are_answered_in_order(worker, gate):
    worker.script = lambda sock, request: time.sleep(0.02) or sock.sendall(reply("200 OK", request.body))
    got = gate.raw(b"".join(b"POST /v1/systemone HTTP/1.1\r\nContent-Length: 2\r\n\r\n%02d" % i for i in range(6))
                   + b"POST /v1/systemone HTTP/1.1\r\nConnection: close\r\nContent-Length: 2\r\n\r\n99")
    bodies = [part.rpartition(b"\r\n\r\n")[2] for part in got.split(b"HTTP/1.1 200 OK")[1:]]
    assert bodies == [b"00", b"01", b"02", b"03", b"04", b"05", b"99"]


def test_stopping_answers_what_is_in_hand_and_takes_nothing_more(worker):
    release = threading.Event()
    worker.script = lambda sock, request: release.wait(20) and sock.sendall(reply())
    with gateway(worker.url) as gate:
        results = []
        threads = [threading.Thread(target=lambda: results.append(gate.ask())) for _ in range(4)]
        [thread.start() for thread in threads]
        assert eventually(lambda: len(worker.requests) == 4)
        gate.gateway.stop()
        assert eventually(lambda: gate.gateway.workers.draining)
        for got in (gate.ask(), gate.health()):
            assert got.status == 503 and got.all("Retry-After") == ["5"] and got.all("Connection") == ["close"]
        assert json.loads(got.body) == {"status": "draining"} and len(worker.requests) == 4
        release.set()
        [thread.join() for thread in threads]
        assert [got.status for got in results] == [200] * 4
        assert all(got.all("Connection") == ["close"] for got in results)


class PanicException(BaseException):
    """What an extension module in Rust raises: none of Exception's."""


@pytest.mark.parametrize("error", [PanicException, SystemExit, RuntimeError, MemoryError])
def test_whatever_is_raised_is_answered(gate, monkeypatch, caplog, error):
    def explode(*_):
        raise error(" ".join(["very", "private"]))
    for name in ("decide", "get"):
        monkeypatch.setattr(gate.gateway.workers, name, explode)
    for got in (gate.ask(), gate.health()):
        check_error(got, 500, "internal_error")
    assert caplog.text.count(f"a request failed: {error.__name__} at") == 2 and "very private" not in caplog.text
