"""The workers behind a gateway, and which of them is next.

Nothing is sent twice. `jev.gateway.upstream` separates the two ways in which a request fails: `Unreachable` means that no
byte of it left this process, and only then may another worker have it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from jev.gateway.http1 import Answer
from jev.gateway.upstream import ClientGone, ExchangeFailed, Failure, OutOfSockets, Request, Unreachable, Worker
from jev.threads import starting

logger = logging.getLogger("jev.gateway.workers")

# Between two looks at a worker that failed. Until one succeeds, the others get its share.
COOL_DOWN_SECONDS = 1.0


class Workers:
    """The workers behind one gateway: the one with the fewest requests in hand is next, failing ones wait outside.

    A worker that could not be reached, gave no usable answer or answered 500 or more is set aside when there are
    others (instant failures would otherwise look like a short queue and attract every request). So is one that kept a
    client waiting for longer than `/health` may take until the client left, and then does not answer `/health`
    either: it hangs, and clients with little patience would hide that for ever. A thread asks such workers for `/health`
    and brings back those that answer. When all are set aside, all are used: the attempt itself is the best probe left.

    Every thread that it will ever need is started with it; RuntimeError when the system has none left.
    """

    on_lost: Callable[[], None]         # never called: workers come back

    def __init__(self, urls: Sequence[str], health_seconds: float, limit: int) -> None:
        """urls: see `jev.gateway.settings.parse_backends`. health_seconds: what a probe may take. limit: bytes of an
        answer's body."""
        self._workers = [Worker(url, limit) for url in urls]
        self._health_seconds = health_seconds
        self._turn = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._suspects: set[Worker] = set()
        self._changed = threading.Condition(self._lock)         # somebody is suspected or set aside, or it is time to stop
        self._prober: threading.Thread | None = None
        if len(self._workers) > 1:
            self._prober = threading.Thread(target=self._probe, name="jev-frontend-probe", daemon=True)
            with starting("the thread that asks workers for their health"):
                self._prober.start()

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def draining(self) -> bool:
        return self._stop.is_set()

    @property
    def pending(self) -> int:
        """Requests that some worker has in hand."""
        return sum(worker.outstanding for worker in self._workers)

    def decide(self, request: Request, deadline: float) -> Answer:
        """The answer of one worker; of another only when no connection to the first could be made."""
        tried: list[Worker] = []
        while True:
            worker = self._take(tried)
            started = time.monotonic()
            try:
                answer = worker.exchange(request, deadline)
            except Unreachable as error:
                self._set_aside(worker, error.reason)
                tried.append(worker)
                if len(tried) == len(self._workers) or time.monotonic() >= deadline:
                    raise
                continue
            except ExchangeFailed as error:
                self._set_aside(worker, error.reason)
                raise
            except ClientGone:
                if time.monotonic() - started > self._health_seconds:
                    self._suspect(worker)
                raise
            finally:
                self._put_back(worker)
            if answer.status >= 500:
                self._set_aside(worker, f"it answered {answer.status}")
            return answer

    def get(self, request: Request, deadline: float) -> Answer:
        """For requests that change nothing: that of the workers in turn which answers 200 first; else the last answer, or
        else the last failure is raised.

        Each gets an even share of the time that is left, so that one hung worker does not hide a ready one.
        """
        tried: list[Worker] = []
        answer: Answer | None = None
        failure: Failure | None = None
        while len(tried) < len(self._workers):
            worker = self._take(tried)
            now = time.monotonic()
            share = now + (deadline - now) / (len(self._workers) - len(tried))
            tried.append(worker)
            try:
                if request.body is not None:
                    request.body.seek(0)
                answer = worker.exchange(request, share)
            except (Unreachable, ExchangeFailed) as error:
                failure = error
                self._set_aside(worker, error.reason)
                continue
            finally:
                self._put_back(worker)
            if answer.status == 200:
                return answer
        if answer is None:
            assert failure is not None          # there is a worker, and it gave one or the other
            raise failure
        return answer

    def _take(self, tried: Sequence[Worker]) -> Worker:
        with self._lock:
            left = [worker for worker in self._workers if worker not in tried]
            left = [worker for worker in left if worker.healthy] or left
            fewest = min(worker.outstanding for worker in left)
            equals = [worker for worker in left if worker.outstanding == fewest]
            self._turn += 1
            worker = equals[self._turn % len(equals)]
            worker.outstanding += 1
            return worker

    def _put_back(self, worker: Worker) -> None:
        with self._lock:
            worker.outstanding -= 1

    def _set_aside(self, worker: Worker, why: str) -> None:
        logger.warning("worker %s: %s", worker.name, why)
        with self._lock:
            if self._prober is not None and not self._stop.is_set():
                worker.healthy = False
                self._changed.notify()

    def _suspect(self, worker: Worker) -> None:
        """Have the worker asked for `/health` at once, and set aside if it does not answer."""
        with self._lock:
            if self._prober is not None and worker.healthy:
                self._suspects.add(worker)
                self._changed.notify()

    def _probe(self) -> None:
        while not self._stop.is_set():
            for worker in self._to_probe():
                try:
                    failure = self._failure(worker)
                except OutOfSockets as error:
                    logger.error("%s", error.reason)
                    continue
                if failure is None and not worker.healthy:
                    logger.info("worker %s: back", worker.name)
                    with self._lock:
                        worker.healthy = True
                elif failure is not None and worker.healthy and not self._stop.is_set():
                    self._set_aside(worker, f"a client waited and left, and now /health: {failure}")

    def _to_probe(self) -> set[Worker]:
        """Waits for workers to ask: suspects at once, those set aside after a while, none when it is time to stop."""
        def due() -> bool:
            return bool(self._suspects) or self._stop.is_set()

        def aside() -> set[Worker]:
            return {worker for worker in self._workers if not worker.healthy}

        with self._lock:
            self._changed.wait_for(lambda: due() or aside())
            self._changed.wait_for(due, COOL_DOWN_SECONDS)
            suspects, self._suspects = self._suspects, set()
            return set() if self._stop.is_set() else suspects or aside()

    def _failure(self, worker: Worker) -> str | None:
        """What is wrong with the worker's `/health`, or None."""
        request = Request("GET", "/health", [], None, 0, self._stop.is_set)
        try:
            answer = worker.exchange(request, time.monotonic() + self._health_seconds)
        except (Unreachable, ExchangeFailed) as error:
            return error.reason
        except ClientGone:
            return "not asked to the end"
        # 401 when the worker wants a key: it is there all the same.
        return None if answer.status < 500 else f"it answered {answer.status}"

    def drain(self) -> None:
        """The gateway is about to end: no worker is worth probing any more. What is in hand still passes."""
        self._stop.set()
        with self._lock:
            self._changed.notify()

    def close(self) -> None:
        """End the threads and the idle connections. Call it when no request is left."""
        self.drain()
        if self._prober is not None:
            self._prober.join()
        for worker in self._workers:
            worker.close()
