"""Every setting of the gateway, in one dataclass: its environment variable, its default and what it is for."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from urllib.parse import urlsplit

from jev.http.hosts import checked_hosts, parse_allowed_hosts
from jev.settings import SettingsError

MIB = 1024 * 1024


def _setting(default: str | int, high: int, help: str):
    return field(default=default, metadata={"high": high, "help": help})


@dataclass(frozen=True)
class GatewaySettings:
    """What `jev frontend` can be told: each field is `OMNI_JEV_<NAME>`, and the flag of that name."""

    bind: str = _setting("127.0.0.1:8080", 0, "IP address and port to listen on; port 0 takes a free one")
    backend_url: str = _setting("http://127.0.0.1:8000", 0, "URL of the worker, or several separated by commas")
    health_timeout_ms: int = _setting(2000, 60_000, "milliseconds that GET /health may take")
    max_response_bytes: int = _setting(16 * MIB, 1024 * MIB, "largest body that is accepted from a worker")
    queue: int = _setting(256, 2048, "decisions in hand at a time; one more is answered 503")
    allowed_hosts: str = _setting("", 0, "names, separated by commas, that requests may be for (Host) besides the loopback's, "
                                  "when the address to listen on is the loopback's; * for any")
    drain_seconds: int = _setting(60, 86_400, "how long SIGTERM waits for requests in hand before giving up on them")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], **flags: str | None) -> GatewaySettings:
        """Settings from `environ`, overridden by `flags` (field name -> text, None when not given).

        A variable set to nothing counts as unset. Raises SettingsError, which never shows a value: a URL may hold
        a password, and whatever was meant to be a number may be one.
        """
        values = {}
        for f in fields(cls):
            name = "OMNI_JEV_" + f.name.upper()
            text = environ.get(name, "").strip()
            if flags.get(f.name) is not None:
                name, text = "--" + f.name.replace("_", "-"), flags[f.name].strip()
            elif not text:
                continue
            high = f.metadata["high"]
            if high and not (text.isascii() and text.isdigit() and len(text) < 20 and 1 <= int(text) <= high):
                raise SettingsError(f"{name}: expected an integer in 1..{high}")
            values[f.name] = int(text) if high else text
        settings = cls(**values)
        settings.address()
        settings.hosts()
        if any(url.startswith("https:") for url in settings.backends()) and environ.get("SSL_CERT_FILE"):
            # OpenSSL passes over a file that it cannot read, and then no worker's certificate would be good.
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(environ["SSL_CERT_FILE"])
            except OSError as error:
                why = "no certificates in it" if isinstance(error, ssl.SSLError) else error.strerror
                raise SettingsError(f"SSL_CERT_FILE: {why}") from None
        return settings

    def address(self) -> tuple[str, int]:
        """The IP address and port of `bind`."""
        host, _, port = self.bind.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        try:
            ip = ipaddress.ip_address(host[1:-1] if bracketed else host)
            if (ip.version == 6) != bracketed or not (port.isascii() and port.isdigit()) or int(port[:6]) > 65535:
                raise ValueError
        except ValueError:
            message = "OMNI_JEV_BIND: expected an IP address and a port, as in 127.0.0.1:8080 or [::1]:8080"
            raise SettingsError(message) from None
        return str(ip), int(port)

    def hosts(self) -> frozenset[str] | None:
        """The hosts that requests may be for besides the loopback's, or None for any."""
        try:
            allowed = parse_allowed_hosts(self.allowed_hosts) if self.allowed_hosts else ()
        except ValueError:
            raise SettingsError("OMNI_JEV_ALLOWED_HOSTS: expected host names separated by commas, without ports") from None
        return checked_hosts(self.address()[0], None, allowed)

    def backends(self) -> list[str]:
        """The worker URLs of `backend_url`, without a trailing slash."""
        return parse_backends(self.backend_url)


def parse_backends(text: str) -> list[str]:
    """The worker URLs of a comma-separated list. Raises SettingsError, which names the entry by number only."""
    urls: list[str] = []
    entries = text.split(",")
    for number, entry in enumerate(entries, 1):
        which = "OMNI_JEV_BACKEND_URL" + (f", entry {number}" if len(entries) > 1 else "")
        url = entry.strip()
        if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
            raise SettingsError(f"{which}: the URL holds characters that a URL cannot")
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise SettingsError(f"{which}: the host or port is not valid") from None
        if parts.scheme not in ("http", "https"):
            raise SettingsError(f"{which}: the URL must start with http:// or https://")
        if "@" in parts.netloc:
            raise SettingsError(f"{which}: the URL must not hold credentials")
        if "?" in url or "#" in url:
            raise SettingsError(f"{which}: the URL must not hold a query or fragment")
        try:
            (parts.hostname or "").encode("idna")
        except UnicodeError:            # an empty label, or one of more than 63 characters
            raise SettingsError(f"{which}: the host or port is not valid") from None
        if not parts.hostname or port == 0:
            raise SettingsError(f"{which}: the URL must name a host, and a port other than 0 if any")
        url = url.rstrip("/")
        if url in urls:
            raise SettingsError(f"{which}: the same URL stands in the list twice")
        urls.append(url)
    return urls
