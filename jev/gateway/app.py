"""The gateway, `jev frontend`: one address in front of one or more workers.

`POST /v1/systemone`, `GET /health` and `GET /v1/models` go to a worker and come back as they were: body bytes, status,
repeated and oddly spelt headers included. Everything else is answered here, in the worker's own form of error. How one
worker is spoken to is in `jev.gateway.upstream`, how one is chosen among several in `jev.gateway.workers`. Each request
leaves a line in the access log, of the worker's kind, with the worker that had it and the time that it took there.

A worker's answer is read whole before the first byte of it goes out, because a status cannot be taken back: an
answer that breaks off, is too large or too slow becomes a clean 502 or 504 instead of half a 200.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from http import HTTPStatus
from traceback import format_tb
from typing import Any
from urllib.parse import quote_from_bytes

from waitress.utilities import build_http_date

from jev import access_log, logs, signals
from jev.access_log import CLIENT_CLOSED_REQUEST
from jev.arguments import Parser
from jev.gateway.http1 import Answer, Headers, end_to_end
from jev.gateway.settings import GatewaySettings
from jev.gateway.upstream import ClientGone, ExchangeFailed, OutOfSockets, Request, Unreachable
from jev.gateway.workers import Workers
from jev.http.channel import Channel, Task
from jev.http.errors import error_body
from jev.http.hosts import host_refused
from jev.http.parser import HEAD_ACCEPTED, Refusal, RequestHead
from jev.server import Server, bind
from jev.settings import SettingsError, misspelt

logger = logging.getLogger("jev.gateway.app")

DECISION_SECONDS = 60.0
RETRY_AFTER_DRAIN = ("Retry-After", "5")
METHODS = {"/v1/systemone": "POST", "/health": "GET", "/v1/models": "GET"}      # what is forwarded
MAX_BODY_BYTES = 4 << 20                # the worker's, jev.contract's, which would load NumPy
URL_CHARACTERS = bytes(range(0x21, 0x7F))
ABSOLUTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*")  # before the path, in a target as proxies get it


class GatewayTask(Task):
    """Hands the header lines to the application, and writes a response's headers as the application gave them."""

    def get_environment(self) -> dict[str, Any]:
        environ = super().get_environment()
        environ["jev.header_items"] = self.request.header_items
        return environ

    def build_response_header(self) -> bytes:
        # Waitress would re-spell and sort the names and add `Via: waitress`. Every response here is whole, so its
        # length is known and chunking never arises.
        wants = self.request.headers.get("CONNECTION", "")          # the parser has made one word of a list
        keep = (wants != "close" if self.version == "1.1" else wants == "keep-alive") and not self.channel.server.draining
        lines = [f"HTTP/{self.version} {self.status}"]
        lines += [f"{name}: {value}" for name, value in self.response_headers]
        if not any(name.lower() == "date" for name, _ in self.response_headers):
            lines.append(f"Date: {build_http_date(self.start_time)}")
        if not keep:
            self.close_on_finish = True
            lines.append("Connection: close")
        elif self.version == "1.0":
            lines.append("Connection: Keep-Alive")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class GatewayChannel(Channel):
    task_class = GatewayTask


@dataclass
class _Reply:
    """A whole response, which goes out as it is; `own` when no worker made it."""

    status: int
    reason: str
    headers: Headers
    body: bytes
    own: bool = True


