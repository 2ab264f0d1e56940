"""Additional faults of hostile worlds that production meets and that simulator schedules lack."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from fd_core.ops.contract import KVCache
from fd_core.simulation.engines.device import PlanComputer
from fd_core.simulation.engines.engine import SimulatedWorker
from fd_core.types import StepOutput, StepPlan
from tests.simulation.hostile.computing import AuditedComputer, PlanWatch

if TYPE_CHECKING:
    from tests.simulation.hostile.world import HostileWorld

__all__ = ["Accident", "AccidentKind", "Poison", "PoisonedComputer", "schedule_accident"]

AccidentKind = Literal["messages_late", "requests_aborted", "rows_fail", "worker_deregistered", "role_changed"]
Poison = Literal["kills", "fails"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accident:
    """One fault and the worker that it affects."""

    at: float
    kind: AccidentKind
    target: str
    seconds: float = 0.0
    """Duration."""
    amount: float = -1.0
    """For aborted requests and late messages: seconds until the engine dies; negative if it survives."""


def schedule_accident(world: HostileWorld, accident: Accident) -> None:
    """Schedule an accident."""
    worker = next(each for each in world.workers if each.name == accident.target)
    begin = {
        "messages_late": _messages_late,
        "requests_aborted": _requests_aborted,
        "rows_fail": _rows_fail,
        "worker_deregistered": _worker_deregistered,
        "role_changed": _role_changed,
    }[accident.kind]

    def happen() -> None:
        world.log_event(f"accident: {accident}")
        world.counts[f"accident_{accident.kind}"] += 1
        if (end := begin(world, worker, accident)) is not None:
            world.timeline.after(accident.seconds, end)

    world.timeline.at(accident.at, happen)


def _messages_late(world: HostileWorld, worker: SimulatedWorker, accident: Accident) -> Callable[[], None]:
    """Delay messages of the engine to its client, even past the engine's death and the start of its successor."""
    epochs = world.epochs[worker.name]
    epochs.hold()
    _die_later(world, worker, accident)
    return epochs.resume


def _die_later(world: HostileWorld, worker: SimulatedWorker, accident: Accident) -> None:
    client = worker.client
    if client is not None and accident.amount >= 0:
        world.timeline.after(accident.amount, partial(client.die, f"a fault after {accident.kind}"))


def _requests_aborted(world: HostileWorld, worker: SimulatedWorker, accident: Accident) -> None:
    """Abort, as an operator, what runs on a worker whose engine may die before it acknowledges."""
    client = worker.client
    if client is None or not (client.alive or client.restarts):
        return
    client.abort([*world.epochs[worker.name].open_requests])
    _die_later(world, worker, accident)


def _rows_fail(world: HostileWorld, worker: SimulatedWorker, _: Accident) -> Callable[[], None]:
    """Fail every row that samples on a worker."""
    name = worker.name
    world.sick.add(name)
    return partial(world.sick.discard, name)


def _worker_deregistered(world: HostileWorld, worker: SimulatedWorker, _: Accident) -> Callable[[], None]:
    """Deregister a worker, as an operator, from every router, and register it again later."""
    for gateway in world.gateways:
        gateway.router.deregister(worker.url, world.timeline.now)

    def back() -> None:
        for gateway in world.gateways:
            gateway.register(worker)

    return back


def _role_changed(world: HostileWorld, worker: SimulatedWorker, _: Accident) -> Callable[[], None]:
    """Report another role in health checks than the one registered."""
    world.disguise.reported_role[worker.url] = "decode" if worker.role != "decode" else "prefill"
    return partial(world.disguise.reported_role.pop, worker.url, None)


class PoisonedComputer(PlanComputer):
    """Wraps another computer, with requests that kill the engine and rows that fail."""

    def __init__(
        self,
        computer: AuditedComputer,
        poison: Callable[[str], Poison | None],
        sick: Callable[[], bool],
        kill: Callable[[], None],
    ) -> None:
        """`poison` returns the effect of a request, `sick` whether all rows fail; `kill` ends the engine at once."""
        self._computer = computer
        self._poison = poison
        self._sick = sick
        self._kill = kill
        self._requests: dict[int, str] = {}
        """Request in each slot, according to submitted plans."""
        self._bad: dict[int, set[int]] = {}
        """Slots with failing rows, by step in flight."""

    @property
    def cache(self) -> KVCache:
        return self._computer.cache

    @property
    def watch(self) -> PlanWatch | None:
        """Additional observer of plans."""
        return self._computer.watch

    @watch.setter
    def watch(self, watch: PlanWatch) -> None:
        self._computer.watch = watch

    def announce(self, plan: StepPlan) -> None:
        self._computer.announce(plan)
        self._requests |= {admission.slot: admission.request_id for admission in plan.admissions}
        fates = {slot: self._poison(self._requests[slot]) for slot in plan.slots.tolist()}
        if "kills" in fates.values():
            self._kill()
        self._bad[plan.step] = {slot for slot, fate in fates.items() if fate == "fails"}

    def execute(self, plan: StepPlan) -> StepOutput:
        output = self._computer.execute(plan)
        bad, sick = self._bad.pop(plan.step), self._sick()
        slots = plan.slots[plan.samples].tolist()
        errors = tuple((slot, "poison request") for slot in slots if sick or slot in bad)
        return dataclasses.replace(output, errors=(*output.errors, *errors)) if errors else output
