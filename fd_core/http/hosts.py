"""Host names that a server answers to, and origins whose pages may call it.

A page that a browser loaded from elsewhere can send requests to this machine: across origins, and, once its name
resolves to this machine, as if they were of the same one (DNS rebinding). Only browsers send an origin, and all of them
name the host.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

import msgspec

from fd_core.errors import ConfigError
from fd_core.http.errors import ApiError

_ANY: Final = "*"
_HOST: Final = re.compile(r"(?:\[(?P<six>[0-9a-f:.]+)\]|(?P<name>[^:\[\]/@]+))(?::[0-9]*)?", re.IGNORECASE)
_NAME: Final = re.compile(r"(?:\*\.)?[a-z0-9_-]+(?:\.[a-z0-9_-]+)*|[0-9a-f:.]+|\*", re.IGNORECASE)
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+|null|\*", re.IGNORECASE)
_EXPOSED: Final = ", ".join(
    (
        "X-Request-Id",
        "X-Ignored-Fields",
        "Retry-After",
        *(f"x-ratelimit-{part}-{what}" for what in ("requests", "tokens") for part in ("limit", "remaining", "reset")),
    )
)


class Visit(msgspec.Struct, frozen=True):
    """Host and origin of a request."""

    hosts: Sequence[str]
    """Values of the header Host; HTTP/1.0 may leave it out."""
    address: str | None
    """This machine's address, at which the connection arrived."""
    origin: str | None = None
    method: str = "GET"
    wants_method: str | None = None
    """Access-Control-Request-Method: the method for which a browser requests permission on behalf of a page."""
    wants_headers: str | None = None
    """Access-Control-Request-Headers."""

    @classmethod
    def of(cls, method: str, hosts: Sequence[str], address: str | None, header: Callable[[str], str | None]) -> Visit:
        """Return host and origin of a request; `header` returns the value of a header."""
        origin = header("Origin")
        if origin is None:  # not a browser's
            return cls(hosts, address, None, method)
        asks = header("Access-Control-Request-Method"), header("Access-Control-Request-Headers")
        return cls(hosts, address, origin, method, *asks)

    @property
    def preflight(self) -> bool:
        """True if this is a browser's preflight request for permission to send the page's request."""
        return self.method == "OPTIONS" and self.origin is not None and self.wants_method is not None


class HostRules:
    """Rejects requests that a page of another origin made a browser send."""

    def __init__(self, bound: str, hosts: Iterable[str], origins: Iterable[str]) -> None:
        """Without `hosts`, a server `bound` to loopback has only its own. `ConfigError` for bad hosts, origins."""
        for host in hosts:
            if not _NAME.fullmatch(host):
                hint = "expected a name such as example.org or *.example.org, an address, or * for any"
                raise ConfigError(f"{host!r:.80} is not a valid host", field="--allowed-hosts", hint=hint)
        for origin in origins:
            if not _ORIGIN.fullmatch(origin):
                hint = "expected a scheme and a host such as https://chat.example.org, or * for any"
                raise ConfigError(f"{origin!r:.80} is not a valid origin", field="--allowed-origins", hint=hint)
        self._hosts = frozenset(host.lower() for host in hosts)
        self._any_host = _ANY in self._hosts or not (self._hosts or is_loopback(bound))
        self._bound = bound.lower()
        self._last: tuple[str, str | None] | None = None
        """Host that was accepted last, with the address at which it arrived: most requests name the same."""
        self._origins = frozenset(origin.lower() for origin in origins)

    def check(self, visit: Visit) -> Mapping[str, str]:
        """Return headers for a page of another origin; `ApiError`: 421 for a foreign host, 403 for a foreign origin."""
        if len(visit.hosts) > 1:
            raise ApiError(400, "the request has more than one Host header", code="invalid_host")
        given = visit.hosts[0] if visit.hosts else None
        if given is not None and not self._any_host and (given, visit.address) != self._last:
            if not self._is_own(given, visit.address):
                message = "the Host of the request is not allowed; add it with --allowed-hosts"
                raise ApiError(421, message, code="foreign_host")
            self._last = given, visit.address
        if visit.origin is None or (given is not None and _same(visit.origin, given)):
            return {}
        if _ANY not in self._origins and visit.origin.lower() not in self._origins:
            message = "requests from pages of this origin are not allowed; add it with --allowed-origins"
            raise ApiError(403, message, code="foreign_origin")
        headers = {
            "Access-Control-Allow-Origin": visit.origin,
            "Access-Control-Expose-Headers": _EXPOSED,
            "Vary": "Origin",
        }
        if visit.preflight:
            headers |= {
                "Access-Control-Allow-Methods": "GET, HEAD, POST, DELETE, OPTIONS",
                "Access-Control-Allow-Headers": visit.wants_headers or "Authorization, Content-Type",
                "Access-Control-Allow-Private-Network": "true",
                "Access-Control-Max-Age": "600",
            }
        return headers

    def _is_own(self, given: str, address: str | None) -> bool:
        found = _HOST.fullmatch(given.strip())
        if found is None:
            return False
        host = (found["six"] or found["name"]).rstrip(".").lower()
        if is_loopback(host) or host.endswith(".localhost") or host in (self._bound, address):
            return True
        return host in self._hosts or any(host.endswith(name[1:]) for name in self._hosts if name.startswith("*."))


def _same(origin: str, host: str) -> bool:
    """Return True if a page of `origin` was loaded from `host`; a proxy in between may have changed its scheme."""
    try:
        page = urlsplit(origin.lower())
        port = page.port
    except ValueError:
        return False
    default = {"http": ":80", "https": ":443"}.get(page.scheme, "")
    name = page.netloc if port is None else page.netloc.removesuffix(default)
    return bool(name) and name == host.strip().lower().removesuffix(default)


@lru_cache(maxsize=4096)
def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