def create_app(settings: GatewaySettings, workers: Workers) -> Callable[[dict[str, Any], Callable[..., Any]], _Sent]:
    """The gateway as a WSGI application. It needs `GatewayChannel` under it for headers as they were sent."""
    slots = threading.BoundedSemaphore(settings.queue)
    get_seconds = settings.health_timeout_ms / 1000
    hosts = settings.hosts()

    def refusal(head: RequestHead) -> _Reply | None:
        """The answer to a request that no worker needs to see, known from its head alone."""
        if hosts is not None and host_refused(head.headers.get("HOST"), head.target, hosts):
            return _error(403, "forbidden", "this gateway answers for the loopback's names and addresses only, and for those "
                                            "in OMNI_JEV_ALLOWED_HOSTS")
        path = target_path(head.target)
        expected = METHODS.get(path)
        if expected is None:
            known = ", ".join(f"{method} {path}" for path, method in METHODS.items())
            return _error(404, "not_found", f"no such path; there are {known}")
        if head.method != expected and (head.method, expected) != ("HEAD", "GET"):
            allow = "GET, HEAD" if expected == "GET" else expected
            return _error(405, "method_not_allowed", "this path does not take this method", ("Allow", allow))
        if workers.draining and path == "/health":
            return _json(503, {"status": "draining"}, RETRY_AFTER_DRAIN)
        if workers.draining:
            return _error(503, "overloaded_error", "the gateway is shutting down", RETRY_AFTER_DRAIN)
        if (head.content_length or 0) > MAX_BODY_BYTES:
            return _too_large()
        return None

    def refuse_head(head: RequestHead) -> Refusal | None:
        started = time.perf_counter()
        reply = refusal(head)
        if reply is None:
            return None
        request_id = head.headers.get("X_REQUEST_ID", "")
        _finish(head.method, head.target, request_id, head.content_length or 0, None, reply, started)()
        return Refusal(reply.status, [item for item in reply.headers if item[0] != "Content-Length"], reply.body)

    def answer(request: Request) -> _Reply:
        if request.method == "GET":
            return _forward(workers.get, request, get_seconds)
        if request.length > MAX_BODY_BYTES:         # it came in chunks
            return _too_large()
        if not slots.acquire(blocking=False):
            return _error(503, "overloaded_error", "too many requests in hand", ("Retry-After", "1"))
        try:
            return _forward(workers.decide, request, DECISION_SECONDS)
        finally:
            slots.release()

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> _Sent:
        started = time.perf_counter()
        request = None
        reply = None if environ.get(HEAD_ACCEPTED) else refusal(RequestHead.of(environ))
        if reply is None:
            request = _request(environ)
            try:
                reply = answer(request)
            except BaseException as error:          # whatever it is; without its message, which may quote the request
                logger.error("a request failed: %s at\n%s", type(error).__name__, "".join(format_tb(error.__traceback__)))
                reply = _error(500, "internal_error", "internal error")
        line = _finish(environ["REQUEST_METHOD"], environ["REQUEST_URI"], environ.get("HTTP_X_REQUEST_ID", ""),
                       int(environ.get("CONTENT_LENGTH") or 0), request, reply, started)
        start_response(f"{reply.status} {reply.reason}", reply.headers)
        return _Sent(() if environ["REQUEST_METHOD"] == "HEAD" else (reply.body,), line)

    app.refuse_head, app.max_body_bytes = refuse_head, MAX_BODY_BYTES       # type: ignore[attr-defined]
    return app


def target_path(target: str) -> str:
    """The path of a request target as it was sent: neither unquoted nor put in order, which could make it another one."""
    if not target.startswith("/") and (authority := ABSOLUTE.match(target)):
        target = target[authority.end():]
    return target.partition("?")[0]


def _request(environ: dict[str, Any]) -> Request:
    path = target = target_path(environ["REQUEST_URI"])
    if environ["QUERY_STRING"]:
        # Bytes that no URL may hold are percent-encoded; any other query passes untouched.
        target += "?" + quote_from_bytes(environ["QUERY_STRING"].encode("latin-1"), safe=URL_CHARACTERS)
    # Expect was answered here, when the client's body was taken in.
    headers = [item for item in end_to_end(environ["jev.header_items"]) if item[0].lower() not in ("host", "expect")]
    return Request(METHODS[path], target, headers, environ["wsgi.input"],
                   int(environ.get("CONTENT_LENGTH") or 0), environ["waitress.client_disconnected"])


def _forward(send: Callable[[Request, float], Answer], request: Request, seconds: float) -> _Reply:
    """The answer that `send` (a method of Workers) gets to the request, or an error that says why there is none."""
    deadline = time.monotonic() + seconds
    try:
        answer = send(request, deadline)
    except (Unreachable, ExchangeFailed) as error:
        if time.monotonic() >= deadline:
            return _error(504, "gateway_timeout", "the worker did not answer in time")
        return _error(502, "bad_gateway", str(error))
    except OutOfSockets as error:
        logger.error("%s", error.reason)
        return _error(503, "overloaded_error", str(error), ("Retry-After", "1"))
    except ClientGone:
        return _error(CLIENT_CLOSED_REQUEST, "client_closed_request", "the client left")
    if answer.status not in (204, 304):
        answer.headers.append(("Content-Length", str(len(answer.body))))
    return _Reply(answer.status, answer.reason, answer.headers, answer.body, own=False)


