"""Workers and gateways as processes, a client for them, and what they hold: threads, descriptors, memory."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
MIB = 2**20
# What a process may have grown by at the end of a case: allocator slack, not what a leak of bodies would leave.
GROWTH_BYTES = 64 * MIB

GOOD = {"state": "The parcel left the depot at nine. \u00e9\u4e2d", "questions": {
    "late": {"type": "noul", "instructions": "Is it late?"},
    "where": {"type": "choice", "instructions": "Where is it?", "criteria": {"depot": None, "road": "on its way"}},
    "sure": {"type": "score", "instructions": "How sure?", "criteria": ["not", "somewhat", "very"]}}}
GOOD_BODY = json.dumps(GOOD).encode()


@dataclass(frozen=True)
class Footprint:
    """What a process holds."""

    threads: int
    descriptors: int
    resident: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
        return cls(len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd")), resident)


class Process:
    """A `jev` command in a process of its own; its output goes to files in `folder`."""

    def __init__(self, folder: Path, command: list[str], **environ: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        number = len(list(folder.glob("*.err")))
        self.out, self.err = folder / f"{number}.out", folder / f"{number}.err"
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("OPEN_JEV_", "OMNI_JEV_", "CUA_S1_"))}
        # One arithmetic thread: the machine is shared, and the number of threads stays what the tests count.
        clean |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environ}
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.child = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=clean, stdout=out, stderr=err)
        self.pid = self.child.pid
        try:
            self.port = self._port()
        except BaseException:
            self.kill()
            raise

    def _port(self, seconds: float = 90) -> int:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.child.poll() is None:
            for line in self.err.read_text().splitlines():
                if "listening on http://" in line:
                    return int(line.split("http://")[1].split(",")[0].rpartition(":")[2])
            time.sleep(0.02)
        raise AssertionError(f"did not start:\n{self.err.read_text()}")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def footprint(self) -> Footprint:
        return Footprint.of(self.pid)

    def signal(self, number: int) -> None:
        self.child.send_signal(number)

    def stop(self, seconds: float = 30) -> int:
        """SIGTERM, and the exit status."""
        self.signal(signal.SIGTERM)
        return self.child.wait(seconds)

    def kill(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait(30)

    def access(self) -> list[dict]:
        """The worker's access log."""
        return [json.loads(line) for line in self.out.read_text().splitlines()]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def start_worker(folder: Path, model: Path, port: int = 0, **settings: object) -> Process:
    """A worker whose backbone obeys files in `folder` (see unruly_serve)."""
    flags = [text for name, value in settings.items() for text in ("--" + name.replace("_", "-"), str(value))]
    command = ["-m", "tests.faults.unruly_serve", str(folder), "serve", "--model", str(model), "--port", str(port),
               "--backend", "numpy", *flags]
    return Process(folder, command)


def start_gateway(folder: Path, *urls: str, **settings: object) -> Process:
    environ = {"OMNI_JEV_" + name.upper(): str(value) for name, value in settings.items()}
    return Process(folder, ["-m", "jev", "frontend"], OMNI_JEV_BIND="127.0.0.1:0", OMNI_JEV_QUEUE="32",
                   OMNI_JEV_BACKEND_URL=",".join(urls), **environ)


@dataclass(frozen=True)
class Got:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> dict:
        return json.loads(self.body)


def ask(port: int, body: bytes = GOOD_BODY, path: str = "/v1/systemone", timeout: float = 60,
        connection: http.client.HTTPConnection | None = None) -> Got:
    """POST (or GET when the body is empty) on a connection of its own unless one is given."""
    own = connection or http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        own.request("POST" if body else "GET", path, body or None, {"Content-Type": "application/json"})
        response = own.getresponse()
        return Got(response.status, response.headers, response.read())
    finally:
        if connection is None:
            own.close()


class Asking(threading.Thread):
    """A request under way, in a thread: `result` is None when it failed with `error`."""

    def __init__(self, port: int, body: bytes = GOOD_BODY) -> None:
        super().__init__()
        self.port, self.body = port, body
        self.got: Got | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.got = ask(self.port, self.body)
        except (OSError, http.client.HTTPException) as error:
            self.error = error

    def result(self) -> Got | None:
        self.join(60)
        assert not self.is_alive(), "hangs"
        return self.got


def health(port: int) -> int:
    return ask(port, b"", "/health").status


def post_bytes(body: bytes, *headers: bytes, length: int | None = None) -> bytes:
    """A POST to /v1/systemone as bytes, with a Content-Length that may be wrong."""
    lines = [b"POST /v1/systemone HTTP/1.1", b"Host: localhost", b"Content-Type: application/json", *headers,
             b"Content-Length: %d" % (len(body) if length is None else length)]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def read_all(sock: socket.socket) -> bytes:
    """Everything until the other side closes (a reset counts as that)."""
    data = b""
    try:
        while block := sock.recv(65536):
            data += block
    except ConnectionResetError:
        pass
    return data


def answers(got: Got) -> dict:
    """What must be equal between two answers to one request."""
    assert got.status == 200, got
    return without_timing(got.json)


def without_timing(response: dict) -> dict:
    return {name: response[name] for name in ("answers", "usage", "model")}


def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def pause(seconds: float) -> None:
    """Give the processes time to get somewhere: more of it on a machine that has other things to do."""
    time.sleep(seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def check_settled(process: Process, before: Footprint) -> None:
    """The process holds no more than it did `before`."""
    def settled() -> bool:
        now = process.footprint
        return now.threads <= before.threads and now.descriptors <= before.descriptors

    assert eventually(settled), f"{process.footprint} after {before}\n" + "\n".join(
        os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{process.pid}/fd"))
    grown = process.footprint.resident - before.resident
    assert grown < GROWTH_BYTES, f"grew by {grown / MIB:.0f} MiB"
