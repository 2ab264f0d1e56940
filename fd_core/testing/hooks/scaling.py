"""The cases that every scaling policy has to pass.

A policy is pure: two instances with the same loads propose the same numbers, independent of the process's clock and
random numbers. Groups in virtual time show whether the number follows the load and settles.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, cycle, pairwise, product
from types import MappingProxyType
from typing import Any

import pytest

from fd_core.cluster.scaling import GroupLoad, ScalingPolicy
from fd_core.errors import ConfigError
from fd_core.plugins import SCALING_POLICY, installed_plugins
from fd_core.router.workers import ROLES, Role
from fd_core.testing.axes.parts import KitCase
from fd_core.testing.hooks.drafted import RecordedOptions
from fd_core.testing.hooks.loads import SCALING
from fd_core.testing.hooks.purity import require_freed
from fd_core.testing.kit.growth import require_bounded
from fd_core.testing.kit.requirements import OPEN, Requirement, constructed, lacks
from fd_core.testing.stores.values import draws

_SLOTS = 16
"""Slots of a worker."""
_QUEUED = 2
"""Requests for each worker that may wait for a slot, as under the core's policy."""
_HELD = {"slots": 1000, "kv": 8}
"""Requests whose KV fits a worker, by what limits their number."""
_START_SECONDS = 20.0
"""Time until a new worker is ready."""
_STARTS = (_START_SECONDS, 300.0)
"""The same, also for one that loads a large model."""
_OVERSHOOT = 4
"""Workers that a policy may have started for each one that a constant load needs."""
_MAX_TURNS = 4
"""Changes of direction in an hour of constant load."""
_MUST_LEAVE = 6
"""Workers, or half of those that idle if they are fewer, that are removed in two hours of little load or none."""
_GROUP_SECONDS = 60
"""CPU time of all proposals for a group of workers, in virtual time: those of the core take 0.2 for two hours."""
_CALL_MS = 50
"""Milliseconds in which a policy has to propose a number, each second for each group; the core takes 0.01."""
_CLOCKS = ((0.0, 1), (2**31 / 1000 - 9660, 5), (2**32 / 1000 - 9660, 1), (1e8, 3))
"""Readings of the clock at which groups begin, and seconds between calls: a machine may be up for years. Milliseconds
fill so many bits a minute after the end of the first load of `test_the_number_follows_the_load`."""
_VALUES = (False, True, 0.05, 0.5, 1, 3, 30, 1000)
"""Values of an option, of which a policy may refuse some."""
_TIMED = 5
"""Calls of which the shortest has to keep that limit: it depends on no other load, and others would run for hours."""


