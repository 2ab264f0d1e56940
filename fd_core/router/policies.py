"""Router policies: the choice of a worker for a request. The first use load alone, others the request as well.

A policy is pure: it sees frozen values, among them one random number and a reading of the clock, and returns one of the
candidates. Plugins offer policies through `fd_core.hookspecs.fd_register_router_policies`.
"""

from __future__ import annotations

import abc
import bisect
import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, ClassVar, Final, Generic, Self, TypeVar, overload

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
FEW: Final = 16
"""Number of candidates up to which they are compared one by one: a call of numpy takes longer than that."""


class Candidate(msgspec.Struct, frozen=True):
    """A worker that may be chosen."""

    worker: RouterWorker
    load: WorkerLoad
    hits: int = 0
    """Leading prompt blocks that the worker is believed to hold; 0 unless the policy sets `uses_prefix`."""
    expected_hits: int = 0
    """Leading prompt blocks that the worker holds or computes for another request; at least `hits`."""


_worker_of: Final = attrgetter("worker")


class Candidates(Sequence[Candidate]):
    """The workers that may be chosen, at least one, and never changed.

    Behaves as a tuple of `Candidate`, each of which is made on access. A policy that wants to be fast among
    a thousand workers compares columns instead: arrays of shape [n], read-only, one element for each candidate.
    """

    __slots__ = (
        "_expected_hits",
        "_hits",
        "_loads",
        "_made",
        "_whole",
        "_worked_out",
        "workers",
    )

    def __init__(
        self,
        workers: tuple[RouterWorker, ...],
        loads: Numbers,
        hits: Numbers | None = None,
        expected_hits: Numbers | None = None,
        worked_out: dict[Callable[..., Any], Any] | None = None,
    ) -> None:
        """`loads` has shape [fields of `WorkerLoad`, n]; `worked_out` holds the results of `once` for these workers."""
        for given in (loads, hits, expected_hits):
            if given is not None:
                given.setflags(write=False)
        self.workers = workers
        self._loads: Numbers | None = loads
        self._hits = hits
        self._expected_hits = hits if expected_hits is None else expected_hits
        self._made: dict[int, Candidate] = {}
        self._whole: tuple[Candidate, ...] | None = None
        """The candidates, if they exist already, as those of at most `FEW` workers do."""
        self._worked_out: dict[Callable[..., Any], Any] = {} if worked_out is None else worked_out

    @classmethod
    def of(cls, candidates: Iterable[Candidate], worked_out: dict[Callable[..., Any], Any] | None = None) -> Self:
        """Return these candidates; their columns are made on access."""
        made = cls.__new__(cls)
        made._whole = whole = tuple(candidates)
        made.workers = tuple(map(_worker_of, whole))
        made._loads = made._hits = made._expected_hits = None
        made._made = {}
        made._worked_out = {} if worked_out is None else worked_out
        return made

    @property
    def requests(self) -> Numbers:
        """Requests in flight of each."""
        return self._column(0)

    @property
    def waiting(self) -> Numbers:
        """Requests in flight whose answer has not begun, of each."""
        return self._column(1)

    @property
    def prefill_tokens(self) -> Numbers:
        """Prompt tokens that each has to compute for requests whose answer has not begun."""
        return self._column(2)

    @property
    def hits(self) -> Numbers:
        """Leading prompt blocks that each is believed to hold; 0 unless the policy sets `uses_prefix`."""
        if self._loads is None:
            self._columns()
        return np.zeros(len(self.workers), np.int64) if self._hits is None else self._hits

    @property
    def expected_hits(self) -> Numbers:
        """Leading prompt blocks that each holds or computes for another request; at least `hits`."""
        if self._loads is None:
            self._columns()
        return np.zeros(len(self.workers), np.int64) if self._expected_hits is None else self._expected_hits

    def _column(self, index: int) -> Numbers:
        column: Numbers = (self._columns() if self._loads is None else self._loads)[index]
        return column

    def _columns(self) -> Numbers:
        """Return `requests`, `waiting` and `prefill_tokens`, shape [3, n]."""
        if self._loads is None:
            whole = self._all()
            rows = [(*msgspec.structs.astuple(each.load), each.hits, each.expected_hits) for each in whole]
            columns = np.array(rows, np.int64).T
            columns.setflags(write=False)
            self._loads, self._hits, self._expected_hits = columns[:3], columns[3], columns[4]
        return self._loads

    def once(self, work_out: Callable[[tuple[RouterWorker, ...]], _T]) -> _T:
        """Return `work_out(workers)`, which is called once for as long as these workers are the candidates.

        The result depends on the workers alone, not on loads or requests, and is not changed.
        """
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
        if isinstance(index, slice) or self._whole is not None or self._loads is None:
            return self._all()[index]
        position = range(len(self.workers))[index]
        made = self._made.get(position)
        if made is None:
            load = WorkerLoad(*self._loads[:, position].tolist())
            hits = 0 if self._hits is None else int(self._hits[position])
            expected = 0 if self._expected_hits is None else int(self._expected_hits[position])
            made = self._made[position] = Candidate(self.workers[position], load, hits, expected)
        return made

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._all())

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """Return the index of a candidate; raises `ValueError` for anything else."""
        for position, made in self._made.items():
            if made is value and start <= position:
                return position
        whole = self._all() if self._whole is None else self._whole
        return whole.index(value, start, len(whole) if stop is None else stop)

    def _all(self) -> tuple[Candidate, ...]:
        if self._whole is None:
            loads = map(WorkerLoad, *self._columns().tolist())
            whole = [*map(Candidate, self.workers, loads, self.hits.tolist(), self.expected_hits.tolist())]
            for position, made in self._made.items():
                whole[position] = made
            self._whole = tuple(whole)
            self._made.clear()
        return self._whole


