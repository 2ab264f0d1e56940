"""The registry of workers: their incarnations, their health and their circuit breakers.

A worker that returns is a new incarnation: `RouterWorker.incarnation` is never reused, and anything counted
or remembered for an earlier incarnation does not touch a later one.

    (none) --register--> UNKNOWN --checks pass--> HEALTHY <--> UNHEALTHY    (back to HEALTHY: a new incarnation)
                            any of them --deregister--> DRAINING --nothing runs--> GONE
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, get_args
from urllib.parse import urlsplit

import msgspec

from fd_core.errors import BadRequest
from fd_core.kv.breaker import Breaker

if TYPE_CHECKING:
    from fd_core.router.config import RouterConfig

Role = Literal["mixed", "prefill", "decode"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)


class WorkerState(enum.Enum):
    """State of a worker; only `HEALTHY` workers are candidates."""

    UNKNOWN = "unknown"
    """Registered, and not checked often enough yet."""
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    DRAINING = "draining"
    """Deregistered: it gets no new requests and finishes running ones."""
    GONE = "gone"


class RouterWorker(msgspec.Struct, frozen=True, cache_hash=True):
    """One incarnation of a worker."""

    url: str
    """Base address without a slash at the end, such as `http://127.0.0.1:8001`."""
    role: Role
    incarnation: int
    """Never reused by one registry, not even for another address."""


class Circuit(Breaker):
    """A worker's circuit breaker; a request that it let through may also end without a verdict on the worker."""

    def __init__(self, *, first: float, longest: float, max_failures: int, on_turn: Callable[[], None]) -> None:
        """`on_turn` is called whenever the state changes."""
        self._on_turn = on_turn
        super().__init__(first=first, longest=longest, max_failures=max_failures)

    def __setattr__(self, name: str, value: object) -> None:
        """Report a change of state."""
        super().__setattr__(name, value)
        if name == "state":
            self._on_turn()

    def withdraw(self) -> None:
        """Allow another request: the one that was let through ended without a verdict."""
        if self.state == "half_open":
            self.state = "open"

    def convict(self, now: float) -> None:
        """Record a failure that was attributed to the worker only after the call had ended."""
        self.admit(now)  # so that the failure of a trial lengthens the pause
        self.failure(now, severe=False)


@dataclass(slots=True)
class Member:
    """Registry entry of one incarnation."""

    worker: RouterWorker
    instance: str | None
    circuit: Circuit
    since: float
    """Time at which the worker entered its state, by the clock that is passed in."""
    state: WorkerState = WorkerState.UNKNOWN
    passed: int = 0
    missed: int = 0
    failure: str = ""
    """Reason of the last failed health check; empty while checks pass."""
    reported_role: str | None = None
    """Role that the worker named in its last passed health check; None if it named none."""
    kv_port: int | None = None
    """Port on which a prefill worker listens for decode workers, if its last passed health check named one."""
    leaving: bool = False
    models: frozenset[str] | None = None
    """Names of the models that the worker serves; None if they are not known."""
    adapters: frozenset[str] = frozenset()
    """Those of them that are adapters, whose prompts share no KV with others."""

    def turn(self, state: WorkerState, now: float) -> None:
        """Change the state, with its time; does nothing if the state is the same."""
        if state is not self.state:
            self.state, self.since = state, now

    def open_to_requests(self, now: float) -> bool:
        """Return True if the worker may be chosen."""
        return self.state is WorkerState.HEALTHY and self.circuit.ready(now) and not self.unfit

    @property
    def unfit(self) -> str:
        """Reason why the worker is unfit for its configured role; empty if it is fit."""
        if self.reported_role not in (None, self.worker.role):
            return f"it was registered as a {self.worker.role} worker but reports the role {self.reported_role}"
        if self.worker.role == "prefill" and self.kv_port is None and self.state is WorkerState.HEALTHY:
            return "it reports no KV transfer port for decode workers"
        return ""

    @property
    def broken(self) -> bool:
        """True if the worker passes its health checks but has recently failed requests."""
        return self.state is WorkerState.HEALTHY and self.circuit.state != "closed"


