"""The gateway, `jev frontend`: one address in front of one or more workers.

`POST /v1/systemone` and `GET /health` go to a worker and come back as they were: body bytes, status, repeated and
oddly spelt headers included. Everything else is answered here, in the worker's own form of error. How one
worker is spoken to is in `jev.gateway.upstream`, how one is chosen among several in `jev.gateway.workers`.

A worker's answer is read whole before the first byte of it goes out, because a status cannot be taken back: an
answer that breaks off, is too large or too slow becomes a clean 502 or 504 instead of half a 200.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import re
import socket
import ssl
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from urllib.parse import quote_from_bytes, urlsplit

from flask import Flask, request
from waitress.parser import get_header_lines
from waitress.utilities import build_http_date
from werkzeug.exceptions import HTTPException
from werkzeug.http import HTTP_STATUS_CODES

from jev import logs, signals
from jev.arguments import Parser
from jev.gateway.upstream import Answer, ClientGone, ExchangeFailed, OutOfSockets, Unreachable, end_to_end
from jev.gateway.workers import Workers
from jev.server import Server, _Channel, _Parser, _Task, bind
from jev.settings import SettingsError

logger = logging.getLogger("jev.gateway.app")

DECISION_SECONDS = 60.0
RETRY_AFTER_DRAIN = ("Retry-After", "5")
MIB = 1024 * 1024
URL_CHARACTERS = bytes(range(0x21, 0x7F))
ABSOLUTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#]*")  # before the path, in a target as proxies get it


def _setting(default: str | int, high: int, help: str):
    return field(default=default, metadata={"high": high, "help": help})


@dataclass(frozen=True)
class GatewaySettings:
    """What `jev frontend` can be told: each field is `OMNI_JEV_<NAME>`, and the flag of that name."""

    bind: str = _setting("127.0.0.1:8080", 0, "IP address and port to listen on; port 0 takes a free one")
    backend_url: str = _setting("http://127.0.0.1:8000", 0, "URL of the worker, or several separated by commas")
    health_timeout_ms: int = _setting(2000, 60_000, "milliseconds that GET /health may take")
    max_response_bytes: int = _setting(16 * MIB, 1024 * MIB, "largest body that is accepted from a worker")
    queue: int = _setting(256, 2048, "decisions in hand at a time; one more is answered 503")
    drain_seconds: int = _setting(60, 86_400, "how long SIGTERM waits for requests in hand before giving up on them")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], **flags: str | None) -> GatewaySettings:
        """Settings from `environ`, overridden by `flags` (field name -> text, None when not given).

        A variable set to nothing counts as unset. Raises SettingsError, which never shows a value: a URL may hold
        a password, and whatever was meant to be a number may be one.
        """
        values = {}
        for f in fields(cls):
            name = "OMNI_JEV_" + f.name.upper()
            text = environ.get(name, "").strip()
            if flags.get(f.name) is not None:
                name, text = "--" + f.name.replace("_", "-"), flags[f.name].strip()
            elif not text:
                continue
            high = f.metadata["high"]
            if high and not (text.isascii() and text.isdigit() and len(text) < 20 and 1 <= int(text) <= high):
                raise SettingsError(f"{name}: expected an integer in 1..{high}")
            values[f.name] = int(text) if high else text
        settings = cls(**values)
        settings.address()
        if any(url.startswith("https:") for url in settings.backends()) and environ.get("SSL_CERT_FILE"):
            # OpenSSL passes over a file that it cannot read, and then no worker's certificate would be good.
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(environ["SSL_CERT_FILE"])
            except OSError as error:
                why = "no certificates in it" if isinstance(error, ssl.SSLError) else error.strerror
                raise SettingsError(f"SSL_CERT_FILE: {why}") from None
        return settings

    def address(self) -> tuple[str, int]:
        """The IP address and port of `bind`."""
        host, _, port = self.bind.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        try:
            ip = ipaddress.ip_address(host[1:-1] if bracketed else host)
            if (ip.version == 6) != bracketed or not (port.isascii() and port.isdigit()) or int(port[:6]) > 65535:
                raise ValueError
        except ValueError:
            message = "OMNI_JEV_BIND: expected an IP address and a port, as in 127.0.0.1:8080 or [::1]:8080"
            raise SettingsError(message) from None
        return str(ip), int(port)

    def backends(self) -> list[str]:
        """The worker URLs of `backend_url`, without a trailing slash."""
        return parse_backends(self.backend_url)


def parse_backends(text: str) -> list[str]:
    """The worker URLs of a comma-separated list. Raises SettingsError, which names the entry by number only."""
    urls: list[str] = []
    entries = text.split(",")
    for number, entry in enumerate(entries, 1):
        which = "OMNI_JEV_BACKEND_URL" + (f", entry {number}" if len(entries) > 1 else "")
        url = entry.strip()
        if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
            raise SettingsError(f"{which}: the URL holds characters that a URL cannot")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise SettingsError(f"{which}: the host or port is not valid") from None
        if parts.scheme not in ("http", "https"):
            raise SettingsError(f"{which}: the URL must start with http:// or https://")
        if "@" in parts.netloc:
            raise SettingsError(f"{which}: the URL must not hold credentials")
        if "?" in url or "#" in url:
            raise SettingsError(f"{which}: the URL must not hold a query or fragment")
        if not parts.hostname or port == 0:
            raise SettingsError(f"{which}: the URL must name a host, and a port other than 0 if any")
        url = url.rstrip("/")
        if url in urls:
            raise SettingsError(f"{which}: the same URL stands in the list twice")
        urls.append(url)
    return urls


class GatewayParser(_Parser):
    """Keeps the header lines as they were sent; WSGI's own form joins repetitions and drops names with underscores."""

    header_items: list[tuple[str, str]] = []

    def parse_header(self, header_plus: bytes) -> None:
        super().parse_header(header_plus)
        lines = get_header_lines(header_plus[header_plus.index(b"\r\n") + 2 :])
        pairs = (line.decode("latin-1").partition(":") for line in lines)
        self.header_items = [(name, value.strip(" \t")) for name, _, value in pairs]


