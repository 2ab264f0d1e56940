"""Router whose every result is compared with a plain model of its inputs, written from the invariants.

The model compares incarnations by number and finds the longest prefix by a linear search. It has no guards, indexes,
versions or caches.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from fd_core.router.config import RouterConfig
from fd_core.router.policies import Candidate, RouterPolicy, RoutingContext
from fd_core.router.router import Router
from fd_core.router.selection import NoWorker, RouteRequest, Selection, WorkerLoad
from fd_core.router.workers import Role, RouterWorker
from tests.simulation.hostile.computing import BrokenLaw

__all__ = ["Disguise", "WatchedRouter"]

_FAILURES = 2
"""Failed workers after which a request is not retried."""

Path = tuple[str, str, bytes]
"""Salt, adapter and tokens of a prefix."""


@dataclass(slots=True)
class _Fuse:
    """Circuit breaker of an incarnation: a pause, then one trial request."""

    config: RouterConfig
    failures: int = 0
    pause: float = 0.0
    until: float | None = None
    """End of the pause; None while the circuit is closed."""
    trial: bool = False
    """True while the trial request is in progress."""

    def __post_init__(self) -> None:
        self.pause = self.config.circuit_open_secs

    def open_to_requests(self, now: float) -> bool:
        return not self.trial and (self.until is None or now >= self.until)

    def chosen(self) -> bool:
        """Return True if the admitted request is the trial."""
        self.trial = self.until is not None
        return self.trial

    def success(self) -> None:
        if self.trial:
            self.until, self.trial = None, False
        if self.until is None:
            self.failures, self.pause = 0, self.config.circuit_open_secs

    def failure(self, now: float, *, severe: bool) -> None:
        if self.until is not None and not self.trial:
            return
        self.failures += 1
        if self.trial:
            self.pause = min(2 * self.pause, self.config.circuit_max_open_secs)
        elif not severe and self.failures < self.config.circuit_failure_threshold:
            return
        self.until, self.trial = now + self.pause, False

    def convict(self, now: float) -> None:
        """Attribute an earlier failure to the worker; one that ends its pause was a trial."""
        self.trial |= self.until is not None and now >= self.until
        self.failure(now, severe=False)


@dataclass(slots=True)
class _Known:
    """Model state of one incarnation."""

    number: int
    url: str
    role: Role
    instance: str | None
    fuse: _Fuse
    state: str = "unknown"
    passed: int = 0
    missed: int = 0
    reported_role: str | None = None
    port: int | None = None
    leaving: bool = False
    adapters: frozenset[str] = frozenset()
    held: dict[Path, float] = field(default_factory=dict)
    """Time at which each prefix was last served, in eviction order."""

    @property
    def fit(self) -> bool:
        return self.reported_role in (None, self.role) and (self.role != "prefill" or self.port is not None)


@dataclass(slots=True)
class Disguise:
    """Differences between what workers report and what they are."""

    anonymous: bool = False
    """True if processes report no instance name."""
    given: Mapping[str, Role] = field(default_factory=dict)
    """Registered roles, by address."""
    reported_role: dict[str, str] = field(default_factory=dict)
    """Roles reported in health checks, by address."""


@dataclass(slots=True, eq=False)
class _Attempt:
    """Model state of one selection."""

    selection: Selection
    paths: list[Path]
    missing: int
    number: int
    tried: frozenset[str]
    """Addresses at which earlier attempts failed."""
    suspects: list[int]
    failures: int
    trials: set[int]
    verdicts: dict[int, str] = field(default_factory=dict)

    def counts(self) -> Iterator[tuple[int, WorkerLoad]]:
        """Yield the load that it adds to each of its workers."""
        selection = self.selection
        for position, worker in enumerate(selection.workers):
            if not selection.started:
                yield worker.incarnation, WorkerLoad(1, 1, 0 if position else self.missing)
            elif worker.role != "prefill":
                yield worker.incarnation, WorkerLoad(1, 0, 0)


class WatchedRouter(Router):
    """The production router with a model of its results and counters."""

    def __init__(
        self,
        config: RouterConfig,
        policy_class: Callable[[str], type[RouterPolicy]],
        name: str,
        disguise: Disguise,
        adapters: Collection[str] = (),
        rude: random.Random | None = None,
    ) -> None:
        """`rude`: random source of API misuse: double release, late verdicts, retries after the first byte."""
        super().__init__(config, policy_class)
        self.name = name
        self._disguise = disguise
        self._served_there = adapters
        self._rude = rude
        self._rudeness = 0
        """Number of caller faults that the router has to count."""
        self._current: dict[str, _Known] = {}
        self._latest = 0
        """Highest incarnation number so far."""
        self._attempts: dict[Selection, _Attempt] = {}
        """All attempts; those in progress are in `_in_force` as well."""
        self._in_force: list[_Attempt] = []
        self._pending_request: tuple[RouteRequest, list[Path], float] | None = None
        """Request for which a policy is about to choose, with its prefixes and the time."""
        self._pools: dict[Role, list[_Known]] = {}
        self._chosen: Candidate | None = None
        """Choice of the prefill policy."""
        for role, policy in self._policies.items():
            policy.choose = partial(self._choose, role, policy.choose)  # type: ignore[method-assign]
        begin = self.reported_kv.begin
        self.reported_kv.begin = partial(self._on_report, begin)  # type: ignore[method-assign]

    # Worker updates -----------------------------------------------------------------------------------------------

    def register(self, url: str, role: Role, now: float, *, instance: str | None = None) -> RouterWorker:
        self._remove_drained()
        role = self._disguise.given.get(url, role)
        instance = None if self._disguise.anonymous else instance
        before = self._current.get(url)
        worker = super().register(url, role, now, instance=instance)
        same = before is not None and instance is not None and (before.instance, before.role) == (instance, role)
        if same and before is not None and before.state != "draining":
            self._require(worker.incarnation == before.number, "7.4", f"{url} is unchanged, but got another number")
        else:
            self._arrived(worker, instance)
        self.check()
        return worker

    def deregister(self, url: str, now: float) -> RouterWorker | None:
        self._remove_drained()
        worker = super().deregister(url, now)
        if url in self._current:
            self._current[url].state = "draining"
        self.check()
        return worker

    def health(
        self,
        worker: RouterWorker,
        ok: bool,
        now: float,
        *,
        instance: str | None = None,
        role: str | None = None,
        kv_port: int | None = None,
    ) -> RouterWorker:
        self._remove_drained()
        instance = None if self._disguise.anonymous else instance
        role = role and self._disguise.reported_role.get(worker.url, role)
        after = super().health(worker, ok, now, instance=instance, role=role, kv_port=kv_port)
        known = self._current.get(worker.url)
        if known is None or known.number != worker.incarnation or known.state == "draining":
            self._require(after.incarnation == worker.incarnation, "7.4", f"a check of {worker} counts, which is gone")
        elif not ok:
            self._require(
                after.incarnation == worker.incarnation, "7.4", f"{worker} got a new incarnation from a failed check"
            )
            known.passed, known.missed = 0, known.missed + 1
            if known.missed >= self.config.health_failure_threshold:
                known.state = "unhealthy"
        else:
            self._passed(known, after, instance, role, kv_port)
            if self._served_there and not self._current[after.url].adapters:
                self.serves(after, ("model", *self._served_there), self._served_there)
        self.check()
        return after

    @property
    def num_in_force(self) -> int:
        """Number of attempts not yet released."""
        return len(self._in_force)

    def _passed(
        self, known: _Known, after: RouterWorker, instance: str | None, role: str | None, port: int | None
    ) -> None:
        enough = self.config.health_success_threshold
        returns = known.state == "unhealthy" and known.passed + 1 >= enough
        if instance is not None and known.instance not in (None, instance):
            known = self._arrived(after, instance)
        elif returns and (instance is None or instance != known.instance):
            known = self._arrived(after, instance)
            known.passed = enough
        self._require(
            after.incarnation == known.number, "7.4", f"{after} answered instead of incarnation {known.number}"
        )
        known.passed, known.missed = known.passed + 1, 0
        if known.state != "unhealthy":
            known.instance = instance or known.instance
        if known.passed >= enough:
            known.state = "healthy"
        known.reported_role, known.port = role, port

    def _arrived(self, worker: RouterWorker, instance: str | None) -> _Known:
        self._require(worker.incarnation > self._latest, "7.4", f"{worker} reuses an earlier incarnation")
        self._latest = worker.incarnation
        known = _Known(worker.incarnation, worker.url, worker.role, instance, _Fuse(self.config))
        self._current[worker.url] = known
        return known

    def leaving(self, worker: RouterWorker) -> None:
        super().leaving(worker)
        if (known := self._known(worker)) is not None:
            known.leaving = True

    def serves(self, worker: RouterWorker, models: Collection[str], adapters: Collection[str] = ()) -> None:
        super().serves(worker, models, adapters)
        if (known := self._known(worker)) is not None:
            known.adapters = frozenset(adapters)

    def _on_report(self, begin: Callable[..., bool], worker: RouterWorker, block_size: int, instance: str) -> bool:
        counts, known = begin(worker, block_size, instance), self._known(worker)
        right = known is not None and known.instance in (None, instance)
        self._require(counts is right, "7.2", f"reports of {instance} count for {worker}: {counts}")
        return counts

    # Selection ----------------------------------------------------------------------------------------------------

    def select(self, request: RouteRequest, now: float, rng: float) -> Selection | NoWorker:
        return self._judged(request, now, None, lambda: super(WatchedRouter, self).select(request, now, rng))

    def retry(self, selection: Selection, now: float, rng: float) -> Selection | NoWorker:
        before, request = self._attempts[selection], selection.request
        again = partial(super().retry, selection, now, rng)
        if why := self._retry_obstacle(before):
            answer = again()
            self._require(not isinstance(answer, Selection), "7.3", f"a request is retried {why}")
            return answer
        return self._judged(request, now, before, again)

    def _retry_obstacle(self, attempt: _Attempt) -> str:
        if attempt.selection.started:
            return "after the first byte of its response"
        if attempt.failures >= _FAILURES:
            return "although two workers have failed on it"
        return f"after {attempt.number} attempts" if attempt.number >= self.config.max_attempts else ""

    def _judged(
        self,
        request: RouteRequest,
        now: float,
        before: _Attempt | None,
        choose: Callable[[], Selection | NoWorker],
    ) -> Selection | NoWorker:
        self._remove_drained()
        tried: frozenset[str] = frozenset()
        if before is not None:
            workers = before.selection.workers
            failed = [one.url for one in workers if before.verdicts.get(one.incarnation, "served") != "served"]
            tried = before.tried.union(failed or (one.url for one in workers))
        paths = self._paths(request)
        self._pending_request, self._pools, self._chosen = (request, paths, now), self._open(tried, now), None
        answer = choose()
        self._pending_request = None
        if not isinstance(answer, Selection):
            self._require(
                not _sufficient(self._pools), "7.4", f"no worker is chosen ({answer.message}), but some are available"
            )
            return answer
        self._began(answer, paths, tried, before)
        return answer

    def _began(self, selection: Selection, paths: list[Path], tried: frozenset[str], before: _Attempt | None) -> None:
        missing = selection.request.length
        uses = any(self._policies[worker.role].uses_prefix for worker in selection.workers)
        if uses and self._chosen is not None:
            block = self.config.cache_block_size
            missing = min(missing, max(1, missing - block * self._chosen.expected_hits))
        trials = set()
        for worker in selection.workers:
            known = self._known(worker)
            self._require(known is not None and worker.url not in tried, "7.3", f"{worker} is chosen, but excluded")
            assert known is not None
            alone = worker.role == "decode" and len(selection.workers) == 1
            self._require(not (alone and _paired(self._pools)), "7.1", f"{worker} is chosen without a prefill worker")
            if known.fuse.chosen():
                trials.add(known.number)
        attempt = _Attempt(
            selection,
            paths if uses else [],
            missing,
            number=1 if before is None else before.number + 1,
            tried=tried,
            suspects=[] if before is None else [*before.suspects],
            failures=0 if before is None else before.failures,
            trials=trials,
        )
        self._attempts[selection] = attempt
        self._in_force.append(attempt)
        selection.on_release = partial(self._released, attempt, selection.on_release)
        self.check()

    def _open(self, tried: frozenset[str], now: float) -> dict[Role, list[_Known]]:
        """Return the candidates: healthy, with the registered role, closed circuit, not failed on this request."""
        found = [
            known
            for known in self._current.values()
            if known.state == "healthy" and known.fit and known.fuse.open_to_requests(now) and known.url not in tried
        ]
        staying = [known for known in found if not known.leaving]
        found = staying if _sufficient(_by_role(staying)) else found
        pairs_or_mixed = _paired(_by_role(found))
        if limit := self.config.max_requests_per_worker:
            loads = self._loads_expected()
            found = [known for known in found if loads.get(known.number, WorkerLoad()).requests < limit]
        pools = _by_role(found)
        if pairs_or_mixed and not _paired(pools):
            pools.pop("decode", None)  # a full prefill side does not move prefills to decode workers
        return pools

    def _choose(self, role: Role, choose: Callable[[RoutingContext], Candidate], context: RoutingContext) -> Candidate:
        assert self._pending_request is not None
        request, paths, now = self._pending_request
        self._require(np.array_equal(context.tokens, request.tokens), "7.2", "a policy receives another prompt")
        expected = {known.number: known for known in self._pools.get(role, ())}
        found = {candidate.worker.incarnation for candidate in context.candidates}
        if found != expected.keys():
            law = "7.2" if found - expected.keys() else "7.4"
            raise BrokenLaw(law, f"{self.name} may choose among {sorted(found)}, expected {sorted(expected)}")
        loads = self._loads_expected()
        for candidate in context.candidates:
            load = loads.get(candidate.worker.incarnation, WorkerLoad())
            self._require(candidate.load == load, "7.1", f"{candidate.worker} has {load}, not {candidate.load}")
            if self._policies[role].uses_prefix:
                self._check_hits(candidate, expected[candidate.worker.incarnation], request, paths, now)
        chosen = choose(context)
        if self.config.policy_of(role) == "cache_aware":
            self._check_balance(context, chosen)
        if self._chosen is None:  # the worker that computes the prompt
            self._chosen = chosen
        return chosen

    def _check_hits(
        self, candidate: Candidate, known: _Known, request: RouteRequest, paths: list[Path], now: float
    ) -> None:
        kept = self.config.eviction_duration
        held = {path for path, served in known.held.items() if now - served < kept}
        computed = {
            path
            for attempt in self._in_force
            if attempt.selection.prefill.incarnation == known.number
            for path in attempt.paths
        }
        hits, expected = _leading(held, paths), max(_leading(held, paths), _leading(computed, paths))
        salted = bool(request.salt or self._adapter(request))
        if not salted and self.reported_kv.num_blocks(candidate.worker) is not None:
            hits = candidate.hits  # its reports are checked where they are published
            expected = max(hits, _leading(computed, paths))
        found = candidate.hits, candidate.expected_hits
        if found != (hits, expected):
            raise BrokenLaw(
                "7.2", f"{candidate.worker} holds {hits} and with prefills {expected} blocks of a prompt, not {found}"
            )

    def _check_balance(self, context: RoutingContext, chosen: Candidate) -> None:
        requests = [candidate.load.requests for candidate in context.candidates]
        apart = max(requests) - min(requests)
        config = self.config
        if apart > config.balance_abs_threshold and apart > config.balance_rel_threshold * max(requests):
            least = min(candidate.load.prefill_tokens for candidate in context.candidates)
            self._require(chosen.load.prefill_tokens == least, "7.2", "imbalanced load is ignored")

    # Attempts -----------------------------------------------------------------------------------------------------

    def prefilled(self, selection: Selection, now: float) -> None:
        super().prefilled(selection, now)
        self._record_success(selection, selection.prefill, now)
        self.check()

    def served(self, selection: Selection, now: float) -> None:
        super().served(selection, now)
        self._record_success(selection, selection.decode, now)
        there = {known.number: known for known in self._current.values()}
        for suspect in self._attempts[selection].suspects:
            if suspect in there:
                there[suspect].fuse.convict(now)
        self.check()

    def declined(self, selection: Selection, worker: RouterWorker) -> None:
        super().declined(selection, worker)
        self._attempts[selection].verdicts[worker.incarnation] = "declined"

    def failed(self, selection: Selection, worker: RouterWorker, now: float, *, severe: bool = False) -> None:
        super().failed(selection, worker, now, severe=severe)
        attempt, known = self._attempts[selection], self._known(worker)
        attempt.verdicts[worker.incarnation] = "failed"
        if not severe:
            attempt.suspects.append(worker.incarnation)
            attempt.failures += worker.incarnation == selection.decode.incarnation
        elif known is not None:
            known.fuse.failure(now, severe=True)
        self.check()

    def _record_success(self, selection: Selection, worker: RouterWorker, now: float) -> None:
        attempt, known = self._attempts[selection], self._known(worker)
        attempt.verdicts[worker.incarnation] = "served"
        if known is None:
            return
        known.fuse.success()
        if not self._policies[worker.role].uses_prefix:
            return
        kept, most = self.config.eviction_duration, self.config.max_index_blocks
        for path in [path for path, served in known.held.items() if now - served >= kept]:
            del known.held[path]
        for path in reversed(attempt.paths[:most]):  # the tail of a prefix is evicted first
            known.held.pop(path, None)
            known.held[path] = now
        for path in [*known.held][: max(0, len(known.held) - most)]:
            del known.held[path]

    def _released(self, attempt: _Attempt, on_release: Callable[[Selection], None], selection: Selection) -> None:
        on_release(selection)
        self._require(attempt in self._in_force, "7.1", f"{selection.workers} are released twice")
        self._in_force.remove(attempt)
        for known in self._current.values():
            if known.number in attempt.trials and attempt.verdicts.get(known.number) != "served":
                known.fuse.trial = False
        self._remove_drained()
        self.check()
        if self._rude is not None and self._rude.random() < 0.5:
            self._misuse_api(selection)

    def _misuse_api(self, selection: Selection) -> None:
        """Misuse the API: nothing may change except the count of caller faults."""
        before = self._everything_counted()
        self._require(not selection.release(), "7.1", "a second release has an effect")
        super().served(selection, 0.0)
        self._rudeness += 2
        after = self._everything_counted()
        self._require(before == after, "7.2", f"a verdict after the end changes {before} to {after}")
        if selection.started:
            again = super().retry(selection, 0.0, 0.5)
            self._require(not isinstance(again, Selection), "7.3", "a request is retried after its first byte")
        self.check()

    def _everything_counted(self) -> tuple[Any, ...]:
        return dict(self._loads.by_worker), len(self._index), deepcopy((self._departed, self._by_worker))

    # Invariants at every moment -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Check that counters and beliefs follow from the inputs."""
        self._remove_drained()
        expected = self._loads_expected()
        counted = {worker.incarnation: load for worker, load in self._loads.by_worker.items()}
        self._require(counted == expected, "7.1", f"{counted} is counted, {expected} is in progress")
        self._require(
            self._loads.faults == self._rudeness, "7.1", "wrong number of double or late releases and verdicts"
        )
        members = [*self.registry]
        there = {member.worker.incarnation: member.state.value for member in members}
        known = {each.number: each.state for each in self._current.values()}
        self._require(there == known, "7.4", f"workers {there}, expected {known}")
        index = sum(self._index.blocks(member.worker) for member in members)
        self._require(len(self._index) == index, "7.4", "prefixes of lost workers are kept")
        telling = sum(self.reported_kv.num_blocks(member.worker) is not None for member in members)
        self._require(len(self.reported_kv) == telling, "7.2", "reports of lost workers count")

    def _remove_drained(self) -> None:
        """Remove drained workers: one stays until nothing runs on it."""
        leaving = [known for known in self._current.values() if known.state == "draining"]
        if leaving:
            busy = self._loads_expected()
            for known in leaving:
                if known.number not in busy:
                    del self._current[known.url]

    def _loads_expected(self) -> dict[int, WorkerLoad]:
        loads: dict[int, WorkerLoad] = {}
        for attempt in self._in_force:
            for number, load in attempt.counts():
                loads[number] = loads[number].plus(load) if number in loads else load
        return loads

    def _known(self, worker: RouterWorker) -> _Known | None:
        known = self._current.get(worker.url)
        return known if known is not None and known.number == worker.incarnation else None

    def _adapter(self, request: RouteRequest) -> str:
        name = request.model or ""
        return name if any(name in known.adapters for known in self._current.values()) else ""

    def _paths(self, request: RouteRequest) -> list[Path]:
        size, tokens, adapter = self.config.cache_block_size, request.tokens, self._adapter(request)
        ends = range(size, len(tokens) + 1, size)
        return [(request.salt, adapter, tokens[:end].tobytes()) for end in ends]

    def _require(self, holds: bool, law: str, what: str) -> None:
        if not holds:
            raise BrokenLaw(law, f"{self.name}: {what}")


def _by_role(found: Iterable[_Known]) -> dict[Role, list[_Known]]:
    pools: dict[Role, list[_Known]] = {}
    for known in found:
        pools.setdefault(known.role, []).append(known)
    return pools


def _paired(pools: dict[Role, list[_Known]]) -> bool:
    """Return True if there is a mixed worker, or both sides of a pair."""
    return "mixed" in pools or pools.keys() >= {"prefill", "decode"}


def _sufficient(pools: dict[Role, list[_Known]]) -> bool:
    """Return True if there is a mixed worker, or a decode worker, which can compute prompts itself."""
    return "mixed" in pools or "decode" in pools


def _leading(held: Collection[Path], paths: list[Path]) -> int:
    return next((count for count, path in enumerate(paths) if path not in held), len(paths))