class ScalingPolicySuite:
    """Derive a class `Test...` from it and name the policy."""

    policy: str
    """Value of `policy` in the file of `fdcore cluster serve`."""
    follows_load: Requirement = OPEN
    """The number grows with the load and shrinks without it."""
    tunable: Requirement = OPEN
    """Each of its options changes the number in two hours of load; closed for one whose options matter otherwise."""

    def policy_class(self) -> type[ScalingPolicy]:
        """Return the class of the policy; override for a class that no plugin registers."""
        return installed_plugins().load(SCALING_POLICY, self.policy)

    def options(self) -> Mapping[str, Any]:
        """Return the options of the file: each one that the policy has, with a value of it."""
        return {}

    def new_policy(self) -> ScalingPolicy:
        """Create the policy as a deployment does for one group."""
        return self.policy_class()(MappingProxyType(dict(self.options())))

    def construct(self) -> None:
        """Construct the plugin. Raises `PluginError`."""
        constructed(SCALING_POLICY, self.policy_class(), self.new_policy)

    @pytest.mark.law("8")
    @pytest.mark.fd_cases(SCALING)
    def test_case(self, case: KitCase) -> None:
        case.check(self.new_policy, "pytest", option="--fd-case")

    @pytest.mark.law("8")
    def test_an_unknown_option_is_named(self) -> None:
        with pytest.raises(ConfigError, match=r"no.such.option"):
            self.policy_class()(MappingProxyType({**self.options(), "no-such-option": 1}))

    @pytest.mark.law("8")
    def test_wrong_values_of_options_are_refused_by_name(self) -> None:
        """Otherwise the controller fails, or ignores the option, when the load first depends on it.

        Tries the options of `options`, and those that the policy reads one by one.
        """
        for name, wrong in product(self._names(), ({"a": 1}, math.nan)):
            with pytest.raises(ConfigError) as caught:
                self.policy_class()(MappingProxyType({**self.options(), name: wrong}))
                pytest.fail(f"the value {wrong!r} of the option {name} is accepted")
            said = f"{caught.value.message} {caught.value.field}"
            assert name in said, f"the error for the value {wrong!r} of the option {name} does not name it: {said}"

    @pytest.mark.law("8")
    def test_some_values_of_each_option_have_other_numbers(self) -> None:
        """Run groups whose load rises and falls, with every value that is accepted: one without effect misleads."""
        for name in self._names():
            self.tunable.require()
            others = {key: value for key, value in self.options().items() if key != name}
            tried = [self.options(), others, *({**others, name: value} for value in _VALUES)]
            assert any(self._differ(tried, role, held) for held, role in product(_HELD.values(), ROLES)), (
                f"{name} never changes a number; use it, or close `tunable`"
            )

    def _names(self) -> list[str]:
        """Return the names of the options of `options`, and of those that the policy reads one by one."""
        given = RecordedOptions(self.options())
        self.policy_class()(given)
        if not (names := given.read | {*self.options()}):
            lacks("no options are known: return each with a value of it in `options` of the suite")
        return sorted(names)

    def _differ(self, tried: Sequence[Mapping[str, Any]], role: Role, held: int) -> bool:
        """Return True if a group has other numbers with some of these options."""
        demands, first = [min(second, 7200 - second) // 30 for second in range(7200)], list[int]()
        for options in tried:
            with suppress(ConfigError):
                counts = run_group(self.policy_class()(MappingProxyType({**options})), demands, role=role, held=held)
                if counts != (first := first or counts):
                    return True
        return False

    @pytest.mark.law("8")
    @pytest.mark.parametrize("limited_by", [*_HELD])
    @pytest.mark.parametrize("demand", [0, 10, _SLOTS + 4, 40, 200])
    def test_the_number_settles_under_a_constant_load(self, demand: int, limited_by: str) -> None:
        held, noise = _HELD[limited_by], draws(demand)
        for clock, start in enumerate(_STARTS, 2 * (limited_by == "kv")):
            counts = run_group(self.new_policy(), [demand] * 7200, held=held, start=start, clock=clock)[3600:]
            changes = [after - before for before, after in pairwise(counts) if after != before]
            turns = sum(one * other < 0 for one, other in pairwise(changes))
            what = f"in an hour of constant load the number of workers, which start in {start:g} s, turns {turns} times"
            assert turns <= _MAX_TURNS, (
                f"{what}, expected at most {_MAX_TURNS}; it lies between {min(counts)} and {max(counts)}"
            )
        demands = [round(demand * noise.uniform(0.9, 1.1)) for _ in range(7200)]
        most, needed = max(run_group(self.new_policy(), demands, held=held, clock=1)), -(-demand // min(held, _SLOTS))
        what = f"in two hours of {demand} requests, more or less by a tenth in each second,"
        assert most <= _OVERSHOOT * max(1, needed), f"{what} the number grows to {most}; {needed} are needed"

    @pytest.mark.law("8")
    def test_it_forgets_loads(self) -> None:
        policy = self.new_policy()

        def use(call: int) -> None:
            load = GroupLoad(
                role="mixed", target=3, ready=3, running=40, slots=48, kv_usage=0.7, ttft_seconds=call / 1e4
            )
            policy.propose(load, 60.0 * call)

        require_bounded(use, 1000, "loads", "8")
        require_freed(self.new_policy)

    @pytest.mark.law("8")
    @pytest.mark.parametrize(
        ("demand", "role", "start", "clock"),
        [*zip((_SLOTS + 3, 40, 200, 5000), cycle(ROLES), cycle(_STARTS), (3, 1, 0, 2), strict=False)],
    )
    def test_the_number_follows_the_load(self, demand: int, role: Role, start: float, clock: int) -> None:
        """It does so again after idle hours, an hour without calls (as of a machine that was suspended), load that ends
        before a worker starts, and load beyond the number that the file allows; and where KV runs out before slots.
        In the first quiet hours an eighth of the load stays.
        """
        self.follows_load.require()
        enough = max(1800, 20 * int(start))
        seconds = (2, 3600, enough, 36_000, 10, 36_000, enough)
        loads = (demand, None, demand, demand // 8, demand, 0, demand)
        demands = [load for load, last in zip(loads, seconds, strict=True) for _ in range(last)]
        run = partial(run_group, role=role, start=start, clock=clock)
        counts = run(self.new_policy(), demands)
        needed, ends = -(-demand // (_SLOTS + _QUEUED)), [*accumulate(seconds)]
        most, after = max(counts), [counts[end - 1] for end in ends]
        what = f"{most} workers, {needed} are needed: it adds some while others start, which takes {start:g} s"
        assert most <= _OVERSHOOT * needed, what
        for at in (2, 6):
            assert after[at] >= needed, (
                f"{after[at]} workers after {enough / 3600:.1f} hours of load, {needed} are needed"
            )
        for at in (3, 5):
            peak = max(counts[ends[at - 2] : ends[at]])
            what = f"of {peak} workers, for {loads[at]} requests instead of {demand},"
            assert after[at] < peak or peak <= after[at - 2], f"{what} none left in ten hours"
            soon, idle = counts[ends[at - 1] + 7200], peak - after[at - 2]
            assert peak - soon >= min(idle // 2, _MUST_LEAVE), (
                f"{what} {soon} are there two hours later; at least {min(idle // 2, _MUST_LEAVE)} had to leave"
            )
        limit = max(2, needed // 2)
        last = run(self.new_policy(), [demand] * enough + [0] * 36_000, limit)[-1]
        assert last < limit, f"after load for more than the {limit} workers of the file, these stay for ten idle hours"
        held = _HELD["kv"]
        last = run(self.new_policy(), [demand] * enough, held=held)[-1]
        what = (
            f"{last} workers, whose KV holds {held} requests each, after {enough / 3600:.1f} hours of {demand} requests"
        )
        assert last >= needed, f"{what}, which therefore wait; {needed} are needed for their slots alone"

    @pytest.mark.law("8")
    @pytest.mark.parametrize(("start", "lull", "period", "clock"), [(_START_SECONDS, 20, 60, 3), (300.0, 60, 300, 2)])
    def test_workers_stay_in_a_lull_shorter_than_their_start(
        self, start: float, lull: int, period: int, clock: int
    ) -> None:
        """Workers that are taken away start again after each lull."""
        self.follows_load.require()
        hours = 2 if start > _START_SECONDS else 1  # it takes as long to add them again
        loads = [200] * (period - lull) + [20] * lull
        counts = run_group(self.new_policy(), loads * ((1 + hours) * 3600 // period), start=start, clock=clock)
        removed = sum(max(0, before - after) for before, after in pairwise(counts[3600:]))
        needed = -(-200 // _SLOTS)
        what = (
            f"in {hours} h with a lull of {lull} of each {period} seconds, {removed} workers were taken away and "
            f"started again, each in {start:g} s"
        )
        assert removed <= _OVERSHOOT * needed, f"{what}; {needed} are needed at most"

    @pytest.mark.law("8")
    @pytest.mark.parametrize("left", [0, 1, 6])
    def test_the_number_stays_while_workers_that_ended_start_again(self, left: int) -> None:
        """All workers but `left` end at once, twice: none of those that start in their place is taken away.

        Nor are workers that a new policy finds, those of the file, whose load it sees in its first call.
        """
        self.follows_load.require()
        ends, seconds = (3600, 5400), int(_START_SECONDS)
        counts = run_group(self.new_policy(), [200] * 7200, left=dict.fromkeys(ends, left), clock=min(left, 2))
        needed = -(-200 // _SLOTS)
        for end in ends:
            number, fewest = counts[end - 1], min(counts[end : end + seconds])
            what = f"of {number} workers all but {left} end, and while others start the number falls to {fewest}"
            assert fewest >= min(number, needed), f"{what}; {needed} are needed"
        assert max(counts) <= _OVERSHOOT * needed, f"{max(counts)} workers, {needed} are needed"
        fewest = min(run_group(self.new_policy(), [200] * 600, first=needed))
        assert fewest >= needed, f"a group begins with {needed} workers, all of which it needs, and falls to {fewest}"


def run_group(
    policy: ScalingPolicy,
    demands: Sequence[int | None],
    most: int = 1024,
    role: Role = "mixed",
    held: int = _HELD["slots"],
    left: Mapping[int, int] = MappingProxyType({}),
    start: float = _START_SECONDS,
    first: int = 1,
    clock: int = 0,
) -> list[int]:
    """Return the number of workers in each second, 1 to `most`, for so many requests at once.

    There are `first` workers at first. A worker is ready after `start` seconds, and has the KV of `held` requests. The
    policy is not called in seconds without a number, and as `_CLOCKS` has it, at any fraction of a second. In the
    seconds of `left`, all ready workers end but so many.
    """
    target, ready, counts, (uptime, every), draw = first, first, [], _CLOCKS[clock], draws(clock)
    starting, times, spent = list[float](), list[float](), 0.0
    for second, demand in enumerate(demands):
        ready += sum(at <= second for at in starting)
        ready = min(ready, left.get(second, ready))
        starting = [at for at in starting if at > second]
        if demand is None or second % every:
            counts.append(target)
            continue
        most_running = ready * min(_SLOTS, held)
        running, waiting = min(demand, most_running), max(0, demand - most_running) if ready else 0
        load = GroupLoad(
            role=role,
            target=target,
            ready=ready,
            running=running,
            waiting=waiting,
            slots=ready * _SLOTS,
            kv_usage=running / max(ready * held, 1),
            ttft_seconds=0.2 + waiting / most_running if running else None,
        )
        began = time.thread_time()
        target = max(1, min(most, policy.propose(load, uptime + second + draw.random())))
        spent += time.thread_time() - began
        assert spent < _GROUP_SECONDS, (
            f"proposals of {second:,} seconds take {spent:.0f} s of the processor, expected less than {_GROUP_SECONDS}"
        )
        if len(times) < _TIMED:
            times.append(1000 * (time.thread_time() - began))
            assert len(times) < _TIMED or min(times) < _CALL_MS, (
                f"each proposal takes {min(times):.0f} ms of the processor, expected less than {_CALL_MS}"
            )
        if target < ready + len(starting):
            starting = starting[: max(0, target - ready)]
            ready = min(ready, target)
        starting += [second + start] * (target - ready - len(starting))
        counts.append(target)
    return counts
