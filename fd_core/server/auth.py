"""API keys that clients must send."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from typing import Final

from fd_core.server.errors import ApiError

__all__ = ["OPEN_PATHS", "KeyRing"]

_PROBES: Final = ("/health", "/ping", "/ready", "/load", "/version", "/metrics")
OPEN_PATHS: Final = frozenset({"/", "/status.json", "/openapi.json", *_PROBES})
"""Paths served without a key, for probes and scrapers. None of them shows a prompt, a text or a key."""


class KeyRing:
    """The accepted keys, kept as digests. Without keys every request is accepted."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def owner(self, authorization: bytes | None, api_key: bytes | None = None) -> str | None:
        """Return who sends the header `Authorization: Bearer KEY`, or `x-api-key: KEY`; None if it is none of the keys.

        The name is a digest of the key, the same for as long as the key is; "" where there are no keys.

        The time this takes says nothing about the keys: digests of equal length are compared, all of them.
        """
        if not self._digests:
            return ""
        scheme, _, given = (authorization or b"").partition(b" ")
        sent = ((given, scheme.lower() == b"bearer"), (api_key or b"", api_key is not None))
        matches = [
            digest
            for key, counts in sent
            for digest in self._digests
            if hmac.compare_digest(_digest(key.strip()), digest) and counts
        ]
        return hashlib.blake2b(matches[0], digest_size=16, person=b"fd_core owner").hexdigest() if matches else None

    def check(self, path: str, authorization: bytes | None, api_key: bytes | None = None) -> str:
        """Return whose request it is, "" for anybody's, see `owner`.

        Raises `ApiError` (401) unless the path is open or a header carries an accepted key.
        """
        owner = self.owner(authorization, api_key)
        if owner is None and path not in OPEN_PATHS:
            raise ApiError(
                401,
                "a valid API key is required: send the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return owner or ""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
