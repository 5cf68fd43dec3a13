"""The body of an error, the same from the worker, the gateway and the server under both."""

from __future__ import annotations

from typing import Any


def error_body(error_type: str, message: str) -> dict[str, Any]:
    """What every error is in JSON, but for those with a list of places in the request as their detail."""
    return {"error": message, "detail": {"error_type": error_type, "message": message}}
