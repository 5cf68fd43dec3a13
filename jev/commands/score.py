"""``jev score``: the answers to the requests of a file or a pipe, without a server."""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, BinaryIO

from tqdm import tqdm

from jev import json_lines
from jev.cli import open_engine, say
from jev.contract import MAX_BODY_BYTES
from jev.engine import ContractError, Engine, InferenceError, QueueFull, RequestTooLarge
from jev.errors import JevError
from jev.terminal import render, shows_unicode


def run(args: argparse.Namespace) -> int:
    if sys.stdout is None:
        raise JevError("stdout is closed: there is nowhere to write answers to")
    file = _open_requests(args.file)
    # Several at a time share forward passes; results are written in the order of the requests.
    engine = open_engine(replace(args.settings, queue=max(args.settings.queue, args.together)))
    stop = threading.Event()
    pool = ThreadPoolExecutor(args.together)
    failed = done = 0
    try:
        with _bar(file) as progress:
            for line, body, result in json_lines.in_order(
                    pool, lambda body: _score_one(engine, body, stop), json_lines.requests(file, MAX_BODY_BYTES),
                    window=2 * args.together):
                if "error" in result:
                    failed += 1
                    result = {"line": line, **result}
                # The bar is taken away while an answer is written to the terminal that shows it.
                with tqdm.external_write_mode(file=sys.stdout) if sys.stdout.isatty() else nullcontext():
                    if args.pretty and "error" not in result:
                        _write(render(result, json.loads(body), unicode=shows_unicode(sys.stdout)) + "\n")
                    else:
                        _write(json.dumps(result, ensure_ascii=False))
                done += 1
                progress.update()
                if engine.lost:
                    raise engine.lost
    finally:
        stop.set()
        pool.shutdown(wait=False, cancel_futures=True)
        engine.close()
    if not done:
        say(f"no requests in {'stdin' if args.file == '-' else args.file}")
    elif failed:
        say(f"{failed} of {done} requests failed")
    return 1 if failed or not done else 0


def _open_requests(name: str) -> BinaryIO:
    try:
        # Not sys.stdin: a thread that waits for it would be in Python's way when an interrupted command ends.
        return open(0, "rb", closefd=False) if name == "-" else open(name, "rb")
    except OSError as error:
        raise JevError(f"{'stdin' if name == '-' else name}: {error.strerror}") from None


def _bar(file: BinaryIO) -> tqdm:
    """A progress bar on a terminal, which knows how many requests there are where they can be counted before."""
    shown = sys.stderr is not None and sys.stderr.isatty()
    return tqdm(desc="requests", unit="", file=sys.stderr, disable=not shown, total=_count(file) if shown else None)


def _count(file: BinaryIO) -> int | None:
    """The requests of a file, from where it stands; None for a pipe, which can be read once only."""
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return None
    with open(f"/dev/fd/{file.fileno()}", "rb") as again:
        again.seek(file.tell())
        return sum(1 for _ in json_lines.requests(again, MAX_BODY_BYTES))


def _write(text: str) -> None:
    """A line to stdout, in UTF-8 whatever the terminal's encoding: JSON Lines are."""
    sys.stdout.buffer.write(text.encode() + b"\n")
    sys.stdout.buffer.flush()


def _score_one(engine: Engine, body: bytes | None, stop: threading.Event) -> dict[str, Any]:
    if body is None:
        return _failure("request_too_large", f"the body is larger than {MAX_BODY_BYTES} bytes")
    while True:
        try:
            return engine.answer(body, stop.is_set)
        except QueueFull as full:           # of memory: places are enough. Others will be done
            if stop.wait(full.retry_after):
                raise
        except ContractError as error:
            return {"error": str(error), "detail": error.errors}
        except RequestTooLarge as error:
            return _failure("request_too_large", str(error))
        except InferenceError as error:
            return _failure("inference_error", str(error))


def _failure(error_type: str, message: str) -> dict[str, Any]:
    return {"error": message, "detail": {"error_type": error_type, "message": message}}
