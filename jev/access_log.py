"""The access log: one JSON line for each request, from the worker and the gateway alike, in the log ``jev.access``.

Who asked what never appears in it: no body, query, header, key or address of a client, but for a request id that is plain.
"""

from __future__ import annotations

import json
import logging
import re
import uuid
from datetime import datetime, timezone
from typing import Any

CLIENT_CLOSED_REQUEST = 499             # the client left: nobody is there to receive it
# The second name is the one under which System One clients look.
REQUEST_ID_HEADERS = ("X-Request-Id", "X-TypeSafe-Request-Id")
PLAIN = re.compile(r"[A-Za-z0-9._:-]{1,64}", re.ASCII)

logger = logging.getLogger("jev.access")


def request_id(*given: str) -> str:
    """The first that is plain, or else one made up."""
    return next(filter(PLAIN.fullmatch, given), None) or uuid.uuid4().hex


def write(id: str, method: str, path: str, status: int, seconds: float, bytes_in: int, bytes_out: int, **more: Any) -> None:
    """A line. ``seconds`` are those from the whole request to its answer; ``path`` is without the query."""
    logger.info(json.dumps({
        "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"), "id": id, "method": method[:16],
        "path": path[:200], "status": status, "ms": round(1000 * seconds, 3), "bytes_in": bytes_in, "bytes_out": bytes_out,
        **more}))
