"""Several workers behind one gateway, TLS on the way to them, and the gateway as a process."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jev import cli
from jev.gateway import workers as frontend_pool
from jev.gateway.upstream import ExchangeFailed, Worker
from tests.scripted_worker import ScriptedWorker, answer, eventually, gateway, reply

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "jev", "frontend"]


@pytest.fixture
def two(monkeypatch):
    monkeypatch.setattr(frontend_pool, "COOL_DOWN_SECONDS", 0.1)
    with ScriptedWorker(answer("200 OK", b"a")) as a, ScriptedWorker(answer("200 OK", b"b")) as b:
        yield a, b


def decisions(worker):
    return [request for request in worker.requests if request.line.startswith("POST")]


def closed_port():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def down(worker):
    """Have the worker refuse connections, and give back a function that brings it back at the same port."""
    port = worker.port
    worker.close()

    def back():
        return ScriptedWorker(worker.script, port=port)

    return back


def test_workers_take_turns(two):
    with gateway(*(worker.url for worker in two)) as gate:
        assert {gate.ask().body for _ in range(2)} == {b"a", b"b"}
        for _ in range(8):
            gate.ask()
    assert [len(worker.requests) for worker in two] == [5, 5]


def test_the_one_with_the_fewest_requests_in_hand_is_next(two):
    a, b = two
    release = threading.Event()
    a.script = lambda sock, request: release.wait(10) and sock.sendall(reply("200 OK", b"a"))
    with gateway(a.url, b.url) as gate:
        bodies = []
        threads = [threading.Thread(target=lambda: bodies.append(gate.ask().body)) for _ in range(2)]
        [thread.start() for thread in threads]
        assert eventually(lambda: len(a.requests) == len(b.requests) == 1)
        assert [gate.ask().body for _ in range(6)] == [b"b"] * 6
        release.set()
        [thread.join() for thread in threads]
    assert sorted(bodies) == [b"a", b"b"]


def test_a_request_moves_on_only_when_nothing_of_it_was_sent(two):
    a, b = two
    back = down(a)
    with gateway(a.url, b.url) as gate:
        assert [gate.ask(b"body").body for _ in range(6)] == [b"b"] * 6
        assert [request.body for request in b.requests] == [b"body"] * 6
        with back() as again:
            assert eventually(lambda: len(again.requests) > 0)                # the probe
            assert again.requests[0].line == "GET /health HTTP/1.1"
            assert eventually(lambda: gate.ask().body == b"a")


def test_a_request_that_may_have_run_is_not_given_to_another(two):
    a, b = two
    for worker in two:
        worker.script = lambda sock, request: True                              # takes it and hangs up
    with gateway(a.url, b.url) as gate:
        assert gate.ask().status == 502
        assert len(decisions(a)) + len(decisions(b)) == 1


@pytest.mark.parametrize("failing", [
    lambda sock, request: True,
    lambda sock, request: sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n") or True,
    answer("503 Service Unavailable", b"draining", "Retry-After: 5"),
    answer("500 Internal Server Error", b"broken")], ids=["hangs up", "breaks off", "503", "500"])
def test_a_failing_worker_is_set_aside_until_it_is_well(two, failing):
    a, b = two
    a.script = failing
    with gateway(a.url, b.url) as gate:
        first = [gate.ask() for _ in range(6)]
        assert [got.status for got in first if got.body != b"b"] in ([502], [503], [500])   # one request found out
        a.script = answer("200 OK", b"a")
        assert eventually(lambda: gate.ask().body == b"a")
        probes = len(a.requests) - len(decisions(a))
        time.sleep(0.3)
        assert len(a.requests) - len(decisions(a)) == probes                        # nobody asks after a worker that is well


def hang(sock, request):
    time.sleep(30)
    return "cut"


def leave(gate, seconds):
    """A client that waits for so long and goes, with a reset, which is known at once; True if it was answered."""
    with gate.connect() as sock:
        sock.settimeout(seconds)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.sendall(b"POST /v1/systemone HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}")
        with contextlib.suppress(TimeoutError):
            return bool(sock.recv(100))
    return False


def test_a_worker_that_hangs_is_set_aside_though_no_client_waits_for_its_end(two, caplog):
    a, b = two
    a.script = hang
    with gateway(a.url, b.url, health_timeout_ms=200) as gate:
        while leave(gate, 0.6):
            pass
        assert eventually(lambda: f"worker {a.url}: a client waited and left" in caplog.text)
        assert [gate.ask().body for _ in range(6)] == [b"b"] * 6
        assert len(decisions(a)) == 1
        a.script = answer("200 OK", b"a")
        assert eventually(lambda: gate.ask().body == b"a")


def test_a_slow_worker_that_is_well_is_kept_when_a_client_leaves(two, caplog):
    a, b = two
    for worker in two:
        worker.script = lambda sock, request: (
            hang(sock, request) if request.line.startswith("POST") else sock.sendall(reply()))
    with gateway(a.url, b.url, health_timeout_ms=1000) as gate:
        assert not leave(gate, 1.5)
        assert eventually(lambda: [r.line for w in two for r in w.requests if r.line.startswith("GET")])
        assert not leave(gate, 0.1)                          # too short a wait to suspect anyone
        assert eventually(lambda: gate.gateway.workers.pending == 0)
        time.sleep(0.3)
    assert "worker http" not in caplog.text
    assert len([r for w in two for r in w.requests if r.line.startswith("GET")]) == 1


def test_a_worker_that_wants_a_key_counts_as_well(two):
    a, b = two
    a.script = lambda sock, request: True
    with gateway(a.url, b.url) as gate:
        while gate.ask().status == 200:
            pass
        a.script = answer("401 Unauthorized", b"key")
        assert eventually(lambda: gate.ask().body == b"key")


def test_all_are_used_when_all_fail(two):
    a, b = two
    for worker in two:
        worker.script = answer("503 Service Unavailable", b"full", "Retry-After: 1")
    with gateway(a.url, b.url) as gate:
        assert [gate.ask().status for _ in range(6)] == [503] * 6
        assert len(decisions(a)) + len(decisions(b)) == 6
    with gateway(*(f"http://127.0.0.1:{closed_port()}" for _ in range(2))) as gate:
        assert gate.ask().status == 502


def test_running_out_of_descriptors_is_not_the_workers_fault(two, monkeypatch, caplog):
    with gateway(*(worker.url for worker in two)) as gate:
        with monkeypatch.context() as patch:
            def no_socket(*_, **__):
                raise OSError(errno.EMFILE, "Too many open files")
            patch.setattr("jev.gateway.connection.Socket", no_socket)
            for got in [gate.ask() for _ in range(4)] + [gate.health()]:
                assert got.status == 503 and got.all("Retry-After") == ["1"] and b"connections" in got.body
        assert "[Errno 24] Too many open files" in caplog.text and "worker http" not in caplog.text
        assert {gate.ask().body for _ in range(2)} == {b"a", b"b"}


def test_the_log_says_why_and_repeats_nothing_of_a_request(two, caplog):
    a, b = two
    a.close()
    b.script = lambda sock, request: sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n")
    with gateway(a.url, b.url) as gate:
        assert [gate.ask(Authorization="Bearer hunter2").status for _ in range(3)] == [502] * 3
    assert "no connection to the worker (ConnectionRefusedError): [Errno 111] Connection refused" in caplog.text
    assert "no usable answer from the worker (an invalid Content-Length)" in caplog.text
    error = ExchangeFailed("no usable answer")
    error.__cause__ = ValueError("Invalid header value b'hunter2'")
    assert error.reason == "no usable answer" and "hunter2" not in caplog.text


def test_one_worker_is_never_set_aside():
    with ScriptedWorker(lambda sock, request: True) as worker, gateway(worker.url) as gate:
        assert [gate.ask().status for _ in range(3)] == [502] * 3
        assert len(worker.requests) == 3


def test_health_is_that_of_any_ready_worker(two):
    a, b = two
    a.script = answer("503 Service Unavailable", b"loading")
    with gateway(a.url, b.url, health_timeout_ms=1500) as gate:
        assert [(gate.health().status, gate.health().body) for _ in range(3)] == [(200, b"b")] * 3
        b.script = answer("503 Service Unavailable", b"loading too")
        assert gate.health().status == 503
        a.script = b.script = lambda sock, request: time.sleep(20)
        started = time.monotonic()
        assert gate.health().status == 504
        assert 1.4 < time.monotonic() - started < 10
        b.script = answer("200 OK", b"b")
        assert eventually(lambda: gate.health().body == b"b")


# TLS -------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_a_worker_behind_tls(tmp_path, monkeypatch, caplog):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                    "-keyout", key, "-out", certificate, "-days", "2", "-subj", "/CN=test", "-addext",
                    "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with ScriptedWorker(lambda sock, request: sock.sendall(reply("200 OK", request.body)), tls=context) as worker:
        with gateway(worker.url) as gate:
            assert gate.ask().status == 502                                      # nobody vouches for the certificate
        assert worker.requests == [] and "certificate verify failed: self" in caplog.text
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with gateway(worker.url, health_timeout_ms=1500) as gate:
            body = bytes(range(256)) * 4000
            assert gate.ask(body).body == body and gate.ask().body == b"{}"
            assert len([r for r in worker.requests if r.connection == worker.requests[0].connection]) == 2
            worker.script = lambda sock, request: sock.sendall(reply("200 OK", b"whole")) or True
            assert gate.ask().body == b"whole"
            # Without TLS's goodbye nobody knows whether an answer that ends with its connection was cut off.
            worker.script = lambda sock, request: sock.sendall(reply("200 OK", b"cut", length=False)) or True
            assert gate.ask().status == 502
            worker.script = lambda sock, request: time.sleep(20)
            assert gate.health().status == 504


# The process -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def process(worker, **environ):
    """`jev frontend` before a worker: (process, port)."""
    port = closed_port()
    env = {**os.environ, "OMNI_JEV_BIND": f"127.0.0.1:{port}", "OMNI_JEV_BACKEND_URL": worker.url, **environ}
    child = subprocess.Popen(COMMAND, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
    try:
        assert "listening" in child.stderr.readline()
        yield child, port
    finally:
        child.kill()
        child.wait()
        child.stderr.close()


def post(port, body):
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        sock.sendall(b"POST /v1/systemone HTTP/1.1\r\nConnection: close\r\nAuthorization: Bearer hunter2\r\n"
                     b"Content-Length: %d\r\n\r\n" % len(body) + body)
        return b"".join(iter(lambda: sock.recv(65536), b""))


def resident(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_large_uploads_are_spooled_and_the_end_is_orderly():
    seen = []
    with ScriptedWorker() as worker, process(worker) as (child, port):
        def script(sock, request):
            seen.append(len(request.body))
            sock.sendall(reply())

        worker.script = script
        assert post(port, b"x" * 1000).startswith(b"HTTP/1.1 200")
        before, peak = resident(child.pid), 0
        upload = bytes(4 << 20)
        threads = [threading.Thread(target=post, args=(port, upload)) for _ in range(12)]
        [thread.start() for thread in threads]
        while any(thread.is_alive() for thread in threads):
            peak = max(peak, resident(child.pid) - before)
            time.sleep(0.01)
        assert seen == [1000, *[len(upload)] * 12] and peak < 24_000_000
        worker.script = lambda sock, request: time.sleep(0.4) or sock.sendall(reply("200 OK", b"in hand"))
        got = []
        thread = threading.Thread(target=lambda: got.append(post(port, b"{}")))
        thread.start()
        assert eventually(lambda: len(worker.requests) == 14)
        child.send_signal(signal.SIGTERM)
        thread.join()
        assert got[0].endswith(b"in hand")
        assert child.wait(30) == 0
        assert "hunter2" not in child.stderr.read()


@pytest.mark.parametrize("argv, environ", [
    (["--backend-url", "http://me:hunter2@host"], {}), ([], {"OMNI_JEV_BACKEND_URL": "http://me:hunter2@host"}),
    (["--bind", "hunter2"], {}), (["--health-timeout-ms", "hunter2"], {}),
    (["http://me:hunter2@host:1"], {}), (["--worker-url", "http://me:hunter2@host"], {}),
    (["--worker-url=http://me:hunter2@host"], {}), (["--b=hunter2"], {}), (["-hunter2"], {})])
def test_a_wrong_setting_ends_with_one_line(argv, environ):
    done = subprocess.run([*COMMAND, *argv], cwd=ROOT, env={**os.environ, **environ},
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("jev frontend: ") and "hunter2" not in done.stderr


@pytest.mark.parametrize("argv, says", [
    (["serve", "--api-key", "hunter2"], "no such flag: --api-key"), (["serve", "x", "--api-key=hunter2"], "--api-key"),
    (["serve", "x", "hunter2"], "1 argument too many"), (["hunter2"], "no such command"),
    (["serve", "--m=hunter2"], "ambiguous option: --m could match"), (["score", "x", "--pretty=hunter2"], "--pretty"),
    (["score", "x", "y", "--together", "hunter2"], "--together"), (["demo-checkpoint", "x", "--seed", "hunter2"], "--seed"),
    (["serve", "--model"], "expected one argument")])
def test_an_argument_out_of_place_is_not_repeated(argv, says, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == ""
    assert said.err.startswith("jev") and said.err.count("\n") == 1
    assert says in said.err and "hunter2" not in said.err


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as sock:
        done = subprocess.run(COMMAND, cwd=ROOT, capture_output=True, text=True, timeout=20,
                              env={**os.environ, "OMNI_JEV_BIND": f"127.0.0.1:{sock.getsockname()[1]}"})
    assert done.returncode == 1 and "cannot listen" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("url, host", [
    ("http://worker", "worker"), ("http://worker:80", "worker"), ("https://worker:443/p", "worker"),
    ("https://Worker:8000", "worker:8000"), ("http://worker.example.:8000", "worker.example:8000"),
    ("http://[::1]:9", "[::1]:9"), ("http://[fe80::1%25eth0]", "[fe80::1]")])
def test_the_name_by_which_a_worker_is_called(url, host):
    assert Worker(url, 1).host_header == host
