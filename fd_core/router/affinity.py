"""A map of bounded size whose entries expire; the entry that was written longest ago leaves first."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Hashable
from functools import lru_cache
from typing import ClassVar, Final, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from fd_core.router.config import RouterConfig
from fd_core.router.policies import (
    Candidate,
    RouterPolicy,
    RoutingContext,
    fewest_requests,
    fewest_tokens,
    lowest,
)
from fd_core.router.workers import RouterWorker

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Expiring(Generic[Key, Value]):
    """At most `capacity` entries, each found for `duration` seconds after it was last put. Every call is O(1).

    The readings of the clock that are passed in never go backwards.
    """

    def __init__(self, *, duration: float, capacity: int) -> None:
        self._duration = duration
        self._capacity = capacity
        self._entries: OrderedDict[Key, tuple[float, Value]] = OrderedDict()

    def __len__(self) -> int:
        """Entries that take memory, expired ones included until a sweep."""
        return len(self._entries)

    def put(self, key: Key, value: Value, now: float) -> None:
        """Write an entry; beyond the capacity the oldest one leaves."""
        self._entries[key] = (now, value)
        self._entries.move_to_end(key)
        if len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    def has(self, key: Key, now: float) -> bool:
        """Whether an entry is there and has not expired."""
        entry = self._entries.get(key)
        return entry is not None and now - entry[0] < self._duration

    def get(self, key: Key, now: float) -> Value | None:
        """Return the value of an entry; None if there is none or it has expired."""
        return self._entries[key][1] if self.has(key, now) else None

    def sweep(self, now: float) -> None:
        """Remove all entries that have expired."""
        while self._entries:
            key, (written, _) = next(iter(self._entries.items()))
            if now - written < self._duration:
                return
            del self._entries[key]


_MISSING_WEIGHT: Final = 6
"""Cost of a prompt token that a worker has to compute, where a token that others wait for there costs 1. The token
takes its own time, its block evicts another one, and both are paid again when the conversation goes on. Between 4 (the
first token comes soonest) and 8 (the most hits) the choice is flat on recorded conversations, see
`benchmarks/NOTES.md`."""
_REQUEST_TOKENS: Final = 256
"""Prompt tokens that slow other requests of a worker down as much as one request that decodes there."""


class CacheAware(RouterPolicy):
    """The worker with the least left to compute, of this prompt and of the prompts before it.

    The score is `missing * hit-ratio-weight + load * load-balance-weight`, in prompt tokens, and the smallest one wins.
    `missing` are the tokens of this prompt that the worker neither holds nor computes at this moment, each with the
    weight `_MISSING_WEIGHT`. `load` are the tokens that the worker has to compute for other requests, and a share for
    each of its requests. While the requests of two workers differ by more than both balance thresholds, prompt tokens
    to compute decide alone.
    """

    uses_prefix: ClassVar[bool] = True

    def choose(self, context: RoutingContext) -> Candidate:
        """Return the candidate with the smallest score, or with the fewest tokens where load is out of balance."""
        seen = context.candidates
        largest = int(seen.requests.max())
        apart = largest - int(seen.requests.min())
        if apart > self.config.balance_abs_threshold and apart > self.config.balance_rel_threshold * largest:
            return fewest_tokens(context)

        length, block = len(context.tokens), self.config.cache_block_size
        of_missing, of_load = self.config.hit_ratio_weight * _MISSING_WEIGHT, self.config.load_balance_weight

        missing, load = length - seen.expected_hits * block, seen.prefill_tokens + seen.requests * _REQUEST_TOKENS
        return lowest(seen, context.random, missing * of_missing + load * of_load)


class PrefixHash(RouterPolicy):
    """Prompts that begin alike go to the same worker; the policy remembers nothing.

    Each prefix ranks the workers by a hash of both (highest random weight, Thaler and Ravishankar 1998), so a worker
    that comes or goes moves only its own share. The first worker in that order whose load stays within
    `prefix-hash-slack` of the mean takes the request (bounded loads, Mirrokni, Thorup and Zadimoghaddam 2018).
    """

    def choose(self, context: RoutingContext) -> Candidate:
        """Return the first candidate in the prefix's order that has room."""
        head = context.tokens[: self.config.cache_block_size * self.config.prefix_hash_blocks]
        prefix = _hash(np.ascontiguousarray(head, "<i4").tobytes())
        urls, loads = context.candidates.once(_hashes_of_urls), context.candidates.requests
        room = math.ceil((1 + self.config.prefix_hash_slack) * (int(loads.sum()) + 1) / len(loads))
        # At least one has room: the one with the fewest requests.
        weights = np.where(loads < room, _mixed(urls ^ np.uint64(prefix)), np.uint64(0))
        return context.candidates[int(weights.argmax())]


class SessionAffinity(RouterPolicy):
    """Requests of one session go to the worker of its last request, all others to the least loaded worker.

    A session that sends nothing for `eviction-duration-mins` is forgotten; beyond `max-sessions` the session that was
    silent longest is.
    """

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._homes: Expiring[str, str] = Expiring(duration=config.eviction_duration, capacity=config.max_sessions)

    def choose(self, context: RoutingContext) -> Candidate:
        """Return the session's worker if it is a candidate, else the least loaded one."""
        home = None if context.session is None else self._homes.get(context.session, context.now)
        place = None if home is None else context.candidates.once(_places_of_urls).get(home)
        chosen = fewest_requests(context) if place is None else context.candidates[place]
        if context.session is not None:
            self._homes.put(context.session, chosen.worker.url, context.now)
        return chosen

    def sweep(self, now: float) -> None:
        """Forget sessions that were silent for too long."""
        self._homes.sweep(now)


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _hashes_of_urls(workers: tuple[RouterWorker, ...]) -> npt.NDArray[np.uint64]:
    return np.array([_hash_of_url(worker.url) for worker in workers], np.uint64)


@lru_cache(maxsize=1 << 16)
def _hash_of_url(url: str) -> int:
    return _hash(url.encode())


def _places_of_urls(workers: tuple[RouterWorker, ...]) -> dict[str, int]:
    return {worker.url: place for place, worker in enumerate(workers)}


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return numbers of which each bit depends on all bits of the one given (SplitMix64, Steele and others 2014)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    return numbers ^ (numbers >> np.uint64(31))
