"""The logs of a service, worker or gateway: lines that no request, no answer and no end ever waits for.

Whoever writes to a pipe that nobody reads waits, and so does whoever writes to a terminal that was stopped with Ctrl-S. So
a service writes into memory: each of stdout and stderr has a bounded buffer and a thread that empties it. Lines that find
no room are dropped and counted, and the count is logged where they are missing. What leaves is whole lines, in blocks
small enough not to be mixed with those of other processes on the same pipe.

O_NONBLOCK would need no threads. But it belongs to the open file, not to the descriptor, and the shell or another process
may have the same one.

Access lines, logger ``jev.access``, are JSON on stdout; everything else, ``sys.stderr`` included, goes to stderr.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any, NoReturn, TextIO

from jev.threads import starting

ROOM_BYTES = 1 << 20                    # of lines that wait to be written, for each stream
# An access line is put down before its answer has left, and no other thread may wake up for it then: its writer looks for
# new lines so often, and less and less often while there are none. The rare lines on stderr are written at once.
INTERVAL_SECONDS = 0.05
IDLE_SECONDS = 0.4
RETRY_SECONDS = 1.0                     # after a write that failed: a full disk, a reader that left
FLUSH_SECONDS = 1.0                     # for what is left at the end
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class Writer:
    """Lines to the file descriptor ``fd``, written by a thread of its own.

    missing: the line that says how many are missing. interval: seconds between two looks for lines, at least; None: at once.
    """

    def __init__(self, fd: int, missing: Callable[[int], bytes], interval: float | None) -> None:
        self.fd = fd
        self._missing, self._interval = missing, interval
        self._lock = threading.RLock()          # for the buffer alone; reentrant, because signal handlers interrupt put
        self._lines: list[bytes] = []
        self._held = 0                          # bytes of these and of those that the thread is writing
        self._dropped = 0
        self._closing = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"jev-log-{fd}", daemon=True)
        with starting("the threads of the log"):
            self._thread.start()

    def put(self, lines: bytes) -> None:
        """Have text written. From the first line that finds no room all are dropped, until the thread has come around: so
        there is one gap, and its place is known."""
        with self._lock:
            if self._dropped or self._held + len(lines) > ROOM_BYTES:
                self._dropped += lines.count(b"\n")
                return
            self._held += len(lines)
            self._lines.append(lines)
        if self._interval is None:
            self._wake.put(None)

    def close(self, deadline: float) -> bool:
        """Write what is left, until ``deadline`` (time.monotonic()) at most. False: the writer is stuck."""
        self._closing = True
        self._wake.put(None)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        wait = self._interval
        while True:
            closing = self._closing
            with self._lock:
                lines, self._lines = self._lines, []
                dropped, self._dropped = self._dropped, 0
            if dropped:
                lines.append(self._missing(dropped))
                with self._lock:
                    self._held += len(lines[-1])
            if lines:
                self._write_all(lines, dropped)
                wait = self._interval
            elif closing:
                return
            else:
                with contextlib.suppress(queue.Empty):
                    self._wake.get(timeout=wait)
                wait = wait and min(2 * wait, IDLE_SECONDS)

    def _write_all(self, lines: list[bytes], dropped: int) -> None:
        """Write these. dropped: how many the last of them stands for, 0 for an ordinary one."""
        left = _blocks(lines)
        while left:
            try:
                self._write(left[0])
            except OSError:
                with self._lock:
                    self._held -= sum(map(len, left))
                    self._dropped += sum(block.count(b"\n") for block in left) + max(0, dropped - 1)
                if self._closing:               # this was the last attempt
                    self._dropped = 0
                else:
                    with contextlib.suppress(queue.Empty):
                        self._wake.get(timeout=RETRY_SECONDS)
                return
            with self._lock:
                self._held -= len(left.pop(0))

    def _write(self, block: bytes) -> None:
        while block:
            try:
                block = block[os.write(self.fd, block):]
            except OSError as error:            # somebody else has made it non-blocking
                if error.errno != errno.EAGAIN:
                    raise
                ready = select.poll()
                ready.register(self.fd, select.POLLOUT)
                ready.poll()


def _blocks(lines: list[bytes]) -> list[bytes]:
    """Joined to blocks of at most PIPE_BUF bytes, which a pipe takes whole, but for a line that is longer."""
    blocks: list[bytes] = []
    together: list[bytes] = []
    size = 0
    for line in lines:
        if together and size + len(line) > select.PIPE_BUF:
            blocks.append(b"".join(together))
            together, size = [], 0
        together.append(line)
        size += len(line)
    return [*blocks, b"".join(together)]


class _AccessHandler(logging.Handler):
    def __init__(self, writer: Writer) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        self._writer.put(record.getMessage().encode() + b"\n")


class _Raw(io.RawIOBase):
    """A Writer as a file: what `sys.stderr` stands on."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:              # whatever has a buffer
        self._writer.put(bytes(data))
        return len(data)

    def fileno(self) -> int:
        return self._writer.fd

    def isatty(self) -> bool:
        return os.isatty(self._writer.fd)


