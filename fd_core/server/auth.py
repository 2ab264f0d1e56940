"""API keys that clients must send."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from typing import Final

from fd_core.server.errors import ApiError

__all__ = ["OPEN_PATHS", "KeyRing"]

OPEN_PATHS: Final = frozenset({"/", "/health", "/ready", "/version", "/metrics", "/openapi.json"})
"""Paths served without a key, for probes and scrapers. None of them shows a prompt, a text or a key."""


class KeyRing:
    """The accepted keys, kept as digests. Without keys every request is accepted."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def accepts(self, authorization: bytes | None) -> bool:
        """Whether the header `Bearer KEY` carries one of the keys.

        The time this takes says nothing about the keys: digests of equal length are compared, all of them.
        """
        scheme, _, given = (authorization or b"").partition(b" ")
        found = _digest(given.strip())
        matches = [hmac.compare_digest(found, digest) for digest in self._digests]
        return scheme.lower() == b"bearer" and any(matches)

    def check(self, path: str, authorization: bytes | None) -> None:
        """Raise `ApiError` (401) unless the path is open or the header carries an accepted key."""
        if self._digests and path not in OPEN_PATHS and not self.accepts(authorization):
            raise ApiError(
                401,
                "a valid API key is required: send the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
