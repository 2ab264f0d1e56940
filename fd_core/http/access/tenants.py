"""The tenant of a request that a router passes on: whose work it is, signed with the worker's key.

A worker sees one key, the router's. The header names the client's key behind it, for one request only: method, path and
request id are signed as well. A tenant owns a part of what the carrying key owns and nothing else, so whoever forges a
header with a key of their own gains nothing by it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Final, NamedTuple

from fd_core.http.access.keys import ApiKey

TENANT_HEADER: Final = "X-FD-Tenant"
_HEADER: Final = re.compile(r"([0-9a-f]{32}) (admin|user) (\d{0,13}) ([0-9a-f]{64})")


class Tenant(NamedTuple):
    """A key of a router's, as a worker sees it."""

    owner: str
    """See `ApiKey.owner`."""
    admin: bool = False
    tokens_per_minute: int | None = None

    @staticmethod
    def of(key: ApiKey) -> Tenant:
        """Return the tenant that a key of the router's stands for."""
        return Tenant(key.owner, key.admin, key.limits.tokens_per_minute)


def sign_tenant(secret: bytes, tenant: Tenant, method: str, path: str, request_id: str) -> str:
    """Return the header of one request; `secret` is the SHA-256 of the worker's key, `path` the decoded path."""
    limit = tenant.tokens_per_minute
    said = f"{tenant.owner} {'admin' if tenant.admin else 'user'} {'' if limit is None else limit}"
    return f"{said} {_mac(secret, said, method, path, request_id)}"


def read_tenant(secret: bytes | None, header: bytes, method: str, path: str, request_id: str) -> Tenant | None:
    """Return the tenant that a header names; None unless it is signed with `secret` for this very request.

    A worker without keys has no secret, None, and believes every header, as it serves everybody.
    """
    found = _HEADER.fullmatch(header.decode("latin-1"))
    if found is None:
        return None
    owner, right, limit, mac = found.groups()
    if secret is not None:
        good = _mac(secret, f"{owner} {right} {limit}", method, path, request_id)
        if not hmac.compare_digest(mac, good):
            return None
    return Tenant(owner, right == "admin", int(limit) if limit else None)


def _mac(secret: bytes, *said: str) -> str:
    text = b"".join(len(raw).to_bytes(4, "little") + raw for raw in (each.encode("utf-8", "replace") for each in said))
    return hmac.new(secret, b"fd_core tenant" + text, hashlib.sha256).hexdigest()
