"""An order whose lease ended is taken back, or its end is told: one of both."""

from fd_core.disagg.orders import Orders
from fd_core.types import PrefillJob


def order(lease: str) -> PrefillJob:
    return PrefillJob(bytes(4), lease=lease)


def test_an_order_is_collected_once_and_its_end_after_it() -> None:
    orders, rung = Orders(), []
    orders.on_order = lambda: rung.append(1)
    orders.put(order("a"))
    assert [one.lease for one in orders.collect()] == ["a"]
    assert orders.collect() == []
    orders.over("a", abort=True)
    assert orders.collect_over() == ["a"]
    assert orders.collect_over() == []
    assert len(rung) == 2


def test_an_order_that_nobody_saw_is_forgotten() -> None:
    orders = Orders()
    orders.put(order("a"))
    orders.over("a", abort=True)
    assert orders.collect() == []
    assert orders.collect_over() == []


def test_the_end_of_a_request_that_is_complete_is_not_told() -> None:
    orders = Orders()
    orders.put(order("a"))
    orders.collect()
    orders.over("a", abort=False)
    assert orders.collect_over() == []
