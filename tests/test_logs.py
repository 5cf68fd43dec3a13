"""Logs that nobody reads: lines are dropped and counted, and nothing waits for them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection

import pytest

from jev import logs
from tests.fakes import ROOT, demo_export, eventually, post

PIPE_BYTES = 4096


@pytest.fixture
def pipe():
    """(reader, writer) of a pipe that holds PIPE_BYTES, closed at the end."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    yield reader, writer
    for fd in (reader, writer):
        with contextlib.suppress(OSError):
            os.close(fd)


def writer_to(fd: int) -> logs.Writer:
    return logs.Writer(fd, lambda count: b"missing %d\n" % count, None)


def soon() -> float:
    return time.monotonic() + 10


def read_to_the_end(reader: int) -> list[bytes]:
    with open(reader, "rb", closefd=False) as file:
        return file.read().splitlines()


def test_lines_arrive_whole_and_in_order(pipe):
    reader, fd = pipe
    writer = writer_to(fd)
    lines = [b"line %d %s" % (i, b"x" * (i % 300)) for i in range(3000)] + [b"y" * 10_000]
    got = []
    taking = threading.Thread(target=lambda: got.extend(read_to_the_end(reader)))
    taking.start()
    for line in lines:
        writer.put(line + b"\n")
    assert writer.close(soon())
    os.close(fd)
    taking.join()
    assert got == lines


def test_lines_without_room_are_dropped_and_counted_where_they_are_missing(pipe, monkeypatch):
    monkeypatch.setattr(logs, "ROOM_BYTES", 50_000)
    reader, fd = pipe
    writer = writer_to(fd)
    count = 2000
    for i in range(count):                              # 200 kB, and nobody reads
        writer.put(b"%099d\n" % i)
    assert writer._held <= 50_000
    got = []
    taking = threading.Thread(target=lambda: got.extend(read_to_the_end(reader)))
    taking.start()
    eventually(lambda: not writer._held and not writer._dropped)
    writer.put(b"after\n")
    assert writer.close(soon())
    os.close(fd)
    taking.join()
    gap = next(i for i, line in enumerate(got) if line.startswith(b"missing"))
    assert got[:gap] == [b"%099d" % i for i in range(gap)]
    assert gap + int(got[gap].split()[1]) == count and got[gap + 1:] == [b"after"]


def test_the_end_does_not_wait_for_a_stuck_pipe(pipe):
    _, fd = pipe
    writer = writer_to(fd)
    for _ in range(100):
        writer.put(b"x" * 999 + b"\n")
    started = time.monotonic()
    assert not writer.close(started + 0.2)
    assert time.monotonic() - started < 5
    os.close(pipe[0])                                   # lets its thread go


def test_what_fails_is_counted_and_tried_again(tmp_path, monkeypatch):
    """A disk that is full for a while."""
    monkeypatch.setattr(logs, "RETRY_SECONDS", 0.01)
    file = open(tmp_path / "log", "wb", buffering=0)
    full, write = threading.Event(), os.write

    def write_if_room(fd, data):
        if fd == file.fileno() and full.is_set():
            raise OSError(28, "No space left on device")
        return write(fd, data)
    monkeypatch.setattr(os, "write", write_if_room)
    writer = writer_to(file.fileno())
    full.set()
    for _ in range(5):
        writer.put(b"lost\n")
    eventually(lambda: writer._dropped == 5)
    time.sleep(0.05)                                    # some attempts
    full.clear()
    eventually(lambda: (tmp_path / "log").read_bytes() == b"missing 5\n")
    eventually(lambda: not writer._dropped)
    writer.put(b"kept\n")
    assert writer.close(soon())
    assert (tmp_path / "log").read_bytes() == b"missing 5\nkept\n"
    file.close()


def test_a_reader_that_left_or_a_descriptor_that_does_not_block_is_no_matter(pipe):
    reader, fd = pipe
    os.set_blocking(fd, False)
    writer = writer_to(fd)
    for i in range(50):
        writer.put(b"%0999d\n" % i)
    taken = b""
    while taken.count(b"\n") < 50:
        taken += os.read(reader, 100)
    os.close(reader)
    writer.put(b"nobody takes this\n")
    assert writer.close(soon())


def test_an_access_line_wakes_no_thread(pipe, monkeypatch):
    """What writes it comes around by itself."""
    reader, fd = pipe
    monkeypatch.setattr(logs.queue, "SimpleQueue", lambda: Waker())

    class Waker:
        def put(self, _):
            raise AssertionError("a thread is woken up")

        def get(self, timeout):
            time.sleep(timeout)
            raise logs.queue.Empty
    writer = logs.Writer(fd, lambda count: b"", 0.01)
    writer.put(b"a line\n")
    assert os.read(reader, 100) == b"a line\n"
    monkeypatch.setattr(Waker, "put", lambda self, _: None)
    assert writer.close(soon())


def test_a_service_gives_back_what_it_takes():
    before = (sys.stderr, logging.raiseExceptions, logging.getLogger().level, list(logging.getLogger().handlers),
              list(logging.getLogger("jev.access").handlers), logging.getLogger("jev.access").propagate)
    threads = threading.active_count()
    with logs.service(logging.WARNING):
        assert logging.getLogger("jev.access").handlers
    assert before == (sys.stderr, logging.raiseExceptions, logging.getLogger().level, list(logging.getLogger().handlers),
                      list(logging.getLogger("jev.access").handlers), logging.getLogger("jev.access").propagate)
    assert threading.active_count() == threads


# ---------------------------------------------------------------------------------------------------------------------
# Worker and gateway


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    return demo_export(tmp_path_factory.mktemp("export"))


