"""API keys, recognising the one that a client sent, and what each may take. There is no clock: moments are passed in.

The minute of a limit slides: of any 60 seconds, what was admitted within them never exceeds the limit. A request takes
its tokens when it begins, as many as it may read and write, and gives back at its end what it did not use.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import math
import secrets
from collections.abc import Iterable, Iterator
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

WINDOW_SECONDS: Final = 60.0
_SLOT_SECONDS: Final = 0.25
"""What is admitted within one slot counts until the whole slot is a minute old."""

Limited = Literal["requests", "tokens", "parallel"]
_Limit = Annotated[int, Meta(ge=1, le=10**12)]


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one key may take; None sets no limit."""

    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    """Of prompts and texts together."""
    parallel_requests: _Limit | None = None
    """Requests that are answered at the same time, streamed or whole."""


class LimitReached(Exception):
    """A request would exceed a limit of its key."""

    def __init__(self, limited: Limited, limit: int, used: int, asked: int, wait: float | None) -> None:
        super().__init__(limited)
        self.limited = limited
        self.limit = limit
        self.used = used
        self.asked = asked
        self.wait = wait
        """Seconds until it fits, if nothing else is admitted meanwhile; None if it never fits."""


class SlidingWindow:
    """Sums what was added within the last minute, in memory that has a bound."""

    __slots__ = ("_latest", "_slots", "used")

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._latest = -math.inf
        self.used = 0

    def advance(self, now: float) -> None:
        """Forget what is older than a minute. A clock that goes back stands still."""
        self._latest = max(self._latest, now)
        for slot in list(self._slots):
            if _end_of(slot) > self._latest:
                break
            self.used -= self._slots.pop(slot)

    def add(self, now: float, amount: int) -> int:
        """Add to the current slot, and return its number."""
        self.advance(now)
        slot = math.floor(self._latest / _SLOT_SECONDS)
        self._slots[slot] = self._slots.get(slot, 0) + amount
        self.used += amount
        return slot

    def give_back(self, slot: int, amount: int) -> None:
        """Take back what was added to a slot; no more than nothing if a minute has passed since."""
        if slot in self._slots:
            self._slots[slot] -= amount
            self.used -= amount

    def wait(self, now: float, excess: int) -> float:
        """Return the seconds until `excess` of what is used is forgotten."""
        self.advance(now)
        for slot, amount in self._slots.items():
            excess -= amount
            if excess <= 0:
                return _end_of(slot) - self._latest
        return 0.0

    def reset(self, now: float) -> float:
        """Return the seconds until nothing is used, if nothing is added."""
        self.advance(now)
        return max((_end_of(slot) - self._latest for slot, amount in self._slots.items() if amount), default=0.0)


class KeyAccount:
    """What the requests of one key have taken."""

    def __init__(self, limits: KeyLimits) -> None:
        self.limits = limits
        """May be replaced; what was taken before still counts."""
        self.running = 0
        self.requests = SlidingWindow()
        self.tokens = SlidingWindow()

    def enter(self, now: float) -> None:
        """Let a request begin, which counts in `running`. Raises `LimitReached`; one that is refused takes nothing."""
        limits = self.limits
        if limits.parallel_requests is not None and self.running >= limits.parallel_requests:
            raise LimitReached("parallel", limits.parallel_requests, self.running, 1, 1.0)
        if limits.requests_per_minute is not None:
            _require("requests", self.requests, limits.requests_per_minute, now, 1)
            self.requests.add(now, 1)
        self.running += 1

    def reserve(self, now: float, tokens: int) -> Reservation:
        """Take tokens in advance. Raises `LimitReached`."""
        limit = self.limits.tokens_per_minute
        if limit is None:
            return Reservation(self, None, tokens)
        _require("tokens", self.tokens, limit, now, tokens)
        return Reservation(self, self.tokens.add(now, tokens), tokens)


class Reservation:
    """Tokens that one request took in advance."""

    __slots__ = ("_account", "_open", "_slot", "tokens")

    def __init__(self, account: KeyAccount, slot: int | None, tokens: int) -> None:
        self._account = account
        self._slot = slot
        self._open = True
        self.tokens = tokens

    def settle(self, now: float, used: int) -> None:
        """Give back, once, what was not used; what was used beyond that is taken now, whatever the limit says."""
        if not self._open or self._slot is None:
            return
        self._open = False
        if used > self.tokens:
            self._account.tokens.add(now, used - self.tokens)
        else:
            self._account.tokens.give_back(self._slot, self.tokens - max(0, used))


def _require(limited: Limited, window: SlidingWindow, limit: int, now: float, asked: int) -> None:
    window.advance(now)
    excess = window.used + asked - limit
    if excess > 0:
        raise LimitReached(limited, limit, window.used, asked, None if asked > limit else window.wait(now, excess))


def _end_of(slot: int) -> float:
    """Return the moment from which on nothing of a slot counts."""
    return (slot + 1) * _SLOT_SECONDS + WINDOW_SECONDS


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
