"""Stand-ins for the slow parts: a backbone whose hidden states depend on a sequence's tokens alone, at no cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPMessage
from pathlib import Path
from typing import Any

import numpy as np

from jev.app import create_app
from jev.checkpoint.demo import write_demo_checkpoint
from jev.checkpoint.opening import Export, open_export
from jev.engine import Engine
from jev.model.backbone import Computed
from jev.model.row_pool import count_rows
from jev.server import Server, bind
from jev.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
BF16_NAN = 0x7FC0


class FakeBackbone:
    """Hidden states are BF16 noise seeded by the token ids, so the same in any company.

    ``gate``, an Event, holds every forward until it is set; each but the first takes ``seconds``. ``fail`` maps a
    forward to an exception or None; ``poison`` maps a sequence to whether its hidden state is NaN. ``forwards`` lists
    the number of sequences and rows of each.
    """

    name = "numpy"

    def __init__(self, hidden_size: int = 256, max_rows: int = 8192, seconds: float = 0.0) -> None:
        self.hidden_size, self.max_rows, self.seconds = hidden_size, max_rows, seconds
        self.gate = threading.Event()
        self.gate.set()
        self.fail = lambda sequences: None
        self.poison = lambda sequence: False
        self.forwards: list[tuple[int, int]] = []
        self.running = threading.Lock()
        self.closed = False

    def resumable(self, ids: np.ndarray) -> int:
        return 0

    def hidden(self, sequences: Sequence[np.ndarray]) -> Computed:
        assert self.running.acquire(blocking=False), "two forwards at once"
        try:
            return self._hidden(sequences)
        finally:
            self.running.release()

    def _hidden(self, sequences: Sequence[np.ndarray]) -> Computed:
        self.forwards.append((len(sequences), count_rows(sequences)))
        assert self.gate.wait(30), "nobody opened the gate"
        time.sleep(self.seconds if len(self.forwards) > 1 else 0)      # the warm-up costs nothing
        error = self.fail(sequences)
        if error is not None:
            raise error
        hidden = np.empty((len(sequences), self.hidden_size), np.uint16)
        for row, sequence in zip(hidden, sequences):
            noise = np.random.default_rng(sequence.tolist()).standard_normal(self.hidden_size, np.float32)
            row[:] = BF16_NAN if self.poison(sequence) else noise.view(np.uint32) >> 16
        return Computed(hidden, self.forwards[-1][1], np.zeros(len(sequences), np.intp))

    def close(self) -> None:
        self.closed = True


def demo_export(folder: Path) -> Export:
    """The demo export of ``folder/demo``, written there on the first call."""
    path = folder / "demo"
    if not path.exists():
        write_demo_checkpoint(path)
    return open_export(path)


def request(state: Any = "The parcel is late.", **questions: Any) -> dict[str, Any]:
    """A request; by default with one noul question."""
    return {"state": state, "questions": questions or {"late": {"type": "noul", "instructions": "Is it late?"}}}


def choice(options: int, instructions: str = "Which?") -> dict[str, Any]:
    return {"type": "choice", "instructions": instructions, "criteria": {f"option {i}": None for i in range(options)}}


def body(value: Any) -> bytes:
    return json.dumps(value).encode()


def eventually(condition, seconds: float = 10.0) -> None:
    """Wait until ``condition()`` holds; fails after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


@contextmanager
def serving(export, backbone: FakeBackbone, **settings: Any) -> Iterator[Server]:
    """A worker on a free port of the loopback, in this process; drained and closed at the end."""
    chosen = Settings(port=0, **settings)
    engine = Engine(export, backbone, chosen)
    sock = bind(chosen.host, chosen.port)
    server = Server(create_app(engine, chosen), engine, chosen, sock)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        getattr(backbone, "gate", threading.Event()).set()
        server.stop()
        thread.join(30)
        engine.close()
        assert not thread.is_alive()


class Worker:
    """``jev serve`` in a process of its own. ``seconds``: how long a forward of its fake backbone takes, None: a real
    one. ``before``: a line of Python run first. The port is a free one."""

    def __init__(self, model: Path, folder: Path, *flags: str, seconds: float | None = 0.0, before: str = "",
                 env: dict[str, str] | None = None) -> None:
        fake = f"jev.model.backends.open_backbone = lambda *a, **k: FakeBackbone(seconds={seconds})"
        program = "\n".join([
            "import ctypes, sys, time", "ctypes.CDLL(None).prctl(1, 9)",    # PR_SET_PDEATHSIG: never outlive the tests
            "import jev.model.backends, jev.cli", "from tests.fakes import FakeBackbone",
            before, "" if seconds is None else fake,
            f"sys.exit(jev.cli.main({['serve', '--model', str(model), '--port', '0', *flags]!r}))"])
        self.access_file = folder / f"access-{time.monotonic_ns()}.jsonl"
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("OPEN_JEV_", "CUA_S1_"))}
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], cwd=ROOT, env={**clean, "PYTHONPATH": str(ROOT), **(env or {})},
            stdout=open(self.access_file, "wb"), stderr=subprocess.PIPE, text=True)
        self._lines: list[str] = []
        self._said = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stderr:
            with self._said:
                self._lines.append(line)
                self._said.notify_all()

    def wait_for(self, text: str, seconds: float = 60) -> str:
        """The line of stderr that holds ``text``."""
        with self._said:
            found = self._said.wait_for(
                lambda: next((line for line in self._lines if text in line), ""), seconds)
        assert found, f"never said {text!r}:\n{self.stderr}"
        return found

    @property
    def stderr(self) -> str:
        return "".join(self._lines)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.wait_for("listening on").split("http://")[1].split(":")
        return host, int(port)

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self.address)

    def access(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.access_file.read_text().splitlines()]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = 30) -> int:
        return self.process.wait(seconds)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join()
        self.process.stderr.close()


def post(connection: HTTPConnection, data: bytes, **headers: str) -> tuple[int, dict[str, Any], HTTPMessage]:
    """(status, JSON, headers) of a POST to /v1/systemone on an open connection."""
    connection.request("POST", "/v1/systemone", data, {"Content-Type": "application/json", **headers})
    response = connection.getresponse()
    return response.status, json.loads(response.read()), response.headers
