"""The cases that every scheduling policy has to pass; see docs/extend/write-a-policy.md."""

from __future__ import annotations

from typing import Final

import numpy as np
import pytest

from fd_core.scheduling.policies import SchedulingPolicy
from fd_core.scheduling.requests import QueuedRequest
from fd_core.scheduling.scheduler import ContinuousBatchingScheduler
from fd_core.testing.axes.covering import Case
from fd_core.testing.axes.parts import KitCase
from fd_core.testing.hooks.orders import ORDERS, Queue, running_of
from fd_core.testing.hooks.purity import holdings
from fd_core.testing.kit.law import require
from fd_core.testing.kit.requirements import lacks
from fd_core.testing.models.texts import greedy
from fd_core.testing.schedulers.driver import RecordingPolicy, SchedulerTarget, drive, prompt_of
from fd_core.testing.schedulers.scripted import count_bytecodes

_REQUESTS = 400
"""Requests after which a policy must have forgotten those that ended."""
_CONSTANT = 60
"""Objects that it may hold more than at the start."""
_PATIENCE = 200
"""Admissions of later requests that may precede a request."""
_ROWS: Final[Case] = {"rows": 9, "oldest": 0, "tokens": "mixed", "gained": "mixed", "again": "some", "block": 16}


class SchedulingPolicySuite:
    """Derive a class `Test...` from it and name the policy."""

    policy: str
    """Value that users pass to `--scheduling-policy`."""
    favours_small: str = ""
    """Reason why a large request may wait as long as small ones arrive; empty if the policy admits it in time."""

    def policy_class(self) -> type[SchedulingPolicy]:
        """Return the class of the policy; override for a class that no plugin registers."""
        from fd_core.plugins import SCHEDULING_POLICY, installed_plugins

        return installed_plugins().load(SCHEDULING_POLICY, self.policy)

    @pytest.mark.law("2.2", "8")
    @pytest.mark.fd_cases(ORDERS)
    def test_order(self, case: KitCase) -> None:
        case.check(self.policy_class(), "pytest", option="--fd-case")

    @pytest.mark.law("2.2")
    @pytest.mark.parametrize("tenants", [1, 2])
    @pytest.mark.parametrize("size", [10, 5000])
    @pytest.mark.parametrize("aborted", [0, 2])
    def test_request_is_admitted_while_others_keep_arriving(self, aborted: int, size: int, tenants: int) -> None:
        """All have the same priority, and one arrives for each that is admitted, with some that are aborted at once."""
        if size > 10 and self.favours_small:
            lacks(self.favours_small)
        queue = Queue(self.policy_class()())
        for arrival in range(20):
            queue.add(QueuedRequest(arrival, 10, 10, 0, "t0", False))
        queue.add(QueuedRequest(20, size, 10, 0, f"t{tenants - 1}", False))
        for arrival in range(21, 40):
            queue.add(QueuedRequest(arrival, 10, 10, 0, "t0", False))
        for arrival in range(40, 40 + _PATIENCE):
            admitted = queue.admit()
            if admitted.arrival == 20:
                return
            queue.end(admitted, 20)
            queue.add(QueuedRequest(arrival, 10, 10, 0, "t0", False))
            for number in range(aborted):
                other = QueuedRequest(1000 + aborted * arrival + number, 10, 10, 0, "t0", False)
                queue.add(other)
                queue.abort(other)
        require(False, "2.2", f"a request of {size} tokens waits after {_PATIENCE} admissions of later ones")

    @pytest.mark.law("3.6")
    @pytest.mark.parametrize("admitted", [True, False])
    def test_it_forgets_requests_that_ended(self, *, admitted: bool) -> None:
        """Requests end after their admission, or are aborted while they wait."""
        queue = Queue(self.policy_class()())
        before = holdings(queue.policy)
        for arrival in range(_REQUESTS):
            request = QueuedRequest(arrival, 10, 10, 0, f"tenant {arrival}", False)
            queue.add(request)
            queue.end(queue.admit(), 15) if admitted else queue.abort(request)
        grown = holdings(queue.policy) - before
        require(grown < _CONSTANT, "3.6", f"it holds {grown} objects more after {_REQUESTS} requests that ended")

    @pytest.mark.law("2.6")
    def test_cost_does_not_grow_with_waiting_requests(self) -> None:
        costs = []
        for count in (50, 2000):
            policy = self.policy_class()()
            for arrival in range(count):
                policy.arrived(QueuedRequest(arrival, 10, 10, arrival % 5, f"tenant {arrival}", False))
            costs.append(min(count_bytecodes(lambda: _one(policy, count + number)) for number in range(5)))  # noqa: B023
        few, many = costs
        require(many <= 1.5 * few + 200, "2.6", f"a request takes {few} bytecodes with 50 waiting, {many} with 2000")

    @pytest.mark.law("8")
    @pytest.mark.parametrize("priorities", ["same", "two", "wide"])
    def test_preemption_candidates_are_running_requests(self, priorities: str) -> None:
        running = running_of({**_ROWS, "priorities": priorities})
        policy, count = self.policy_class()(), len(running.slots)
        found = [policy.preemption_candidates(running) for _ in range(2)]
        rows = np.asarray(found[0]).tolist()
        valid = rows and len(set(rows)) == len(rows) and all(0 <= row < count for row in rows)
        require(valid, "8", f"expected some of {count} rows, each once, got {rows}")
        require(np.array_equal(found[0], found[1]), "8", f"expected {rows} again, got {found[1]}")

    @pytest.mark.law("1.1", "2.2", "4")
    def test_a_scheduler_serves_with_it(self) -> None:
        """Requests of several tenants and priorities compete for blocks; all complete with their texts."""
        target = SchedulerTarget("continuous", ContinuousBatchingScheduler)
        specs = [
            greedy(f"r{index}", prompt_of(1 + 5 * index % 17, index), 30, tenant=f"t{index % 3}", priority=index % 4)
            for index in range(24)
        ]
        driver = drive(target, *specs, policy=RecordingPolicy(self.policy_class()()), depth=2)
        driver.run(2)
        require(driver.auditor.preemptions, "2.2", "no request was preempted, although they exceed the blocks")
        driver.check_policy()


def _one(policy: SchedulingPolicy, arrival: int) -> None:
    request = QueuedRequest(arrival, 10, 10, 0, "tenant 7", False)
    policy.arrived(request)
    policy.rank(request)
    policy.turn(policy.flow(request))
    policy.admitted(request)
    policy.ended(request, 15)
