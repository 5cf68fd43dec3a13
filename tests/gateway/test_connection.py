"""Connecting to a worker: its name, its addresses and everything after share one deadline."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time

import pytest

from jev.gateway import upstream
from jev.gateway.connection import Resolver, connect
from jev.gateway.upstream import Worker
from tests.scripted_worker import ScriptedWorker, answer, eventually, gateway

NAME = "worker.test"


def nobody_left():
    return False


def found(port, host="127.0.0.1"):
    return socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (host, port)


@pytest.fixture
def names(monkeypatch):
    """What NAME is to the system's resolver: a function of no argument."""
    system, names = socket.getaddrinfo, {}

    def getaddrinfo(host, *args, **kwargs):
        if host == NAME and not kwargs.get("flags"):
            return names[NAME]()
        return system(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return names


@pytest.fixture
def dead():
    """A port at which connections are neither accepted nor refused."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


@pytest.fixture
def refusing():
    """A port at which connections are refused."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


def seconds(ask):
    started = time.monotonic()
    return ask().status, time.monotonic() - started


def test_dead_addresses_share_the_time_of_one(names, dead, monkeypatch):
    names[NAME] = lambda: [found(dead)] * 8
    with gateway(f"http://{NAME}:1", health_timeout_ms=1000) as gate:
        status, took = seconds(gate.health)
        assert status == 504 and 0.9 < took < 5                             # not eight times as long
        monkeypatch.setattr(upstream, "CONNECT_SECONDS", 1)
        status, took = seconds(gate.ask)
        assert status == 502 and 0.9 < took < 5


def test_a_dead_address_does_not_hide_a_living_one(names, dead, refusing):
    with ScriptedWorker(answer("200 OK", b"fine")) as worker:
        names[NAME] = lambda: [found(refusing), found(dead), found(worker.port)]
        with gateway(f"http://{NAME}:1", health_timeout_ms=10_000) as gate:
            assert gate.health().body == b"fine"
    assert worker.connections == 1 and worker.requests[0].all("Host") == [f"{NAME}:1"]


def test_a_resolver_that_hangs_is_waited_for_no_longer_than_the_deadline_by_one_thread(names):
    release, asked = threading.Event(), []
    with ScriptedWorker(answer("200 OK", b"fine")) as worker:
        def hang():
            asked.append(threading.current_thread())
            release.wait(60)
            return [found(worker.port)]

        names[NAME] = hang
        with gateway(f"http://{NAME}:1", health_timeout_ms=500) as gate:
            before = threading.active_count()
            results = []
            threads = [threading.Thread(target=lambda: results.append(seconds(gate.health))) for _ in range(8)]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
            assert [status for status, _ in results] == [504] * 8
            assert all(0.4 < took < 10 for _, took in results)
            assert len(asked) == 1 and threading.active_count() <= before
            release.set()
            assert eventually(lambda: gate.health().body == b"fine")
            assert {thread.name for thread in asked} == {"jev-frontend-resolver"}
        assert eventually(lambda: not asked[0].is_alive())


def test_a_name_is_looked_up_for_every_connection_and_none_is_unreachable(names):
    with ScriptedWorker(answer("200 OK", b"a")) as a, ScriptedWorker(answer("200 OK", b"b")) as b:
        answers = [[found(a.port)], [found(b.port)]]
        names[NAME] = lambda: answers.pop(0)
        with gateway(f"http://{NAME}:1") as gate:
            assert [gate.ask().body for _ in range(2)] == [b"a", b"a"]      # one connection
            a.close()
            assert eventually(lambda: not a.open)
            assert gate.ask().body == b"b"

    def unknown():
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    names[NAME] = unknown
    with gateway(f"http://{NAME}:1") as gate:
        got = gate.ask()
    assert got.status == 502 and b"no connection to the worker (gaierror)" in got.body


def test_a_client_that_leaves_ends_the_wait_for_a_connection(names, dead):
    names[NAME] = lambda: [found(dead)]
    with gateway(f"http://{NAME}:1") as gate:
        with gate.connect() as sock:
            sock.sendall(b"POST /v1/systemone HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}")
            assert eventually(lambda: gate.gateway.workers.pending == 1)
        started = time.monotonic()
        assert eventually(lambda: gate.gateway.workers.pending == 0)
        assert time.monotonic() - started < upstream.CONNECT_SECONDS - 1


def test_what_connecting_failed_with(refusing):
    with pytest.raises(ConnectionRefusedError):
        connect([found(refusing)], time.monotonic() + 20, nobody_left)
    # What is wrong with this process is said when nothing else is: here an address that is not ours to use.
    unusable = (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("255.255.255.255", 1))
    with pytest.raises(OSError) as caught:
        connect([unusable, found(refusing)], time.monotonic() + 20, nobody_left)
    assert caught.value.errno == errno.ECONNREFUSED
    with pytest.raises(TimeoutError):
        connect([found(refusing)], time.monotonic() - 1, nobody_left)


@pytest.mark.parametrize("url, expected", [
    ("http://127.0.0.1:9", ("127.0.0.1", 9)), ("http://[::1]:9", ("::1", 9, 0, 0)),
    ("http://[fe80::1%25lo]:9", ("fe80::1%lo", 9, 0, socket.if_nametoindex("lo")))])
def test_an_address_needs_no_resolver(url, expected):
    before = threading.active_count()
    worker = Worker(url, 1)
    address = worker._resolver.addresses(time.monotonic() + 20, nobody_left)[0][4]
    assert threading.active_count() == before
    assert socket.getnameinfo(address, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV) == (expected[0], "9")
    assert address[1:] == expected[1:]


def test_every_thread_exists_from_the_start():
    before = set(threading.enumerate())
    resolver = Resolver("localhost", 1)
    assert len(set(threading.enumerate()) - before) == 1
    assert resolver.addresses(time.monotonic() + 20, nobody_left)
    resolver.close()
    assert eventually(lambda: set(threading.enumerate()) <= before)
