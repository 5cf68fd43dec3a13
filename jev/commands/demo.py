"""``jev demo``: a demo checkpoint, a worker on a free port, one request and its answers as a person reads them."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from jev.app import create_app
from jev.checkpoint.checked_json import CheckpointError
from jev.checkpoint.demo import write_demo_checkpoint
from jev.checkpoint.opening import open_export
from jev.cli import open_engine, say
from jev.errors import JevError
from jev.export.writer import UNFINISHED
from jev.processor import Processor, ProcessorError
from jev.server import Server, bind
from jev.settings import Settings
from jev.terminal import render, shows_unicode

EXAMPLE = Path(__file__).resolve().parent.parent / "example-request.json"


def run(args: argparse.Namespace) -> int:
    def stop(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt
    signal.signal(signal.SIGTERM, stop)
    request_file = Path(args.request) if args.request else EXAMPLE
    body = request_file.read_bytes()            # before anything is made for it
    place = contextlib.nullcontext(args.dir) if args.dir else tempfile.TemporaryDirectory(prefix="jev-demo-")
    with place as parent:
        folder = Path(parent) / "checkpoint"
        _make_demo_checkpoint(folder)
        status = _show_demo(folder, request_file, body, args.settings)
    if args.dir:
        say(f"To keep one running: {os.path.relpath(sys.executable)} -m jev serve --model {folder}")
    return status


def _make_demo_checkpoint(folder: Path) -> None:
    try:
        Processor.of(open_export(folder))
        say(f"1. a demo checkpoint lies in {folder} already")
    except (CheckpointError, ProcessorError):
        say(f"1. writing a demo checkpoint to {folder}: the real architecture, tiny, with random weights")
        try:
            write_demo_checkpoint(folder, overwrite=True)
        except CheckpointError as error:
            if not any(os.path.lexists(path) for path in (folder, f"{folder}{UNFINISHED}")):
                raise
            # Perhaps a demo that lost its manifest, perhaps something of the user's: not ours to delete.
            raise JevError(f"{error}; remove that folder (`make clean` removes the one of `make demo`)") from None


def _show_demo(folder: Path, request_file: Path, body: bytes, settings: Settings) -> int:
    settings = replace(settings, model=folder, port=0, queue=8)
    say("2. starting the worker")
    sock = bind(settings.host, settings.port)
    engine = open_engine(settings)
    server = Server(create_app(engine, settings), engine, settings, sock)
    logging.getLogger("jev.server").setLevel(logging.CRITICAL)      # its farewells are for those who run a worker
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    thread = threading.Thread(target=server.run, name="jev-demo-server")
    thread.start()
    try:
        say(f"3. posting {request_file} to {server.url}/v1/systemone\n")
        host, port = sock.getsockname()[:2]
        connection = HTTPConnection(host, port, timeout=120)
        started = time.perf_counter()
        connection.request("POST", "/v1/systemone", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
        seconds = time.perf_counter() - started
        connection.close()
        if response.status != 200:
            raise JevError(f"the worker answered {response.status}: {answer['error']}")
        print(render(answer, json.loads(body), seconds, shows_unicode(sys.stdout)), flush=True)
    except BaseException:       # Ctrl-C above all: nobody wants to wait for the forward pass that is under way
        server.stop()
        raise
    finally:
        server.stop()
        thread.join()
    engine.close()
    say("\n4. stopped the worker")
    return 0
