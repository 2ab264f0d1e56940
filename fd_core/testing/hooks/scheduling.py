"""The cases that every scheduling policy has to pass; see docs/extend/write-a-policy.md."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np
import pytest

from fd_core.plugins import SCHEDULING_POLICY, installed_plugins
from fd_core.scheduling.policies import FairShare, Fcfs, Priority, SchedulingPolicy
from fd_core.scheduling.requests import QueuedRequest
from fd_core.scheduling.scheduler import ContinuousBatchingScheduler
from fd_core.scheduling.victims import FewestTokens, RunningRequests
from fd_core.testing.axes.parts import KitCase
from fd_core.testing.hooks.orders import (
    ADMISSIONS,
    CANDIDATES,
    ORDERS,
    SHARES,
    Queue,
    check_time_of_choices,
    grown,
    returned,
    running_of,
)
from fd_core.testing.hooks.purity import require_freed
from fd_core.testing.kit.growth import cpu_seconds, require_bounded
from fd_core.testing.kit.law import require
from fd_core.testing.kit.requirements import constructed, lacks
from fd_core.testing.models.texts import greedy
from fd_core.testing.schedulers.day import SERVERS, require_ordinary_day
from fd_core.testing.schedulers.scripted import scripted_core

_RUNNING = running_of(CANDIDATES.case("plain").values)
_CROWD = 50_000
"""Waiting requests among which no request may be searched."""
_CROWDS: Final = ("one tenant", "as many tenants")
_REQUEST_MS = 1
"""Milliseconds that the calls about a request may take; those of the core take 0.003."""


class SchedulingPolicySuite:
    """Derive a class `Test...` from it and name the policy."""

    policy: str
    """Value that users pass to `--scheduling-policy`."""
    favours_small: str = ""
    """Reason why a large request may wait as long as small ones arrive; empty if the policy admits it in time."""

    def policy_class(self) -> type[SchedulingPolicy]:
        """Return the class of the policy; override for a class that no plugin registers."""
        return installed_plugins().load(SCHEDULING_POLICY, self.policy)

    def construct(self) -> None:
        """Construct the plugin. Raises `PluginError`."""
        constructed(SCHEDULING_POLICY, cls := self.policy_class(), cls)

    @pytest.mark.law("2.2", "8")
    @pytest.mark.fd_cases(ORDERS)
    def test_order(self, case: KitCase) -> None:
        case.check(self.policy_class(), "pytest", option="--fd-case")

    @pytest.mark.law("2.2")
    @pytest.mark.fd_cases(ADMISSIONS)
    def test_request_is_admitted_while_others_keep_arriving(self, case: KitCase) -> None:
        if case.values["large_one"] in ("prompt", "output") and self.favours_small:
            lacks(self.favours_small)
        case.check(self.policy_class(), "pytest", option="--fd-case")

    @pytest.mark.law("2.2")
    @pytest.mark.fd_cases(SHARES)
    def test_shares_of_tenants(self, case: KitCase) -> None:
        case.check(self.policy_class(), "pytest", option="--fd-case")

    @pytest.mark.law("3.6")
    @pytest.mark.parametrize("preempted", [False, True])
    @pytest.mark.parametrize("end", ["alone", "while others run", "while it waits", "before it has a rank"])
    def test_it_forgets_requests_that_ended(self, end: str, *, preempted: bool) -> None:
        """Each request ends after its admission, or is aborted while it waits, the first time or after a preemption."""
        queue, admissions = Queue(self.policy_class()()), deque[QueuedRequest]()

        def use(arrival: int) -> None:
            request = QueuedRequest(arrival, 10, 10, 0, f"tenant {arrival}", False)
            if end == "before it has a rank":  # as while its grammar is compiled
                queue.park(request)
                queue.abort(request)
                return
            queue.add(request)
            if preempted:
                queue.policy.preemption_candidates(_RUNNING)
                admitted = queue.admit()
                queue.policy.displaced_by(request, _alone(admitted), FewestTokens())
                request = returned(admitted)
                queue.add(request)
            if end == "while it waits":
                queue.abort(request)
                return
            admissions.append(queue.admit())
            if len(admissions) > 3 * (end == "while others run"):
                queue.end(admissions.popleft(), 15)

        require_bounded(use, 100, "requests that ended")
        require_freed(self.policy_class())

    @pytest.mark.timing
    @pytest.mark.fd_alone
    @pytest.mark.law("2.6")
    def test_time_of_requests_does_not_grow_with_waiting_ones(self) -> None:
        """They have an absolute limit, too."""
        check_time_of_choices(self.policy_class()().preemption_candidates)

        def took(waiting: int, tenants: str) -> float:
            policy, numbers = self._crowded(waiting, tenants), itertools.count(waiting)
            return 1000 * cpu_seconds(lambda: _some(policy, numbers))

        for tenants in _CROWDS:
            few = took(50, tenants)
            what, most = f"20 requests take {few:.2f} ms with 50 waiting of {tenants}", 20 * _REQUEST_MS
            require(few < most, "2.6", f"{what}, expected less than {most}: it is time of a step")
            many = took(_CROWD, tenants)
            require(many <= 4 * few + 1, "2.6", f"{what}, {many:.2f} with {_CROWD:,}")

    def _crowded(self, count: int, tenants: str) -> SchedulingPolicy:
        """Return a policy that knows so many waiting requests."""
        policy = self.policy_class()()
        for arrival in range(count):
            tenant = f"tenant {7 if tenants == 'one tenant' else arrival}"
            policy.arrived(QueuedRequest(arrival, 10, 10, arrival % 5, tenant, False))
        return policy

    @pytest.mark.law("2.2", "8")
    def test_displaced_requests_return_and_end(self) -> None:
        """Long texts of a tenant run, others wait, and further tenants send some, until all have ended."""
        run = scripted_core(self.policy_class()(), FewestTokens(), num_kv_blocks=200)
        preempted = sent = 0
        names, displaced = dict[int, str](), ""
        for step in range(600):
            for number in range(12 if step % 20 == 0 and step < 100 else 0):
                run.scheduler.add(greedy(f"r{step}-{number}", (step, number), 40, tenant=f"t{step}"))
                sent += 1
            plan, _ = run.step()
            if plan is None:
                continue
            for admission in plan.admissions:
                names[admission.slot], back = admission.request_id, displaced == admission.request_id
                require(not back, "8", f"{displaced} is displaced for a request that waits, and returns before it")
                displaced = ""
            for revoked in plan.revocations:
                preempted, displaced = preempted + 1, names[revoked.slot]
        left = run.scheduler.request_ids()
        require(
            not left, "2.2", f"after 600 steps with 6 slots, {len(left)} of {sent} texts of 40 tokens are unfinished"
        )
        what = f"{preempted} preemptions for {sent} texts, although there is memory for all: `displaced_by` goes on"
        require(preempted <= sent, "2.2", what)

    @pytest.mark.law("8")
    @pytest.mark.fd_cases(CANDIDATES)
    def test_preemption_candidates(self, case: KitCase) -> None:
        case.check(self.policy_class(), "pytest", option="--fd-case")

    @pytest.mark.fd_thorough
    @pytest.mark.fd_alone
    @pytest.mark.law("2.2", "2.6", "3.6", "8")
    @pytest.mark.parametrize("name", ["crowded", "drafts", "store"])
    def test_an_ordinary_day(self, name: str) -> None:
        """Compare what users and the host of a server notice with the worst of the same days under the core's."""
        if self.favours_small:
            lacks(self.favours_small)
        server = SERVERS[name]
        cores, cls = [replace(server, policy=each) for each in (Fcfs, Priority, FairShare)], self.policy_class()
        require_ordinary_day(
            ContinuousBatchingScheduler,
            replace(server, policy=cls),
            cores,
            f"a day of {name!r}",
            displaces=cls.displaced_by is not SchedulingPolicy.displaced_by,
        )


def _alone(request: QueuedRequest) -> RunningRequests:
    """Return the request as the only one that runs."""
    return replace(_RUNNING.only(np.array([0])), arrivals=np.array([request.arrival]))


def _one(policy: SchedulingPolicy, arrival: int) -> None:
    request = QueuedRequest(arrival, 10, 10, 0, "tenant 7", False)
    policy.arrived(request)
    policy.rank(request)
    policy.turn(policy.flow(request))
    policy.admitted(request)
    policy.displaced_by(request, _alone(request), FewestTokens())
    policy.ended(grown(request, 5), 15)


def _some(policy: SchedulingPolicy, numbers: Iterator[int]) -> None:
    for number in itertools.islice(numbers, 20):
        _one(policy, number)
