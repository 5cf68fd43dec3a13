"""The worker's HTTP face: a Flask application over an engine, every status and error body of the contract.

    POST /v1/systemone    decide          GET /health    ready?          GET /v1/models    what is served

Every refusal has the contract's error shape. ``/health`` refuses nothing: with 503 too it shows the state that it was
asked for, as ``status``.

The application knows the engine's ``answer`` and the two objects it shows, and no more. Each request leaves one JSON
line in the log ``jev.access``: who asked what never appears in it, nor in any other log.
"""

from __future__ import annotations

import hmac
import json
import logging
import re
import time
import traceback
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import flask
from flask import Flask
from werkzeug import Request, Response
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from jev.contract import MAX_BODY_BYTES
from jev.engine import Cancelled, ContractError, Engine, InferenceError, Refused, RequestTooLarge
from jev.scheduler import SHUTDOWN_RETRY_SECONDS
from jev.settings import Settings

CLIENT_CLOSED_REQUEST = 499             # for the log: nobody is there to receive it
EXCHANGE = "jev.exchange"                 # of the WSGI environment
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}", re.ASCII)
# The second name is the one under which System One clients look.
REQUEST_ID_HEADERS = ("X-Request-Id", "X-TypeSafe-Request-Id")

logger = logging.getLogger("jev.app")
access_log = logging.getLogger("jev.access")


class _Request(Request):
    # One more than allowed: a body of unknown length ends there without a word, and is recognised by that byte.
    max_content_length = MAX_BODY_BYTES + 1


def create_app(engine: Engine, settings: Settings) -> Flask:
    """The WSGI application that serves ``engine``; of ``settings`` it needs the key."""
    app = Flask("jev", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = _Request.max_content_length
    app.url_map.merge_slashes = False
    key = None if settings.api_key is None else settings.api_key.encode()

    def begin(request: Request) -> Response | None:
        given = request.headers.get("X-Request-Id", "")
        request.environ[EXCHANGE] = _Exchange(given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex)
        if key is not None and request.path.startswith("/v1/") and not _authorized(request, key):
            response = _error(401, "authentication_error", "a valid key is required: Authorization: Bearer KEY")
            response.headers["WWW-Authenticate"] = "Bearer"
            return response
        return None

    def decide(request: Request) -> Response:
        if request.mimetype != "application/json":
            return _error(415, "unsupported_media_type", "Content-Type must be application/json")
        if request.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
            response = _error(415, "unsupported_media_type", "a compressed body is not understood: send it as it is")
            response.headers["Accept-Encoding"] = "identity"
            return response
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
    app.before_request(lambda: begin(flask.request))
    for kind, handler in HANDLERS:
        app.register_error_handler(kind, lambda error, handler=handler: handler(error, flask.request))
    app.after_request(lambda response: _finish(flask.request, response))
    routed = app.wsgi_app

    def wsgi_app(environ: dict[str, Any], start_response: Callable) -> Iterable[bytes]:
        """Decisions go around Flask's routing and contexts, which take 0.15 ms, and half a millisecond on a processor
        that has had nothing to do while the GPU worked."""
        if environ["REQUEST_METHOD"] != "POST" or environ["PATH_INFO"] != "/v1/systemone":
            return routed(environ, start_response)
        request = _Request(environ)
        try:
            response = _finish(request, begin(request) or decide(request))
        except Exception as error:
            handler = next(handler for kind, handler in HANDLERS if isinstance(error, kind))
            response = _finish(request, handler(error, request))
        return response(environ, start_response)

    app.wsgi_app = wsgi_app
    return app


@dataclass
class _Exchange:
    """What is known of a request besides itself, kept in its WSGI environment."""
    id: str
    started: float = field(default_factory=time.perf_counter)
    answered: dict[str, Any] = field(default_factory=dict)


def _authorized(request: Request, key: bytes) -> bool:
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    # WSGI hands header bytes over as latin-1 text. Both sides are compared whatever the scheme, in constant time.
    same = hmac.compare_digest(given.strip().encode("latin-1", "replace"), key)
    return same and scheme.lower() == "bearer"


def _json(status: int, value: Any) -> Response:
    return Response(json.dumps(value, allow_nan=False), status, mimetype="application/json")


def _error(status: int, error_type: str, message: str) -> Response:
    return _json(status, {"error": message, "detail": {"error_type": error_type, "message": message}})


def _refused_by_contract(error: ContractError, request: Request) -> Response:
    return _json(422, {"error": str(error), "detail": error.errors})


def _refused_for_now(error: Refused, request: Request) -> Response:
    response = _error(503, "overloaded_error", str(error))
    response.headers["Retry-After"] = str(error.retry_after)
    return response


def _too_large(error: RequestTooLarge, request: Request) -> Response:
    return _error(413, "request_too_large", str(error))


def _failed(error: InferenceError, request: Request) -> Response:
    return _error(500, "inference_error", str(error))


def _client_gone(error: Cancelled, request: Request) -> Response:
    return _error(CLIENT_CLOSED_REQUEST, "client_closed_request", "the client left")


def _http_error(error: HTTPException, request: Request) -> Response:
    if isinstance(error, RequestEntityTooLarge):
        return _error(413, "request_too_large", f"the body is larger than {MAX_BODY_BYTES} bytes")
    name = error.name.lower().replace(" ", "_")
    message = {404: "no such path", 405: "this path does not take this method"}.get(error.code, error.name)
    response = _error(error.code, name, message)
    for header, value in error.get_headers():
        if header.lower() != "content-type":            # such as Allow
            response.headers[header] = value
    return response


def _unexpected(error: Exception, request: Request) -> Response:
    # Without the message, which may quote the request.
    logger.error("request %s failed: %s at\n%s", request.environ[EXCHANGE].id, type(error).__name__,
                 "".join(traceback.format_tb(error.__traceback__)))
    return _error(500, "internal_error", "internal error")


HANDLERS = ((ContractError, _refused_by_contract), (Refused, _refused_for_now), (RequestTooLarge, _too_large),
            (InferenceError, _failed), (Cancelled, _client_gone), (HTTPException, _http_error), (Exception, _unexpected))


def _finish(request: Request, response: Response) -> Response:
    exchange = request.environ[EXCHANGE]
    for header in REQUEST_ID_HEADERS:
        response.headers[header] = exchange.id
    access_log.info(json.dumps({
        "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"), "id": exchange.id,
        "method": request.method[:16], "path": request.path[:200], "status": response.status_code,
        "ms": round(1000 * (time.perf_counter() - exchange.started), 3), "bytes_in": request.content_length or 0,
        "bytes_out": response.content_length or 0, **exchange.answered}))
    return response
