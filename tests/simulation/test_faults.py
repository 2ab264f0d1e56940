"""Faults of a schedule: each one starts, ends, and affects clients no more than necessary."""

from __future__ import annotations

import random

import pytest

from fd_core.router.config import RouterConfig
from fd_core.simulation.clock.timeline import LocalTimeline, Network, Timeline
from fd_core.simulation.faults import FAULT_KINDS, SimulatedFault, apply, draw_faults, over_at
from tests.simulation.helpers import conversations, group, world

WORKERS, ROUTERS = ("mixed0", "mixed1"), ("router0",)
HARMLESS = {"engine_dies", "engine_hangs", "device_slow", "clock_wrong", "network_slow"}
"""Faults that, one at a time, fail no request while another worker and time remain."""


def schedule(seed: int) -> tuple[SimulatedFault, ...]:
    draw = random.Random(seed)
    return draw_faults(draw, 40, seconds=3.0, workers=WORKERS, routers=ROUTERS, store=True, pairs=True)


def test_equal_seeds_give_equal_fault_schedules() -> None:
    assert schedule(1) == schedule(1) != schedule(2)


def test_every_applicable_fault_kind_is_drawn() -> None:
    drawn = {fault.kind for seed in range(10) for fault in schedule(seed)}
    assert drawn == set(FAULT_KINDS)
    alone = draw_faults(random.Random(1), 300, seconds=3.0, workers=("mixed0",))
    assert not {"store_full", "router_restarted", "places_parted"} & {fault.kind for fault in alone}


def test_fault_without_target_is_rejected() -> None:
    with pytest.raises(ValueError, match="mixed7"):
        apply([SimulatedFault(at=0.0, kind="engine_dies", target=("mixed7",))], world())
    with pytest.raises(ValueError, match="needs a store"):
        apply([SimulatedFault(at=0.0, kind="store_full")], world())


@pytest.mark.parametrize("kind", [kind for kind in FAULT_KINDS if not kind.startswith(("store", "transfers"))])
def test_every_request_ends_under_faults(kind: str) -> None:
    router = RouterConfig(policy="round_robin", health_check_interval_secs=0.5)
    one = world(group(count=2, config={"watchdog_seconds": 1.0}, restart_seconds=0.5), router=router)
    faults = draw_faults(random.Random(3), 1, seconds=1.0, workers=WORKERS, routers=ROUTERS, kinds=(kind,))
    apply(faults, one)
    run = one.run(conversations(30, rate=60.0), until=60.0 + over_at(faults))
    ends = [outcome.end for outcome in run.outcomes]
    assert len(ends) == 30
    if kind in HARMLESS:
        assert set(ends) == {"stop"}


def test_slow_health_check_returns_state_at_reply_time() -> None:
    one = world(group(count=2), routers=1)
    gateway, worker, network = one.gateways[0], one.workers[1], one.network
    network.slow("router0", "mixed1", 0.2)
    gateway.check()
    gateway.check()
    checks = gateway.checks
    one.timeline.at(0.1, worker.kill)
    one.timeline.run(0.3)
    assert [each.state.value for each in gateway.router.snapshot().workers] == ["healthy", "healthy"]
    one.timeline.run(0.5)
    assert [each.state.value for each in gateway.router.snapshot().workers] == ["healthy", "unhealthy"]
    assert gateway.checks == checks, "one check at a time"


def test_health_reply_of_replaced_process_is_ignored() -> None:
    one = world(group(count=2), routers=1)
    gateway, worker, network = one.gateways[0], one.workers[1], one.network
    worker.kill()
    network.slow("router0", "mixed1", 0.2)
    gateway.check()
    network.slow("router0", "mixed1", 0.0)
    worker.start()
    gateway.register(worker)
    before = gateway.router.snapshot().workers
    assert before[1].worker.incarnation == 3
    one.timeline.run(1.0)
    assert gateway.router.snapshot().workers == before


def test_partitioned_messages_arrive_in_order_after_healing() -> None:
    timeline, delivered = Timeline(), []
    network = Network(timeline, 0.25)
    network.part("a", "b")
    network.send("a", "b", lambda: delivered.append("first"))
    network.send("a", "c", lambda: delivered.append("elsewhere"))
    timeline.run(1.0)
    assert delivered == ["elsewhere"]
    network.join("b", "a")
    assert not network.clear("a", "b"), "held messages have not arrived"
    network.send("a", "b", lambda: delivered.append("second"))
    timeline.run(1.25)
    assert network.clear("a", "b")
    assert delivered == ["elsewhere", "first", "second"]


def test_messages_do_not_overtake_slow_ones() -> None:
    timeline, delivered = Timeline(), []
    network = Network(timeline, 0.25)
    network.slow("a", "b", 1.0)
    network.send("a", "b", lambda: delivered.append("first"))
    network.slow("a", "b", 0.0)
    assert not network.clear("a", "b")
    network.send("a", "b", lambda: delivered.append("second"))
    timeline.run()
    assert delivered == ["first", "second"]
    assert timeline.now == 1.25


def test_suspended_process_acts_late_and_in_order() -> None:
    timeline, did = Timeline(), []
    local = LocalTimeline(timeline)
    local.at(1.0, lambda: did.append((timeline.now, "one")))
    local.at(2.0, lambda: did.append((timeline.now, "two")))
    local.at(1.5, lambda: did.append((timeline.now, "never"))).cancel()
    timeline.at(0.5, lambda: local.freeze(3.0))
    timeline.run()
    assert did == [(3.5, "one"), (3.5, "two")]


def test_skewed_clock_is_monotonic() -> None:
    timeline, did = Timeline(), []
    local = LocalTimeline(timeline)
    local.set_clock(10.0, 1.0)
    local.after(4.0, lambda: did.append((timeline.now, local.now)))
    timeline.run(3.0)
    assert did == [(2.0, 14.0)]
    local.set_clock(-5.0, -0.5)
    assert local.now == 16.0
    timeline.run(5.0)
    assert local.now == 17.0