@dataclass(frozen=True, slots=True, eq=False)
class RoutingContext:
    """Input of a policy: one request, and the workers that could take it."""

    candidates: Candidates
    """At least one: the healthy workers of one role on which this request has not failed."""
    tokens: IntArray
    """The prompt, int32 of shape [n], never empty, read-only."""
    keys: tuple[bytes, ...]
    """Keys of the prompt's full blocks; empty unless the policy sets `uses_prefix`."""
    session: str | None
    """Name that all requests of one conversation or user carry, if there is one."""
    random: float
    """One uniform number in [0, 1)."""
    now: float
    """Reading of a monotonic clock in seconds."""


class RouterPolicy(abc.ABC):
    """Chooses one worker for each request; the router makes one instance for each role, which share no state.

    One that remembers sessions remembers `config.max_sessions` of them at most, those that were used last. Most of
    the sessions that return to their workers stay there when another worker joins or leaves. It keeps no prompts, which
    may have a million tokens each, logs neither them nor names of sessions, and saves nothing for another process.
    """

    uses_prefix: ClassVar[bool] = False
    """True if the policy reads `RoutingContext.keys` and the hits of candidates, which cost time."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config

    @abc.abstractmethod
    def choose(self, context: RoutingContext) -> Candidate:
        """Return one of `context.candidates`. Equal calls in equal states give equal answers."""

    def departed(self, worker: RouterWorker) -> None:  # noqa: B027 - most policies keep no state of workers
        """Forget an incarnation that was lost or replaced."""

    def sweep(self, now: float) -> None:  # noqa: B027 - most policies keep no state
        """Forget expired state, which changes no choice; called every `eviction-interval-secs`."""


def least(
    candidates: Sequence[Candidate], key: Callable[[Candidate], float | tuple[float, ...]], random: float
) -> Candidate:
    """Return the candidate with the smallest key; `random`, in [0, 1), decides between equal ones."""
    return _drawn(candidates, [*map(key, candidates)], random)


def _drawn(candidates: Sequence[Candidate], keys: list[Any], random: float) -> Candidate:
    smallest = min(keys)
    if keys.count(smallest) == 1:
        return candidates[keys.index(smallest)]
    equal = [candidate for candidate, its in zip(candidates, keys, strict=True) if its == smallest]
    return equal[int(random * len(equal))]


def lowest(candidates: Candidates, random: float, *columns: npt.NDArray[Any]) -> Candidate:
    """Return the candidate with the smallest number in the first column, among equal ones in the next, and so on.

    `random`, in [0, 1), decides between those that are equal in all columns. Does what `least` does for tuples, but
    takes hardly longer for a thousand candidates than for one.
    """
    first = columns[0]
    if len(first) == 1:
        return candidates[0]
    best = (first == first[first.argmin()]).nonzero()[0]  # `argmin` takes less than `min`
    for column in columns[1:]:
        if len(best) == 1:
            break
        among = column[best]
        best = best[among == among.min()]
    return candidates[int(best[int(random * len(best))])]


_Score = Callable[[Any, Any, Any, Any], tuple[Any, ...]]
"""Key of a candidate from its requests, waiting requests, prefill tokens and expected hits; or columns from columns."""


def _smallest(context: RoutingContext, score: _Score) -> Candidate:
    seen = context.candidates
    if seen._whole is not None:
        keys = []
        for one in seen._whole:
            load = one.load
            keys.append(score(load.requests, load.waiting, load.prefill_tokens, one.expected_hits))
        return _drawn(seen._whole, keys, context.random)
    requests, waiting, tokens = seen._columns()
    return lowest(seen, context.random, *score(requests, waiting, tokens, seen.expected_hits))


class Random(RouterPolicy):
    """Any worker, each with the same chance."""

    def choose(self, context: RoutingContext) -> Candidate:
        """Return the candidate that the random number names."""
        return context.candidates[int(context.random * len(context.candidates))]


class RoundRobin(RouterPolicy):
    """One worker after the other, by address; workers that join or leave do not disturb the order of the others."""

    _last = ""

    def choose(self, context: RoutingContext) -> Candidate:
        """Return the candidate whose address follows that of the last choice."""
        urls, positions = context.candidates.once(_by_url)
        following = bisect.bisect_right(urls, self._last) % len(urls)
        self._last = urls[following]
        return context.candidates[positions[following]]


def _by_url(workers: tuple[RouterWorker, ...]) -> tuple[list[str], list[int]]:
    positions = sorted(range(len(workers)), key=lambda position: workers[position].url)
    return [workers[position].url for position in positions], positions


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
        weight = self.config.waiting_weight
        return _smallest(
            context,
            lambda requests, waiting, tokens, _: (requests - waiting + weight * waiting, tokens, requests),
        )


def fewest_requests(context: RoutingContext) -> Candidate:
    """Return the candidate with the fewest requests, then with the fewest prefill tokens."""
    return _smallest(context, lambda requests, _, tokens, __: (requests, tokens))


def fewest_tokens(context: RoutingContext) -> Candidate:
    """Return the candidate with the fewest prefill tokens, then with the fewest requests."""
    return _smallest(context, lambda requests, _, tokens, __: (tokens, requests))


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
        """Return True if an entry exists and has not expired."""
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
"""Cost of a prompt token to compute, relative to a queued token of other requests. A computed token takes time and its
block evicts another one, and both costs recur when the conversation continues. On recorded conversations the results
are flat between 4 (earliest first token) and 8 (most hits), see `benchmarks/NOTES.md`.
"""
_REQUEST_TOKENS: Final = 256
"""Load of one decoding request, in prompt tokens that slow the worker down equally."""


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
        config, seen = self.config, context.candidates
        of_hits = config.hit_ratio_weight * _MISSING_WEIGHT * config.cache_block_size
        of_load = config.load_balance_weight
        # The length of the prompt is the same for all.
        if seen._whole is None:
            requests, _, tokens = seen._columns()  # of which `argmin` and `argmax` take less than `min` and `max`
            fewest, most = int(requests[requests.argmin()]), int(requests[requests.argmax()])
            scores = (tokens + requests * _REQUEST_TOKENS) * of_load - seen.expected_hits * of_hits
        else:
            counts, scores = [], []
            for one in seen._whole:
                load = one.load
                counts.append(load.requests)
                scores.append(
                    (load.prefill_tokens + load.requests * _REQUEST_TOKENS) * of_load - one.expected_hits * of_hits
                )
            fewest, most = min(counts), max(counts)
        if most - fewest > max(config.balance_abs_threshold, config.balance_rel_threshold * most):
            return fewest_tokens(context)
        if seen._whole is None:
            return lowest(seen, context.random, scores)
        return _drawn(seen._whole, scores, context.random)


class PrefixHash(RouterPolicy):
    """Prompts with equal beginnings go to the same worker; the policy is stateless.

    Each prefix ranks the workers by a hash of both (highest random weight, Thaler and Ravishankar 1998), so a worker
    that joins or leaves moves only its own share. The first worker in that order whose load stays within
    `prefix-hash-slack` of the mean takes the request (bounded loads, Mirrokni, Thorup and Zadimoghaddam 2018).
    """

    def choose(self, context: RoutingContext) -> Candidate:
        """Return the first candidate in the prefix's order that has room."""
        head = context.tokens[: self.config.cache_block_size * self.config.prefix_hash_blocks]
        prefix, seen = _hash(head.astype("<i4", copy=False).tobytes()), context.candidates
        whole, slack = seen._whole, 1 + self.config.prefix_hash_slack
        # At least one has room: the one with the fewest requests.
        if whole is None:
            loads = seen.requests
            room = math.ceil(slack * (int(loads.sum()) + 1) / len(loads))
            weights = np.where(loads < room, _mixed(seen.once(_hashes_of_urls) ^ np.uint64(prefix)), np.uint64(0))
            return seen[int(weights.argmax())]
        counts = [one.load.requests for one in whole]
        room = math.ceil(slack * (sum(counts) + 1) / len(counts))
        hashes = zip(seen.once(_hash_of_each_url), counts, strict=True)
        ranks = [_mixed(url ^ prefix) if count < room else 0 for url, count in hashes]
        return whole[ranks.index(max(ranks))]


