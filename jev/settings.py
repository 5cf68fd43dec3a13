"""Every setting of the worker, in one dataclass: its environment variable, its default and what it is for.

Flags of ``jev serve`` override the environment; ``jev/cli.py`` builds its flags and its help from the fields here.
One variable of a library counts too: ``OPENBLAS_NUM_THREADS``, which ``jev/cli.py`` sets to 1 unless it is set already.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from jev.errors import UsageError
from jev.http.hosts import parse_allowed_hosts
from jev.spelling import distance, letters, meant

BACKENDS = ("auto", "cuda", "numpy")
MAX_LENGTH_LIMIT = 16384
DECIMAL = re.compile(r"\d{1,5}(\.\d*)?|\.\d+", re.ASCII)

# What Kubernetes (and Docker's links) put into the environment of every container for a Service named open-jev. One of
# the names is a setting's; its value tells the two apart.
SERVICE = re.compile(r"(tcp|udp|sctp)://\S+:\d+", re.ASCII)
PREFIX = re.compile(r"[A-Z0-9]+_[A-Z0-9]+_")              # of a variable's name: OPEN_JEV_, OMNI_JEV_, CUA_S1_


class SettingsError(UsageError, ValueError):
    """Settings with impossible values, a line each; a line names the flag or the variable, never a secret's value."""


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        digits = text.strip()           # int() alone would take 8_000 and digits of other scripts too
        if not (digits.isascii() and digits.isdigit() and len(digits) < 20 and low <= int(digits) <= high):
            raise ValueError(f"expected an integer in {low}..{high}, found {text!r:.40}")
        return int(digits)
    return parse


def _seconds(text: str) -> float:
    if not DECIMAL.fullmatch(text.strip()) or not float(text) <= 86400:
        raise ValueError(f"expected seconds in 0..86400, found {text!r:.40}")
    return float(text)


def _gigabytes(text: str) -> float:
    if not DECIMAL.fullmatch(text.strip()) or not float(text) <= 4096:
        raise ValueError(f"expected GB in 0..4096, found {text!r:.40}")
    return float(text)


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
        "MiB of memory that requests in the worker may hold together; beyond it 503 (`jev score` waits), and 413 for one that "
        "is too large alone", "--queue-mb")
    cache_gb: float | None = _setting(
        None, "OPEN_JEV_CACHE_GB", _gigabytes,
        "GB of GPU memory (with numpy: of memory) for prefixes of earlier requests, 0: none; default: 0, with numpy "
        "0.25", "--cache-gb")
    batch_rows: int | None = _setting(
        None, "OPEN_JEV_BATCH_ROWS", _integer(1, 1 << 24),
        "token rows of one forward pass, at most; default: as many as the backend takes", "--batch-rows")
    drain_seconds: float = _setting(
        60.0, "OPEN_JEV_DRAIN_SECONDS", _seconds,
        "how long SIGTERM waits for admitted requests before giving up on them", "--drain-seconds")
    verify: bool = _setting(
        False, "OPEN_JEV_VERIFY", _flag,
        "1: before serving, read every file of the export once and compare it with its digest; without, small files only",
        "--verify")
    allowed_hosts: tuple[str, ...] = _setting(
        (), "OPEN_JEV_ALLOWED_HOSTS", parse_allowed_hosts,
        "names, separated by commas, that requests may be for (Host) besides the loopback's, when the address is the "
        "loopback's and no key is set; * for any", "--allowed-hosts")
    api_key: str | None = field(default=None, repr=False, metadata={
        "env": ["OPEN_JEV_API_KEY"], "parse": _secret, "flag": None,
        "help": "required as `Authorization: Bearer KEY` on /v1/* when set (no flag: others could read it in ps)"})
    # Field name -> the flag or variable that it came from, for what came from one.
    sources: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], names: Collection[str] | None = None,
                         **flags: str | None) -> Settings:
        """Settings from ``environ``, overridden by ``flags`` (field name -> text, None when not given).

        names: the fields that the caller uses, None for all; the variables of the others are not looked at. A variable
        set to nothing counts as unset, except the key's, and so does one that holds what Kubernetes puts there. Raises
        SettingsError with a line for every value that is impossible.
        """
        values, sources, wrong = {}, {}, []
        for f in settable(names):
            text, source = flags.get(f.name), f.metadata["flag"]
            if text is None:
                source = next((name for name in f.metadata["env"] if environ.get(name)), f.metadata["env"][0])
                text = environ.get(source)
                if text is None or (not text and f.name != "api_key") or is_of_a_service(source, text):
                    continue
            try:
                values[f.name], sources[f.name] = f.metadata["parse"](text), source
            except ValueError as error:
                wrong.append(f"{source}: {error}")
        if wrong:
            raise SettingsError("\n".join(wrong))
        return cls(**values, sources=sources)

    def named(self, name: str) -> str:
        """What a person calls the field: the flag or variable that set it, or the flag that would."""
        return self.sources.get(name, self.__dataclass_fields__[name].metadata["flag"])


def settable(names: Collection[str] | None = None) -> Iterator[Field[Any]]:
    """The fields of Settings that have a variable: those of ``names``, in the order of the class, or all."""
    return (f for f in fields(Settings) if "env" in f.metadata and (names is None or f.name in names))


def is_of_a_service(name: str, value: str) -> bool:
    """Whether a variable is one that Kubernetes sets for a Service, whatever else its name may mean."""
    return name.endswith("_PORT") and SERVICE.fullmatch(value) is not None


def remarks(environ: Mapping[str, str], names: Collection[str] | None = None, **flags: str | None) -> list[str]:
    """Lines about variables that have no effect though somebody may think so: of a Service, or misspelt. For the fields
    of ``names``; one that is set by a flag (``flags`` as for ``from_environment``) needs no word."""
    found = []
    for f in settable(names):
        if flags.get(f.name) is None:
            found += [f"{name}: ignored: {environ[name]:.80} is what Kubernetes sets for a Service of that name "
                      f"(enableServiceLinks: false keeps it away); {f.metadata['flag']} sets the {f.name}"
                      for name in f.metadata["env"] if is_of_a_service(name, environ.get(name, ""))]
    return found + misspelt(environ, [name for f in settable(names) for name in f.metadata["env"]],
                            [name for f in settable() for name in f.metadata["env"]])


def misspelt(environ: Mapping[str, str], used: Collection[str], known: Collection[str]) -> list[str]:
    """A line for each variable that is not ``known`` and whose name is nearly that of one that is ``used``."""
    return [f"{name}: no such setting, so it has no effect; {right} was meant?" for name, value in environ.items()
            if name not in known and not is_of_a_service(name, value) and (right := _meant(name, known)) in used]


def _meant(name: str, known: Collection[str]) -> str | None:
    """After a prefix that is right the rest alone is compared: OPEN_JEV_HOME is not nearly OPEN_JEV_HOST."""
    written = letters(name)
    for prefix in {match[0] for right in known if (match := PREFIX.match(right))}:
        if written.startswith(letters(prefix)):
            rest = meant(written[len(letters(prefix)):], [right[len(prefix):] for right in known if right.startswith(prefix)])
            return rest and prefix + rest
    near = (right for right in known if abs(len(right) - len(name)) <= 1 and distance(written, letters(right)) <= 1)
    return next(near, None)
