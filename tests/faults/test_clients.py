"""Clients that are slow, leave, or never finish a sentence."""

from __future__ import annotations

import socket
import struct
import time

import pytest

from tests.faults.harness import GOOD_BODY, Asking, ask, connect, eventually, health, pause, post_bytes, read_all


@pytest.fixture(params=["worker", "gateway"])
def port(pair, request):
    return getattr(pair, request.param).port


def reset(sock: socket.socket) -> None:
    """Close with a reset, as a process that died does."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def test_slow_headers_and_slow_bodies(pair, port):
    request = post_bytes(GOOD_BODY, b"Connection: close")
    body_at = request.index(b"\r\n\r\n") + 4
    for slow in (slice(0, body_at), slice(body_at, len(request))):
        with connect(port) as sock:
            sock.sendall(request[:slow.start])
            for i in range(slow.start, slow.stop, 8):
                sock.sendall(request[i:min(i + 8, slow.stop)])
                time.sleep(0.01)
            sock.sendall(request[slow.stop:])
            assert read_all(sock).startswith(b"HTTP/1.1 200")
    pair.check_unharmed()


def test_many_that_never_finish_do_not_keep_others_waiting(pair, port):
    beginnings = [b"", b"POST /v1/sys", post_bytes(GOOD_BODY)[:60], post_bytes(GOOD_BODY)[:-1],
                  b"POST /v1/systemone HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab"]
    unfinished = []
    for i in range(150):
        sock = connect(port)
        sock.sendall(beginnings[i % len(beginnings)])
        unfinished.append(sock)
    started = time.monotonic()
    assert health(port) == 200 and time.monotonic() - started < 5
    pair.check_right()
    for i, sock in enumerate(unfinished):
        reset(sock) if i % 2 else sock.close()
    pair.check_unharmed()


def test_half_closed_connections(pair, port):
    """A client that closes its sending side gets the answer to a whole request, perhaps after an interim one by which the
    server finds out whether it is still there; its connection is closed, nothing hangs."""
    for data in (b"", b"POST /v1/sys", post_bytes(GOOD_BODY)[:-1], post_bytes(GOOD_BODY), post_bytes(b"{", length=9)):
        with connect(port) as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            started = time.monotonic()
            reply = read_all(sock).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
            assert reply.startswith(b"HTTP/1.1 200") if data == post_bytes(GOOD_BODY) else reply == b""
            assert time.monotonic() - started < 30
    pair.check_unharmed()


def test_clients_that_leave_give_their_places_back(pair, port):
    """One request is computed, seven places are left: 21 clients leave while they wait, and the next is not refused."""
    first = pair.hold(port)
    for _ in range(3):
        clients = [connect(port) for _ in range(7)]
        for sock in clients:
            sock.sendall(post_bytes(GOOD_BODY))
        pause(0.2)
        for i, sock in enumerate(clients):
            reset(sock) if i % 2 else sock.close()
        pause(2.0)                  # until one that closed is told from one that only sends no more, and the gateway looks
    waiting = Asking(port)
    pause(0.3)
    assert waiting.is_alive()
    pair.release()
    assert first.result().status == waiting.result().status == 200
    pair.check_unharmed()


def test_clients_that_leave_while_the_answer_is_on_its_way(pair, port):
    for i in range(60):
        sock = connect(port)
        sock.sendall(post_bytes(b'{"state": "x", "questions": 1}'))
        if i % 3 == 0:
            time.sleep(0.005)
        reset(sock) if i % 2 else sock.close()
    assert eventually(lambda: health(port) == 200)
    pair.check_unharmed()


def test_an_upload_over_the_limit(pair, port):
    for _ in range(3):
        got = ask(port, b" " * (5 * 2**20))
        assert got.status == 413 and got.json["detail"]["error_type"] == "request_too_large"
    pair.check_unharmed()
