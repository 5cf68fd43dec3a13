"""Workers that are killed, stopped, told to end, and full."""

from __future__ import annotations

import http.client
import signal
import threading
import time

from tests.faults.conftest import HEALTH_MS
from tests.faults.harness import (
    GOOD_BODY,
    Asking,
    answers,
    ask,
    check_settled,
    connect,
    eventually,
    health,
    pause,
    post_bytes,
    read_all,
    start_worker,
)


def in_hand(pair, number):
    """Wait until the worker holds so many requests: the next one then is refused or waits with them."""
    pause(0.3 + 0.02 * number)


def test_the_worker_is_killed_in_the_middle_of_a_request(pair):
    through, direct = pair.hold(pair.gateway.port), Asking(pair.worker.port)
    in_hand(pair, 2)
    started = time.monotonic()
    pair.worker.signal(signal.SIGKILL)
    assert through.result().status == 502 and through.got.json["detail"]["error_type"] == "bad_gateway"
    assert direct.result() is None and direct.error is not None
    assert time.monotonic() - started < 10
    assert ask(pair.gateway.port).status == 502 and health(pair.gateway.port) == 502
    pair.release()
    gateway_before = pair.before[pair.gateway]
    pair.restart_worker()
    pair.check_unharmed()
    check_settled(pair.gateway, gateway_before)


def test_the_worker_is_stopped_and_resumed(pair):
    pair.worker.signal(signal.SIGSTOP)
    try:
        requests = [Asking(port) for port in (pair.gateway.port, pair.worker.port) for _ in range(3)]
        started = time.monotonic()
        assert health(pair.gateway.port) == 504
        assert HEALTH_MS / 1000 - 0.1 < time.monotonic() - started < 20
    finally:
        pair.worker.signal(signal.SIGCONT)
    for request in requests:
        assert answers(request.result()) == pair.right
    pair.check_unharmed()


def test_the_gateway_is_stopped_and_resumed(pair):
    pair.gateway.signal(signal.SIGSTOP)
    requests = [Asking(pair.gateway.port) for _ in range(3)]
    pause(0.5)
    pair.gateway.signal(signal.SIGCONT)
    for request in requests:
        assert answers(request.result()) == pair.right
    pair.check_unharmed()


def test_a_full_queue(pair):
    held = [pair.hold(pair.worker.port), *(Asking(pair.worker.port if i % 2 else pair.gateway.port) for i in range(7))]
    in_hand(pair, 8)
    for i in range(30):
        got = ask(pair.worker.port if i % 2 else pair.gateway.port)
        assert got.status == 503 and int(got.headers["Retry-After"]) >= 1
        assert got.json["detail"]["error_type"] == "overloaded_error"
    assert health(pair.worker.port) == health(pair.gateway.port) == 200
    pair.release()
    for request in held:
        assert answers(request.result()) == pair.right
    pair.check_unharmed()


def test_sigterm_answers_every_admitted_request_and_none_after(mortal):
    idle = http.client.HTTPConnection("127.0.0.1", mortal.worker.port, timeout=10)
    assert answers(ask(0, connection=idle)) == mortal.right
    half = connect(mortal.worker.port)
    half.sendall(post_bytes(GOOD_BODY)[:-5])
    admitted = [mortal.hold(mortal.worker.port)]
    admitted += [Asking(mortal.worker.port if i % 2 else mortal.gateway.port) for i in range(5)]
    in_hand(mortal, 6)
    mortal.worker.signal(signal.SIGTERM)
    assert eventually(lambda: health(mortal.worker.port) == 503)
    for connection in (idle, None):
        got = ask(mortal.worker.port, connection=connection)
        assert got.status == 503 and int(got.headers["Retry-After"]) >= 1 and got.headers["Connection"] == "close"
    assert ask(mortal.gateway.port).status == health(mortal.gateway.port) == 503
    assert mortal.worker.child.poll() is None
    mortal.release()
    assert read_all(half) == b""                                # half a request is not an admitted one
    half.close()
    for request in admitted:
        got = request.result()
        assert answers(got) == mortal.right
        assert request.port == mortal.gateway.port or got.headers["Connection"] == "close"
    assert mortal.worker.child.wait(30) == 0


def test_sigterm_under_load(mortal):
    """Whatever was computed was delivered: as many 200s arrived as the worker logged, each of them right."""
    last = ask(mortal.worker.port).headers["X-Request-Id"]
    assert eventually(lambda: last in {line["id"] for line in mortal.worker.access()})      # lines are written in time
    earlier, delivered = {line["id"] for line in mortal.worker.access()}, set()
    counts, wrong, lock = {}, [], threading.Lock()

    def load(port):
        while True:
            try:
                got = ask(port)
            except (OSError, http.client.HTTPException) as error:
                with lock:
                    counts[type(error).__name__] = counts.get(type(error).__name__, 0) + 1
                return
            with lock:
                counts[got.status] = counts.get(got.status, 0) + 1
                if got.status == 200:
                    delivered.add(got.headers["X-Request-Id"])
                if got.status == 200 and answers(got) != mortal.right:
                    wrong.append(got)
            if got.status != 200:
                return

    threads = [threading.Thread(target=load, args=(port,))
               for port in (mortal.worker.port, mortal.gateway.port) for _ in range(4)]
    [thread.start() for thread in threads]
    pause(2.5)
    assert mortal.worker.stop(30) == 0
    [thread.join(30) for thread in threads]
    assert not wrong and counts[200] > 8, counts
    computed = {line["id"] for line in mortal.worker.access()
                if line["status"] == 200 and line["path"] == "/v1/systemone"} - earlier
    assert computed == delivered and len(delivered) == counts[200], counts
    assert set(counts) <= {200, 502, 503, "ConnectionRefusedError", "ConnectionResetError", "RemoteDisconnected"}


def test_sigterm_does_not_wait_for_ever(model, tmp_path):
    worker = start_worker(tmp_path, model, drain_seconds=1)
    try:
        (tmp_path / "hold").touch()
        request = Asking(worker.port)
        assert eventually(lambda: (tmp_path / "held").exists())
        started = time.monotonic()
        worker.signal(signal.SIGTERM)
        assert worker.child.wait(30) == 1
        assert 0.9 < time.monotonic() - started < 20
        request.result()
        assert request.got is None or request.got.status == 503
    finally:
        worker.kill()


def test_the_gateway_ends_in_order(pair):
    requests = [pair.hold(pair.gateway.port), *(Asking(pair.gateway.port) for _ in range(3))]
    in_hand(pair, 4)
    pair.gateway.signal(signal.SIGTERM)
    assert eventually(lambda: health(pair.gateway.port) == 503)
    refused = ask(pair.gateway.port)
    assert refused.status == 503 and int(refused.headers["Retry-After"]) >= 1
    assert refused.json["detail"]["error_type"] == "overloaded_error"
    pair.release()
    for request in requests:
        assert answers(request.result()) == pair.right
    assert pair.gateway.child.wait(30) == 0
    pair.restart_gateway()
    pair.check_unharmed()
