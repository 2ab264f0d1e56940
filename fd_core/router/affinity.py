"""Router policies that look at the request: what a worker already holds, or who was there before."""

from __future__ import annotations

import hashlib
import math
from typing import ClassVar

import numpy as np

from fd_core.router.config import RouterConfig
from fd_core.router.expiring import Expiring
from fd_core.router.policies import Candidate, Policy, View, by_requests, by_tokens, least

__all__ = ["CacheAware", "PrefixHash", "Session"]


class CacheAware(Policy):
    """Where the longest part of the prompt is cached, weighed against load, as FastDeploy's router weighs them.

    The smallest `(1 - hit) * hit-ratio-weight + load / largest load * load-balance-weight`, then the fewest prefill
    tokens; `hit` is the share of the prompt's blocks that the worker holds, `load` its requests. If loads differ by
    more than both thresholds, prefill tokens alone decide until they do not.
    """

    uses_prefix: ClassVar[bool] = True

    def choose(self, view: View) -> Candidate:
        """The best sum of hit and load, or the fewest tokens where load is out of balance."""
        loads = [candidate.load.requests for candidate in view.candidates]
        largest = max(loads)
        apart = largest - min(loads)
        if apart > self.config.balance_abs_threshold and apart > self.config.balance_rel_threshold * largest:
            return least(view.candidates, by_tokens, view.random)
        blocks = max(1, len(view.keys))

        def cost(candidate: Candidate) -> tuple[float, ...]:
            missing = (blocks - candidate.hits) / blocks * self.config.hit_ratio_weight
            busy = candidate.load.requests / max(1, largest) * self.config.load_balance_weight
            return (missing + busy, candidate.load.prefill_tokens)

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
