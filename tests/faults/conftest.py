"""A demo checkpoint, the right answer to one request, and processes that end with the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jev.checkpoint.checkpoint import open_export
from jev.checkpoint.demo import write_demo_checkpoint
from jev.engine import Engine
from jev.model.backends import open_backbone
from jev.settings import Settings
from tests.faults.harness import (
    GOOD_BODY,
    Asking,
    Process,
    answers,
    ask,
    check_settled,
    eventually,
    free_port,
    health,
    pause,
    start_gateway,
    start_worker,
    without_timing,
)
from tests.faults.hostile import largest

HEALTH_MS = 3000


class Pair:
    """A worker with a gateway before it. `hold`, `release` and `order` tell the worker's backbone what to do."""

    def __init__(self, folder: Path, model: Path, right: dict, **settings: object) -> None:
        self.folder, self.model, self.right, self.settings = folder, model, right, settings
        port = free_port()
        self.gateway = self.start_gateway(f"http://127.0.0.1:{port}")
        try:
            self.worker = start_worker(folder, model, port, **settings)
        except BaseException:
            self.gateway.kill()
            raise
        self.measure()

    def start_gateway(self, url: str) -> Process:
        return start_gateway(self.folder / "gateway", url, health_timeout_ms=HEALTH_MS)

    def order(self, what: str, content: str = "") -> None:
        (self.folder / what).write_text(content)

    def hold(self, port: int) -> Asking:
        """A request by itself in a forward pass that lasts until `release`; what comes after it waits in the queue."""
        self.order("hold")
        asking = Asking(port)
        assert eventually(lambda: (self.folder / "held").exists())
        return asking

    def release(self) -> None:
        (self.folder / "hold").unlink(missing_ok=True)

    def restart_worker(self) -> None:
        self.worker.kill()
        self.worker = start_worker(self.folder, self.model, self.worker.port, **self.settings)
        self.measure()

    def restart_gateway(self) -> None:
        self.gateway.kill()
        self.gateway = self.start_gateway(self.worker.url)
        self.measure()

    def measure(self) -> None:
        """Take down what both hold, once they have the connections and the memory that they then keep."""
        for body in largest():
            together = [Asking(port, body) for port in (self.worker.port, self.gateway.port) for _ in range(4)]
            assert all(request.result().status in (413, 422) for request in together)
        requests = [self.hold(self.gateway.port), *(Asking(self.gateway.port) for _ in range(7))]
        pause(0.3)
        self.release()
        assert all(answers(request.result()) == self.right for request in requests)
        self.before = {process: process.footprint for process in (self.worker, self.gateway)}

    def check_right(self) -> None:
        """The next good request is answered right."""
        assert answers(ask(self.gateway.port, GOOD_BODY)) == self.right
        assert health(self.worker.port) == health(self.gateway.port) == 200

    def check_unharmed(self) -> None:
        """The next good request is answered right, and nothing was leaked since the start."""
        self.check_right()
        for process, footprint in self.before.items():
            check_settled(process, footprint)

    def close(self) -> None:
        self.release()
        self.gateway.kill()
        self.worker.kill()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("faults") / "model"
    write_demo_checkpoint(path)
    return path


@pytest.fixture(scope="session")
def right(model: Path) -> dict:
    """The answer to GOOD by an engine that nothing has happened to."""
    export = open_export(model)
    engine = Engine(export, open_backbone(export, "numpy"), Settings())
    try:
        return without_timing(engine.answer(GOOD_BODY))
    finally:
        engine.close()


@pytest.fixture(scope="session")
def shared_pair(model: Path, right: dict, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    running = Pair(tmp_path_factory.mktemp("pair"), model, right, queue=8)
    yield running
    running.close()


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    """For tests that leave a worker and a gateway behind which are as good as before: one pair serves them all."""
    yield shared_pair
    shared_pair.release()


@pytest.fixture
def mortal(model: Path, right: dict, tmp_path: Path) -> Iterator[Pair]:
    """One for a test that ends the worker."""
    running = Pair(tmp_path, model, right, queue=8, drain_seconds=20)
    yield running
    running.close()
