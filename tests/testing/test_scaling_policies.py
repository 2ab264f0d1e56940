"""The core's scaling policy passes the kit, and each of these wrong ones fails the case that names its fault."""

import math
import random
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fd_core.cluster.scaling import GroupLoad, LoadPolicy, LoadPolicyOptions, ScalingPolicy
from fd_core.testing.hooks.loads import GROUPS, SCALING, numbers_of, require_ordinary_day
from fd_core.testing.hooks.scaling import ScalingPolicySuite
from fd_core.testing.kit.requirements import OPEN
from tests.testing.right.scaling import Cautious, Eager, Late, OneForEight, TracksATarget
from tests.testing.witnesses import check_of


class TestLoadPolicy(ScalingPolicySuite):
    policy = "load"

    @pytest.mark.in_turn(4)  # other policies are compared with it in each group
    @pytest.mark.parametrize("group", GROUPS)
    def test_an_ordinary_day(self, group):
        super().test_an_ordinary_day(group)

    def options(self):
        return msgspec.to_builtins(LoadPolicyOptions(ttft_seconds=2.0))


class Proposes(ScalingPolicy):
    def __init__(self, options):
        self.state = {}

    def propose(self, load, now):
        return load.target


class BelievesItsOptions(Proposes):
    """A mapping as the number of workers fails in `propose`, an hour later."""

    def __init__(self, options):
        self.step = options.get("step", 1)


class SharesItsDefaults(Proposes):
    """Changes the defaults of its class, which other groups have as well."""

    options = {"step": 1}  # noqa: RUF012

    def __init__(self, options):
        self.options |= {name: int(value) for name, value in options.items()}

    def propose(self, load, now):
        return load.target + self.options["step"] * (load.waiting > 9)


class UsesRandom(Proposes):
    def propose(self, load, now):
        return load.target + random.randrange(9)


class UsesClock(Proposes):
    def propose(self, load, now):
        return int(time.monotonic() / 3600) % 5