class GatewayTask(_Task):
    """Hands the header lines to the application, and writes a response's headers as the application gave them."""

    def get_environment(self) -> dict:
        environ = super().get_environment()
        environ["jev.header_items"] = self.request.header_items
        return environ

    def build_response_header(self) -> bytes:
        # Waitress would re-spell and sort the names and add `Via: waitress`. Every response here is whole, so its
        # length is known and chunking never arises.
        wants = [token.strip() for token in self.request.headers.get("CONNECTION", "").lower().split(",")]
        keep = "close" not in wants if self.version == "1.1" else "keep-alive" in wants
        keep = keep and not self.channel.server.draining
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


class GatewayChannel(_Channel):
    parser_class = GatewayParser
    task_class = GatewayTask


class _Reply:
    """A whole response as a WSGI application: what it is given goes out as it is."""

    def __init__(self, status: str, headers: list[tuple[str, str]], body: bytes) -> None:
        self.status, self.headers, self.body = status, headers, body

    def __call__(self, environ: dict, start_response: Callable) -> list[bytes]:
        start_response(self.status, self.headers)
        return [self.body]


def create_app(settings: GatewaySettings, workers: Workers) -> Flask:
    """The gateway as a Flask application. It needs `GatewayChannel` under it for headers as they were sent."""
    app = Flask("jev.gateway.app", static_folder=None)
    app.url_map.merge_slashes = False
    slots = threading.BoundedSemaphore(settings.queue)
    health_seconds = settings.health_timeout_ms / 1000

    def decide(environ: dict) -> _Reply:
        if workers.draining:
            return _error(503, "overloaded_error", "the gateway is shutting down", RETRY_AFTER_DRAIN)
        if not slots.acquire(blocking=False):
            return _error(503, "overloaded_error", "too many requests in hand", ("Retry-After", "1"))
        try:
            return _forward(workers.decide, environ, DECISION_SECONDS)
        finally:
            slots.release()

    def health(environ: dict) -> _Reply:
        if workers.draining:
            return _json(503, {"status": "draining"}, RETRY_AFTER_DRAIN)
        return _forward(workers.health, environ, health_seconds)

    for path, view, method in (("/v1/systemone", decide, "POST"), ("/health", health, "GET")):
        app.add_url_rule(path, view.__name__, lambda view=view: view(request.environ), methods=[method],
                         provide_automatic_options=False)

    @app.errorhandler(HTTPException)
    def refused(error: HTTPException) -> _Reply:
        allow = [(name, value) for name, value in error.get_headers() if name == "Allow"]
        name = error.name.lower().replace(" ", "_")
        message = {404: "no such path", 405: "this path does not take this method"}.get(error.code, error.name)
        return _error(error.code or 500, name, message, *allow)

    # Flask's routing and contexts take 0.1 ms, a quarter of what the gateway adds; the two requests that it is
    # there for go around them.
    direct = {("POST", "/v1/systemone"): decide, ("GET", "/health"): health}
    routed = app.wsgi_app

    def wsgi_app(environ: dict, start_response: Callable) -> Iterable[bytes]:
        # PATH_INFO is unquoted and has its first slashes joined: another path than the one that was asked for.
        if ABSOLUTE.sub("", environ["REQUEST_URI"]).partition("?")[0] != environ["PATH_INFO"]:
            environ["PATH_INFO"] = "/"
        reply = direct.get((environ["REQUEST_METHOD"], environ["PATH_INFO"]))
        try:
            return routed(environ, start_response) if reply is None else reply(environ)(environ, start_response)
        except BaseException as error:      # whatever it is; without its message, which may quote the request
            logger.error("a request failed: %s at\n%s", type(error).__name__,
                         "".join(traceback.format_tb(error.__traceback__)))
            return _error(500, "internal_error", "internal error")(environ, start_response)

    app.wsgi_app = wsgi_app
    return app


