"""Threads that the system refuses: which limit it is, in words."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

from jev.errors import JevError


class OutOfThreads(JevError, RuntimeError):
    """The system starts no more threads for this process. The message names the limits and what to do."""


@contextlib.contextmanager
def starting(what: str) -> Iterator[None]:
    """Around code that starts threads: raises OutOfThreads where the system starts no more."""
    try:
        yield
    except BaseException as error:
        if not refused(error):
            raise
        raise OutOfThreads(f"cannot start {what}: {limits()}") from None


def refused(error: BaseException) -> bool:
    """Whether this is what threading, or the thread pool of a Rust library, raises when the system refuses a thread.

    The pool panics, and such an exception is none of Exception's.
    """
    text = str(error)
    return (isinstance(error, RuntimeError) and "can't start new thread" in text
            or type(error).__name__ == "PanicException" and "thread pool" in text)


def limits() -> str:
    """The limits on the number of threads that hold for this process."""
    found = []
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY:
        found.append(f"this user may have {soft} processes and threads (ulimit -u)")
    if (most := _cgroup_limit()) is not None:
        found.append(f"this control group {most} (pids.max)" if found else f"this control group may have {most} (pids.max)")
    known = ", ".join(found) or "the system has no room for more (kernel.threads-max, or memory for their stacks)"
    return f"{known}; raise the limit or lower --queue"


def _cgroup_limit(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """The least pids.max of this process's control group and those around it; None without any."""
    limits = []
    try:
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "pids"):
                folder = root / controllers / path.lstrip("/")
                for group in (folder, *folder.parents):
                    if group.is_relative_to(root) and (group / "pids.max").exists():
                        limits.append((group / "pids.max").read_text().strip())
    except (OSError, ValueError):
        pass
    return min((int(limit) for limit in limits if limit.isdigit()), default=None)
