"""Faults of a simulated deployment: a schedule is plain data, generated from a seed, that applies to any world."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Literal, get_args

import msgspec

from fd_core.kv.stores.contract import FailureReason
from fd_core.simulation.engines.engine import SimulatedEngineClient, SimulatedWorker
from fd_core.simulation.world import World

FaultKind = Literal[
    "engine_dies",
    "engine_hangs",
    "process_killed",
    "process_stands_still",
    "worker_drains",
    "device_slow",
    "clock_wrong",
    "places_parted",
    "network_slow",
    "router_restarted",
    "transfers_lost",
    "transfers_repeated",
    "store_down",
    "store_slow",
    "store_full",
    "store_loses",
    "store_damages",
    "clients_leave",
]
FAULT_KINDS: Final[tuple[FaultKind, ...]] = get_args(FaultKind)
_OF_WORKERS: Final = FAULT_KINDS[:7]
_OF_PLACES: Final = ("places_parted", "network_slow")
_OF_TRANSFERS: Final = ("transfers_lost", "transfers_repeated")


_Acts = tuple[Callable[[], None], Callable[[], None] | None]
"""Start and end of a fault."""


class SimulatedFault(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One fault. Its meaning is in the code of `apply`, kind by kind."""

    at: float
    """Seconds from the start of the run."""
    kind: FaultKind
    target: tuple[str, ...] = ()
    """A worker, a router, or the two endpoints of the faulty link."""
    seconds: float = 0.0
    """Duration: until the process, the link or the store is restored. 0 for instantaneous faults."""
    amount: float = 0.0
    """Severity: a slowdown factor, the share of clients, every how many-th value or message, seconds of a delay or of a
    clock offset."""


def draw_faults(
    draw: random.Random,
    count: int,
    *,
    seconds: float,
    workers: Sequence[str],
    routers: Sequence[str] = (),
    store: bool = False,
    pairs: bool = False,
    kinds: Sequence[FaultKind] = FAULT_KINDS,
) -> tuple[SimulatedFault, ...]:
    """Return `count` faults within `seconds`, in order of time, of the kinds that have a target."""
    possible = [
        kind
        for kind in kinds
        if not (kind.startswith("store") and not store)
        and not (kind in _OF_TRANSFERS and not pairs)
        and not (kind == "router_restarted" and not routers)
        and not (kind in _OF_PLACES and len(workers) + len(routers) < 2)
    ]
    return tuple(
        sorted(
            (_drawn(draw, draw.choice(possible), seconds, workers, routers) for _ in range(count if possible else 0)),
            key=lambda fault: fault.at,
        )
    )


def _drawn(
    draw: random.Random, kind: FaultKind, seconds: float, workers: Sequence[str], routers: Sequence[str]
) -> SimulatedFault:
    target: tuple[str, ...] = ()
    lasts, amount = draw.expovariate(2.0 / seconds), 0.0
    if kind in _OF_WORKERS:
        target = (draw.choice(workers),)
    elif kind in _OF_PLACES:
        # Mostly a router and a worker; pairs of workers communicate as well.
        one = draw.choice(routers) if routers and (len(workers) < 2 or draw.random() < 0.7) else draw.choice(workers)
        target = one, draw.choice([name for name in workers if name != one])
    elif kind == "router_restarted":
        target = (draw.choice(routers),)
    match kind:
        case "device_slow" | "store_slow":
            amount = draw.choice((2.0, 10.0, 100.0))
        case "network_slow":
            amount = draw.expovariate(1.0 / (0.05 * seconds))
        case "clock_wrong":
            amount, lasts = draw.choice((-1, 1)) * draw.expovariate(1.0), 0.0
        case "clients_leave":
            amount, lasts = draw.choice((0.3, 1.0)), 0.0
        case "transfers_lost" | "transfers_repeated":
            amount = draw.choice((2, 3, 7))
        case "store_loses" | "store_damages":
            amount, lasts = draw.choice((1, 2, 3)), 0.0
        case "router_restarted" | "engine_dies" | "engine_hangs":
            lasts = 0.0
    return SimulatedFault(at=draw.random() * seconds, kind=kind, target=target, seconds=lasts, amount=amount)


