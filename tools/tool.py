"""What the tools share: a sentence about what is missing instead of a traceback, and children that end with their parent."""
from __future__ import annotations

import argparse
import ctypes
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from jev.errors import JevError

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


class Needed:
    """For imports that a tool can tell its --help without: ``with needed: import torch``. What is missing is kept, and
    ``parse`` says it."""

    def __init__(self, **behind: str) -> None:
        """behind: packages that are needed with an option only, by its name."""
        self.behind = behind
        self.missing: str | None = None

    def __enter__(self) -> Needed:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, ImportError) and error.name is not None:
            self.missing = error.name.partition(".")[0]
            return True
        return False

    def parse(self, parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None,
              gpu: bool = False) -> argparse.Namespace:
        """The arguments; exits with a sentence where a package, or with ``gpu`` a GPU, is missing.

        From here on SIGTERM and SIGHUP raise SystemExit, so that what stands in ``finally`` is done, and an export or a file
        that is not there ends the tool with a sentence too.
        """
        options = parser.parse_args(arguments)
        for flag, package in self.behind.items():
            if getattr(options, flag):
                with self:
                    import_module(package)
        if self.missing:
            parser.exit(1, f"{parser.prog}: needs the Python package {self.missing}, which is not installed here\n")
        if gpu and not has_gpu():
            parser.exit(1, f"{parser.prog}: needs an NVIDIA GPU, and there is no usable one here\n")
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
        sys.excepthook = lambda kind, error, trace: _tell(parser.prog, error) or sys.__excepthook__(kind, error, trace)
        return options


def _tell(prog: str, error: BaseException) -> bool:
    """Say what is wrong, if whoever started the tool can mend it."""
    file = getattr(error, "filename", None)
    if isinstance(error, OSError) and file is not None:
        error = f"{file}: {error.strerror}"
    elif not isinstance(error, JevError):
        return False
    print(f"{prog}: {error}", file=sys.stderr)
    return True


def has_gpu() -> bool:
    """Whether the driver shows a GPU. No context is made: the GPU may be for a child."""
    try:
        driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    except OSError:
        return False
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def child(command: Sequence[str], **options: Any) -> subprocess.Popen:
    """A process that is killed when this one ends, however it ends. For the main thread: it counts as the parent."""
    return subprocess.Popen(command, preexec_fn=lambda: LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL), **options)
