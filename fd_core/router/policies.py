"""Router policies: which worker gets a request. Those here look at load, those of `affinity` at the request as well.

A policy is pure: it sees frozen values, among them one random number and a reading of the clock, and returns one of the
candidates. Plugins offer policies through `fd_core.hookspecs.fd_register_router_policies`.
"""

from __future__ import annotations

import abc
import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Final, Self, TypeVar, overload

import msgspec
import numpy as np
import numpy.typing as npt

from fd_core.router.config import RouterConfig
from fd_core.router.selection import Numbers, WorkerLoad
from fd_core.router.workers import RouterWorker
from fd_core.types import IntArray

__all__ = [
    "Candidate",
    "Candidates",
    "MetricsScore",
    "PowerOfTwo",
    "ProcessTokens",
    "Random",
    "RequestNum",
    "RoundRobin",
    "RouterPolicy",
    "RoutingContext",
    "least",
    "lowest",
]

_T = TypeVar("_T")


class Candidate(msgspec.Struct, frozen=True):
    """A worker that may be chosen."""

    worker: RouterWorker
    load: WorkerLoad
    hits: int = 0
    """Leading prompt blocks that the worker is believed to hold; 0 unless the policy says `uses_prefix`."""
    expected_hits: int = 0
    """Leading prompt blocks that the worker holds or computes for another request; at least `hits`."""


class Candidates(Sequence[Candidate]):
    """The workers that may be chosen, at least one, and never changed.

    Behaves as a tuple of `Candidate`, each of which is made when it is asked for. A policy that wants to be fast among
    a thousand workers compares columns instead: arrays of shape [n], read-only, one element for each candidate.
    """

    __slots__ = ("_expected_hits", "_hits", "_loads", "_made", "_whole", "_worked_out", "workers")

    def __init__(
        self,
        workers: tuple[RouterWorker, ...],
        loads: Numbers,
        hits: Numbers | None = None,
        expected_hits: Numbers | None = None,
        worked_out: dict[Callable[..., Any], Any] | None = None,
    ) -> None:
        """`loads` has shape [fields of `WorkerLoad`, n]; `worked_out` is what `once` has found for these workers."""
        self.workers: Final = workers
        self._loads = loads
        self._hits = hits
        self._expected_hits = hits if expected_hits is None else expected_hits
        for given in (loads, hits, expected_hits):
            if given is not None:
                given.flags.writeable = False
        self._made: dict[int, Candidate] = {}
        self._whole: tuple[Candidate, ...] | None = None
        self._worked_out: dict[Callable[..., Any], Any] = {} if worked_out is None else worked_out

    @classmethod
    def of(cls, candidates: Iterable[Candidate]) -> Self:
        """Return these candidates."""
        whole = tuple(candidates)
        loads = np.array([msgspec.structs.astuple(each.load) for each in whole], np.int64).T
        hits, expected = (np.array([*map(attrgetter(name), whole)], np.int64) for name in ("hits", "expected_hits"))
        made = cls(tuple(each.worker for each in whole), loads, hits, expected)
        made._whole = whole
        return made

    @property
    def requests(self) -> Numbers:
        """Requests in flight of each."""
        requests: Numbers = self._loads[0]
        return requests

    @property
    def waiting(self) -> Numbers:
        """Requests in flight whose answer has not begun, of each."""
        waiting: Numbers = self._loads[1]
        return waiting

    @property
    def prefill_tokens(self) -> Numbers:
        """Prompt tokens that each has to compute for requests whose answer has not begun."""
        tokens: Numbers = self._loads[2]
        return tokens

    @property
    def hits(self) -> Numbers:
        """Leading prompt blocks that each is believed to hold; 0 unless the policy says `uses_prefix`."""
        return np.zeros(len(self.workers), np.int64) if self._hits is None else self._hits

    @property
    def expected_hits(self) -> Numbers:
        """Leading prompt blocks that each holds or computes for another request; at least `hits`."""
        return np.zeros(len(self.workers), np.int64) if self._expected_hits is None else self._expected_hits

    def once(self, work_out: Callable[[tuple[RouterWorker, ...]], _T]) -> _T:
        """Return `work_out(workers)`, which is called once for as long as these workers are the candidates."""
        if work_out not in self._worked_out:
            self._worked_out[work_out] = work_out(self.workers)
        found: _T = self._worked_out[work_out]
        return found

    def __len__(self) -> int:
        return len(self.workers)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Candidate, ...]: ...
    def __getitem__(self, index: int | slice) -> Candidate | tuple[Candidate, ...]:
        if isinstance(index, slice) or self._whole is not None:
            return self._all()[index]
        place = range(len(self.workers))[index]
        made = self._made.get(place)
        if made is None:
            load = WorkerLoad(*self._loads[:, place].tolist())
            hits = (0 if each is None else int(each[place]) for each in (self._hits, self._expected_hits))
            made = self._made[place] = Candidate(self.workers[place], load, *hits)
        return made

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._all())

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """Return the place of a candidate; raises `ValueError` for anything else."""
        for place, made in self._made.items():
            if made is value and start <= place:
                return place
        return self._all().index(value, start, len(self) if stop is None else stop)

    def _all(self) -> tuple[Candidate, ...]:
        if self._whole is None:
            loads = map(WorkerLoad, *self._loads.tolist())
            whole = [*map(Candidate, self.workers, loads, self.hits.tolist(), self.expected_hits.tolist())]
            for place, made in self._made.items():
                whole[place] = made
            self._whole = tuple(whole)
            self._made.clear()
        return self._whole


