"""What ends a command. ``SIGTERM``, ``SIGINT`` (Ctrl-C) and ``SIGHUP`` (the terminal is gone) mean the same to a service.

A handler that raises would not do for a service that is still loading: where an exception can only be reported and passed
over, as in a destructor, the signal would be lost.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def on_stop(act: Callable[[], object]) -> None:
    """Have this done from now on. Under ``nohup``, which ignores SIGHUP, it stays ignored."""
    for number in STOP:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: act())


@contextlib.contextmanager
def service() -> Iterator[None]:
    """A signal ends the process at once, with status 0, until ``on_stop`` says better: nobody waits for anything yet."""
    before = {number: signal.getsignal(number) for number in STOP}
    on_stop(lambda: os._exit(0))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt inside, where it ends the process at once outside (see ``jev.__main__``).

    So does what a library makes of it: a KeyboardInterrupt during an import of NumPy comes out as an ImportError.
    """
    before, came = signal.getsignal(signal.SIGINT), []

    def interrupt(*_: object) -> None:
        came.append(True)
        raise KeyboardInterrupt
    if before == signal.SIG_DFL:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception:
        if came:
            raise KeyboardInterrupt from None
        raise
    finally:
        if before == signal.SIG_DFL:
            signal.signal(signal.SIGINT, before)
