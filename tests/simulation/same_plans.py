"""Equal requests for a computing engine and a simulated one, submitted after equal numbers of plans."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fd_core.config import EngineConfig
from fd_core.engine.core import Engine
from fd_core.engine.process.messages import Abort, ClientMessage, Submit
from fd_core.engine.process.service import EngineService
from fd_core.kv.prefix import PrefixHasher
from fd_core.plugins import installed_plugins
from fd_core.scheduling.contract import Scheduler
from fd_core.simulation.clock.timeline import Timeline
from fd_core.simulation.engines.device import ScriptedComputer
from fd_core.simulation.engines.engine import EngineParts, SimulatedEngineClient, SimulatedPool
from fd_core.simulation.workloads.conversations import Piece
from fd_core.types import RequestSpec, SamplingParams, StepPlan
from tests.simulation.fixed_costs import FixedCosts

PlainPlan = dict[str, Any]
"""Plan fields, except token values, which differ in a simulated model."""


@dataclass
class Arrivals:
    """Messages to an engine, each with the number of plans that precede it."""

    due: list[tuple[int, ClientMessage]]
    plans: list[PlainPlan] = field(default_factory=list)

    def listen(self, scheduler: Scheduler, send: Callable[[ClientMessage], None]) -> None:
        """Record every plan of a scheduler, and send what is due after it."""
        plan_of = scheduler.plan

        def plan() -> Any:
            plan, effects = plan_of()
            if plan is not None:
                self.plans.append(plain(plan))
                for message in self.take():
                    send(message)
            return plan, effects

        scheduler.plan = plan  # type: ignore[method-assign]

    def take(self, idle: bool = False) -> Iterator[ClientMessage]:
        """Yield what is due now; an idle engine makes no more plans, so the next messages are due."""
        if idle and self.due:
            yield self.due.pop(0)[1]
        while self.due and self.due[0][0] <= len(self.plans):
            yield self.due.pop(0)[1]


def plain(plan: StepPlan) -> PlainPlan:
    """Return a plan as comparable values."""
    rows = ("slots", "gens", "starts", "num_tokens", "num_drafts", "samples")
    return {
        "step": plan.step,
        **{name: getattr(plan, name).tolist() for name in rows},
        "admissions": [
            (one.request_id, one.slot, one.gen, len(one.token_ids), one.prompt_len, one.computed)
            for one in plan.admissions
        ],
        "grants": [(one.slot, one.offset, one.blocks.tolist()) for one in plan.grants],
        "revocations": [(one.slot, one.gen) for one in plan.revocations],
    }


def messages(count: int, seed: int, *, vocab: int, longest: int) -> list[tuple[int, ClientMessage]]:
    """Return requests that end at their token limit, some with a shared prefix, and aborts of some of them."""
    draw, at, made = random.Random(seed), 0, []
    heads = [[draw.randrange(3, vocab) for _ in range(70)] for _ in range(2)]
    for index in range(count):
        own = [draw.randrange(3, vocab) for _ in range(draw.randint(1, longest))]
        head = draw.choice([[], *heads])[: draw.choice((32, 48, 70))]
        spec = RequestSpec(
            request_id=f"r{index}",
            prompt=(*head, *own),
            params=SamplingParams(temperature=0.0, max_tokens=draw.randint(1, longest), ignore_eos=True),
            priority=draw.randrange(3),
            tenant=f"t{index % 3}",
        )
        made.append((at, Submit(spec)))
        if draw.random() < 0.2:
            made.append((at + draw.randrange(20), Abort((spec.request_id,))))
        at += draw.choice((0, 0, 1, 2, 5))
    return sorted(made, key=lambda one: one[0])


def computed_plans(engine: Engine, due: list[tuple[int, ClientMessage]]) -> list[PlainPlan]:
    """Return the plans of an engine with a runner, in the serving loop."""
    arrivals, inbox = Arrivals(list(due)), []
    arrivals.listen(engine.probe().scheduler, inbox.append)
    service = EngineService(engine, lambda _: None)
    while engine.has_work or inbox or arrivals.due:
        inbox += arrivals.take(idle=not engine.has_work and not inbox)
        taken, inbox[:] = list(inbox), []
        service.send(service.take(taken) + engine.step(), 0.0)
    return arrivals.plans


def simulated_plans(engine: Engine, config: EngineConfig, due: list[tuple[int, ClientMessage]]) -> list[PlainPlan]:
    """Return the plans of a simulated engine with the limits of a computing one."""
    limits = engine.probe().runner.limits
    hasher = PrefixHasher(block_size=limits.block_size, identity="other", secret=bytes(32))
    parts = EngineParts(
        pool=SimulatedPool(config=config, limits=limits, costs=FixedCosts(), profile="fixed"),
        plugins=installed_plugins(),
        computer=lambda: ScriptedComputer(limits, lambda name: Piece(hash(name) & 0xFFFF, 10**6)),
        hasher=hasher if config.enable_prefix_caching else None,
        check=True,
    )
    timeline = Timeline()
    client = SimulatedEngineClient(timeline, parts)
    streams = {}

    def send(message: ClientMessage) -> None:
        if isinstance(message, Submit):
            streams[message.spec.request_id] = client.submit(message.spec)
        elif isinstance(message, Abort):
            for name in message.request_ids:
                streams[name].abort()

    arrivals = Arrivals(list(due))
    arrivals.listen(client.engine.probe().scheduler, send)
    while arrivals.due or client.engine.has_work:
        for message in list(arrivals.take(idle=not client.engine.has_work)):
            send(message)
        timeline.run()
    return arrivals.plans
