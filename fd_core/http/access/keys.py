"""API keys, and recognising the one that a client sent."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Iterable, Iterator

import msgspec

from fd_core.http.access.limits import KeyLimits


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """One key, without its text."""

    digest: bytes
    """SHA-256 of the key."""
    name: str = ""
    """For logs and metrics; a key without a name has none."""
    admin: bool = False
    """Whether it may act on the requests of others."""
    limits: KeyLimits = KeyLimits()

    @staticmethod
    def of(text: str) -> ApiKey:
        """Return a key without name and limits."""
        return ApiKey(digest=_digest(text.encode("utf-8", "surrogateescape")))

    @property
    def owner(self) -> str:
        """Whose files, batches and kept responses they are: a digest of the name, or of a key without one.

        It stays the same for as long as the name does, so that a key can be replaced.
        """
        if self.name:
            return hashlib.blake2b(self.name.encode(), digest_size=16, person=b"fd_core key name").hexdigest()
        return hashlib.blake2b(self.digest, digest_size=16, person=b"fd_core owner").hexdigest()


def scoped(owner: str, name: str | None) -> str:
    """Return a name that a client chose as a name among its owner's only; as it is where there are no keys."""
    return f"{owner}/{name or ''}" if owner else name or ""


class KeyRing:
    """The accepted keys. Without any, every request is accepted.

    Keys are found by a digest that is keyed with a secret of this process: nobody outside can tell which keys it brings
    close to each other, so the time that a search takes says nothing about them, however many there are.
    """

    def __init__(self, keys: Iterable[ApiKey | str]) -> None:
        self._secret = secrets.token_bytes(32)
        self._nobody = ApiKey(digest=secrets.token_bytes(32))
        all_keys = [ApiKey.of(key) if isinstance(key, str) else key for key in keys]
        self._keys = {self._place(key.digest): key for key in all_keys}
        self._owners = {key.owner: key for key in all_keys}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[ApiKey]:
        return iter(self._keys.values())

    def of_owner(self, owner: str) -> ApiKey | None:
        """Return the key of an owner, None if there is none (any more)."""
        return self._owners.get(owner)

    def find(self, authorization: bytes | None, api_key: bytes | None = None, *, basic: bool = False) -> ApiKey | None:
        """Return the key of `Authorization: Bearer KEY` or `x-api-key: KEY`; None if it is none of the keys.

        With `basic`, the password of `Authorization: Basic` is a key as well, as browsers send it.
        """
        scheme, _, given = (authorization or b"").partition(b" ")
        kind = scheme.lower()
        if basic and kind == b"basic":
            kind, given = b"bearer", _password(given)
        sent = ((given, kind == b"bearer"), (api_key or b"", api_key is not None))
        matches = [found for text, counts in sent if (found := self._find(text.strip())) is not None and counts]
        return matches[0] if matches else None

    def _find(self, text: bytes) -> ApiKey | None:
        digest = _digest(text)
        found = self._keys.get(self._place(digest), self._nobody)
        return found if hmac.compare_digest(digest, found.digest) else None

    def _place(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, digest_size=16, key=self._secret).digest()


def _password(given: bytes) -> bytes:
    try:
        return base64.b64decode(given.strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
