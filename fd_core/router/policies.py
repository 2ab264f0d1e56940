"""Router policies: which worker gets a request. Those here look at load, those of `affinity` at the request as well.

A policy is pure: it sees frozen values, among them one random number and a reading of the clock, and returns one of the
candidates. Plugins offer policies through `fd_core.hookspecs.fd_register_router_policies`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar

import msgspec

from fd_core.router.accounting import WorkerLoad
from fd_core.router.config import RouterConfig
from fd_core.router.workers import RouterWorker
from fd_core.types import IntArray

__all__ = [
    "Candidate",
    "MetricsScore",
    "PowerOfTwo",
    "ProcessTokens",
    "Random",
    "RequestNum",
    "RoundRobin",
    "RouterPolicy",
    "RoutingContext",
    "cheapest",
    "least",
]


class Candidate(msgspec.Struct, frozen=True):
    """A worker that may be chosen."""

    worker: RouterWorker
    load: WorkerLoad
    hits: int = 0
    """Leading prompt blocks that the worker is believed to hold; 0 unless the policy says `uses_prefix`."""
    expected_hits: int = 0
    """Leading prompt blocks that the worker holds or computes for another request; at least `hits`."""


@dataclass(frozen=True, slots=True, eq=False)
class RoutingContext:
    """What a policy sees: one request, and the workers that could take it."""

    candidates: tuple[Candidate, ...]
    """At least one: the healthy workers of one role on which this request has not failed."""
    tokens: IntArray
    """The prompt, int32 of shape [n], never empty, read-only."""
    keys: tuple[bytes, ...]
    """Keys of the prompt's full blocks; empty unless the policy says `uses_prefix`."""
    session: str | None
    """Name that all requests of one conversation or user carry, if there is one."""
    random: float
    """One uniform number in [0, 1)."""
    now: float
    """Reading of a monotonic clock in seconds."""


class RouterPolicy(abc.ABC):
    """Chooses one worker for each request; the router makes one instance for each role."""

    uses_prefix: ClassVar[bool] = False
    """Whether the policy reads `RoutingContext.keys` and the hits of candidates, which cost time."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config

    @abc.abstractmethod
    def choose(self, context: RoutingContext) -> Candidate:
        """Return one of `context.candidates`. Equal calls in equal states give equal answers."""

    def departed(self, worker: RouterWorker) -> None:  # noqa: B027 - most policies need not know
        """Forget an incarnation that is gone or was replaced."""

    def sweep(self, now: float) -> None:  # noqa: B027 - most policies remember nothing
        """Forget what has expired; called every `eviction-interval-secs`."""


def least(
    candidates: Sequence[Candidate], key: Callable[[Candidate], float | tuple[float, ...]], random: float
) -> Candidate:
    """Return the candidate with the smallest key; `random`, in [0, 1), decides between equal ones."""
    return cheapest(candidates, [*map(key, candidates)], random)


def cheapest(candidates: Sequence[Candidate], costs: Sequence[Any], random: float) -> Candidate:
    """Return the candidate with the smallest of `costs`, one for each; `random` decides between equal ones."""
    smallest = min(costs)
    equal = [candidate for candidate, cost in zip(candidates, costs, strict=True) if cost == smallest]
    return equal[int(random * len(equal))]


class Random(RouterPolicy):
    """Any worker, each with the same chance."""

    def choose(self, context: RoutingContext) -> Candidate:
        """Return the candidate that the random number names."""
        return context.candidates[int(context.random * len(context.candidates))]


class RoundRobin(RouterPolicy):
    """One worker after the other, by address; workers that come or go do not disturb the order of the others."""

    _last = ""

    def choose(self, context: RoutingContext) -> Candidate:
        """Return the candidate whose address follows that of the last choice."""
        later = [candidate for candidate in context.candidates if candidate.worker.url > self._last]
        chosen = min(later or context.candidates, key=attrgetter("worker.url"))
        self._last = chosen.worker.url
        return chosen


class PowerOfTwo(RouterPolicy):
    """The less loaded of two random workers (Mitzenmacher 2001): close to the least load, with half the herding."""

    def choose(self, context: RoutingContext) -> Candidate:
        """Draw two candidates from one random number; return the one with fewer requests, then with fewer tokens."""
        count = len(context.candidates)
        scaled = context.random * count
        first = int(scaled)
        if count == 1:
            return context.candidates[0]
        second = (first + 1 + int((scaled - first) * (count - 1))) % count
        pair = (context.candidates[first], context.candidates[second])
        return min(pair, key=by_requests)


class RequestNum(RouterPolicy):
    """The worker with the fewest requests, then with the fewest prefill tokens."""

    def choose(self, context: RoutingContext) -> Candidate:
        """Return the least loaded candidate."""
        return least(context.candidates, by_requests, context.random)


class ProcessTokens(RouterPolicy):
    """The worker with the fewest prompt tokens to compute, then with the fewest requests."""

    def choose(self, context: RoutingContext) -> Candidate:
        """Return the candidate that will finish its prefill first."""
        return least(context.candidates, by_tokens, context.random)


class MetricsScore(RouterPolicy):
    """The worker with the fewest requests; those that wait for their first token have the weight `waiting-weight`."""

    def choose(self, context: RoutingContext) -> Candidate:
        """Return the candidate with the smallest weighted sum."""
        weight = self.config.waiting_weight
        return least(
            context.candidates,
            lambda each: (each.load.requests - each.load.waiting + weight * each.load.waiting, *by_tokens(each)),
            context.random,
        )


by_requests: Callable[[Candidate], tuple[float, ...]] = attrgetter("load.requests", "load.prefill_tokens")
"""Sort key: requests, then prefill tokens."""
by_tokens: Callable[[Candidate], tuple[float, ...]] = attrgetter("load.prefill_tokens", "load.requests")
"""Sort key: prefill tokens, then requests."""
