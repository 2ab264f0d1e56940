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
    """The accepted keys, kept as digests. With no keys everybody may ask."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def check(self, path: str, authorization: bytes | None) -> None:
        """Raise `ApiError` (401) unless the path is open or the header `Bearer KEY` carries an accepted key.

        The time this takes says nothing about the keys: digests of equal length are compared, all of them.
        """
        if not self._digests or path in OPEN_PATHS:
            return
        scheme, _, given = (authorization or b"").partition(b" ")
        found = _digest(given.strip())
        matches = [hmac.compare_digest(found, digest) for digest in self._digests]
        if scheme.lower() != b"bearer" or not any(matches):
            raise ApiError(
                401,
                "a valid API key is required: send the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
