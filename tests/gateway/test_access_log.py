"""The gateway's access log, and what it decides on a request's head alone."""

from __future__ import annotations

import json
import logging
import re
import threading

import pytest

from jev.contract import MAX_BODY_BYTES
from jev.gateway import app
from tests.scripted_worker import ScriptedWorker, answer, eventually, gateway, reply

FIELDS = ["time", "id", "method", "path", "status", "ms", "bytes_in", "bytes_out"]


@pytest.fixture
def lines():
    """The lines of the access log."""
    found = []

    class Keep(logging.Handler):
        def emit(self, record):
            found.append(json.loads(record.getMessage()))

    logger, handler = logging.getLogger("jev.access"), Keep()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def worker():
    with ScriptedWorker() as scripted:
        yield scripted


def test_a_line_for_each_request_with_its_worker_and_both_durations(worker, lines):
    slow = threading.Event()
    worker.script = lambda sock, request: slow.wait(0.05) or sock.sendall(
        reply("200 OK", b"12345", "X-Request-Id: of-the-worker"))
    with gateway(worker.url) as gate:
        gate.ask(b"{}", path="/v1/systemone?secret=hunter2", Authorization="Bearer hunter2")
        gate.health()
        gate.ask(method="GET", path="/v1/models")
        assert eventually(lambda: len(lines) == 3)
    assert [list(line) for line in lines] == [[*FIELDS, "worker", "worker_ms"]] * 3
    first = lines[0]
    assert (first["id"], first["method"], first["path"], first["status"], first["bytes_in"], first["bytes_out"]) == (
        "of-the-worker", "POST", "/v1/systemone", 200, 2, 5)
    assert first["worker"] == worker.url and 50 <= first["worker_ms"] <= first["ms"]
    assert [(line["method"], line["path"]) for line in lines[1:]] == [("GET", "/health"), ("GET", "/v1/models")]
    assert "hunter2" not in json.dumps(lines)


def test_an_answer_of_the_gateway_has_the_id_that_the_log_has(worker, lines):
    with gateway(worker.url) as gate:
        made_up, given = gate.ask(path="/nowhere?x"), gate.ask(path="/nowhere", X_Request_Id="mine-1")
        unfit = gate.ask(path="/nowhere", X_Request_Id="no id")
        worker.close()
        failed = gate.ask(X_Request_Id="mine-2")
        assert eventually(lambda: len(lines) == 4)
    assert (given.all("X-Request-Id"), given.all("X-TypeSafe-Request-Id")) == (["mine-1"], ["mine-1"])
    assert [line["id"] for line in lines] == [got.all("X-Request-Id")[0] for got in (made_up, given, unfit, failed)]
    assert re.fullmatch("[0-9a-f]{32}", lines[0]["id"]) and re.fullmatch("[0-9a-f]{32}", lines[2]["id"])
    assert [list(line) for line in lines[:3]] == [FIELDS] * 3
    assert (lines[3]["status"], lines[3]["worker"]) == (502, worker.url) and failed.status == 502


def test_a_client_that_left_is_logged_as_such(worker, lines):
    worker.script = lambda sock, request: bool(sock.recv(1) == b"")
    with gateway(worker.url) as gate:
        with gate.connect() as sock:
            sock.sendall(b"POST /v1/systemone HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}")
            assert eventually(lambda: len(worker.requests) == 1)
        assert eventually(lambda: len(lines) == 1)
    assert (lines[0]["status"], lines[0]["worker"]) == (499, worker.url)


# Decided on the head ---------------------------------------------------------------------------------------------


def test_the_limit_is_the_contracts():
    assert app.MAX_BODY_BYTES == MAX_BODY_BYTES


@pytest.mark.parametrize("line, status", [
    ("POST /v1/systemone", 413), ("POST /nowhere", 404), ("PUT /v1/systemone", 405), ("POST /v1/models", 405)])
@pytest.mark.parametrize("expect", ["", "Expect: 100-continue\r\n"])
def test_the_head_is_enough_to_refuse(worker, lines, line, status, expect):
    with gateway(worker.url) as gate, gate.connect() as sock:
        sock.sendall(f"{line} HTTP/1.1\r\n{expect}Content-Length: {MAX_BODY_BYTES + 1}\r\n\r\n".encode())
        got = sock.makefile("rb").read()                     # no byte of the body was sent, and it ends all the same
        assert got.startswith(b"HTTP/1.1 %d " % status) and b"100 Continue" not in got
        error = json.loads(got.partition(b"\r\n\r\n")[2])
        assert error["detail"]["message"] == error["error"]
    assert [(entry["status"], entry["bytes_in"]) for entry in lines] == [(status, MAX_BODY_BYTES + 1)]
    assert worker.requests == []


def test_a_body_in_chunks_that_is_too_large_is_refused_here(worker):
    chunk = b"100000\r\n" + bytes(1 << 20) + b"\r\n"
    head = b"POST /v1/systemone HTTP/1.1\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    with gateway(worker.url) as gate:
        assert gate.raw(head + 4 * chunk + b"0\r\n\r\n").startswith(b"HTTP/1.1 200 ")
        assert gate.raw(head + 4 * chunk + b"1\r\nx\r\n0\r\n\r\n").startswith(b"HTTP/1.1 413 ")
    assert len(worker.requests) == 1


def test_what_exists_is_told(worker):
    with gateway(worker.url) as gate:
        assert json.loads(gate.ask(method="GET", path="/").body)["error"] == (
            "no such path; there are POST /v1/systemone, GET /health, GET /v1/models")


@pytest.mark.parametrize("host, status", [
    ("127.0.0.1", 200), ("127.0.0.1:8080", 200), ("localhost", 200), ("[::1]:1", 200), ("evil.example", 403),
    ("evil.example:8080", 403), ("127.0.0.1.evil.example", 403), ("localhost.evil.example", 403), ("", 403),
    ("good.example", 200), ("GOOD.example.:8080", 200)])
def test_only_hosts_of_the_loopback_and_those_allowed(worker, host, status):
    with gateway(worker.url, allowed_hosts="good.example") as gate:
        got = gate.raw(f"GET /health HTTP/1.1\r\nHost: {host}\r\nOrigin: http://evil.example\r\n"
                       "Connection: close\r\n\r\n".encode())
    assert got.startswith(b"HTTP/1.1 %d " % status) and b"Access-Control" not in got
    assert len(worker.requests) == (status == 200)


def test_models_come_from_a_worker_that_has_them():
    with ScriptedWorker(answer("503 Service Unavailable", b"")) as a, ScriptedWorker(answer("200 OK", b"models")) as b:
        with gateway(a.url, b.url) as gate:
            got = [gate.ask(method="GET", path="/v1/models", Authorization="Bearer key") for _ in range(4)]
    assert [(g.status, g.body) for g in got] == [(200, b"models")] * 4
    assert {r.line for r in b.requests} >= {"GET /v1/models HTTP/1.1"}
    assert b.requests[0].all("Authorization") == ["Bearer key"]
