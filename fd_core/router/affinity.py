"""Router policies that look at the request: what a worker already holds, or who was there before."""

from __future__ import annotations

import hashlib
import math
from typing import ClassVar, Final

import numpy as np

from fd_core.router.config import RouterConfig
from fd_core.router.expiring import Expiring
from fd_core.router.policies import Candidate, Policy, View, by_requests, by_tokens, least

__all__ = ["CacheAware", "PrefixHash", "Session"]

_TWICE: Final = 6
"""What a token costs that is computed though another worker holds it: its own time; that of those which its block
pushes out of the cache, now there and here; and both again when the conversation goes on. Between 4 (the first token
comes soonest) and 8 (the most hits) the choice is flat on recorded conversations, see `benchmarks/NOTES.md`."""
_REQUEST: Final = 256
"""Prompt tokens that cost the others on a worker as much as a request that decodes there."""


class CacheAware(Policy):
    """Where the least is left to compute, of this prompt and of those before it.

    The smallest `missing * hit-ratio-weight + load * load-balance-weight`, both in prompt tokens: `missing` are those
    that the worker neither holds nor computes at this moment, each worth several (`_TWICE`), `load` those that others
    on it still wait for, and a share for each of its requests. If the requests of two workers differ by more than both
    thresholds, prompt tokens still to compute decide alone until they do not.
    """

    uses_prefix: ClassVar[bool] = True

    def choose(self, view: View) -> Candidate:
        """The smallest sum of hit and load, or the fewest tokens where load is out of balance."""
        loads = [candidate.load.requests for candidate in view.candidates]
        largest = max(loads)
        apart = largest - min(loads)
        if apart > self.config.balance_abs_threshold and apart > self.config.balance_rel_threshold * largest:
            return least(view.candidates, by_tokens, view.random)

        def cost(candidate: Candidate) -> tuple[float, ...]:
            missing = len(view.tokens) - candidate.coming * self.config.cache_block_size
            load = candidate.load.prefill_tokens + candidate.load.requests * _REQUEST
            weights = (self.config.hit_ratio_weight, self.config.load_balance_weight)
            return (missing * _TWICE * weights[0] + load * weights[1],)

        return least(view.candidates, cost, view.random)


class PrefixHash(Policy):
    """Prompts that begin alike go to the same worker, without anything remembered.

    Each prefix ranks the workers by a hash of both (highest random weight, Thaler and Ravishankar 1998), so whoever
    comes or goes moves only its own share. The first in that order whose load stays within `prefix-hash-slack` of the
    mean takes the request (bounded loads, Mirrokni, Thorup and Zadimoghaddam 2018).
    """

    def choose(self, view: View) -> Candidate:
        """The first in the prefix's order that has room."""
        head = view.tokens[: self.config.cache_block_size * self.config.prefix_hash_blocks]
        prefix = np.ascontiguousarray(head, "<i4").tobytes()
        ranked = sorted(view.candidates, key=lambda one: _weight(one.worker.url, prefix), reverse=True)
        total = sum(candidate.load.requests for candidate in ranked) + 1
        room = math.ceil((1 + self.config.prefix_hash_slack) * total / len(ranked))
        return next((candidate for candidate in ranked if candidate.load.requests < room), ranked[0])


class Session(Policy):
    """Requests of one session go to the worker that it was last given; others, and new sessions, to the least loaded.

    A session that sends nothing for `eviction-duration-mins` is forgotten, and the one that was silent longest if
    there are more than `max-sessions`.
    """

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._homes: Expiring[str, str] = Expiring(duration=config.eviction_duration, capacity=config.max_sessions)

    def choose(self, view: View) -> Candidate:
        """The session's worker if it is a candidate."""
        home = None if view.session is None else self._homes.get(view.session, view.now)
        at_home = (candidate for candidate in view.candidates if candidate.worker.url == home)
        chosen = next(at_home, None) or least(view.candidates, by_requests, view.random)
        if view.session is not None:
            self._homes.put(view.session, chosen.worker.url, view.now)
        return chosen

    def sweep(self, now: float) -> None:
        """Forget silent sessions."""
        self._homes.sweep(now)


def _weight(url: str, prefix: bytes) -> bytes:
    return hashlib.blake2b(url.encode() + b"\n" + prefix, digest_size=8).digest()
