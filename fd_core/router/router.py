"""The router: chooses workers for the gateway's requests, and receives the outcome of each.

selection = router.select(request, now, rng)      # Selection, or NoWorker
with selection:                                   # releases at the end, also after an error
    router.prefilled(selection, now)              # for a pair: its prefill side succeeded, failed or declined
    ...                                           # stream; selection.first_token() before its first byte goes out
    router.served(selection, now)                 # or router.failed(selection, worker, now)
selection = router.retry(selection, now, rng)     # after a failure: another worker, only before the first byte
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Collection
from copy import copy
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from fd_core.kv.breaker import BreakerState
from fd_core.router.config import RouterConfig
from fd_core.router.placement import PARTS, Placer
from fd_core.router.policies import RouterPolicy
from fd_core.router.prefix_index import PrefixesInFlight, PrefixIndex, ReportedKV
from fd_core.router.selection import (
    IDLE,
    Mode,
    NoWorker,
    RouteRequest,
    Selection,
    Verdict,
    WorkerIndices,
    WorkerLoad,
    WorkerLoads,
)
from fd_core.router.workers import ROLES, Member, Registry, Role, RouterWorker, WorkerState
from fd_core.types.metrics import counter, gauge

_FAILURES: Final = 2
"""Workers that may fail on one request: a failure on a second one is attributed to the request."""


class Router:
    """Chooses workers and accounts for their load. `now` is one monotonic clock, `rng` uniform in [0, 1)."""

    def __init__(self, config: RouterConfig, policy_class: Callable[[str], type[RouterPolicy]]) -> None:
        """`policy_class` finds a policy by name, or raises `PluginError`. `ConfigError` for numbers out of range."""
        self.config = config
        self.registry = Registry(config)
        self._indices = WorkerIndices()
        self._loads = WorkerLoads(self._on_idle, self._indices)
        self._index = PrefixIndex(
            duration=config.eviction_duration, capacity=config.max_index_blocks, indices=self._indices
        )
        self._policies: dict[Role, RouterPolicy] = {
            role: policy_class(config.policy_of(role))(config) for role in ROLES
        }
        self._in_flight = PrefixesInFlight(self._indices)
        self.reported_kv = ReportedKV(self.registry, config.max_index_blocks, self._indices)
        self._placer = Placer(
            config,
            self._policies,
            self.registry,
            loads=self._loads,
            index=self._index,
            in_flight=self._in_flight,
            reported_kv=self.reported_kv,
            indices=self._indices,
        )
        self._by_worker: dict[RouterWorker, SelectionCounts] = {}
        self._departed: dict[Role, SelectionCounts] = {role: SelectionCounts() for role in ROLES}
        """Counts of all workers that were lost, by role."""
        self._modes: dict[Mode, int] = dict.fromkeys(PARTS, 0)
        self._refused: Counter[str] = Counter()
        self._retries = 0
        self._next_sweep = 0.0

    def register(self, url: str, role: Role, now: float, *, instance: str | None = None) -> RouterWorker:
        """Add a worker, see `Registry.register`. It gets requests once a check has passed."""
        before = self.registry.at(url)
        worker = self.registry.register(url, role, now, instance=instance)
        if before is not None and before != worker:
            self._forget(before)
        return worker

    def deregister(self, url: str, now: float) -> RouterWorker | None:
        """Drain a worker: it gets no new requests and leaves after its last one. None if no worker has the address."""
        worker = self.registry.deregister(url, now)
        if worker is not None and worker not in self._loads.by_worker:
            self._on_idle(worker)
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
        failure: str = "",
    ) -> RouterWorker:
        """Apply the result of a health check, see `Registry.health`; a worker unfit for its role is not chosen."""
        after = self.registry.health(worker, ok, now, instance=instance, role=role, kv_port=kv_port, failure=failure)
        if worker != after:
            self._forget(worker)
        return after

    def leaving(self, worker: RouterWorker) -> None:
        """Note that `worker` shuts down, see `Registry.leaving`."""
        self.registry.leaving(worker)

    def serves(self, worker: RouterWorker, models: Collection[str], adapters: Collection[str] = ()) -> None:
        """Note the models that `worker` serves, see `Registry.serves`."""
        self.registry.serves(worker, models, adapters)

    def emptied(self, worker: RouterWorker) -> None:
        """Forget the prefixes that `worker` served: its cache is empty, while its requests stay with it."""
        self._index.remove(worker)

    def workers(self) -> tuple[RouterWorker, ...]:
        """Return every incarnation whose health is to be checked, draining ones included."""
        return tuple(member.worker for member in self.registry)

    def ready(self) -> bool:
        """Return True if requests can be served: by a mixed worker, a pair, or a decode worker alone."""
        return self._placer.possible()

    def uses_prefix(self, worker: RouterWorker) -> bool:
        """Return True if the policy that chooses among workers of this role uses the prefixes that they hold."""
        return self._policies[worker.role].uses_prefix

    def select(self, request: RouteRequest, now: float, rng: float) -> Selection | NoWorker:
        """Choose a worker, or a pair, for a new request, and count it there until the selection is released."""
        return self._attempt(request, frozenset(), now, rng)

    def retry(self, selection: Selection, now: float, rng: float) -> Selection | NoWorker:
        """Choose again among workers not tried, after an attempt that was released; otherwise raises `RuntimeError`."""
        if not selection.released:
            raise RuntimeError("release the failed attempt before choosing the next one")
        if selection.started:
            return self._refuse(NoWorker("answer_started", "the worker failed after its answer had begun", None))
        if selection.failures >= _FAILURES:
            return self._refuse(NoWorker("failed_twice", "two workers failed on this request", None))
        if selection.attempt >= self.config.max_attempts:
            tries = f"{selection.attempt} attempts" if selection.attempt > 1 else "the only attempt"
            return self._refuse(NoWorker("too_many_attempts", f"{tries} failed", None))
        failed = [worker for worker, verdict in selection.verdicts.items() if verdict != "served"]
        tried = selection.tried | {worker.url for worker in failed or selection.workers}
        following = self._attempt(selection.request, tried, now, rng, after=selection)
        self._retries += isinstance(following, Selection)
        return following

    def prefilled(self, selection: Selection, now: float) -> None:
        """Record the prefix for the prefill side, even if the answer fails; `ValueError` if there is no pair."""
        if selection.mode != "pd":
            raise ValueError("a mixed worker has no separate prefill side")
        self._did_well(selection, selection.prefill, now)

    def served(self, selection: Selection, now: float) -> None:
        """Record the prefix for the worker that succeeded; workers that failed before are then at fault."""
        if self._did_well(selection, selection.workers[-1], now):
            for suspect in selection.suspects:
                member = self.registry.member(suspect)
                if member is not None:
                    member.circuit.convict(now)

    def declined(self, selection: Selection, worker: RouterWorker) -> None:
        """Record that `worker` was full or serves another model: it is not at fault, but a retry avoids it."""
        self._record_verdict(selection, worker, "declined")

    def failed(self, selection: Selection, worker: RouterWorker, now: float, *, severe: bool = False) -> None:
        """Record that `worker`, one of the selection's, failed; `severe` if it was unreachable.

        A worker that was reached may have failed because of the request, so its breaker counts it only if another
        worker `served` the same request: a request that fails everywhere makes no worker unselectable.
        """
        counts, member = self._record_verdict(selection, worker, "failed")
        if severe and member is not None:
            member.circuit.failure(now, severe=True)
        elif counts and not severe:
            selection.suspects += (worker,)
            selection.failures += worker == selection.decode

    def snapshot(self) -> RouterSnapshot:
        """Return everything that metrics and the live page show."""
        loads = dict(self._loads.by_worker)
        total = functools.reduce(WorkerLoad.plus, loads.values(), IDLE)
        roles = {role: copy(counts) for role, counts in self._departed.items()}
        for worker, counts in self._by_worker.items():
            roles[worker.role] = roles[worker.role].plus(counts)
        workers = tuple(
            WorkerSnapshot(
                worker=member.worker,
                state=member.state,
                since=member.since,
                circuit=member.circuit.state,
                load=loads.pop(member.worker, IDLE),
                tally=copy(self._by_worker.get(member.worker, SelectionCounts())),
                index_blocks=self._index.blocks(member.worker),
                held_blocks=self.reported_kv.num_blocks(member.worker),
                kv_events=self.reported_kv.num_events(member.worker),
                kv_port=member.kv_port,
                unfit=member.unfit,
                failure=member.failure,
            )
            for member in self.registry
        )
        return RouterSnapshot(
            workers=workers,
            departed=tuple(loads.items()),
            index_blocks=len(self._index),
            total=total,
            roles=roles,
            modes=dict(self._modes),
            refused=dict(self._refused),
            retries=self._retries,
            faults=self._loads.faults,
        )

    def _attempt(
        self, request: RouteRequest, tried: frozenset[str], now: float, rng: float, after: Selection | None = None
    ) -> Selection | NoWorker:
        if now >= self._next_sweep:
            self._next_sweep = now + self.config.eviction_interval_secs
            self._index.sweep(now)
            for policy in self._policies.values():
                policy.sweep(now)
        placement = self._placer.place(request, tried, now, rng)
        if isinstance(placement, NoWorker):
            return self._refuse(placement)
        held: dict[RouterWorker, WorkerLoad] = {}
        trials: frozenset[RouterWorker] = frozenset()
        for member in placement.members:
            worker, missing = member.worker, 0
            if member.circuit.state != "closed":
                member.circuit.admit(now)
                if member.circuit.state == "half_open":
                    trials |= {worker}
            counts = self._by_worker.get(worker) or self._counts(worker)
            counts.selected += 1
            if not held:
                missing = placement.missing
                counts.prompt_blocks += len(placement.keys)
                counts.hit_blocks += placement.hits
            held[worker] = WorkerLoad(1, 1, missing)
            self._loads.change(worker, 1, 1, missing)
        chosen = Selection(
            request,
            tuple(held),
            held,
            loads=self._loads,
            on_release=self._on_release,
            keys=placement.keys,
            hits=placement.hits,
            tried=tried,
            trials=trials,
            kv_port=placement.members[0].kv_port if len(held) > 1 else None,
            mode="pd" if len(held) > 1 else "mixed" if worker.role == "mixed" else "alone",
            attempt=1 if after is None else after.attempt + 1,
            suspects=() if after is None else after.suspects,
            failures=0 if after is None else after.failures,
        )
        self._modes[chosen.mode] += 1
        self._in_flight.begin(chosen.workers[0], placement.keys)
        return chosen

    def _refuse(self, answer: NoWorker) -> NoWorker:
        self._refused[answer.reason] += 1
        return answer

    def _did_well(self, selection: Selection, worker: RouterWorker, now: float) -> bool:
        counts, member = self._record_verdict(selection, worker, "served")
        if member is not None:
            member.circuit.success()
            if self._policies[worker.role].uses_prefix:
                self._index.record(worker, selection.keys, now)
        return counts

    def _record_verdict(
        self, selection: Selection, worker: RouterWorker, verdict: Verdict
    ) -> tuple[bool, Member | None]:
        """Count a verdict; return if it counts, and the worker's entry. Repeated or late ones count as faults only."""
        if worker not in selection.workers:
            raise ValueError(f"{worker} is not a worker of this selection")
        if selection.released or worker in selection.verdicts:
            self._loads.faults += 1
            return False, None
        selection.verdicts[worker] = verdict
        counts = self._by_worker.get(worker) or self._counts(worker)
        setattr(counts, verdict, getattr(counts, verdict) + 1)
        return True, self.registry.member(worker)

    def _on_release(self, selection: Selection) -> None:
        self._in_flight.end(selection.workers[0], selection.keys)
        ended_well = selection.verdicts.get(selection.workers[-1]) == "served"
        for worker in selection.workers:
            verdict = selection.verdicts.get(worker)
            if verdict is None:
                counts = self._by_worker.get(worker) or self._counts(worker)
                if ended_well:
                    counts.unused += 1
                else:
                    counts.left += 1
            member = self.registry.member(worker)
            if member is None:
                self._release(worker)
            elif verdict != "served" and worker in selection.trials:
                member.circuit.withdraw()

    def _on_idle(self, worker: RouterWorker) -> None:
        if self.registry.idle(worker):
            self._forget(worker)

    def _forget(self, worker: RouterWorker) -> None:
        """Forget an incarnation; its running requests stay counted until their selections are released."""
        self._index.remove(worker)
        self.reported_kv.remove(worker)
        counts = self._by_worker.pop(worker, None)
        if counts is not None:
            self._departed[worker.role] = counts.plus(self._departed[worker.role])
        for policy in self._policies.values():
            policy.departed(worker)
        self._release(worker)

    def _release(self, worker: RouterWorker) -> None:
        """Free the index of a lost incarnation, unless requests that run there are still counted."""
        if worker not in self._loads.by_worker and worker not in self._in_flight:
            self._indices.release(worker)

    def _counts(self, worker: RouterWorker) -> SelectionCounts:
        """Return the counts of a worker that has none yet, or, if it was lost, those of lost workers of its role."""
        if self.registry.member(worker) is None:
            return self._departed[worker.role]
        self._by_worker[worker] = counts = SelectionCounts()
        return counts