def over_at(schedule: Sequence[SimulatedFault]) -> float:
    """Return the end of the last fault, in seconds from the start of the run; its consequences may last longer."""
    return max((fault.at + fault.seconds for fault in schedule), default=0.0)


def apply(schedule: Sequence[SimulatedFault], world: World) -> None:
    """Schedule every fault. Raises `ValueError` for one whose target is not in the world."""
    for fault in schedule:
        begin, end = _performed(fault, world)
        world.timeline.at(fault.at, begin)
        if end is not None:
            world.timeline.at(fault.at + fault.seconds, end)


def _performed(fault: SimulatedFault, world: World) -> _Acts:
    kind, amount, network = fault.kind, fault.amount, world.network
    if kind in _OF_WORKERS:
        worker = next((each for each in world.workers if each.name in fault.target), None)
        if worker is None:
            raise ValueError(f"the fault {kind} is for {fault.target}, and no worker has that name")
        return _of_worker(fault, worker)
    match kind:
        case "places_parted":
            one, other = fault.target
            return partial(network.part, one, other), partial(network.join, one, other)
        case "network_slow":
            one, other = fault.target
            return partial(network.slow, one, other, amount), partial(network.slow, one, other, 0.0)
        case "router_restarted":
            gateway = next((each for each in world.gateways if each.name in fault.target), None)
            if gateway is None:
                raise ValueError(f"the fault {kind} is for {fault.target}, and no router has that name")
            return gateway.restart, None
        case "clients_leave":
            return partial(_clients_leave, world, amount), None
        case "transfers_lost" | "transfers_repeated":
            hit = () if kind == "transfers_lost" else (0.0, 0.01)
            change = partial(setattr, world.transfers, "fate")
            fate = partial(change, lambda number: (0.0,) if number % int(amount) else hit)
            return fate, partial(change, lambda _: (0.0,))
    if (store := world.store) is None:
        raise ValueError(f"the fault {kind} needs a store")
    match kind:
        case "store_loses":
            return partial(store.lose, int(amount)), None
        case "store_damages":
            return partial(store.damage, int(amount)), None
        case "store_slow":
            return partial(setattr, store, "slowness", amount), partial(setattr, store, "slowness", 1.0)
        case "store_full":
            change = partial(setattr, store, "write_fault")
            return partial(change, FailureReason.FULL), partial(change, None)
        case _:
            change = partial(setattr, store, "fault")
            return partial(change, FailureReason.TIMEOUT), partial(change, None)


def _of_worker(fault: SimulatedFault, worker: SimulatedWorker) -> _Acts:
    def at_engine(act: Callable[[SimulatedEngineClient], None]) -> Callable[[], None]:
        def happen() -> None:
            if worker.client is not None and worker.client.alive:
                act(worker.client)

        return happen

    def slow(factor: float, client: SimulatedEngineClient) -> None:
        client.device.slowness = factor

    def start() -> None:
        if not worker.up:
            worker.start()

    def end_drain() -> None:
        worker.kill()
        worker.start()

    match fault.kind:
        case "engine_dies":
            return at_engine(lambda client: client.die("a fault of the schedule")), None
        case "engine_hangs":
            return at_engine(lambda client: client.device.hang()), None
        case "process_killed":
            return worker.kill, start
        case "process_stands_still":
            return partial(worker.timeline.freeze, fault.seconds), None
        case "worker_drains":
            return worker.drain, end_drain
        case "device_slow":
            return at_engine(partial(slow, fault.amount)), at_engine(partial(slow, 1.0))
        case _:
            # A drift of a thousandth is ten times that of a bad clock, and enough to reorder deadlines.
            return partial(worker.timeline.set_clock, fault.amount, 1e-3 * fault.amount), None


def _clients_leave(world: World, share: float) -> None:
    clients = [*world.clients.values()]
    for client in clients[: round(share * len(clients))]:
        client.leave()
