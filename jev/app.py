"""The worker's HTTP face: a Flask application over an engine, every status and error body of the contract.

    POST /v1/systemone    decide          GET /health    ready?          GET /v1/models    what is served

What a request's head decides (host, key, path, method, media type, length, whether the worker drains) is decided by
``refuse_head``, which the server asks before it takes in a body; behind another server the application asks itself.
Every refusal has the contract's error shape. ``/health`` refuses nothing: with 503 too it shows the state that it was
asked for, as ``status``.

The application knows the engine's ``answer`` and the two objects it shows, and no more. Each request leaves one JSON
line in the log ``jev.access``: who asked what never appears in it, nor in any other log.
"""

from __future__ import annotations

import hmac
import json
import logging
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import flask
from flask import Flask
from werkzeug import Request, Response
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge
from werkzeug.http import parse_options_header

from jev import access_log
from jev.access_log import CLIENT_CLOSED_REQUEST
from jev.contract import MAX_BODY_BYTES
from jev.engine import Cancelled, ContractError, Engine, InferenceError, Refused, RequestTooLarge
from jev.http.errors import error_body
from jev.http.hosts import checked_hosts, host_refused
from jev.scheduler import SHUTDOWN_RETRY_SECONDS
from jev.server import HEAD_ACCEPTED, Refusal, RequestHead
from jev.settings import Settings

MAX_LOGGED_ERRORS = 3
KNOWN_NAMES = frozenset(("body", "model", "state", "questions", "type", "instructions", "criteria", "true", "false"))
EXCHANGE = "jev.exchange"                 # of the WSGI environment
_PATHS = "POST /v1/systemone, GET /health and GET /v1/models"

logger = logging.getLogger("jev.app")


class _Request(Request):
    # One more than allowed: a body of unknown length ends there without a word, and is recognised by that byte.
    max_content_length = MAX_BODY_BYTES + 1