def _error(status: int, error_type: str, message: str, *headers: tuple[str, str]) -> _Reply:
    return _json(status, error_body(error_type, message), *headers)


def _too_large() -> _Reply:
    return _error(413, "request_too_large", f"the body is larger than {MAX_BODY_BYTES} bytes")


def _json(status: int, content: dict[str, Any], *headers: tuple[str, str]) -> _Reply:
    body = json.dumps(content).encode()
    reason = "Client Closed Request" if status == CLIENT_CLOSED_REQUEST else HTTPStatus(status).phrase
    fixed = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
    return _Reply(status, reason, [*fixed, *headers], body)


def _finish(method: str, target: str, given: str, length: int, request: Request | None, reply: _Reply,
            started: float) -> Callable[[], None]:
    """What writes the request's line in the access log. An answer of our own gets a request id first, `given` by the client
    or made up; a worker's has one."""
    if reply.own:
        id = access_log.request_id(given)
        reply.headers += [(name, id) for name in access_log.REQUEST_ID_HEADERS]
    else:
        id = access_log.request_id(*(value for name, value in reply.headers if name.lower() == "x-request-id"), given)
    worker = {} if request is None or request.worker is None else {
        "worker": request.worker, "worker_ms": round(1000 * request.worker_seconds, 3)}
    return functools.partial(
        access_log.write, id, method, target_path(target), reply.status, time.perf_counter() - started, length,
        len(reply.body), **worker)


class _Sent:
    """A response's blocks. Its line in the log is written when they are sent, so that no answer waits for it."""

    def __init__(self, blocks: Sequence[bytes], line: Callable[[], None]) -> None:
        self._blocks = blocks
        self.close = line                       # WSGI's: called once all is sent, or cannot be

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._blocks)


class Gateway(Server):
    """The gateway on a bound socket. `Server` has `run` and `stop`; the workers stand where it expects an engine."""

    def __init__(self, settings: GatewaySettings, sock: socket.socket) -> None:
        self.workers = Workers(settings.backends(), settings.health_timeout_ms / 1000, settings.max_response_bytes)
        super().__init__(create_app(settings, self.workers), self.workers, settings, sock)
        self._waitress.channel_class = GatewayChannel

    def run(self) -> bool:
        try:
            return super().run()
        finally:
            self.workers.close()


def main(argv: Sequence[str] | None = None) -> int:
    """`jev frontend`: serve until SIGTERM, SIGINT or SIGHUP. 0 when everything in hand was answered, 2 for a wrong setting."""
    parser = Parser(
        prog="jev frontend", description="A gateway in front of one or more workers.",
        epilog="Each flag overrides the environment variable of its name: --bind is OMNI_JEV_BIND.")
    for f in fields(GatewaySettings):
        parser.add_argument("--" + f.name.replace("_", "-"), help=f"{f.metadata['help']} (default: {f.default})")
    flags = vars(parser.parse_args(argv))
    names = ["OMNI_JEV_" + f.name.upper() for f in fields(GatewaySettings)]
    for remark in misspelt(os.environ, names, names):
        print(f"jev frontend: {remark}", file=sys.stderr)
    with logs.service(logging.INFO):
        signals.on_stop(lambda: logs.leave(0))          # nobody waits for anything yet
        return serve(flags)


def serve(flags: Mapping[str, str | None]) -> int:
    """Serve with `flags` until a signal; the exit status."""
    try:
        settings = GatewaySettings.from_environment(os.environ, **flags)
        sock = bind(*settings.address())
    except SettingsError as error:
        for line in str(error).split("\n"):
            print(f"jev frontend: {line}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"jev frontend: cannot listen on {settings.bind}: {error.strerror}", file=sys.stderr)
        return 1
    gateway = Gateway(settings, sock)
    signals.on_stop(gateway.stop)
    logger.info("listening on %s, %d worker(s)", gateway.url, len(gateway.workers))
    if not gateway.run():
        logs.leave(1)           # requests are still under way, and the end would wait for their threads
    return 0
