"""The gateway passes requests and answers on as they are: bytes, headers, statuses, connections."""

from __future__ import annotations

import gzip
import json
import threading
import time

import pytest

from jev.gateway import upstream as frontend_http
from jev.gateway.app import target_path
from tests.scripted_worker import ScriptedWorker, answer, eventually, gateway, reply

STATUSES = ["200 OK", "201 Created", "204 No Content", "301 Moved Permanently", "302 Found", "304 Not Modified",
            "307 Temporary Redirect", "400 Bad Request", "401 Unauthorized", "404 Not Found", "413 Too Large",
            "415 Unsupported Media Type", "422 Unprocessable Entity", "429 Too Many Requests",
            "500 Internal Server Error", "503 Service Unavailable", "599 Its Own Reason"]


@pytest.fixture
def worker():
    with ScriptedWorker() as scripted:
        yield scripted


@pytest.fixture
def gate(worker):
    with gateway(worker.url) as running:
        yield running


@pytest.mark.parametrize("status", STATUSES)
def test_every_status_comes_back_as_it_was_and_is_asked_for_once(worker, gate, status):
    empty = status[:3] in ("204", "304")
    body = b"" if empty else b'{"error": "x"}'
    script = answer(status, body, "Location: /elsewhere?a=%C3%A9|b", "Retry-After: 7", "Content-Type: text/x; a=b")
    worker.script = (lambda sock, request: sock.sendall(
        reply(status, b"", "Location: /elsewhere?a=%C3%A9|b", "Retry-After: 7", "Content-Type: text/x; a=b",
              length=False))) if empty else script
    got = gate.ask()
    assert (f"{got.status} {got.reason}", got.body) == (status, body)
    assert (got.all("Location"), got.all("Retry-After")) == (["/elsewhere?a=%C3%A9|b"], ["7"])
    assert got.all("Content-Type") == ["text/x; a=b"]
    assert len(worker.requests) == 1
    assert gate.ask().status == got.status and worker.connections == 1


