"""Workers that announce their shutdown."""

from __future__ import annotations

from tests.router.helpers import add, place, router_of


def test_leaving_worker_gets_nothing_while_another_stays() -> None:
    router = router_of(mixed=2, policy="round_robin")
    leaves, stays = router.workers()
    router.leaving(leaves)
    assert {place(router).decode for _ in range(4)} == {stays}
    assert {each.circuit for each in router.snapshot().workers} == {"closed"}


def test_only_worker_serves_while_it_accepts_requests() -> None:
    router = router_of(mixed=1)
    router.leaving(router.workers()[0])
    assert place(router).decode == router.workers()[0] and router.ready()


def test_leaving_side_of_a_pair_is_replaced_alone() -> None:
    router = router_of(prefill=2, decode=2, decode_policy="round_robin", prefill_policy="round_robin")
    p, q, d, e = router.workers()
    router.leaving(p)
    router.leaving(e)
    pairs = {(each.prefill, each.decode) for each in (place(router) for _ in range(4))}
    assert pairs == {(q, d)}


def test_next_process_at_the_address_is_not_leaving() -> None:
    router = router_of()
    worker = add(router, "http://a", instance="one")
    router.leaving(worker)
    add(router, "http://b")
    after = router.health(worker, True, 1.0, instance="two")
    assert {place(router).decode.url for _ in range(8)} <= {"http://a", "http://b"}
    member = router.registry.member(after)
    assert after != worker and member is not None and not member.leaving
