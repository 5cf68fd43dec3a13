"""Threads that the system refuses: at the start in words, and never after it."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
from http.client import HTTPConnection
from types import SimpleNamespace

import pytest

from jev import cli, threads as threads_module
from jev.server import SPARE_THREADS, Server, bind
from jev.threads import OutOfThreads, limits, refused, starting
from tests.fakes import Worker, demo_export, eventually, post


@pytest.fixture
def no_more(monkeypatch):
    """no_more(n): after n more threads the system has no room."""
    start = threading.Thread.start

    def after(count):
        left = iter(range(count))

        def limited(thread):
            if next(left, None) is None:
                raise RuntimeError("can't start new thread")
            start(thread)
        monkeypatch.setattr(threading.Thread, "start", limited)
    yield after
    monkeypatch.undo()


def test_a_server_without_room_for_its_threads_names_the_limit_and_the_flag(no_more, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda kind: (77, 77))
    before = threading.active_count()
    no_more(5 + SPARE_THREADS - 1)
    with pytest.raises(OutOfThreads, match=r"22 threads.*77 processes and threads \(ulimit -u\).*lower --queue") as refused:
        Server(None, None, SimpleNamespace(queue=5, drain_seconds=1), bind("127.0.0.1", 0))
    assert "--queue 5" in str(refused.value)
    eventually(lambda: threading.active_count() == before)


def test_other_threads_are_refused_in_a_sentence(no_more, monkeypatch, capsys, tmp_path):
    (tmp_path / "requests").write_text("{}\n")

    def load(settings):
        threading.Thread(target=print).start()
    monkeypatch.setattr(cli, "open_engine", load)
    no_more(0)
    assert cli.main(["score", str(tmp_path / "requests"), "--model", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("jev: cannot start a thread: ") and "raise the limit" in said and "Traceback" not in said


def test_the_panic_of_a_thread_pool_is_such_a_refusal():
    class PanicException(BaseException):
        """As pyo3 has it."""
    assert refused(PanicException("The global thread pool has not been initialized.: ThreadPoolBuildError"))
    assert not refused(PanicException("index out of bounds")) and not refused(RuntimeError("something else"))
    with pytest.raises(OutOfThreads), starting("it"):
        raise PanicException("The global thread pool has not been initialized.")
    with pytest.raises(PanicException), starting("it"):
        raise PanicException("index out of bounds")


def test_the_limit_of_a_control_group_is_the_least_above_it(tmp_path, monkeypatch):
    (tmp_path / "a/b/c").mkdir(parents=True)
    for folder, limit in (("a", "500"), ("a/b", "120"), ("a/b/c", "max")):
        (tmp_path / folder / "pids.max").write_text(limit + "\n")
    (tmp_path / "own").write_text("0::/a/b/c\n")
    least = threads_module._cgroup_limit
    assert least(tmp_path, tmp_path / "own") == 120
    (tmp_path / "own").write_text("5:cpu:/x\n3:pids:/b\n")
    (tmp_path / "pids/b").mkdir(parents=True)
    (tmp_path / "pids/b/pids.max").write_text("64\n")
    assert least(tmp_path, tmp_path / "own") == 64
    assert least(tmp_path, tmp_path / "none") is None
    monkeypatch.setattr(threads_module, "_cgroup_limit", lambda: 64)
    monkeypatch.setattr("resource.getrlimit", lambda kind: (resource.RLIM_INFINITY, -1))
    assert "this control group may have 64 (pids.max)" in limits()


# ---------------------------------------------------------------------------------------------------------------------
# Whole workers

USER = 2_000_000 + os.getpid()
# The limit does not hold for root: the worker becomes a user that has no other process, with root's right to read files.
BECOME_USER = f"""
import ctypes, os, resource
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(8, 1, 0, 0, 0) == 0                                           # PR_SET_KEEPCAPS
os.setresuid({USER}, {USER}, {USER})
# CAP_DAC_OVERRIDE alone, effective and permitted.
assert libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(2, 2)) == 0
resource.setrlimit(resource.RLIMIT_NPROC, (MOST, MOST))
"""
# The second text is long enough for the tokenizer to use threads of its own.
REQUESTS = [json.dumps({"state": state, "questions": {"q": {"type": "noul", "instructions": "?"}}}).encode()
            for state in ("short", " ".join(f"word{i}" for i in range(200)))]


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    return demo_export(tmp_path_factory.mktemp("export"))


def number_of_threads(worker: Worker) -> int:
    return len(os.listdir(f"/proc/{worker.process.pid}/task"))


def check_serves_without_more_threads(worker: Worker) -> int:
    """How many it has."""
    connection = HTTPConnection(*worker.address, timeout=60)
    before = number_of_threads(worker)
    for body in REQUESTS:
        assert post(connection, body)[0] == 200
    connection.close()
    assert number_of_threads(worker) == before
    return before


def test_every_thread_is_there_when_a_worker_is_ready(export, tmp_path):
    with Worker(export.path, tmp_path, "--queue", "2") as worker:
        check_serves_without_more_threads(worker)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user with no other processes")
def test_a_worker_at_its_own_number_of_threads_serves_and_one_lower_says_why_it_cannot(export, tmp_path):
    def limited(limit: int) -> Worker:
        return Worker(export.path, tmp_path, "--queue", "2", before=BECOME_USER.replace("MOST", str(limit)))
    with limited(4096) as worker:
        eventually(lambda: "listening" in worker.stderr or worker.process.poll() is not None, 60)
        if "PermissionError" in worker.stderr or "AssertionError" in worker.stderr:
            pytest.skip("this root cannot become another user")
        number = check_serves_without_more_threads(worker)
    with limited(number) as worker:
        assert check_serves_without_more_threads(worker) == number
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
    with limited(number - 1) as worker:
        assert worker.wait() == 1
    assert "Traceback" not in worker.stderr
    last = worker.stderr.splitlines()[-1]
    assert last.startswith("jev: cannot start 19 threads, 17 more than the places of --queue 2: ")
    assert f"{number - 1} processes and threads (ulimit -u)" in last and "lower --queue" in last
