"""The cases that every victim policy has to pass; see docs/extend/write-a-policy.md."""

from __future__ import annotations

from typing import Final

import pytest

from fd_core.scheduling.scheduler import ContinuousBatchingScheduler
from fd_core.scheduling.victims import VictimPolicy
from fd_core.testing.axes.covering import Case
from fd_core.testing.axes.parts import KitCase
from fd_core.testing.hooks.orders import CHOICES, running_of
from fd_core.testing.hooks.purity import require_freed
from fd_core.testing.kit.growth import require_bounded
from fd_core.testing.kit.law import require
from fd_core.testing.models.texts import greedy
from fd_core.testing.schedulers.driver import SchedulerTarget, drive, prompt_of
from fd_core.testing.schedulers.scripted import count_bytecodes

_ROWS: Final[Case] = {
    "oldest": 0,
    "priorities": "wide",
    "tokens": "mixed",
    "gained": "mixed",
    "again": "some",
    "block": 16,
}


class VictimPolicySuite:
    """Derive a class `Test...` from it and name the policy."""

    policy: str
    """Value that users pass to `--victim-policy`."""

    def policy_class(self) -> type[VictimPolicy]:
        """Return the class of the policy; override for a class that no plugin registers."""
        from fd_core.plugins import VICTIMS, installed_plugins

        return installed_plugins().load(VICTIMS, self.policy)

    @pytest.mark.law("8")
    @pytest.mark.fd_cases(CHOICES)
    def test_victim(self, case: KitCase) -> None:
        case.check(self.policy_class(), "pytest", option="--fd-case")

    @pytest.mark.law("2.2")
    @pytest.mark.parametrize("k", [0, 3])
    @pytest.mark.parametrize("block_size", [1, 4])
    def test_every_request_completes_when_blocks_are_scarce(self, block_size: int, k: int) -> None:
        """A policy that preempts the same request again and again, or one that is about to end, makes no progress."""
        target = SchedulerTarget("continuous", ContinuousBatchingScheduler)
        specs = [greedy(f"r{index}", prompt_of(1 + 3 * index % 11, index), 44) for index in range(8)]
        driver = drive(
            target,
            *specs,
            k=k,
            wrong=0.3,
            victims=self.policy_class()(),
            depth=2,
            caching=False,
            block_size=block_size,
            num_kv_blocks=64 // block_size,
        )
        driver.run(2)
        require(driver.auditor.preemptions, "2.2", "no request was preempted, although they exceed the blocks")

    @pytest.mark.law("2.6")
    def test_cost_is_at_most_linear_in_the_running_requests(self) -> None:
        costs = []
        for count in (50, 400):
            policy, running = self.policy_class()(), running_of({**_ROWS, "rows": count})
            costs.append(count_bytecodes(lambda: policy.choose(running)))  # noqa: B023
        few, many = costs
        require(many <= 12 * few, "2.6", f"a choice takes {few} bytecodes among 50 requests, {many} among 400")

    @pytest.mark.law("3.6")
    def test_it_forgets_requests(self) -> None:
        policy = self.policy_class()()
        require_bounded(lambda at: policy.choose(running_of({**_ROWS, "rows": 4, "oldest": 4 * at})), 100, "choices")
        require_freed(self.policy_class())