class Service:
    """A command whose stdout, stderr or both nobody reads, on pipes that are full after a few lines."""

    def __init__(self, *command: str, port: int, unread: str, before: str = "", **env: str) -> None:
        program = "\n".join([
            "import ctypes, sys", "ctypes.CDLL(None).prctl(1, 9)",              # never outlive the tests
            before, f"import jev.cli; sys.exit(jev.cli.main({list(command)!r}))"])
        self.port, self.pipes, ends = port, {}, {}
        for name in ("stdout", "stderr"):
            self.pipes[name], ends[name] = os.pipe()
            fcntl.fcntl(ends[name], fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.read = {name: b"" for name in self.pipes}
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], cwd=ROOT, **ends, env={**os.environ, "PYTHONPATH": str(ROOT), **env})
        for name, end in ends.items():
            os.close(end)
            if name not in unread:
                self.take(name)

    def take(self, name: str) -> None:
        """Read the stream from now on."""
        def run():
            while block := os.read(self.pipes[name], 65536):
                self.read[name] += block
        threading.Thread(target=run, daemon=True).start()

    def ask(self, connection: HTTPConnection, path: str = "/health") -> int:
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        return response.status

    def __enter__(self) -> Service:
        def up():
            assert self.process.poll() is None, self.read
            with contextlib.suppress(OSError):
                connection = HTTPConnection("127.0.0.1", self.port, timeout=20)
                self.ask(connection)
                connection.close()
                return True
        eventually(up, 60)
        return self

    def __exit__(self, *_) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def free_port() -> int:
    import socket
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


FAKE = ("import jev.model.backends; from tests.fakes import FakeBackbone\n"
        "jev.model.backends.open_backbone = lambda *a, **k: BACKBONE\nBACKBONE = FakeBackbone()\n")
# What is served writes a line of 900 bytes to stderr for each request, as a failing device would.
NOISY = FAKE + "BACKBONE.fail = lambda sequences: RuntimeError('x' * 900) if len(BACKBONE.forwards) > 1 else None\n"


def worker(export, unread: str, before: str = FAKE) -> Service:
    port = free_port()
    return Service("serve", "--model", str(export.path), "--port", str(port), "--drain-seconds", "2", "--queue", "4",
                   port=port, unread=unread, before=before)


@pytest.mark.parametrize("unread", ["stdout", "stderr", "stdout stderr"])
def test_a_worker_whose_log_nobody_reads_answers_and_ends(export, unread):
    request = json.dumps({"state": "s", "questions": {"q": {"type": "noul", "instructions": "?"}}}).encode()
    with worker(export, unread, FAKE if unread == "stdout" else NOISY) as service:
        connection = HTTPConnection("127.0.0.1", service.port, timeout=20)
        for _ in range(100):
            assert post(connection, request)[0] == (200 if unread == "stdout" else 500)
            service.ask(connection)
        connection.close()
        started = time.monotonic()
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(30) == 0
        assert time.monotonic() - started < 15


def test_a_worker_that_gives_up_ends_too_when_nobody_reads_its_log(export):
    before = FAKE + ("import time\n"
                     "BACKBONE.fail = lambda sequences: time.sleep(60) if len(BACKBONE.forwards) > 1 else None\n")
    with worker(export, "stdout stderr", before) as service:
        connection = HTTPConnection("127.0.0.1", service.port, timeout=60)
        for _ in range(200):
            service.ask(connection, "/unknown")
        body = b'{"state": "s", "questions": {"q": {"type": "noul", "instructions": "?"}}}'
        connection.request("POST", "/v1/systemone", body, {"Content-Type": "application/json"})
        time.sleep(0.5)
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(30) == 1


def test_the_count_is_in_the_log_when_there_is_room_again(export):
    with worker(export, "stdout", "import jev.logs; jev.logs.ROOM_BYTES = 20_000\n" + FAKE) as service:
        connection = HTTPConnection("127.0.0.1", service.port, timeout=20)
        for _ in range(300):
            service.ask(connection, "/unknown")
        service.take("stdout")
        eventually(lambda: b'"dropped"' in service.read["stdout"])
        service.ask(connection, "/last")
        eventually(lambda: b"/last" in service.read["stdout"])
        connection.close()
        lines = [json.loads(line) for line in service.read["stdout"].splitlines()]
        dropped = sum(line.get("dropped", 0) for line in lines)
        # /health was asked at least once before.
        assert 0 < dropped < 301 and len([line for line in lines if "path" in line]) + dropped >= 302


def test_a_gateway_whose_log_nobody_reads_answers_and_ends(export):
    """Its worker is away, which is worth a line for each request."""
    port = free_port()
    with Service("frontend", "--bind", f"127.0.0.1:{port}", "--backend-url", f"http://127.0.0.1:{free_port()}",
                 "--drain-seconds", "2", "--queue", "4", port=port, unread="stdout stderr") as service:
        connection = HTTPConnection("127.0.0.1", port, timeout=20)
        for _ in range(200):
            assert service.ask(connection) == 502
        connection.close()
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(30) == 0


def test_loggers_are_named_by_their_modules():
    named = [(path.relative_to(ROOT), name) for package in ("jev", "jev_kernels") for path in (ROOT / package).rglob("*.py")
             for name in re.findall(r"^logger = logging\.getLogger\((.*)\)$", path.read_text("utf-8"), re.MULTILINE)]
    assert len(named) > 5
    for path, name in named:
        module = ".".join(path.with_suffix("").parts)
        assert name == ('"jev.access"' if module == "jev.access_log" else f'"{module}"'), path