_PROMPT_BLOCKS: Final = counter("prompt_blocks", "Prompt blocks looked up in the prefix index.")
_HIT_BLOCKS: Final = counter("hit_blocks", "Prompt blocks that the chosen worker was believed to hold.")


class SelectionCounts(msgspec.Struct):
    """Outcomes of selections, of one worker or of all workers of a role; every count only grows."""

    selected: Annotated[int, counter("selected", "Attempts given to the worker.")] = 0
    served: Annotated[int, counter("served", "Attempts that succeeded.")] = 0
    failed: Annotated[int, counter("failed", "Attempts that failed.")] = 0
    declined: Annotated[
        int, counter("declined", "Attempts rejected because the worker was full or does not serve the model.")
    ] = 0
    unused: Annotated[
        int,
        counter(
            "unused", "Answers that did not need this prefill worker, because the decode worker had the prompt's KV."
        ),
    ] = 0
    left: Annotated[
        int,
        counter("left", "Attempts without a verdict, as when a client disconnects or the pair's other side fails."),
    ] = 0
    prompt_blocks: Annotated[int, _PROMPT_BLOCKS] = 0
    hit_blocks: Annotated[int, _HIT_BLOCKS] = 0

    def plus(self, other: SelectionCounts) -> SelectionCounts:
        """Return the sum of both."""
        return SelectionCounts(*map(operator.add, msgspec.structs.astuple(self), msgspec.structs.astuple(other)))


