"""The cases that every victim policy has to pass; see docs/extend/write-a-policy.md."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Final

import pytest

from fd_core.plugins import VICTIMS, installed_plugins
from fd_core.scheduling.policies import Fcfs
from fd_core.scheduling.scheduler import ContinuousBatchingScheduler
from fd_core.scheduling.victims import FewestTokens, LatestArrival, RunningRequests, VictimPolicy
from fd_core.testing.axes.covering import Case
from fd_core.testing.axes.parts import KitCase
from fd_core.testing.hooks.orders import CHOICES, check_time_of_choices, running_of
from fd_core.testing.hooks.purity import require_freed
from fd_core.testing.kit.growth import require_bounded
from fd_core.testing.kit.law import require
from fd_core.testing.kit.requirements import constructed
from fd_core.testing.models.texts import greedy
from fd_core.testing.schedulers.day import SERVERS, require_ordinary_day
from fd_core.testing.schedulers.driver import prompt_of
from fd_core.testing.schedulers.scripted import scripted_core

_SLOWER: Final = 2
"""Most steps of a request, as a multiple of those under `cheapest`."""
_LONG: Final = (
    (1, (4, 60), (40, 160)),
    (512, (8, 24), (160, 80)),
    *((2 * 4**power, (4, 60), (160, 80)) for power in range(12)),
)
"""Times that its tokens a request is shown with, up to 2^31; prompt and output of short requests, and of the long one.

Between their tokens lies, at one of the scales, any number above which a policy may treat a request as long."""
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
        return installed_plugins().load(VICTIMS, self.policy)

    def construct(self) -> None:
        """Construct the plugin. Raises `PluginError`."""
        constructed(VICTIMS, cls := self.policy_class(), cls)

    @pytest.mark.law("8")
    @pytest.mark.fd_cases(CHOICES)
    def test_victim(self, case: KitCase) -> None:
        case.check(self.policy_class(), "pytest", option="--fd-case")

    @pytest.mark.fd_thorough
    @pytest.mark.fd_alone
    @pytest.mark.law("2.2", "2.6", "3.6", "8")
    @pytest.mark.parametrize("name", ["crowded", "drafts", "store"])
    def test_an_ordinary_day(self, name: str) -> None:
        """Compare what users and the host of a server notice with the worst of the same days under the core's."""
        server = SERVERS[name]
        cores = [replace(server, victims=each) for each in (FewestTokens, LatestArrival)]
        require_ordinary_day(
            ContinuousBatchingScheduler, replace(server, victims=self.policy_class()), cores, f"a day of {name!r}"
        )

    @pytest.mark.law("2.2")
    @pytest.mark.parametrize(("scale", "short", "long"), _LONG)
    def test_a_long_request_ends_while_short_ones_keep_arriving(
        self, scale: int, short: tuple[int, int], long: tuple[int, int]
    ) -> None:
        """Compare its steps with those under `cheapest`: one that is preempted is computed again each time.

        The policy is shown all tokens, and those of a block, `scale` times. One in four short ones is more important.
        """
        right, _ = _steps_of_a_long_request(FewestTokens(), long, short, most=1000)
        victims = _Scaled(self.policy_class()(), scale)
        steps, admissions = _steps_of_a_long_request(victims, long, short, most=_SLOWER * right)
        took = f"has not ended after {steps} steps and {admissions} admissions; under `cheapest` it takes {right} steps"
        sizes = [size * scale for size in (*long, *short)]
        what = "a request of {:,} + {:,} tokens, while ones of {:,} + {:,} keep arriving,".format(*sizes)
        require(steps < _SLOWER * right, "2.2", f"{what} {took}")

    @pytest.mark.timing
    @pytest.mark.fd_alone
    @pytest.mark.law("2.6")
    def test_choice_takes_little_time(self) -> None:
        check_time_of_choices(self.policy_class()().choose)

    @pytest.mark.law("3.6")
    def test_it_forgets_requests(self) -> None:
        policy = self.policy_class()()
        require_bounded(lambda at: policy.choose(running_of({**_ROWS, "rows": 4, "oldest": 4 * at})), 100, "choices")
        require_freed(self.policy_class())


class _Scaled(VictimPolicy):
    """A policy that is shown larger requests and blocks than those of the scheduler."""

    def __init__(self, policy: VictimPolicy, scale: int) -> None:
        self._policy, self._scale = policy, scale

    def choose(self, running: RunningRequests) -> int:
        names = ("num_tokens", "num_gained", "block_size")
        return self._policy.choose(replace(running, **{name: self._scale * getattr(running, name) for name in names}))


def _steps_of_a_long_request(
    victims: VictimPolicy, long: tuple[int, int], short: tuple[int, int], most: int
) -> tuple[int, int]:
    """Return the steps, at most `most`, until a request of prompt and output ends, and how often it was admitted.

    As many short ones as there are slots always wait; the blocks suffice for the long one and two others.
    """
    run = scripted_core(Fcfs(), victims, max_model_len=256, num_kv_blocks=64)
    numbers, short_ones = itertools.count(), 0
    run.scheduler.add(greedy("long", [7] * long[0], long[1]))
    admissions = 0
    for steps in range(1, most + 1):
        while short_ones < 12:  # twice the slots
            number, short_ones = next(numbers), short_ones + 1
            priority = -1 if number % 4 == 0 else 0
            run.scheduler.add(greedy(f"short {number}", prompt_of(short[0], number), short[1], priority=priority))
        plan, deltas = run.step()
        admissions += sum(each.request_id == "long" for each in (() if plan is None else plan.admissions))
        ended = [each.request_id for each in deltas if each.finish_reason is not None]
        if "long" in ended:
            return steps, admissions
        short_ones -= len(ended)
    return most, admissions