@dataclass(frozen=True, slots=True, eq=False)
class RoutingContext:
    """What a policy sees: one request, and the workers that could take it."""

    candidates: Candidates
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
    keys = [*map(key, candidates)]
    smallest = min(keys)
    equal = [candidate for candidate, its in zip(candidates, keys, strict=True) if its == smallest]
    return equal[int(random * len(equal))]


def lowest(candidates: Candidates, random: float, *columns: npt.NDArray[Any]) -> Candidate:
    """Return the candidate with the smallest number in the first column, among equal ones in the next, and so on.

    `random`, in [0, 1), decides between those that are equal in all columns. Does what `least` does for tuples, but
    takes hardly longer for a thousand candidates than for one.
    """
    if len(candidates) == 1:
        return candidates[0]
    best = (columns[0] == columns[0].min()).nonzero()[0]
    for column in columns[1:]:
        if len(best) == 1:
            break
        among = column[best]
        best = best[among == among.min()]
    return candidates[int(best[int(random * len(best))])]


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
        urls, places = context.candidates.once(_by_url)
        following = bisect.bisect_right(urls, self._last) % len(urls)
        self._last = urls[following]
        return context.candidates[places[following]]


def _by_url(workers: tuple[RouterWorker, ...]) -> tuple[list[str], list[int]]:
    """Return all addresses in order, and the places of their workers."""
    places = sorted(range(len(workers)), key=lambda place: workers[place].url)
    return [workers[place].url for place in places], places


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
        return min(pair, key=attrgetter("load.requests", "load.prefill_tokens"))


class RequestNum(RouterPolicy):
    """The worker with the fewest requests, then with the fewest prefill tokens."""

    def choose(self, context: RoutingContext) -> Candidate:
        """Return the least loaded candidate."""
        return fewest_requests(context)


class ProcessTokens(RouterPolicy):
    """The worker with the fewest prompt tokens to compute, then with the fewest requests."""

    def choose(self, context: RoutingContext) -> Candidate:
        """Return the candidate that will finish its prefill first."""
        return fewest_tokens(context)


class MetricsScore(RouterPolicy):
    """The worker with the fewest requests; those that wait for their first token have the weight `waiting-weight`."""

    def choose(self, context: RoutingContext) -> Candidate:
        """Return the candidate with the smallest weighted sum."""
        seen = context.candidates
        score = seen.requests - seen.waiting + self.config.waiting_weight * seen.waiting
        return lowest(seen, context.random, score, seen.prefill_tokens, seen.requests)


def fewest_requests(context: RoutingContext) -> Candidate:
    """Return the candidate with the fewest requests, then with the fewest prefill tokens."""
    seen = context.candidates
    return lowest(seen, context.random, seen.requests, seen.prefill_tokens)


def fewest_tokens(context: RoutingContext) -> Candidate:
    """Return the candidate with the fewest prefill tokens, then with the fewest requests."""
    seen = context.candidates
    return lowest(seen, context.random, seen.prefill_tokens, seen.requests)