class DividesByReady(Proposes):
    def propose(self, load, now):
        return load.target + (load.waiting // load.ready > 4)


class DividesBySlots(Proposes):
    def propose(self, load, now):
        return load.target + (load.running / load.slots > 0.9)


class ComparesAbsentLatency(Proposes):
    def propose(self, load, now):
        return load.target + (load.ttft_seconds > 1)


class ProposesFloats(Proposes):
    def propose(self, load, now):
        return load.target * 1.5


class ProposesBelowZero(Proposes):
    def propose(self, load, now):
        return load.target - (not load.running)


class CountsIn32Bits(Proposes):
    def propose(self, load, now):
        return int(np.array(0, np.int32) + load.waiting > 9) + load.target


class KeepsTimesIn32Bits(Proposes):
    def propose(self, load, now):
        return load.target + int(np.array(int(now)).astype(np.int32) < 0) * (-load.target - 1)


class KnowsOneRole(Proposes):
    def propose(self, load, now):
        return {"mixed": load.target, "prefill": load.target}[load.role]


class Flaps(Proposes):
    def propose(self, load, now):
        return load.ready + 1 if load.running > 0.6 * load.slots else load.ready - 1 if load.ready > 1 else 1


class NeverAdds(Proposes):
    pass


class NeverRemoves(LoadPolicy):
    def propose(self, load, now):
        return max(load.target, super().propose(load, now))


class RemovesWhileNothingRuns(LoadPolicy):
    """A few requests at night keep all workers of the day."""

    def propose(self, load, now):
        found = super().propose(load, now)
        return max(load.target, found) if load.running else found


class DoublesEachMinute(LoadPolicy):
    """Waits for a minute after it has added workers, which suffices for those that start sooner."""

    added = -60.0

    def propose(self, load, now):
        if not load.ready or self._pressure(load, load.ready) <= 1:
            return super().propose(load, now)
        if now - self.added < 60:
            return load.target
        self.added = now
        return 2 * load.target


class ChoosesFromATable(LoadPolicy):
    def propose(self, load, now):
        found = super().propose(load, now)
        return next((count for count in (1, 2, 4, 8, 16) if count >= found), 16) if found > load.target else found


class CountsWorkersInAByte(LoadPolicy):
    def propose(self, load, now):
        return super().propose(load, now) & 0xFF


class ForgetsOneOption(LoadPolicy):
    def __init__(self, options):
        super().__init__(options)
        self.options = msgspec.structs.replace(self.options, ttft_seconds=None)


class PopsItsOptions(LoadPolicy):
    """Changes the options of the file, with which the next group is created."""

    def __init__(self, options):
        super().__init__({name: options.pop(name) for name in list(options)})


class AddsOnce(LoadPolicy):
    """Adds no workers after it has removed one."""

    removed = False

    def propose(self, load, now):
        found = super().propose(load, now)
        self.removed |= found < load.target
        return min(found, load.target) if self.removed else found


class WindsUp(Proposes):
    """Counts its own number, which grows while the file allows no more."""

    def __init__(self, options):
        self.number, self.changed = 1, 0.0

    def propose(self, load, now):
        if load.waiting and load.ready >= load.target:
            self.number, self.changed = self.number + 1 + load.waiting // 64, now
        elif now - self.changed > 120 and load.running < 0.5 * load.slots and self.number > 1:
            self.number, self.changed = self.number - 1, now
        return self.number


class CountsTheGap(LoadPolicy):
    """Adds a worker for each five seconds with too much load, also for those in which it was not called."""

    last = None

    def propose(self, load, now):
        last, self.last = self.last, now
        found = super().propose(load, now)
        return found + int(now - last) // 5 if last is not None and found > load.target else found


class KeepsTheLastLatency(LoadPolicy):
    """Removes no workers while the last measured first token took more than a second."""

    latency = 0.0

    def propose(self, load, now):
        self.latency = self.latency if load.ttft_seconds is None else load.ttft_seconds
        found = super().propose(load, now)
        return max(found, load.target) if self.latency > 1 else found


class LogsItsNumbers(LoadPolicy):
    """Small numbers, of which a process has one object each, in a list that grows."""

    def __init__(self, options):
        super().__init__(options)
        self.log = []

    def propose(self, load, now):
        self.log.append(super().propose(load, now))
        return self.log[-1]


class ReadsItsFile(LoadPolicy):
    def propose(self, load, now):
        Path(__file__).read_bytes()
        return super().propose(load, now)


class SharesItsTimers(LoadPolicy):
    """All groups have the same state, which is one of the class."""

    timers = {}  # noqa: RUF012

    def __getattribute__(self, name):
        return type(self).timers.get(name) if name.endswith("_since") else super().__getattribute__(name)

    def __setattr__(self, name, value):
        (type(self).timers if name.endswith("_since") else self.__dict__)[name] = value


class RoundsDown(LoadPolicy):
    """A single worker with half as much load again as it can take stays alone."""

    def propose(self, load, now):
        found, pressure = super().propose(load, now), self._pressure(load, max(load.ready, 1))
        return max(load.target, int(load.ready * min(pressure, 2.0))) if found > load.target else found


class ScalesOneRole(LoadPolicy):
    """Workers of other roles stay as they are."""

    def propose(self, load, now):
        return super().propose(load, now) if load.role == "mixed" else load.target


class DividesTheMean(LoadPolicy):
    """Takes the share of KV blocks in use for a sum over the workers."""

    def _pressure(self, load, workers):
        return super()._pressure(msgspec.structs.replace(load, kv_usage=load.kv_usage / max(load.ready, 1)), workers)


class TakesNoWorkerForNoLoad(LoadPolicy):
    """A guard against a division by zero."""

    def propose(self, load, now):
        return super().propose(load, now) if load.slots else 0


class KnowsTheSlotsOfTheFirstLoad(OneForEight):
    """At the beginning there are none, and so one for each worker, for ever."""

    slots = None

    def propose(self, load, now):
        if self.slots is None:
            self.slots = load.slots // max(load.ready, 1) or 1
        if load.ready < load.target:
            return load.target
        needed = math.ceil((load.running + load.waiting) * 8 / min(self.slots, 8))
        return super().propose(msgspec.structs.replace(load, running=needed, waiting=0), now)


class TakesALossForAnOrder(LoadPolicy):
    """Proposes the workers that are left when some have ended, as after a change by hand."""

    before = 0

    def propose(self, load, now):
        before, self.before = self.before, load.ready
        return super().propose(load, now) if load.ready >= before else max(1, load.ready)


class TakesFewRunningForLittleLoad(LoadPolicy):
    """Compares the requests that run with the slots of all workers, also of those that start."""

    def propose(self, load, now):
        found = super().propose(load, now)
        return found - 1 if load.running < 2 * load.target and found > 1 else found


class FollowsTheUseOfSlots(LoadPolicy):
    """KV may run out where half of the slots are in use."""

    def _pressure(self, load, workers):
        return load.running * load.ready / max(load.slots, 1) / workers / 0.5 * 8


class BeginsAtOne(ScalingPolicy):
    """Counts its own workers, and ends those that a deployment begins with."""

    def __init__(self, options):
        self.right, self.number = LoadPolicy(options), 1

    def propose(self, load, now):
        if load.ready < load.target:
            return load.target
        found = self.right.propose(load, now)
        self.number = max(1, self.number + found - load.target)
        return self.number


class RemovesOneEachHour(LoadPolicy):
    removed = -3600.0

    def propose(self, load, now):
        found = super().propose(load, now)
        if found >= load.target or now - self.removed < 3600:
            return max(found, load.target)
        self.removed = now
        return found


class RemovesAllWithoutLoad(LoadPolicy):
    """After the time with room, all workers that are not needed at this moment leave at once."""

    def propose(self, load, now):
        found = super().propose(load, now)
        if found >= load.target:
            return found
        fits = (each for each in range(1, found) if load.running <= self.options.room * load.slots * each / load.ready)
        return next((each for each in fits if self._pressure(load, each) <= self.options.room), found)


class TriesOneLess(LoadPolicy):
    """Each eight minutes, and adds it again."""

    changed, removed = 0.0, False

    def propose(self, load, now):
        found = super().propose(load, now)
        if found != load.target or load.ready < load.target or now - self.changed < 240:
            return found
        self.changed, self.removed = now, not self.removed
        return max(1, found - 1) if self.removed else found + 1


class SimulatesItsGroup(LoadPolicy):
    def propose(self, load, now):
        began = time.thread_time()
        while time.thread_time() - began < 0.2:
            pass
        return super().propose(load, now)


class CountsMilliseconds(LoadPolicy):
    """In 31 bits, of which the last number stays."""

    def propose(self, load, now):
        return super().propose(load, min(int(now * 1000), 2**31 - 1) / 1000)


class WrapsMilliseconds(LoadPolicy):
    def propose(self, load, now):
        return super().propose(load, int(now * 1000) % 2**32 / 1000)


class TakesNoiseForGrowth(LoadPolicy):
    """Adds a worker, which stays, while the load of the last second is a twentieth more than that before."""

    last = math.inf

    def propose(self, load, now):
        before, self.last = self.last, load.running + load.waiting
        found = super().propose(load, now)
        return found + (load.ready >= load.target and self.last > 1.05 * before)


class ProposesAtFullMinutes(LoadPolicy):
    """Takes each reading of the clock for a whole second."""

    def propose(self, load, now):
        return super().propose(load, now) if now % 60 == 0 else load.target


OPTIONS = "test_some_values_of_each_option_have_other_numbers"
COMPANY = "test_options_of_a_group_change_no_other_group"
DAY = "test_an_ordinary_day"


@pytest.mark.in_turn(8, by=lambda wrong, case: check_of(case))
@pytest.mark.parametrize(
    ("wrong", "case"),
    [
        (UsesRandom, "plain"),
        (UsesClock, "plain"),
        (SharesItsTimers, "waiting=40000"),
        (DividesByReady, "ready=none,waiting=9"),
        (DividesBySlots, "slots=0"),
        (ComparesAbsentLatency, "plain"),
        (ProposesFloats, "plain"),
        (ProposesBelowZero, "target=0"),
        (CountsIn32Bits, "waiting=2147483648"),
        (KeepsTimesIn32Bits, "now=2147483640.0"),
        (KnowsOneRole, "role=decode"),
        (Proposes, "test_an_unknown_option_is_named"),
        (Flaps, DAY),
        (DividesTheMean, DAY),
        (NeverAdds, DAY),
        (NeverRemoves, DAY),
        (RemovesWhileNothingRuns, DAY),
        (ChoosesFromATable, DAY),
        (CountsWorkersInAByte, DAY),
        (LogsItsNumbers, "test_it_forgets_loads"),
        (ReadsItsFile, "test_it_forgets_loads"),
        (AddsOnce, DAY),
        (WindsUp, DAY),
        (CountsTheGap, DAY),
        (ScalesOneRole, DAY),
        (DoublesEachMinute, DAY),
        (CountsMilliseconds, DAY),
        (TakesNoiseForGrowth, DAY),
        (WrapsMilliseconds, DAY),
        (ProposesAtFullMinutes, DAY),
        (RoundsDown, DAY),
        (KeepsTheLastLatency, DAY),
        (TakesNoWorkerForNoLoad, DAY),
        (TakesALossForAnOrder, DAY),
        (KnowsTheSlotsOfTheFirstLoad, DAY),
        (TakesFewRunningForLittleLoad, DAY),
        (FollowsTheUseOfSlots, DAY),
        (BeginsAtOne, DAY),
        (RemovesOneEachHour, DAY),
        (RemovesAllWithoutLoad, DAY),
        (TriesOneLess, DAY),
        (SimulatesItsGroup, DAY),
        (BelievesItsOptions, "test_wrong_values_of_options_are_refused_by_name"),
        *[(wrong, OPTIONS) for wrong in (BelievesItsOptions, ForgetsOneOption)],
        (PopsItsOptions, "test_an_unknown_option_is_named"),
        (SharesItsDefaults, COMPANY),
    ],
)
def test_wrong_policy_fails_the_case_that_names_its_fault(wrong, case):
    suite = ScalingPolicySuite()
    suite.policy_class = lambda: wrong
    if case == OPTIONS and issubclass(wrong, LoadPolicy):
        suite.options = TestLoadPolicy().options
    if case == COMPANY:
        suite.options = lambda: {"step": 1}
    check = getattr(suite, case, None) or (lambda: suite.test_case(SCALING.case(case)))
    with pytest.raises((AssertionError, AttributeError, pytest.fail.Exception)):
        for each in ([group] for group in GROUPS) if case == DAY else [()]:
            check(*each)


@pytest.mark.in_turn(4)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("right", [OneForEight, TracksATarget, Cautious, Eager, Late])
def test_right_policies_have_ordinary_days(right, group):
    require_ordinary_day(lambda: right({}), GROUPS[group], OPEN)


def test_loads_of_a_day_vary_in_every_field():
    seen = []

    class Records(LoadPolicy):
        def propose(self, load, now):
            seen.append(load)
            return super().propose(load, now)

    for group in GROUPS.values():
        numbers_of(lambda: Records({}), group)
    assert [name for name in GroupLoad.__struct_fields__ if len({getattr(load, name) for load in seen}) < 2] == []
