"""A worker that does exactly what a test says, byte for byte, and a gateway in front of it, both on real sockets."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jev.gateway.app import Gateway
from jev.gateway.settings import GatewaySettings
from jev.server import bind

Script = Callable[[socket.socket, "Request"], "bool | str | None"]


@dataclass(frozen=True)
class Request:
    """One request as it arrived. `connection` numbers the connections from 0."""

    line: str
    headers: list[tuple[str, str]]
    body: bytes
    connection: int

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name.lower()]


def reply(status: str = "200 OK", body: bytes = b'{"ok": true}', *headers: str, length: bool = True) -> bytes:
    """A response's bytes."""
    lines = [f"HTTP/1.1 {status}", *headers]
    if length:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def answer(status: str = "200 OK", body: bytes = b'{"ok": true}', *headers: str) -> Script:
    """The script that always sends this."""
    return lambda sock, request: sock.sendall(reply(status, body, *headers))


class ScriptedWorker:
    """Runs `script(socket, request)` for each request; the connection is closed when that returns something true.

    With "cut" it is closed without a word: what SO_LINGER says happens, a reset for instance.
    """

    def __init__(self, script: Script | None = None, read_body: bool = True, tls=None, port: int = 0) -> None:
        self.script = script or answer()
        self.read_body = read_body
        self.requests: list[Request] = []
        self.connections = 0
        self.open: set[socket.socket] = set()
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", port))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self.port}"

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                number, self.connections = self.connections, self.connections + 1   # before anyone can be answered
                threading.Thread(target=self._serve, args=(sock, number), daemon=True).start()

    def _serve(self, sock: socket.socket, number: int) -> None:
        end, file = None, sock
        with contextlib.suppress(OSError, ValueError):
            if self._tls:
                sock = self._tls.wrap_socket(sock, server_side=True)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.open.add(sock)
            file = sock.makefile("rb")
            while line := file.readline():
                headers = []
                while (header := file.readline()) not in (b"\r\n", b""):
                    name, _, value = header.decode("latin-1").rstrip("\r\n").partition(": ")
                    headers.append((name, value))
                length = next((int(value) for name, value in headers if name.lower() == "content-length"), 0)
                body = file.read(length) if self.read_body else b""
                request = Request(line.decode("latin-1").strip(), headers, body, number)
                self.requests.append(request)
                if end := self.script(sock, request):
                    break
        self.open.discard(sock)
        with contextlib.suppress(OSError):
            if end != "cut":
                sock.shutdown(socket.SHUT_RDWR)
        file.close()
        sock.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in list(self.open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> ScriptedWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Got:
    """A response as the client saw it, headers in order with repetitions."""

    status: int
    reason: str
    headers: list[tuple[str, str]]
    body: bytes

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name.lower()]


class RunningGateway:
    """A running gateway and a client for it."""

    def __init__(self, gateway: Gateway, port: int) -> None:
        self.gateway = gateway
        self.port = port

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def ask(self, body: bytes = b"{}", method: str = "POST", path: str = "/v1/systemone", **headers: str) -> Got:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body if method == "POST" else None, named)
            response = connection.getresponse()
            return Got(response.status, response.reason, response.getheaders(), response.read())
        finally:
            connection.close()

    def health(self) -> Got:
        return self.ask(method="GET", path="/health")

    def raw(self, data: bytes) -> bytes:
        """Send bytes as they are on a connection of their own, and return everything until it is closed."""
        with self.connect() as sock:
            sock.sendall(data)
            return b"".join(iter(lambda: sock.recv(65536), b""))


@contextlib.contextmanager
def gateway(*urls: str, **settings) -> Iterator[RunningGateway]:
    """A gateway before these workers, on a free port. It is stopped as SIGTERM stops it, and must leave nothing."""
    before = set(threading.enumerate())
    chosen = GatewaySettings(**{"backend_url": ",".join(urls), "queue": 16, "drain_seconds": 20, **settings})
    sock = bind("127.0.0.1", 0)
    running = Gateway(chosen, sock)
    thread = threading.Thread(target=running.run)
    thread.start()
    try:
        yield RunningGateway(running, sock.getsockname()[1])
    finally:
        running.stop()
        thread.join(30)
        assert not thread.is_alive()
        assert eventually(lambda: not [t for t in set(threading.enumerate()) - before if t.name.startswith("waitress")])


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether the condition comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