_writers: list[Writer] = []             # of the service that runs


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def _access_missing(count: int) -> bytes:
    return json.dumps({"time": _now(), "dropped": count}).encode() + b"\n"


def _missing(count: int) -> bytes:
    return f"{_now()} WARNING jev.logs: {count} lines are missing here: stderr was not read\n".encode()


def _descriptor(stream: TextIO | None) -> int | None:
    """The one under a stream; None for a stream that is closed, absent or in memory."""
    try:
        return None if stream is None else stream.fileno()
    except (AttributeError, OSError, ValueError):
        return None


@contextlib.contextmanager
def service(level: int) -> Iterator[None]:
    """Log as a service does while the block runs: access lines, and what is of ``level`` and above.

    `sys.stderr` is a stream that never waits, for tracebacks, warnings and progress bars too; it stays so after the block
    if whatever reads it is stuck, because the process has an end to come to. Raises OutOfThreads.
    """
    with contextlib.ExitStack() as undo:
        undo.callback(setattr, logging, "raiseExceptions", logging.raiseExceptions)
        logging.raiseExceptions = False         # a reader of stdout or stderr that has left must not fill the other
        if (fd := _descriptor(sys.stderr)) is not None:
            _writers.append(Writer(fd, _missing, None))
            stderr, sys.stderr = sys.stderr, io.TextIOWrapper(
                _Raw(_writers[-1]), sys.stderr.encoding, "backslashreplace", line_buffering=True)
            undo.callback(_give_back, stderr, _writers[-1])
        access: logging.Handler = logging.NullHandler()
        if (fd := _descriptor(sys.stdout)) is not None:
            _writers.append(Writer(fd, _access_missing, INTERVAL_SECONDS))
            access = _AccessHandler(_writers[-1])
        messages = logging.NullHandler() if sys.stderr is None else logging.StreamHandler(sys.stderr)
        messages.setFormatter(logging.Formatter(FORMAT))
        for name, handler, lowest, passes_on in (
                ("", messages, level, True), ("jev.access", access, logging.INFO, False),
                ("waitress.queue", logging.NullHandler(), logging.ERROR, True)):
            logger = logging.getLogger(name)
            undo.callback(logger.setLevel, logger.level)
            undo.callback(setattr, logger, "propagate", logger.propagate)
            undo.callback(logger.removeHandler, handler)
            logger.setLevel(lowest)
            logger.propagate = passes_on
            logger.addHandler(handler)
        undo.callback(close)
        yield


def _give_back(stderr: TextIO, writer: Writer) -> None:
    if writer not in _writers:                  # it has written everything
        sys.stderr = stderr


def close(seconds: float = FLUSH_SECONDS) -> None:
    """Write what a service has logged, for so long at most."""
    deadline = time.monotonic() + seconds
    _writers[:] = [writer for writer in _writers if not writer.close(deadline)]


def leave(status: int) -> NoReturn:
    """End the process here and now but for its log; nothing that runs is asked, and nothing can keep it."""
    close()
    os._exit(status)
