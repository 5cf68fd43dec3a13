"""Every setting of the gateway, in one dataclass: its environment variable, its default and what it is for."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

from jev.http.hosts import checked_hosts, parse_allowed_hosts
from jev.settings import SettingsError

MIB = 1024 * 1024


def _integer(high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) < 20 and 1 <= int(text) <= high):
            raise ValueError(f"expected an integer in 1..{high}")
        return int(text)
    return parse


def parse_address(text: str) -> tuple[str, int]:
    """The IP address and port of `127.0.0.1:8080` or `[::1]:8080`. Raises ValueError."""
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        ip = ipaddress.ip_address(host[1:-1] if bracketed else host)
        if (ip.version == 6) != bracketed or not (port.isascii() and port.isdigit()) or int(port[:6]) > 65535:
            raise ValueError
    except ValueError:
        raise ValueError("expected an IP address and a port, as in 127.0.0.1:8080 or [::1]:8080") from None
    return str(ip), int(port)


def parse_backends(text: str) -> list[str]:
    """The worker URLs of a comma-separated list, without a trailing slash. Raises ValueError, which names the entry by
    number only."""
    urls: list[str] = []
    entries = [entry.strip() for entry in text.split(",")]
    for number, url in enumerate(entries, 1):
        which = f"entry {number}" if len(entries) > 1 else "the URL"
        if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
            raise ValueError(f"{which} holds characters that a URL cannot")
        try:
            parts = urlsplit(url)
            port = parts.port
            (parts.hostname or "").encode("idna")       # no label may be empty or have more than 63 characters
        except ValueError:
            raise ValueError(f"the host or port of {which} is not valid") from None
        if parts.scheme not in ("http", "https"):
            raise ValueError(f"{which} must start with http:// or https://")
        if "@" in parts.netloc:
            raise ValueError(f"{which} must not hold credentials")
        if "?" in url or "#" in url:
            raise ValueError(f"{which} must not hold a query or fragment")
        if not parts.hostname or port == 0:
            raise ValueError(f"{which} must name a host, and a port other than 0 if any")
        url = url.rstrip("/")
        if url in urls:
            raise ValueError(f"{which} stands in the list twice")
        urls.append(url)
    return urls


def _hosts(text: str) -> tuple[str, ...]:
    try:
        return parse_allowed_hosts(text) if text else ()
    except ValueError:
        raise ValueError("expected host names separated by commas, without ports") from None


def _checked(parse: Callable[[str], Any]) -> Callable[[str], str]:
    """Keeps the text that `parse` can read."""
    def check(text: str) -> str:
        parse(text)
        return text
    return check


def _setting(default: str | int, parse: Callable[[str], Any], help: str) -> Any:
    return field(default=default, metadata={"parse": parse, "help": help})


@dataclass(frozen=True)
class GatewaySettings:
    """What `jev frontend` can be told: each field is `OMNI_JEV_<NAME>`, and the flag of that name."""

    bind: str = _setting(
        "127.0.0.1:8080", _checked(parse_address), "IP address and port to listen on; port 0 takes a free one")
    backend_url: str = _setting(
        "http://127.0.0.1:8000", _checked(parse_backends), "URL of the worker, or several separated by commas")
    health_timeout_ms: int = _setting(2000, _integer(60_000), "milliseconds that GET /health and /v1/models may take")
    max_response_bytes: int = _setting(16 * MIB, _integer(1024 * MIB), "largest body that is accepted from a worker")
    queue: int = _setting(256, _integer(2048), "decisions in hand at a time; one more is answered 503")
    allowed_hosts: str = _setting(
        "", _checked(_hosts), "names, separated by commas, that requests may be for (Host) besides the loopback's, when the "
        "address to listen on is the loopback's; * for any")
    drain_seconds: int = _setting(
        60, _integer(86_400), "how long SIGTERM waits for requests in hand before giving up on them")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], **flags: str | None) -> GatewaySettings:
        """Settings from `environ`, overridden by `flags` (field name -> text, None when not given).

        A variable set to nothing counts as unset. Raises SettingsError with a line for each that is impossible, which
        never shows a value: a URL may hold a password, and whatever was meant to be a number may be one.
        """
        values, wrong = {}, []
        for f in fields(cls):
            name, text = "OMNI_JEV_" + f.name.upper(), environ.get("OMNI_JEV_" + f.name.upper(), "").strip()
            if (flag := flags.get(f.name)) is not None:
                name, text = "--" + f.name.replace("_", "-"), flag.strip()
            elif not text:
                continue
            try:
                values[f.name] = f.metadata["parse"](text)
            except ValueError as error:
                wrong.append(f"{name}: {error}")
        if not wrong and any(url.startswith("https:") for url in cls(**values).backends()) and environ.get("SSL_CERT_FILE"):
            # OpenSSL passes over a file that it cannot read, and then no worker's certificate would be good.
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(environ["SSL_CERT_FILE"])
            except OSError as error:
                why = "no certificates in it" if isinstance(error, ssl.SSLError) else error.strerror
                wrong.append(f"SSL_CERT_FILE: {why}")
        if wrong:
            raise SettingsError("\n".join(wrong))
        return cls(**values)

    def address(self) -> tuple[str, int]:
        """The IP address and port of `bind`."""
        return parse_address(self.bind)

    def backends(self) -> list[str]:
        """The worker URLs of `backend_url`, without a trailing slash."""
        return parse_backends(self.backend_url)

    def hosts(self) -> Collection[str] | None:
        """The hosts that requests may be for besides the loopback's, or None for any."""
        return checked_hosts(self.address()[0], None, _hosts(self.allowed_hosts))
