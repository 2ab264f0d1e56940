"""The cases that every scaling policy has to pass.

A policy is pure: two instances with the same loads propose the same numbers, independent of the process's clock and
random numbers. Groups in virtual time show whether the number follows the load and settles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import pytest

from fd_core.cluster.scaling import GroupLoad, ScalingPolicy
from fd_core.errors import ConfigError
from fd_core.testing.axes.parts import KitCase
from fd_core.testing.hooks.loads import SCALING
from fd_core.testing.hooks.purity import holdings
from fd_core.testing.kit.requirements import OPEN, Requirement

_SLOTS = 16
"""Slots of a worker."""
_START_SECONDS = 20.0
"""Time until a new worker is ready."""
_OVERSHOOT = 4
"""Workers that a policy may have started for each one that a constant load needs."""


class ScalingPolicySuite:
    """Derive a class `Test...` from it and name the policy."""

    policy: str
    """Value of `policy` in the file of `fdcore cluster serve`."""
    follows_load: Requirement = OPEN
    """The number grows with the load and shrinks without it."""

    def policy_class(self) -> type[ScalingPolicy]:
        """Return the class of the policy; override for a class that no plugin registers."""
        from fd_core.plugins import SCALING_POLICY, installed_plugins

        return installed_plugins().load(SCALING_POLICY, self.policy)

    def options(self) -> Mapping[str, Any]:
        """Return the options of the file."""
        return {}

    def new_policy(self) -> ScalingPolicy:
        """Create the policy as a deployment does for one group."""
        return self.policy_class()(MappingProxyType(dict(self.options())))

    @pytest.mark.law("8")
    @pytest.mark.fd_cases(SCALING)
    def test_case(self, case: KitCase) -> None:
        case.check(self.new_policy, "pytest", option="--fd-case")

    @pytest.mark.law("8")
    def test_an_unknown_option_is_named(self) -> None:
        with pytest.raises(ConfigError, match=r"no.such.option"):
            self.policy_class()(MappingProxyType({**self.options(), "no-such-option": 1}))

    @pytest.mark.law("8")
    def test_groups_do_not_affect_each_other(self) -> None:
        """Compare the proposals for a busy group alone, and next to an idle one."""
        demands = [0 if second // 400 % 2 else 100 for second in range(1600)]
        alone = run_group(self.new_policy(), demands)
        busy, idle = self.new_policy(), self.new_policy()
        idling = (idle.propose(GroupLoad(role="mixed", target=9, ready=9, slots=144), now) for now in range(1600))
        assert run_group(busy, demands, also=lambda: next(idling)) == alone

    @pytest.mark.law("8")
    @pytest.mark.parametrize("demand", [0, 10, 40, 200])
    def test_the_number_settles_under_a_constant_load(self, demand: int) -> None:
        counts = run_group(self.new_policy(), [demand] * 7200)[3600:]
        changes = [after - before for before, after in pairwise(counts) if after != before]
        turns = sum(one * other < 0 for one, other in pairwise(changes))
        assert turns <= 20, f"in an hour of constant load the number of workers turns {turns} times"

    @pytest.mark.law("8")
    def test_it_forgets_loads(self) -> None:
        policy, sizes = self.new_policy(), list[int]()
        for first in (0, 2000):
            for call in range(first, first + 2000):
                load = GroupLoad(role="mixed", target=3, ready=3, running=40, slots=48, kv_usage=0.7, ttft_seconds=0.3)
                policy.propose(load, 60.0 * call)
            sizes.append(holdings(policy))
        assert sizes[1] < sizes[0] + 60, f"it holds {sizes[0]} objects after 2000 calls, {sizes[1]} after 4000"

    @pytest.mark.law("8")
    @pytest.mark.parametrize("demand", [40, 200, 5000])
    def test_the_number_follows_the_load(self, demand: int) -> None:
        self.follows_load.require()
        counts = run_group(self.new_policy(), [demand] * 3600 + [0] * 36_000)
        needed = -(-demand // _SLOTS)
        most = max(counts)
        assert most <= _OVERSHOOT * needed, f"{most} workers, {needed} are needed: it adds some while others start"
        assert counts[3599] >= needed, f"{counts[3599]} workers after an hour, {needed} are needed"
        assert counts[-1] < counts[3599], f"ten idle hours later there are still {counts[-1]} workers"


def run_group(policy: ScalingPolicy, demands: list[int], also: Callable[[], object] = lambda: None) -> list[int]:
    """Return the number of workers in each second, 1 to 1024, for so many requests at once."""
    target, ready, counts = 1, 1, []
    starting: list[float] = []
    for second, demand in enumerate(demands):
        ready += sum(at <= second for at in starting)
        starting = [at for at in starting if at > second]
        slots = ready * _SLOTS
        load = GroupLoad(
            role="mixed",
            target=target,
            ready=ready,
            running=min(demand, slots),
            waiting=max(0, demand - slots),
            slots=slots,
            kv_usage=min(1.0, demand / slots) * 0.8,
            ttft_seconds=None if not demand else 0.2 + max(0, demand - slots) / slots,
        )
        target = max(1, min(1024, policy.propose(load, float(second))))
        also()
        if target < ready + len(starting):
            starting = starting[: max(0, target - ready)]
            ready = min(ready, target)
        starting += [second + _START_SECONDS] * (target - ready - len(starting))
        counts.append(target)
    return counts
