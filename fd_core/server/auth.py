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

    def accepts(self, authorization: bytes | None, api_key: bytes | None = None) -> bool:
        """Whether the header `Authorization: Bearer KEY`, or `x-api-key: KEY`, carries one of the keys.

        The time this takes says nothing about the keys: digests of equal length are compared, all of them.
        """
        scheme, _, given = (authorization or b"").partition(b" ")
        sent = ((given, scheme.lower() == b"bearer"), (api_key or b"", api_key is not None))
        matches = [
            hmac.compare_digest(_digest(key.strip()), digest) and counts
            for key, counts in sent
            for digest in self._digests
        ]
        return any(matches)

    def check(self, path: str, authorization: bytes | None, api_key: bytes | None = None) -> None:
        """Raise `ApiError` (401) unless the path is open or a header carries an accepted key."""
        if self._digests and path not in OPEN_PATHS and not self.accepts(authorization, api_key):
            raise ApiError(
                401,
                "a valid API key is required: send the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
