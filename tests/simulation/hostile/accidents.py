"""What else goes wrong in hostile worlds: faults that production meets, and that no schedule of the simulator has."""

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

__all__ = ["Accident", "AccidentKind", "Poison", "PoisonedComputer", "befall"]

AccidentKind = Literal["words_late", "requests_aborted", "rows_fail", "worker_deregistered", "role_changed"]
Poison = Literal["kills", "fails"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accident:
    """One of them, and the worker that it befalls."""

    at: float
    kind: AccidentKind
    target: str
    seconds: float = 0.0
    """How long it lasts."""
    amount: float = -1.0
    """Of aborted requests and late words: seconds until the engine dies; it lives on if negative."""


def befall(world: HostileWorld, accident: Accident) -> None:
    """Have an accident happen at its time."""
    worker = next(each for each in world.workers if each.name == accident.target)
    begin = {
        "words_late": _words_late,
        "requests_aborted": _requests_aborted,
        "rows_fail": _rows_fail,
        "worker_deregistered": _worker_deregistered,
        "role_changed": _role_changed,
    }[accident.kind]

    def happen() -> None:
        world.say(f"accident: {accident}")
        world.counts[f"accident_{accident.kind}"] += 1
        if (end := begin(world, worker, accident)) is not None:
            world.timeline.after(accident.seconds, end)

    world.timeline.at(accident.at, happen)


def _words_late(world: HostileWorld, worker: SimulatedWorker, accident: Accident) -> Callable[[], None]:
    """What the engine says comes late to its client, even behind the engine's death and the next one's begin."""
    epochs = world.epochs[worker.name]
    epochs.hold()
    _dies_behind(world, worker, accident)
    return epochs.let_go


def _dies_behind(world: HostileWorld, worker: SimulatedWorker, accident: Accident) -> None:
    client = worker.client
    if client is not None and accident.amount >= 0:
        world.timeline.after(accident.amount, partial(client.die, f"a fault behind {accident.kind}"))


def _requests_aborted(world: HostileWorld, worker: SimulatedWorker, accident: Accident) -> None:
    """An operator aborts what runs on a worker, whose engine may not live to answer."""
    client = worker.client
    if client is None or not (client.alive or client.restarts):
        return
    client.abort([*world.epochs[worker.name].open_requests])
    _dies_behind(world, worker, accident)


def _rows_fail(world: HostileWorld, worker: SimulatedWorker, _: Accident) -> Callable[[], None]:
    """Every row that samples on a worker fails."""
    name = worker.name
    world.sick.add(name)
    return partial(world.sick.discard, name)


def _worker_deregistered(world: HostileWorld, worker: SimulatedWorker, _: Accident) -> Callable[[], None]:
    """An operator takes a worker out of every router, and gives it back."""
    for gateway in world.gateways:
        gateway.router.deregister(worker.url, world.timeline.now)

    def back() -> None:
        for gateway in world.gateways:
            gateway.register(worker)

    return back


def _role_changed(world: HostileWorld, worker: SimulatedWorker, _: Accident) -> Callable[[], None]:
    """A worker says in health checks that it has another role than it was registered with."""
    world.disguise.says[worker.url] = "decode" if worker.role != "decode" else "prefill"
    return partial(world.disguise.says.pop, worker.url, None)


class PoisonedComputer(PlanComputer):
    """Computes what another computer does, but for requests that kill the engine and for rows that fail."""

    def __init__(
        self,
        computer: AuditedComputer,
        poison: Callable[[str], Poison | None],
        sick: Callable[[], bool],
        kill: Callable[[], None],
    ) -> None:
        """`poison` says what a request does, `sick` whether every row fails; `kill` ends the engine at once."""
        self._computer = computer
        self._poison = poison
        self._sick = sick
        self._kill = kill
        self._requests: dict[int, str] = {}
        """The request in each slot, as plans that were submitted say."""
        self._bad: dict[int, set[int]] = {}
        """Slots of each step in flight whose rows fail."""

    @property
    def cache(self) -> KVCache:
        return self._computer.cache

    @property
    def watch(self) -> PlanWatch | None:
        """Who looks at plans as well."""
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
        errors = tuple((slot, "it is poison") for slot in slots if sick or slot in bad)
        return dataclasses.replace(output, errors=(*output.errors, *errors)) if errors else output