@dataclass(slots=True)
class Registry:
    """Every worker that may get requests, by address. Health checks and failures change states here, never counters."""

    config: RouterConfig
    version: int = 0
    """Grows whenever the set of eligible workers could change, except by the passing of time."""
    _members: dict[str, Member] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __iter__(self) -> Iterator[Member]:
        """All members, in the order in which their addresses were first registered."""
        return iter(self._members.values())

    def member(self, worker: RouterWorker) -> Member | None:
        """Return the entry of this incarnation; None if it was lost or replaced."""
        member = self._members.get(worker.url)
        if member is None or (member.worker is not worker and member.worker != worker):
            return None
        return member

    def at(self, url: str) -> RouterWorker | None:
        """Return the incarnation that has this address."""
        member = self._members.get(url.strip().rstrip("/"))
        return None if member is None else member.worker

    def register(self, url: str, role: Role, now: float, *, instance: str | None = None) -> RouterWorker:
        """Add a worker and return it; the same process is the same incarnation. Raises `BadRequest`."""
        url = checked_url(url)
        if role not in ROLES:
            raise BadRequest(f"unknown role {role!r}", field="role", hint=f"use one of {', '.join(ROLES)}")
        member = self._members.get(url)
        if (
            member is not None
            and instance is not None
            and (member.instance, member.worker.role) == (instance, role)
            and member.state is not WorkerState.DRAINING
        ):
            return member.worker
        return self._enter(url, role, now, instance=instance).worker

    def deregister(self, url: str, now: float) -> RouterWorker | None:
        """Stop sending requests to a worker. It drains until `idle`; returns None if no worker has that address."""
        worker = self.at(url)
        if worker is not None:
            self._members[worker.url].turn(WorkerState.DRAINING, now)
            self._changed()
        return worker

    def leaving(self, worker: RouterWorker) -> None:
        """Mark `worker` as shutting down: it is chosen only if no other one can be, until it is lost."""
        member = self.member(worker)
        if member is not None and not member.leaving:
            member.leaving = True
            self._changed()

    def serves(self, worker: RouterWorker, models: Collection[str], adapters: Collection[str] = ()) -> None:
        """Record a worker's models, the only ones it gets; prompts of `adapters` match those of the same adapter."""
        member, known = self.member(worker), (frozenset(models), frozenset(adapters))
        if member is not None and (member.models, member.adapters) != known:
            member.models, member.adapters = known
            self._changed()

    def idle(self, worker: RouterWorker) -> bool:
        """Record that nothing runs on `worker`; return True if it was draining, and so is now removed."""
        member = self.member(worker)
        if member is None or member.state is not WorkerState.DRAINING:
            return False
        member.state = WorkerState.GONE
        del self._members[worker.url]
        self._changed()
        return True

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
        """Apply the result of a health check, and the reason of its `failure`.

        Returns the incarnation at the address, a new one for a new process.
        """
        member = self.member(worker)
        if member is None or member.state is WorkerState.DRAINING:
            return worker
        if not ok:
            member.passed, member.missed, member.failure = 0, member.missed + 1, failure
            if member.missed >= self.config.health_failure_threshold and member.state is not WorkerState.UNHEALTHY:
                member.turn(WorkerState.UNHEALTHY, now)
                self._changed()
            return worker
        before = member.state, member.reported_role, member.kv_port
        member = self._passed(member, now, instance)
        member.reported_role, member.kv_port = role, kv_port
        if member.state is WorkerState.HEALTHY:
            member.failure = ""
        if (member.state, role, kv_port) != before:
            self._changed()
        return member.worker

    def _passed(self, member: Member, now: float, instance: str | None) -> Member:
        worker = member.worker
        if instance is not None and member.instance not in (None, instance):
            member = self._enter(worker.url, worker.role, now, instance=instance)
        same_process = instance is not None and instance == member.instance
        member.passed, member.missed = member.passed + 1, 0
        if instance is not None and member.state is not WorkerState.UNHEALTHY:
            member.instance = instance
        if member.passed < self.config.health_success_threshold or member.state is WorkerState.HEALTHY:
            return member
        if member.state is WorkerState.UNHEALTHY and not same_process:
            member = self._enter(worker.url, worker.role, now, instance=instance)
            member.passed = self.config.health_success_threshold
        member.turn(WorkerState.HEALTHY, now)
        return member

    def _enter(self, url: str, role: Role, now: float, instance: str | None) -> Member:
        circuit = Circuit(
            first=self.config.circuit_open_secs,
            longest=self.config.circuit_max_open_secs,
            max_failures=self.config.circuit_failure_threshold,
            on_turn=self._changed,
        )
        worker = RouterWorker(url, role, next(self._numbers))
        self._members[url] = member = Member(worker, instance, circuit, since=now)
        self._changed()
        return member

    def _changed(self) -> None:
        self.version += 1


def checked_url(url: str) -> str:
    """Return the base address of a worker, without a slash at its end. Raises `BadRequest` for anything else."""
    scheme, _, rest = url.strip().rstrip("/").partition("://")
    try:
        parts = urlsplit(f"{scheme}://{rest}")
        is_valid = scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an address in brackets, or a port, that is none
        is_valid = False
    if not is_valid or any(c in rest for c in "@?# \t\r\n"):
        hint = "use http://HOST:PORT, without user, query or fragment"
        raise BadRequest(f"{url!r:.200} is not a worker URL", field="url", hint=hint)
    return f"{scheme}://{rest}"