OUTCOMES: Final = ("served", "failed", "declined", "unused", "left")
"""Fields of `SelectionCounts`; each ended attempt counts in exactly one."""


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """One incarnation of a worker."""

    worker: RouterWorker
    state: WorkerState
    since: float
    """Time at which the worker entered that state, by the clock that is passed in."""
    circuit: BreakerState
    load: WorkerLoad
    tally: SelectionCounts
    index_blocks: Annotated[int, gauge("index_blocks", "Prompt blocks that the worker is believed to hold.")]
    """Blocks of prompts that the worker served, of the router's block size."""
    held_blocks: int | None
    """Blocks that the worker reports to hold, of the worker's block size; None if it does not report."""
    kv_events: Annotated[int, counter("kv_events", "KV events received from the worker.")]
    kv_port: int | None
    """Port on which a prefill worker listens for decode workers, if it named one."""
    unfit: str
    """Reason why the worker is not chosen for its role although it is healthy."""
    failure: str
    """Reason of the last failed health check; empty while checks pass."""

    @property
    def healthy(self) -> Annotated[bool, gauge("healthy", "1 while health checks of the worker pass, 0 otherwise.")]:
        """True if health checks pass."""
        return self.state is WorkerState.HEALTHY

    @property
    def circuit_closed(
        self,
    ) -> Annotated[
        bool, gauge("circuit_closed", "1 while the worker's circuit breaker lets requests through, else 0.")
    ]:
        """True if the circuit breaker lets requests through."""
        return self.circuit == "closed"

    @property
    def reports_kv(
        self,
    ) -> Annotated[
        bool, gauge("reports_kv", "1 while the worker reports the KV that it holds, else 0.", old=("tells_kv",))
    ]:
        """True if the worker reports the KV blocks that it holds."""
        return self.held_blocks is not None

    @property
    def reported_blocks(
        self,
    ) -> Annotated[int, gauge("held_blocks", "KV blocks, of the worker's size, that the worker reports to hold.")]:
        """Blocks that the worker reports to hold; 0 if it does not report."""
        return self.held_blocks or 0


