"""Behaviour of the policy beyond its contract."""

import numpy as np
from fd_core.router.config import RouterConfig
from fd_core.router.policies import Candidate, Candidates, RoutingContext
from fd_core.router.selection import WorkerLoad
from fd_core.router.workers import RouterWorker

from fd_slowstart.policy import FLOOR, RAMP, SlowStart

OLD, NEW = (RouterWorker(f"http://127.0.0.1:{port}", "mixed", port) for port in (8001, 8002))


def chosen(policy: SlowStart, now: float, **requests: int) -> RouterWorker:
    """Return the worker of a request when `old` and `new` have this many."""
    workers = {"old": OLD, "new": NEW}
    seen = Candidates.of(Candidate(workers[name], WorkerLoad(count, 0, 0)) for name, count in requests.items())
    return policy.choose(RoutingContext(seen, np.ones(4, np.int32), (), None, 0.5, now)).worker


def grown() -> SlowStart:
    policy = SlowStart(RouterConfig())
    chosen(policy, 0.0, old=0)
    return policy


def test_new_worker_gets_its_share_and_no_more() -> None:
    policy, busy = grown(), 30
    taken = next(count for count in range(busy) if chosen(policy, 100.0, old=busy, new=count) == OLD)
    assert taken == int((busy + 1) * FLOOR)


def test_fewest_requests_decide_after_the_ramp() -> None:
    policy = grown()
    assert chosen(policy, 100.0, old=3, new=2) == OLD
    assert chosen(policy, 100.0 + RAMP / 2, old=6, new=2) == NEW
    assert chosen(policy, 100.0 + RAMP, old=3, new=2) == NEW


def test_workers_present_at_router_start_are_not_new() -> None:
    policy = SlowStart(RouterConfig())
    assert chosen(policy, 5.0, old=1, new=0) == NEW
    assert chosen(policy, 5.0, old=0, new=1) == OLD


def test_worker_that_left_starts_slowly_again() -> None:
    policy = grown()
    chosen(policy, 0.0, old=0, new=0)
    policy.departed(NEW)
    assert chosen(policy, 500.0, old=3, new=2) == OLD
