"""Signals that ask a long command to end: raised as exceptions while it works, ignored while it cleans up."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ended(KeyboardInterrupt):
    """A signal asked the program to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def raising_signals() -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP raise Ended, unless whoever started the program had them ignored (nohup).

    Within a second of one, others do nothing: they often come in twos, and the second would break off the clean-up.
    That stays so afterwards, since the program is about to end; only if there was none, all is as before.
    """
    last = -math.inf

    def end(number: int, frame: object) -> None:
        nonlocal last
        if time.monotonic() - last > 1:
            last = time.monotonic()
            raise Ended(number)
    before = []
    if threading.current_thread() is threading.main_thread():
        before = [(number, signal.signal(number, end)) for number in ENDING
                  if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)]
    try:
        yield
    finally:
        if last == -math.inf:
            for number, handler in before:
                signal.signal(number, handler)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore the signals that ask a program to end. Other threads than the main one get none anyhow."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [(number, signal.signal(number, signal.SIG_IGN)) for number in ENDING]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
