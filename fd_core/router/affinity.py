"""Router policies that look at the request: at the prefix that a worker holds, or at the session of the client."""

from __future__ import annotations

import hashlib
import math
from typing import ClassVar, Final

import numpy as np

from fd_core.router.config import RouterConfig
from fd_core.router.expiring import Expiring
from fd_core.router.policies import Candidate, RouterPolicy, RoutingContext, by_requests, by_tokens, least

__all__ = ["CacheAware", "PrefixHash", "SessionAffinity"]

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
        loads = [candidate.load.requests for candidate in context.candidates]
        largest = max(loads)
        apart = largest - min(loads)
        if apart > self.config.balance_abs_threshold and apart > self.config.balance_rel_threshold * largest:
            return least(context.candidates, by_tokens, context.random)

        def cost(candidate: Candidate) -> tuple[float, ...]:
            missing = len(context.tokens) - candidate.expected_hits * self.config.cache_block_size
            load = candidate.load.prefill_tokens + candidate.load.requests * _REQUEST_TOKENS
            weights = (self.config.hit_ratio_weight, self.config.load_balance_weight)
            return (missing * _MISSING_WEIGHT * weights[0] + load * weights[1],)

        return least(context.candidates, cost, context.random)


class PrefixHash(RouterPolicy):
    """Prompts that begin alike go to the same worker; the policy remembers nothing.

    Each prefix ranks the workers by a hash of both (highest random weight, Thaler and Ravishankar 1998), so a worker
    that comes or goes moves only its own share. The first worker in that order whose load stays within
    `prefix-hash-slack` of the mean takes the request (bounded loads, Mirrokni, Thorup and Zadimoghaddam 2018).
    """

    def choose(self, context: RoutingContext) -> Candidate:
        """Return the first candidate in the prefix's order that has room."""
        head = context.tokens[: self.config.cache_block_size * self.config.prefix_hash_blocks]
        prefix = np.ascontiguousarray(head, "<i4").tobytes()
        ranked = sorted(context.candidates, key=lambda one: _weight(one.worker.url, prefix), reverse=True)
        total = sum(candidate.load.requests for candidate in ranked) + 1
        room = math.ceil((1 + self.config.prefix_hash_slack) * total / len(ranked))
        return next((candidate for candidate in ranked if candidate.load.requests < room), ranked[0])


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
        at_home = (candidate for candidate in context.candidates if candidate.worker.url == home)
        chosen = next(at_home, None) or least(context.candidates, by_requests, context.random)
        if context.session is not None:
            self._homes.put(context.session, chosen.worker.url, context.now)
        return chosen

    def sweep(self, now: float) -> None:
        """Forget sessions that were silent for too long."""
        self._homes.sweep(now)


def _weight(url: str, prefix: bytes) -> bytes:
    return hashlib.blake2b(url.encode() + b"\n" + prefix, digest_size=8).digest()