class SessionAffinity(RouterPolicy):
    """Requests of one session go to the worker of its last request, all others to the least loaded worker.

    A session that is idle for `eviction-duration-mins` is forgotten; beyond `max-sessions` the session that was
    idle longest is.
    """

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._homes: Expiring[str, str] = Expiring(duration=config.eviction_duration, capacity=config.max_sessions)

    def choose(self, context: RoutingContext) -> Candidate:
        """Return the session's worker if it is a candidate, else the least loaded one."""
        home = None if context.session is None else self._homes.get(context.session, context.now)
        position = None if home is None else context.candidates.once(_positions_of_urls).get(home)
        chosen = fewest_requests(context) if position is None else context.candidates[position]
        if context.session is not None:
            self._homes.put(context.session, chosen.worker.url, context.now)
        return chosen

    def sweep(self, now: float) -> None:
        """Forget sessions that were idle for too long."""
        self._homes.sweep(now)


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _hash_of_each_url(workers: tuple[RouterWorker, ...]) -> list[int]:
    return [_hash_of_url(worker.url) for worker in workers]


def _hashes_of_urls(workers: tuple[RouterWorker, ...]) -> npt.NDArray[np.uint64]:
    return np.array(_hash_of_each_url(workers), np.uint64)


@lru_cache(maxsize=1 << 10)
def _hash_of_url(url: str) -> int:
    return _hash(url.encode())


def _positions_of_urls(workers: tuple[RouterWorker, ...]) -> dict[str, int]:
    return {worker.url: position for position, worker in enumerate(workers)}


def _mixed(numbers: Any) -> Any:
    """Return mixed 64-bit numbers, one or an array: each bit depends on all bits of the input.

    SplitMix64 (Steele and others 2014).
    """
    numbers = (numbers ^ (numbers >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    numbers = (numbers ^ (numbers >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return numbers ^ (numbers >> 31)
