"""Which hosts a server on the loopback address answers for.

A page in a browser can give its own name the address 127.0.0.1 (DNS rebinding) and then speak to a server there as if
to itself, of the same origin. The name that it uses stands in ``Host``. So a server that only this machine can reach,
and that asks for no key, answers under names and addresses of the loopback alone, and those that it is told of.
"""

from __future__ import annotations

import functools
import ipaddress
import re
import socket
from collections.abc import Collection

# A host and perhaps a port, as in the field Host: a name, an IPv4 address, or an IPv6 address in brackets.
HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:/?#@\[\],]+))(:[0-9]*)?")
AUTHORITY = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*)")      # of a request target in absolute form
ANY = "*"


def parse_allowed_hosts(text: str) -> tuple[str, ...]:
    """The names of a comma-separated list, without ports, in lower case; ``*`` for any. Raises ValueError."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        match = HOST.fullmatch(name)
        if match is None or match[3] is not None:
            raise ValueError(f"expected host names separated by commas, without ports, found {name!r:.40}")
    return tuple(filter(None, map(_name, names)))


def checked_hosts(bound: str, key: str | None, allowed: Collection[str]) -> Collection[str] | None:
    """What ``host_refused`` takes for a server that listens on the host ``bound``: ``allowed`` if it has to check hosts;
    None if not, because others can reach it anyway, it asks for a ``key``, or any host is allowed."""
    if key is not None or ANY in allowed:
        return None
    try:
        address = socket.getaddrinfo(bound, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][4][0]
    except OSError:                     # nothing can be bound to it either
        return None
    return frozenset(allowed) if is_loopback(str(address)) else None


def host_refused(host: str | None, target: str, allowed: Collection[str]) -> bool:
    """Whether a request with this field ``Host`` (None: it has none, and so comes from no browser) and this target is
    for a host that is neither the loopback nor one of ``allowed``."""
    absolute = AUTHORITY.match(target)
    return any(not _answers_for(value, allowed)
               for value in (host, absolute and absolute[1]) if value is not None)


@functools.lru_cache(64)         # of the few names that clients use; reading an address takes as long as all else here
def is_loopback(name: str) -> bool:
    """Whether a name or address without brackets is this machine's loopback, by itself and not by what DNS says."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _answers_for(host: str, allowed: Collection[str]) -> bool:
    name = _name(host)
    return name is not None and (is_loopback(name) or name in allowed)


def _name(host: str) -> str | None:
    """The name or address of a field ``Host`` in lower case; None if it is no such field."""
    match = HOST.fullmatch(host)
    return match and (match[1] or match[2]).lower().rstrip(".")
