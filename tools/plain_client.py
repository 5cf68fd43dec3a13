"""An HTTP client that takes no time of its own: one kept connection on a plain socket. For benchmarks."""
from __future__ import annotations

import re
import socket
import time

LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n", re.IGNORECASE)


class Client:
    """A connection to a port of 127.0.0.1, for one thread. headers: further lines of every request."""

    def __init__(self, port: int, *headers: str):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=90)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        lines = ["POST /v1/systemone HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", *headers]
        self._head = "".join(f"{line}\r\n" for line in lines).encode()

    def post(self, body: bytes) -> tuple[float, bytes]:
        """(seconds from the first byte sent to the last one received, the answer's body).

        Raises RuntimeError for anything but 200.
        """
        request, got, whole = b"%sContent-Length: %d\r\n\r\n%s" % (self._head, len(body), body), b"", None
        started = time.perf_counter()
        self.socket.sendall(request)
        while whole is None or len(got) < whole:
            block = self.socket.recv(1 << 20)
            if not block:
                raise RuntimeError(f"the connection ended after {got[:300]!r}")
            got += block
            if whole is None and (end := got.find(b"\r\n\r\n")) >= 0:
                whole = end + 4 + int(LENGTH.search(got, 0, end + 2)[1])
        seconds = time.perf_counter() - started
        if not got.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(f"not a 200: {got[:300]!r}")
        return seconds, got[end + 4:]
