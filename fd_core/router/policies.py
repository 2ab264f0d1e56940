"""Router policies: which worker gets a request. These look at load, those of `affinity` at the request as well.

A policy is pure: it sees frozen values, among them one random number and a reading of the clock, and answers with one
of the candidates. Plugins offer their own through `fd_core.hookspecs.fd_register_router_policies`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec

from fd_core.router.accounting import Load
from fd_core.router.config import RouterConfig
from fd_core.router.workers import Worker
from fd_core.types import IntArray

__all__ = [
    "Candidate",
    "MetricsScore",
    "Policy",
    "PowerOfTwo",
    "ProcessTokens",
    "Random",
    "RequestNum",
    "RoundRobin",
    "View",
    "least",
]


class Candidate(msgspec.Struct, frozen=True):
    """A worker that may be chosen."""

    worker: Worker
    load: Load
    hits: int = 0
    """Leading blocks of the prompt that it is believed to hold; 0 unless the policy says `uses_prefix`."""
    coming: int = 0
    """Leading blocks that it holds or computes for another request; at least `hits`."""


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """What a policy sees of one request and of who could take it."""

    candidates: tuple[Candidate, ...]
    """At least one; healthy workers of one role that this request has not failed on. Others are not to be seen."""
    tokens: IntArray
    """The prompt, int32 of shape [n], never empty, read-only."""
    keys: tuple[bytes, ...]
    """Keys of its full blocks; empty if there is none, or unless the policy says `uses_prefix`."""
    session: str | None
    random: float
    """One uniform number in [0, 1)."""
    now: float
    """Reading of a monotonic clock in seconds."""


class Policy(abc.ABC):
    """Chooses one worker for each request; one instance for each role that it is asked for."""

    uses_prefix: ClassVar[bool] = False
    """Whether it reads `View.keys` and `Candidate.hits`, which cost time."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config

    @abc.abstractmethod
    def choose(self, view: View) -> Candidate:
        """Return one of `view.candidates`. Equal calls in equal states give equal answers."""

    def departed(self, worker: Worker) -> None:  # noqa: B027 - most policies need not know
        """This incarnation is gone or was replaced."""

    def sweep(self, now: float) -> None:  # noqa: B027 - most policies remember nothing
        """Forget what has expired; called now and then."""


def least(candidates: Sequence[Candidate], key: Callable[[Candidate], tuple[float, ...]], random: float) -> Candidate:
    """Return the candidate of the smallest key, the random number deciding between equal ones."""
    keys = [key(candidate) for candidate in candidates]
    smallest = min(keys)
    equal = [candidate for candidate, value in zip(candidates, keys, strict=True) if value == smallest]
    return equal[int(random * len(equal))]


class Random(Policy):
    """Any, each with the same chance."""

    def choose(self, view: View) -> Candidate:
        """The random number decides."""
        return view.candidates[int(view.random * len(view.candidates))]


class RoundRobin(Policy):
    """One after the other, by address; who comes or goes does not disturb the others' order."""

    _last = ""

    def choose(self, view: View) -> Candidate:
        """The one with the next address after the last one chosen."""
        by_address = sorted(view.candidates, key=lambda candidate: candidate.worker.url)
        later = (candidate for candidate in by_address if candidate.worker.url > self._last)
        chosen = next(later, by_address[0])
        self._last = chosen.worker.url
        return chosen


class PowerOfTwo(Policy):
    """The less loaded of two random ones (Mitzenmacher 2001): close to the best with half the herd behaviour."""

    def choose(self, view: View) -> Candidate:
        """Two draws from one random number; of the two the one with fewer requests, then with fewer tokens."""
        count = len(view.candidates)
        scaled = view.random * count
        first = int(scaled)
        if count == 1:
            return view.candidates[0]
        second = (first + 1 + int((scaled - first) * (count - 1))) % count
        pair = (view.candidates[first], view.candidates[second])
        return min(pair, key=by_requests)


class RequestNum(Policy):
    """The fewest requests, then the fewest prefill tokens."""

    def choose(self, view: View) -> Candidate:
        """The least loaded."""
        return least(view.candidates, by_requests, view.random)


class ProcessTokens(Policy):
    """The fewest prompt tokens still to compute, then the fewest requests."""

    def choose(self, view: View) -> Candidate:
        """The one that will be done with its prefill first."""
        return least(view.candidates, by_tokens, view.random)


class MetricsScore(Policy):
    """The fewest requests, those that wait for their first token weighed by `waiting-weight`."""

    def choose(self, view: View) -> Candidate:
        """The smallest weighed sum."""
        weight = self.config.waiting_weight
        return least(
            view.candidates,
            lambda each: (each.load.requests - each.load.waiting + weight * each.load.waiting, *by_tokens(each)),
            view.random,
        )


def by_requests(candidate: Candidate) -> tuple[float, ...]:
    """Sort key: requests, then prefill tokens."""
    return (candidate.load.requests, candidate.load.prefill_tokens)


def by_tokens(candidate: Candidate) -> tuple[float, ...]:
    """Sort key: prefill tokens, then requests."""
    return (candidate.load.prefill_tokens, candidate.load.requests)