@dataclass(frozen=True, slots=True)
class RouterSnapshot:
    """The whole router."""

    workers: tuple[WorkerSnapshot, ...]
    departed: tuple[tuple[RouterWorker, WorkerLoad], ...]
    """Earlier incarnations on which requests have not ended yet."""
    index_blocks: int
    """Blocks that take memory in the prefix index."""
    total: WorkerLoad
    roles: dict[Role, SelectionCounts]
    modes: Annotated[
        dict[Mode, int], counter("attempts", "Attempts on a mixed worker, a pair or a decode worker.", label="mode")
    ]
    refused: Annotated[dict[str, int], counter("refused", "Requests without a worker, by reason.", label="reason")]
    retries: Annotated[int, counter("retries", "Attempts on another worker after a failed one.")]
    faults: Annotated[
        int, counter("faults", "Duplicate or late releases and verdicts: 0 unless the gateway has a bug.")
    ]

    @property
    def tally(self) -> SelectionCounts:
        """Counts of all workers there ever were."""
        return functools.reduce(SelectionCounts.plus, self.roles.values(), SelectionCounts())

    @property
    def prompt_blocks(self) -> Annotated[int, _PROMPT_BLOCKS]:
        """Blocks of all prompts that were looked up."""
        return self.tally.prompt_blocks

    @property
    def hit_blocks(self) -> Annotated[int, _HIT_BLOCKS]:
        """Blocks of all prompts that the chosen worker was believed to hold."""
        return self.tally.hit_blocks
