"""Every setting of the worker, in one dataclass: its environment variable, its default and what it is for.

Flags of ``jev serve`` override the environment; ``jev/cli.py`` builds its flags and its help from the fields here.
One variable of a library counts too: ``OPENBLAS_NUM_THREADS``, which ``jev/cli.py`` sets to 1 unless it is set already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

BACKENDS = ("auto", "cuda", "numpy")
MAX_LENGTH_LIMIT = 16384


class SettingsError(ValueError):
    """A setting with an impossible value; the message names the variable, never a secret's value."""


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise ValueError(f"expected an integer in {low}..{high}, found {text!r:.40}")
        return value
    return parse


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 86400:
        raise ValueError(f"expected seconds in 0..86400, found {text!r:.40}")
    return value


def _gigabytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 4096:
        raise ValueError(f"expected GB in 0..4096, found {text!r:.40}")
    return value


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(f"expected 1 or 0, found {text!r:.40}")
    return text == "1"


def _backend(text: str) -> str:
    if text not in BACKENDS:
        raise ValueError(f"expected {', '.join(BACKENDS)}, found {text!r:.40}")
    return text


def _host(text: str) -> str:
    if not text or any(c.isspace() for c in text):
        raise ValueError(f"expected a host name or address, found {text!r:.40}")
    return text


def _secret(text: str) -> str:
    # An empty key would leave the worker open to everybody, which whoever set the variable did not mean.
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise ValueError("expected printable ASCII without spaces (unset the variable to serve without a key)")
    return text


def _setting(default: Any, env: str, parse: Callable[[str], Any], help: str, flag: str | None = None) -> Any:
    """A field: ``env`` may name several variables, the first that is set counts; ``flag`` is its option on the CLI."""
    return field(default=default, metadata={"env": env.split(), "parse": parse, "help": help, "flag": flag})


@dataclass(frozen=True)
class Settings:
    """What the worker runs with. Built by ``from_environment``; tests construct it directly."""

    model: Path | None = _setting(None, "OPEN_JEV_MODEL", Path, "folder of the export to serve", "--model")
    host: str = _setting("127.0.0.1", "OPEN_JEV_HOST", _host, "address to listen on", "--host")
    port: int = _setting(8000, "OPEN_JEV_PORT", _integer(0, 65535), "port to listen on; 0 takes a free one", "--port")
    backend: str = _setting(
        "auto", "OPEN_JEV_BACKEND", _backend,
        "cuda, numpy, or auto: cuda when a usable GPU is there, else numpy", "--backend")
    max_length: int | None = _setting(
        None, "OPEN_JEV_MAX_LENGTH", _integer(1, MAX_LENGTH_LIMIT),
        f"tokens of one prompt, at most {MAX_LENGTH_LIMIT}; default: what the export says", "--max-length")
    graph: bool = _setting(
        True, "OPEN_JEV_GRAPH CUA_S1_GRAPH", _flag, "1: replay captured CUDA graphs, 0: launch every kernel", "--graph")
    queue: int = _setting(
        256, "OPEN_JEV_QUEUE", _integer(1, 2048),
        "requests in the worker at a time, those being computed included; one more is answered 503", "--queue")
    queue_mb: int = _setting(
        1024, "OPEN_JEV_QUEUE_MB", _integer(16, 1 << 20),
        "MiB of memory that they may hold together; beyond it 503, and 413 for a request too large alone", "--queue-mb")
    cache_gb: float | None = _setting(
        None, "OPEN_JEV_CACHE_GB", _gigabytes,
        "GB of GPU memory (with numpy: of memory) for prefixes of earlier requests, 0: none; default: what is free, with "
        "numpy 0.25", "--cache-gb")
    batch_rows: int | None = _setting(
        None, "OPEN_JEV_BATCH_ROWS", _integer(1, 1 << 24),
        "token rows of one forward pass, at most; default: as many as the backend takes", "--batch-rows")
    drain_seconds: float = _setting(
        60.0, "OPEN_JEV_DRAIN_SECONDS", _seconds,
        "how long SIGTERM waits for admitted requests before giving up on them", "--drain-seconds")
    api_key: str | None = field(default=None, repr=False, metadata={
        "env": ["OPEN_JEV_API_KEY"], "parse": _secret, "flag": None,
        "help": "required as `Authorization: Bearer KEY` on /v1/* when set (no flag: others could read it in ps)"})

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], **flags: str | None) -> Settings:
        """Settings from ``environ``, overridden by ``flags`` (field name -> text, None when not given).

        A variable set to nothing counts as unset, except the key's. Raises SettingsError naming the source.
        """
        values = {}
        for f in fields(cls):
            text, source = flags.get(f.name), f.metadata["flag"]
            if text is None:
                source = next((name for name in f.metadata["env"] if environ.get(name)), f.metadata["env"][0])
                text = environ.get(source)
                if text is None or (not text and f.name != "api_key"):
                    continue
            try:
                values[f.name] = f.metadata["parse"](text)
            except ValueError as error:
                raise SettingsError(f"{source}: {error}") from None
        return cls(**values)