def create_app(engine: Engine, settings: Settings) -> Flask:
    """The WSGI application that serves ``engine``; of ``settings`` it needs the host, the key and the allowed hosts."""
    app = Flask("jev", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = _Request.max_content_length
    app.url_map.merge_slashes = False
    urls = app.url_map.bind("worker")
    key = None if settings.api_key is None else settings.api_key.encode()
    hosts = checked_hosts(settings.host, settings.api_key, settings.allowed_hosts)

    def refusal(head: RequestHead) -> Response | None:
        """What is wrong with a request that its head shows. The first of several is told."""
        if hosts is not None and host_refused(head.headers.get("HOST"), head.target, hosts):
            return _error(403, "forbidden", "this worker answers for the loopback's names and addresses only, and for those "
                                            "in OPEN_JEV_ALLOWED_HOSTS")
        if key is not None and head.path.startswith("/v1/") and not _authorized(head, key):
            response = _error(401, "authentication_error", "a valid key is required: Authorization: Bearer KEY")
            response.headers["WWW-Authenticate"] = "Bearer"
            return response
        if head.method != "POST" or head.path != "/v1/systemone":
            try:
                urls.match(head.path.encode("latin-1").decode("utf-8", "replace"), head.method)
            except HTTPException as error:
                return _described(error)
        else:
            if parse_options_header(head.headers.get("CONTENT_TYPE"))[0].lower() != "application/json":
                return _error(415, "unsupported_media_type", "Content-Type must be application/json")
            if head.headers.get("CONTENT_ENCODING", "identity").lower() != "identity":
                response = _error(415, "unsupported_media_type", "a compressed body is not understood: send it as it is")
                response.headers["Accept-Encoding"] = "identity"
                return response
            if engine.draining:
                return _try_later("the worker is shutting down", SHUTDOWN_RETRY_SECONDS)
        if head.content_length is not None and head.content_length > MAX_BODY_BYTES:
            return _described(RequestEntityTooLarge())
        return None

    def refuse_head(head: RequestHead) -> Refusal | None:
        response = refusal(head)
        if response is None:
            return None
        _finish(_Exchange(head.method, head.path, head.headers.get("X_REQUEST_ID"), head.content_length), response)
        headers = [(name, value) for name, value in response.headers if name != "Content-Length"]
        return Refusal(response.status_code, headers, response.get_data())

    def decide(request: Request) -> Response:
        body = request.get_data(cache=False)
        if len(body) > MAX_BODY_BYTES:
            raise RequestEntityTooLarge
        answer = engine.answer(body, request.environ.get("waitress.client_disconnected"))
        request.environ[EXCHANGE].answered = {
            "questions": len(answer["answers"]), "candidates": answer["metadata"]["candidate_sequences"],
            "rows": answer["metadata"]["prefix_cache"]["rows"], "cached": answer["metadata"]["prefix_cache"]["cached"],
            "inference_ms": round(1000 * answer["metadata"]["inference_seconds"], 3)}
        return _json(200, answer)

    def health(request: Request) -> Response:
        health = engine.health()
        response = _json(200 if health["status"] == "ready" else 503, health)
        if health["status"] == "draining":
            response.headers["Retry-After"] = str(SHUTDOWN_RETRY_SECONDS)
        return response

    def models(request: Request) -> Response:
        return _json(200, engine.models())

    for path, view, method in (("/v1/systemone", decide, "POST"), ("/health", health, "GET"), ("/v1/models", models, "GET")):
        app.add_url_rule(path, view.__name__, lambda view=view: view(flask.request), methods=[method],
                         provide_automatic_options=False)
    for kind, handler in HANDLERS:
        app.register_error_handler(kind, lambda error, handler=handler: handler(error, flask.request))
    app.after_request(lambda response: _finish(flask.request.environ[EXCHANGE], response))
    routed = app.wsgi_app

    def wsgi_app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Decisions go around Flask's routing and contexts, which take 0.15 ms, and half a millisecond on a processor
        that has had nothing to do while the GPU worked."""
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        environ[EXCHANGE] = exchange = _Exchange(
            method, path, environ.get("HTTP_X_REQUEST_ID"), int(environ.get("CONTENT_LENGTH") or 0),
            environ.get("waitress.client_disconnected"))
        request = _Request(environ)
        try:
            response = None if environ.get(HEAD_ACCEPTED) else refusal(RequestHead.of(environ))
            if response is None:
                if method != "POST" or path != "/v1/systemone":
                    return routed(environ, start_response)
                response = decide(request)
        except BaseException as error:      # of Flask's too: it lets pass what is no Exception, such as a library's panic
            handler = next((handler for kind, handler in HANDLERS if isinstance(error, kind)), _unexpected)
            response = handler(error, request)
        return _finish(exchange, response)(environ, start_response)

    app.refuse_head, app.max_body_bytes = refuse_head, MAX_BODY_BYTES       # type: ignore[attr-defined]
    app.wsgi_app = wsgi_app             # type: ignore[method-assign]
    return app


class _Exchange:
    """A request as the log shows it: kept in its WSGI environment once the application has it."""

    def __init__(self, method: str, path: str, given_id: str | None, bytes_in: int | None,
                 gone: Callable[[], bool] | None = None) -> None:
        """path: as in PATH_INFO, latin-1 text. given_id: what the client wants its request to be called. gone: whether the
        client has left."""
        self.started = time.perf_counter()
        self.id = access_log.request_id(given_id or "")
        self.method, self.path = method, path.encode("latin-1").decode("utf-8", "replace")
        self.bytes_in, self.gone = bytes_in or 0, gone
        self.answered: dict[str, Any] = {}


def _authorized(head: RequestHead, key: bytes) -> bool:
    scheme, _, given = head.headers.get("AUTHORIZATION", "").partition(" ")
    # WSGI hands header bytes over as latin-1 text. Both sides are compared whatever the scheme, in constant time.
    same = hmac.compare_digest(given.strip().encode("latin-1", "replace"), key)
    return same and scheme.lower() == "bearer"


def _json(status: int, value: Any, errors: Sequence[dict[str, Any]] = ()) -> Response:
    """errors: why it is no answer, for the log: {"type"} or {"type", "loc"} of each."""
    response = Response(json.dumps(value, allow_nan=False), status, mimetype="application/json")
    response.logged_errors = errors     # type: ignore[attr-defined]
    return response


def _error(status: int, error_type: str, message: str) -> Response:
    return _json(status, error_body(error_type, message), [{"type": error_type}])


def _refused_by_contract(error: ContractError, request: Request) -> Response:
    logged = [{"type": e["type"], "loc": _place(e["loc"])} for e in error.errors[:MAX_LOGGED_ERRORS]]
    return _json(422, {"error": str(error), "detail": error.errors}, logged)


def _place(loc: list[str | int]) -> list[str | int]:
    """A loc for the log: names that the contract knows as they are, and "*" for those that the client chose."""
    return [part if isinstance(part, int) or part in KNOWN_NAMES else "*" for part in loc]


def _refused_for_now(error: Refused, request: Request) -> Response:
    return _try_later(str(error), error.retry_after)


def _try_later(message: str, seconds: int) -> Response:
    response = _error(503, "overloaded_error", message)
    response.headers["Retry-After"] = str(seconds)
    return response


def _too_large(error: RequestTooLarge, request: Request) -> Response:
    return _error(413, "request_too_large", str(error))


def _failed(error: InferenceError, request: Request) -> Response:
    return _error(500, "inference_error", str(error))


def _client_gone(error: Cancelled, request: Request) -> Response:
    return _error(CLIENT_CLOSED_REQUEST, "client_closed_request", "the client left")


def _http_error(error: HTTPException, request: Request) -> Response:
    return _described(error)


def _described(error: HTTPException) -> Response:
    if isinstance(error, RequestEntityTooLarge):
        return _error(413, "request_too_large", f"the body is larger than {MAX_BODY_BYTES} bytes")
    name = error.name.lower().replace(" ", "_")
    message = {404: f"no such path; there are {_PATHS}", 405: f"this path does not take this method; there are {_PATHS}"}
    code = error.code or 500
    response = _error(code, name, message.get(code, error.name))
    for header, value in error.get_headers():
        if header.lower() != "content-type":            # such as Allow
            response.headers[header] = value
    return response


def _unexpected(error: BaseException, request: Request) -> Response:
    # Without the message, which may quote the request.
    logger.error("request %s failed: %s at\n%s", request.environ[EXCHANGE].id, type(error).__name__,
                 "".join(traceback.format_tb(error.__traceback__)))
    return _error(500, "internal_error", "internal error")


HANDLERS: tuple[tuple[type[Exception], Callable[[Any, Request], Response]], ...] = (
    (ContractError, _refused_by_contract), (Refused, _refused_for_now), (RequestTooLarge, _too_large),
    (InferenceError, _failed), (Cancelled, _client_gone), (HTTPException, _http_error), (Exception, _unexpected))


def _finish(exchange: _Exchange, response: Response) -> Response:
    status = response.status_code
    errors = response.logged_errors     # type: ignore[attr-defined]
    explained: dict[str, Any] = {"errors": errors} if errors else {}
    if exchange.gone is not None and exchange.gone():
        explained["answer"], status = status, CLIENT_CLOSED_REQUEST         # nobody takes it any more
    for header in access_log.REQUEST_ID_HEADERS:
        response.headers[header] = exchange.id
    access_log.write(exchange.id, exchange.method, exchange.path, status, time.perf_counter() - exchange.started,
                     exchange.bytes_in, response.content_length or 0, **exchange.answered, **explained)
    return response