def test_a_status_without_a_reason(worker, gate):
    worker.script = lambda sock, request: sock.sendall(b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nok")
    assert gate.ask().body == b"ok"


def test_request_headers_pass_but_for_those_of_the_connection(worker):
    raw = (b"POST /v1/systemone?a=1&a=%20;b HTTP/1.1\r\nHost: public.example\r\nAuthorization: Bearer s3cret\r\n"
           b"X-One: first\r\nx-one:second\r\nX-One: \xe9\r\nUnder_Score: kept\r\nAccept-Encoding: gzip;q=0.5, br\r\n"
           b"Connection: close, X-Private\r\nX-Private: 1\r\nKeep-Alive: timeout=5\r\nTE: trailers\r\nTrailer: X\r\n"
           b"Upgrade: websocket\r\nProxy-Authorization: Basic eA==\r\nProxy-Connection: keep-alive\r\n"
           b"X-Forwarded-For: 192.0.2.1\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
    with gateway(worker.url, allowed_hosts="public.example") as gate:
        assert gate.raw(raw).startswith(b"HTTP/1.1 200 OK\r\n")
    (request,) = worker.requests
    assert request.line == "POST /v1/systemone?a=1&a=%20;b HTTP/1.1"
    assert request.all("Host") == [f"127.0.0.1:{worker.port}"]
    assert [item for item in request.headers if item[0] != "Host"] == [
        ("Authorization", "Bearer s3cret"), ("X-One", "first"), ("x-one", "second"), ("X-One", "\xe9"),
        ("Under_Score", "kept"), ("Accept-Encoding", "gzip;q=0.5, br"), ("X-Forwarded-For", "192.0.2.1"),
        ("Content-Type", "application/json"), ("Content-Length", "2")]


def test_nothing_is_added_to_a_bare_request(worker, gate):
    gate.raw(b"GET /health HTTP/1.0\r\n\r\n")
    assert worker.requests[0].headers == [("Host", f"127.0.0.1:{worker.port}")]


def test_response_headers_pass_but_for_those_of_the_connection(worker, gate):
    worker.script = answer(
        "200 OK", b"x", "Server: worker/1", "Date: Thu, 01 Jan 1970 00:00:00 GMT", "set-COOKIE: a=1",
        "set-COOKIE: b=2", "ETag: \"q\"", "Connection: keep-alive, x-private", "X-Private: 1", "Keep-Alive: timeout=9",
        "Proxy-Authenticate: Basic", "Trailer: X", "Upgrade: h2c", "Via: 1.1 inner", "X-Folded: a\r\n  b")
    head, _, body = gate.raw(b"POST /v1/systemone HTTP/1.1\r\nConnection: close\r\n\r\n").partition(b"\r\n\r\n")
    assert body == b"x"
    assert head.decode().split("\r\n") == [
        "HTTP/1.1 200 OK", "Server: worker/1", "Date: Thu, 01 Jan 1970 00:00:00 GMT", "set-COOKIE: a=1",
        "set-COOKIE: b=2", "ETag: \"q\"", "Via: 1.1 inner", "X-Folded: a b", "Content-Length: 1", "Connection: close"]


def test_bodies_are_the_same_bytes(worker, gate):
    sent = bytes(range(256)) * 40 + b"\x00\xff\r\n\r\n"
    compressed = gzip.compress(sent)
    worker.script = answer("200 OK", compressed, "Content-Encoding: gzip", "Content-Type: application/octet-stream")
    got = gate.ask(sent)
    assert worker.requests[0].body == sent
    assert got.body == compressed and got.all("Content-Encoding") == ["gzip"]


def test_chunked_both_ways(worker, gate):
    chunks = b"3;x=1\r\nabc\r\n002\r\nde\r\n0\r\nX-Trailer: 1\r\n\r\n"
    worker.script = lambda sock, request: sock.sendall(
        reply("200 OK", chunks, "Transfer-Encoding: Chunked", length=False))
    raw = (b"POST /v1/systemone HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n"
           b"Connection: close\r\n\r\n2\r\n{\x00\r\n1\r\n}\r\n0\r\n\r\n")
    head, _, body = gate.raw(raw).partition(b"\r\n\r\n")
    assert body == b"abcde" and b"Content-Length: 5" in head and b"ransfer" not in head and b"railer" not in head
    assert worker.requests[0].body == b"{\x00}" and worker.requests[0].all("Content-Length") == ["3"]
    assert worker.requests[0].all("Transfer-Encoding") == []
    gate.ask()
    assert worker.connections == 1


def test_an_answer_that_ends_with_its_connection(worker, gate):
    worker.script = lambda sock, request: sock.sendall(b"HTTP/1.0 200 OK\r\nX: 1\r\n\r\nuntil the end") or True
    got = gate.ask()
    assert (got.body, got.all("Content-Length")) == (b"until the end", ["13"])


def test_expect_is_answered_here(worker, gate):
    with gate.connect() as sock:
        sock.sendall(b"POST /v1/systemone HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n"
                     b"Connection: close\r\n\r\n")
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(b"{}")
        assert sock.recv(100).startswith(b"HTTP/1.1 200 OK")
    assert worker.requests[0].all("Expect") == [] and worker.requests[0].body == b"{}"


def test_a_path_prefix_and_a_query_that_no_url_may_hold(worker):
    with gateway(worker.url + "/deep/er/") as gate:
        assert gate.raw(b"GET /health?q=\x01%zz|\" HTTP/1.1\r\nConnection: close\r\n\r\n").startswith(b"HTTP/1.1 200")
        gate.ask()
    assert worker.requests[0].line == 'GET /deep/er/health?q=%01%zz|" HTTP/1.1'
    assert worker.requests[1].line == "POST /deep/er/v1/systemone HTTP/1.1"


def test_system_proxies_are_bypassed(worker, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    with gateway(worker.url) as gate:
        assert gate.ask().status == 200


@pytest.mark.parametrize("method, path, status, allow", [
    ("GET", "/v1/systemone", 405, "POST"), ("POST", "/health", 405, "GET"), ("PUT", "/v1/systemone", 405, "POST"),
    ("OPTIONS", "/health", 405, "GET"), ("POST", "/v1/models", 405, "GET"), ("POST", "/v1/systemone/", 404, None),
    ("POST", "/", 404, None), ("GET", "/health/../x", 404, None), ("GET", "/static/x", 404, None),
    ("POST", "/v1%2Fsystemone", 404, None), ("POST", "//v1/systemone", 404, None), ("GET", "/%68ealth", 404, None),
    ("GET", "//health", 404, None), ("POST", "/v1//systemone", 404, None), ("GET", "/health#x", 404, None)])
def test_other_requests_are_refused_here(worker, gate, method, path, status, allow):
    got = gate.ask(method=method, path=path)
    assert got.status == status and got.all("Content-Type") == ["application/json"]
    error = json.loads(got.body)
    assert set(error) == {"error", "detail"} and error["detail"]["message"] == error["error"]
    assert set(error["detail"]) == {"error_type", "message"}
    assert allow is None or allow in got.all("Allow")[0].split(", ")
    assert worker.requests == []


def test_a_target_with_a_host_in_it(worker, gate):
    got = gate.raw(b"GET http://localhost/health?x=/ HTTP/1.1\r\nConnection: close\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 200")
    assert worker.requests[0].line == "GET /health?x=/ HTTP/1.1"


def test_head_of_health_is_asked_as_get_and_answered_without_the_body(worker, gate):
    with gate.connect() as sock:
        for _ in range(2):
            sock.sendall(b"HEAD /health HTTP/1.1\r\n\r\n")
            head = sock.recv(65536)
            assert head.startswith(b"HTTP/1.1 200 OK\r\n") and head.endswith(b"\r\n\r\n")
            assert b"Content-Length: 12\r\n" in head
    assert [request.line for request in worker.requests] == ["GET /health HTTP/1.1"] * 2


# Connections -----------------------------------------------------------------------------------------------------


def test_connections_are_reused_at_both_ends(worker, gate):
    with gate.connect() as sock:
        file = sock.makefile("rb")
        for _ in range(20):
            sock.sendall(b"POST /v1/systemone HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}")
            while file.readline() != b"\r\n":
                pass
            assert file.read(12) == b'{"ok": true}'
    assert (len(worker.requests), worker.connections) == (20, 1)


@pytest.mark.parametrize("script", [
    lambda sock, request: sock.sendall(reply()) or True,                            # closed after the answer
    lambda sock, request: sock.sendall(reply("200 OK", b"x", "Connection: close")),  # announced, not done
    lambda sock, request: sock.sendall(reply() + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil" * 400),
], ids=["closed", "announced", "extra bytes"])
def test_a_connection_that_is_over_is_not_reused(worker, gate, script):
    worker.script = script
    assert gate.ask().status == 200
    time.sleep(0.05)
    worker.script = answer("200 OK", b"mine")
    assert gate.ask().body == b"mine"
    assert worker.connections == 2


def test_an_idle_connection_is_let_go(worker, gate, monkeypatch):
    monkeypatch.setattr(frontend_http, "IDLE_SECONDS", 0.1)
    gate.ask()
    time.sleep(0.2)
    gate.ask()
    assert worker.connections == 2 and eventually(lambda: len(worker.open) == 1)


def test_many_at_once(worker, gate):
    worker.script = lambda sock, request: time.sleep(0.02) or sock.sendall(reply("200 OK", request.body))
    wrong = []

    def client(number):
        for i in range(10):
            body = b"%d %d" % (number, i) * 1000
            if gate.ask(body).body != body:
                wrong.append((number, i))

    threads = [threading.Thread(target=client, args=(n,)) for n in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not wrong and len(worker.requests) == 80 and worker.connections <= 8


def test_more_decisions_than_allowed_are_refused_and_health_still_answers(worker):
    release = threading.Event()
    worker.script = lambda sock, request: (request.line.startswith("GET") or release.wait(10)) and sock.sendall(reply())
    with gateway(worker.url, queue=2) as gate:
        threads = [threading.Thread(target=gate.ask) for _ in range(2)]
        [thread.start() for thread in threads]
        assert eventually(lambda: len(worker.requests) == 2)
        got = gate.ask()
        assert got.status == 503 and got.all("Retry-After") == ["1"]
        assert gate.health().status == 200
        release.set()
        [thread.join() for thread in threads]
        assert gate.ask().status == 200


def test_the_path_of_a_target_costs_in_proportion_to_its_bytes():
    started = time.process_time()
    assert target_path("/" + "a" * 60000 + "?b") == "/" + "a" * 60000 and target_path("a" * 60000) == "a" * 60000
    assert time.process_time() - started < 0.1
    assert target_path("http://host:1/health?a://b/c") == "/health" and target_path("/health://x/v1") == "/health://x/v1"
