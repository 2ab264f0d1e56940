"""Who comes first, and who is taken back."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fd_core.scheduling.policies import FairShare, Priority
from fd_core.scheduling.requests import Request
from fd_core.scheduling.slots import SlotTable
from fd_core.scheduling.victims import Cheapest, Youngest
from fd_core.scheduling.waiting import WaitingQueue
from fd_core.types import RequestSpec, SamplingParams


def request(arrival: int, tenant: str = "", cost: int = 10, priority: int = 0) -> Request:
    spec = RequestSpec(
        request_id=str(arrival),
        prompt=(1,),
        params=SamplingParams(max_tokens=cost - 1),
        tenant=tenant,
        priority=priority,
    )
    return Request(spec, arrival, 1000, b"")


def table(lengths: list[int], *, returned: list[bool] | None = None, gained: list[int] | None = None) -> SlotTable:
    slots = SlotTable(len(lengths), 1000, 16)
    for slot, length in enumerate(lengths):
        entry = request(slot)
        entry.preemptions = int(bool(returned and returned[slot]))
        slots.occupy(slot, entry, np.zeros(length, np.int32))
        slots.known[slot] += gained[slot] if gained else 0
    return slots


def test_a_tenant_with_many_requests_does_not_delay_one_with_few() -> None:
    policy = FairShare()
    queue = WaitingQueue(policy)
    for arrival in range(10):
        queue.push(request(arrival, "greedy"))
    queue.push(request(10, "modest"))
    order = []
    while (next_one := queue.pop()) is not None:
        assert next_one.rank is not None
        policy.admitted(next_one, next_one.rank)
        order.append(next_one.spec.tenant)
    assert order.index("modest") <= 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(2, 50)), min_size=3, max_size=60))
def test_backlogged_tenants_get_equal_service(arrivals: list[tuple[str, int]]) -> None:
    policy = FairShare()
    queue = WaitingQueue(policy)
    left = {tenant: 0 for tenant, _ in arrivals}
    for index, (tenant, cost) in enumerate(arrivals):
        queue.push(request(index, tenant, cost))
        left[tenant] += 1
    served = dict.fromkeys(left, 0)
    while all(left.values()):
        chosen = queue.pop()
        assert chosen is not None
        assert chosen.rank is not None
        policy.admitted(chosen, chosen.rank)
        served[chosen.spec.tenant] += chosen.limit
        left[chosen.spec.tenant] -= 1
        assert max(served.values()) - min(served.values()) <= 2 * 50


def test_an_idle_tenant_saves_nothing_up() -> None:
    policy = FairShare()
    for arrival in range(5):
        early = request(arrival, "busy")
        policy.admitted(early, policy.rank(early))
    late_busy, late_idle = request(5, "busy"), request(6, "idle")
    assert policy.rank(late_busy)[0] - policy.rank(late_idle)[0] <= 10


def test_a_preempted_request_keeps_its_rank() -> None:
    queue = WaitingQueue(FairShare())
    first = request(0, "a")
    queue.push(first)
    rank = first.rank
    assert queue.pop() is first
    queue.push(request(1, "b"))
    queue.push(first)
    assert first.rank == rank
    assert queue.pop() is first


def test_only_the_least_important_are_expendable() -> None:
    slots = table([5, 5, 5])
    slots.priority[:] = [0, 3, 3]
    assert Priority().expendable(slots, np.arange(3)).tolist() == [1, 2]


def test_the_victim_has_the_fewest_tokens_and_is_the_youngest_of_equals() -> None:
    assert Cheapest().choose(table([9, 4, 7, 4]), np.arange(4)) == 3


def test_a_request_that_just_came_back_is_spared() -> None:
    slots = table([9, 4, 7], returned=[False, True, False])
    assert Cheapest().choose(slots, np.arange(3)) == 2
    assert Cheapest().choose(slots, np.array([1])) == 1
    slots.known[1] += 16
    assert Cheapest().choose(slots, np.arange(3)) == 1


def test_lifo_takes_the_latest_arrival() -> None:
    assert Youngest().choose(table([9, 4, 7]), np.arange(3)) == 2