def _forward(send: Callable[..., Answer], environ: dict, seconds: float) -> _Reply:
    """Have `send` (a method of Workers) pass on the request of `environ`; its answer, or 502 or 504."""
    deadline = time.monotonic() + seconds
    target = environ["PATH_INFO"]
    if environ["QUERY_STRING"]:
        # Bytes that no URL may hold are percent-encoded; any other query passes untouched.
        target += "?" + quote_from_bytes(environ["QUERY_STRING"].encode("latin-1"), safe=URL_CHARACTERS)
    # Expect was answered here, when the client's body was taken in.
    headers = [item for item in end_to_end(environ["jev.header_items"]) if item[0].lower() not in ("host", "expect")]
    length = int(environ.get("CONTENT_LENGTH") or 0)
    gone = environ["waitress.client_disconnected"]
    try:
        answer = send(target, headers, environ["wsgi.input"], length, deadline, gone)
    except (Unreachable, ExchangeFailed) as error:
        if time.monotonic() >= deadline:
            return _error(504, "gateway_timeout", "the worker did not answer in time")
        return _error(502, "bad_gateway", str(error))
    except OutOfSockets as error:
        logger.error("%s", error.reason)
        return _error(503, "overloaded_error", str(error), ("Retry-After", "1"))
    except ClientGone:
        return _error(499, "client_closed_request", "the client left before its answer was there")
    if answer.status not in (204, 304):
        answer.headers.append(("Content-Length", str(len(answer.body))))
    return _Reply(f"{answer.status} {answer.reason}", answer.headers, answer.body)


def _error(status: int, error_type: str, message: str, *headers: tuple[str, str]) -> _Reply:
    return _json(status, {"error": message, "detail": {"error_type": error_type, "message": message}}, *headers)


def _json(status: int, content: dict, *headers: tuple[str, str]) -> _Reply:
    body = json.dumps(content).encode()
    reason = HTTP_STATUS_CODES.get(status, "Client Closed Request")
    fixed = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
    return _Reply(f"{status} {reason}", [*fixed, *headers], body)


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
    with logs.service(logging.INFO):
        signals.on_stop(lambda: logs.leave(0))          # nobody waits for anything yet
        return serve(flags)


def serve(flags: Mapping[str, str | None]) -> int:
    """Serve with `flags` until a signal; the exit status."""
    try:
        settings = GatewaySettings.from_environment(os.environ, **flags)
        sock = bind(*settings.address())
    except SettingsError as error:
        print(f"jev frontend: {error}", file=sys.stderr)
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
