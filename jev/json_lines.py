"""Requests from a file or a pipe, as they come, in bounded memory; and their results in order."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Any, BinaryIO


def requests(file: BinaryIO, limit: int) -> Iterator[tuple[int, bytes | None]]:
    """(line number, body) of each request in ``file``: JSON Lines, or one JSON document over several lines.

    A body of more than ``limit`` bytes is None. Lines are given as they come. A first line that is no JSON by itself
    may begin a document: then what follows is read, up to ``limit``, until a line is a request of its own or the end
    tells.
    """
    with file:
        lines = _lines(file, limit)
        first = next(lines, None)
        if first is None:
            return
        held, size = [first], len(first[1] or b"")
        if first[1] is not None and _parsed(first[1]) is None:
            for line in lines:
                held.append(line)
                size += len(line[1] or b"")
                if size > limit or line[1] is None or _is_request(line[1]):
                    break
            else:
                if not _are_lines(held):
                    yield first[0], b"".join(body or b"" for _, body in held)
                    return
            if size > limit and not _are_lines(held):
                for _ in lines:                         # the rest of a document that is too large
                    pass
                yield first[0], None
                return
        yield from held
        yield from lines


def _lines(file: BinaryIO, limit: int) -> Iterator[tuple[int, bytes | None]]:
    """(number, line) of the lines that are not blank; None for a line of more than ``limit`` bytes, its end apart."""
    number = 0
    while line := file.readline(limit + 2):
        number += 1
        if len(line.rstrip(b"\r\n")) > limit:
            while line and not line.endswith(b"\n"):
                line = file.readline(1 << 16)
            yield number, None
        elif line.strip():
            yield number, line


def _are_lines(held: list[tuple[int, bytes | None]]) -> bool:
    """Whether lines of which the first is no JSON are requests, some of them broken, and not one document."""
    bodies = [body or b"" for _, body in held]
    if _parsed(b"".join(bodies)) is not None:
        return False
    return any(body.startswith(b"{") or isinstance(_parsed(body), dict) for body in bodies[1:])


def _is_request(line: bytes) -> bool:
    value = _parsed(line)
    return isinstance(value, dict) and "state" in value and "questions" in value


def _parsed(text: bytes) -> Any:
    """The value of a JSON text; None where it is none, and for null."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def in_order(pool: Executor, run: Callable[[Any], Any], requests: Iterator[tuple[int, Any]],
             window: int) -> Iterator[tuple[int, Any, Any]]:
    """(line, body, run(body)) in the order of ``requests``, each as soon as it is there, up to ``window`` under way.

    A thread takes the requests, so that one that has yet to come keeps no answer waiting. What it raises is raised
    here.
    """
    under_way: queue.Queue[Any] = queue.Queue(window)
    given_up = threading.Event()

    def take() -> None:
        last: BaseException | None = None
        try:
            for line, body in requests:
                future = pool.submit(run, body)
                under_way.put((line, body, future))
                if given_up.is_set():
                    return
        except BaseException as error:
            last = error
        if not given_up.is_set():
            under_way.put(last)

    threading.Thread(target=take, name="jev-requests", daemon=True).start()
    try:
        while isinstance(item := under_way.get(), tuple):
            line, body, future = item
            yield line, body, future.result()
        if item is not None:
            raise item
    finally:
        given_up.set()
