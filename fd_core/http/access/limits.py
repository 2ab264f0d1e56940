"""Limits of one API key: requests and tokens a minute, requests at a time. There is no clock: moments are passed in.

The minute slides: of any 60 seconds, what was admitted within them never exceeds the limit. A request takes its tokens
when it begins, as many as it may read and write, and gives back at its end what it did not use.
"""

from __future__ import annotations

import math
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

    def enter(self, now: float) -> KeyAdmission:
        """Let a request begin. Raises `LimitReached`; a request that is refused takes nothing."""
        limits = self.limits
        if limits.parallel_requests is not None and self.running >= limits.parallel_requests:
            raise LimitReached("parallel", limits.parallel_requests, self.running, 1, 1.0)
        if limits.requests_per_minute is not None:
            _require("requests", self.requests, limits.requests_per_minute, now, 1)
            self.requests.add(now, 1)
        self.running += 1
        return KeyAdmission(self)

    def reserve(self, now: float, tokens: int) -> Reservation:
        """Take tokens in advance. Raises `LimitReached`."""
        limit = self.limits.tokens_per_minute
        if limit is None:
            return Reservation(self, None, tokens)
        _require("tokens", self.tokens, limit, now, tokens)
        return Reservation(self, self.tokens.add(now, tokens), tokens)


class KeyAdmission:
    """One request that was let in; to be released once it is over."""

    __slots__ = ("_over", "account")

    def __init__(self, account: KeyAccount) -> None:
        self.account = account
        self._over = False

    def release(self) -> None:
        """Make room for another request; only the first call does."""
        if not self._over:
            self._over = True
            self.account.running -= 1


class Reservation:
    """Tokens that one request took in advance."""

    __slots__ = ("_account", "_open", "_slot", "tokens")

    def __init__(self, account: KeyAccount, slot: int | None, tokens: int) -> None:
        self._account = account
        self._slot = slot
        self._open = True
        self.tokens = tokens

    def settle(self, now: float, used: int) -> None:
        """Give back what was not used; what was used beyond the reservation is taken now, whatever the limit says.

        Only the first call does anything.
        """
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
