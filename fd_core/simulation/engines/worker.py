"""A simulated worker: the front of a server, which takes requests one after the other, and an engine behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from fd_core.disagg.ticket import read_ticket
from fd_core.engine.clients.client import DeltaStream
from fd_core.errors import BadRequest, EngineDead, FdError
from fd_core.router.workers import Role
from fd_core.scheduling.requests import check_spec
from fd_core.simulation.clock.timeline import LocalTimeline
from fd_core.simulation.clock.waits import FRONT, WaitAccount
from fd_core.simulation.costs.profile_costs import Costs
from fd_core.simulation.engines.engine import EngineParts, SimulatedEngineClient
from fd_core.simulation.storage.storage import SECRET
from fd_core.types import Delta, RequestSpec


class WorkerCaller(Protocol):
    """Who sent a request to a worker. Calls are made when the worker says it; the network takes time of its own."""

    def answered(self, delta: Delta) -> None:
        """The worker sends a part of the answer."""

    def refused(self, status: int, reason: str) -> None:
        """The worker does not take the request, or cannot go on with it, and says so."""

    def lost(self, reason: str) -> None:
        """The connection breaks off: nothing more comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """What one worker is, whenever it is started."""

    name: str
    role: Role
    make_parts: Callable[[int], EngineParts]
    """Makes the parts of the engine of the process with a number, from 1 on."""
    max_queued_requests: int = 1024
    restart_seconds: float | None = 10.0
    """Time to load another engine in place of one that died; None has the server end with its engine."""


class _BadTicket(FdError):
    """Nobody who has the secret sent a request to a prefill worker."""


class SimulatedWorker:
    """One server process, or none between its death and its return."""

    def __init__(self, timeline: LocalTimeline, plan: WorkerPlan, index: int) -> None:
        self.plan = plan
        self.index = index
        self.url = f"http://{plan.name}:8000"
        self.processes = 0
        """Processes that were started at this address."""
        self.client: SimulatedEngineClient | None = None
        self.leaving = False
        """Whether it takes no more requests, because it is to end."""
        self.on_start: Callable[[SimulatedEngineClient], None] = lambda _: None
        """Called with the client of each new process."""
        self.account_of: Callable[[str], WaitAccount | None] = lambda _: None
        """Finds where the time of a request is noted."""
        self.on_answer: Callable[[], None] = lambda: None
        """Called with each part of an answer that leaves the worker."""
        self.timeline = timeline
        """Time as whatever runs at this address sees it; standing still and wrong clocks are faults of it."""
        self._busy_until = 0.0
        self._callers: dict[str, tuple[WorkerCaller, DeltaStream | None]] = {}
        self.start()

    @property
    def instance(self) -> str:
        """Name of the process."""
        return f"{self.plan.name}/{self.processes}"

    @property
    def up(self) -> bool:
        """Whether there is a process."""
        return self.client is not None

    @property
    def healthy(self) -> bool:
        """What `/health` says: a worker that shuts down still does what it took."""
        return self.client is not None and self.client.alive

    @property
    def num_open(self) -> int:
        """Requests that were taken and have not ended."""
        return len(self._callers)

    def start(self) -> None:
        """Start a process with an empty engine."""
        self.processes += 1
        self.leaving = False
        parts = self.plan.make_parts(self.processes)
        self._costs: Costs = parts.costs
        self._shares_processor = parts.shares_processor
        self.client = SimulatedEngineClient(self.timeline, parts, self.plan.restart_seconds)
        self._busy_until = self.timeline.now
        self.on_start(self.client)

    def drain(self) -> None:
        """Take no more requests, as before an orderly end; go on with those that were taken."""
        if self.client is not None:
            self.leaving = True
            self.client.engine.stop()

    def kill(self) -> None:
        """End the process at once: whoever waits for an answer is left without one."""
        if self.client is None:
            return
        client, self.client = self.client, None
        callers, self._callers = self._callers, {}
        client.end()
        for caller, _ in callers.values():
            caller.lost("the worker's process ended")

    def take(self, spec: RequestSpec, caller: WorkerCaller) -> None:
        """Take a request that has come over the network; the caller is told all that becomes of it.

        On its way, `prefill_at` is the ticket of the router.
        """
        client = self.client
        if client is None:
            caller.lost("no process listens at the worker's address")
            return
        self._callers[spec.request_id] = caller, None
        if (account := self.account_of(spec.request_id)) is not None:
            account.wait_for(FRONT)
        taken = self._costs.request(len(spec.prompt))
        if self._shares_processor:
            client.device.work_beside(taken)
        self._busy_until = max(self._busy_until, self.timeline.now) + taken
        self.timeline.at(self._busy_until, lambda: self._submit(client, spec, caller))

    def leave(self, request_id: str) -> None:
        """The client of a request is gone: its connection was closed."""
        _, stream = self._callers.pop(request_id, (None, None))
        if stream is not None:
            stream.leave()

    # Inside -----------------------------------------------------------------------------------------------

    def _submit(self, client: SimulatedEngineClient, spec: RequestSpec, caller: WorkerCaller) -> None:
        name = spec.request_id
        if self.client is not client or name not in self._callers:
            return  # the process ended, or the client left
        room = client.info.max_num_seqs + self.plan.max_queued_requests
        answered = caller.answered

        def news(delta: Delta | None) -> None:
            if self._shares_processor:
                client.device.work_beside(self._costs.delivery())
            self.on_answer()
            if delta is None:
                if self._callers.pop(name, None) is not None:
                    caller.lost("the engine is gone for good")
                return
            if delta.finish_reason is not None:
                self._callers.pop(name, None)
            answered(delta)

        try:
            if self.leaving:
                raise EngineDead("the server is shutting down")
            if client.active_requests >= room:
                raise EngineDead(f"the queue holds {self.plan.max_queued_requests} requests and has no room for more")
            check_spec(spec, client.info.max_model_len)
            stream = client.submit(self._with_peer(spec), news)
        except FdError as error:
            del self._callers[name]
            status = 503 if isinstance(error, EngineDead) else 403 if isinstance(error, _BadTicket) else 400
            caller.refused(status, str(error))
            return
        self._callers[name] = caller, stream

    def _with_peer(self, spec: RequestSpec) -> RequestSpec:
        """Return a request with the address of the prefill worker in place of its ticket."""
        if not spec.prefill_at:
            return spec
        if self.plan.role != "decode":
            raise BadRequest("a prefill worker is named to a worker that is no decode worker")
        if (peer := read_ticket(SECRET, spec.request_id, spec.prefill_at)) is None:
            raise _BadTicket("the ticket to a prefill worker is not signed with the secret of this deployment")
        return msgspec.structs.replace(spec, prefill_at=peer)
