"""Axes and days of scaling policies: loads over time; two instances have to agree in each."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Final

from fd_core.cluster.scaling import GroupLoad, LoadPolicy, ScalingPolicy
from fd_core.router.workers import ROLES, Role
from fd_core.testing.axes.covering import Axis, Case, int_of
from fd_core.testing.axes.parts import Part
from fd_core.testing.hooks.purity import another_world
from fd_core.testing.kit.days.account import DayAccount, account_of, require_as_good, worst_of
from fd_core.testing.kit.law import require
from fd_core.testing.kit.requirements import Requirement
from fd_core.testing.stores.values import draws

_SHAPES: Final[dict[str, Callable[[int, int], float]]] = {
    "constant": lambda call, calls: 1.0,
    "rising": lambda call, calls: (call + 1) / calls,
    "falling": lambda call, calls: 1 - call / calls,
    "pulses": lambda call, calls: float(call % 3 == 0),
    "random": lambda call, calls: draws(call).random(),
}
"""Share of the load of a case, by the number of the call."""

AXES: Final = (
    Axis("role", ROLES, ("GroupLoad.role",)),
    Axis("target", (2, 0, 1, 3, 64, 1000), ("GroupLoad.target",)),
    Axis("ready", ("all", "none", "one less", "one more"), ("GroupLoad.ready",)),
    Axis("slots", (8, 0, 1, 1024), ("GroupLoad.slots",)),
    Axis("running", (1.0, 0.0, 0.5), ("GroupLoad.running",)),
    Axis("waiting", (0, 1, 9, 40_000, 2**31), ("GroupLoad.waiting",)),
    Axis("kv_usage", (0.5, 0.0, 2**-40, 0.899, 0.9, 1.0), ("GroupLoad.kv_usage",)),
    Axis("ttft_seconds", (None, 0.0, 1e-9, 1.5, 3600.0), ("GroupLoad.ttft_seconds",)),
    Axis("shape", tuple(_SHAPES)),
    Axis("calls", (30, 1, 2, 700)),
    Axis("interval", (1.0, 0.0, 0.001, 5.0, 3600.0)),
    Axis("now", (0.0, 32_767.0, 2_147_483_640.0, 4_294_967_290.0, 1e12), ("ScalingPolicy.propose.now",)),
    Axis("follows", (False, True)),
)
"""Axes of a sequence of calls; a case that follows sets the target to what the policy proposed."""
_IDLE: Final = GroupLoad(role="mixed", target=9, ready=9, slots=144)
EXCUSED: Final[Mapping[str, str]] = {"ScalingPolicy.options": "the suite's `options`"}
"""Fields of the contract that no axis varies, with the reason."""


def check_scaling(make: Callable[[], ScalingPolicy], case: Case) -> None:
    """Compare equal calls of two instances, beside another group and in another world. Raises `AssertionError`."""
    one, idle, target, past = make(), make(), int_of(case, "target"), list[tuple[GroupLoad, float, int]]()
    for call, now in enumerate(_times(case)):
        load = _load(case, call, target)
        past.append((load, now, one.propose(load, now)))
        idle.propose(_IDLE, now)
        target = max(0, min(int(past[-1][2]), 1000)) if case["follows"] else target
    _replay(make(), past, int_of(case, "calls"))


def _times(case: Case) -> Iterator[float]:
    start, interval = float(case["now"] or 0), float(case["interval"] or 0)
    return (start + call * interval for call in range(int_of(case, "calls")))


def _load(case: Case, call: int, target: int) -> GroupLoad:
    share = _SHAPES[str(case["shape"])](call, int_of(case, "calls"))
    ready = {"none": 0, "one less": max(0, target - 1), "one more": target + 1}.get(str(case["ready"]), target)
    slots, late = ready * int_of(case, "slots"), case["ttft_seconds"]
    return GroupLoad(
        role=str(case["role"]),  # type: ignore[arg-type]
        target=target,
        ready=ready,
        running=int(share * slots * float(case["running"] or 0)),
        waiting=int(share * int_of(case, "waiting")),
        slots=slots,
        kv_usage=share * float(case["kv_usage"] or 0),
        ttft_seconds=None if late is None else share * float(late),
    )


SCALING: Final[Part[Callable[[], ScalingPolicy]]] = Part("scaling", AXES, check_scaling)


# Days ----------------------------------------------------------------------------------------------------------------

_SLOTS: Final = 16
"""Slots of a worker."""
_ANSWER_SECONDS: Final = 20.0
_PATIENCE: Final = 15.0
"""Mean of the seconds after which clients that wait give up."""


@dataclass(frozen=True)
class Group:
    """A group of workers, whose users make so many requests at once at noon."""

    role: Role
    demand: int
    clock: float
    """Reading of the clock at the beginning of the day."""
    every: int
    """Seconds between proposals."""
    start: float
    """Seconds until a new worker is ready."""
    held: int
    """Requests whose KV fits a worker."""
    first: int = 1
    """Workers of the file."""
    ready: bool = True
    """They are ready at the beginning, which a controller finds that was restarted."""

    @property
    def needed(self) -> int:
        """Workers that noon needs."""
        return -(-self.demand // min(_SLOTS, self.held))


GROUPS: Final[Mapping[str, Group]] = {
    "chat": Group("mixed", 200, clock=2**32 / 1000 - 25_800, every=1, start=20.0, held=1000, ready=False),
    "long contexts": Group("prefill", 300, clock=0.0, every=3, start=20.0, held=8, first=4),
    "a large model": Group(
        "decode", 700, clock=2**31 / 1000 - 18_000, every=5, start=300.0, held=1000, first=20, ready=False
    ),
    "thousands": Group("mixed", 5000, clock=1e8, every=2, start=60.0, held=1000),
}
_HOURS: Final[Mapping[str, Callable[[int, float], float]]] = {
    "an even morning": lambda second, _: 0.4,
    "a rising hour": lambda second, _: 0.4 + 0.6 * second / 3600,
    "an hour with lulls shorter than a start": lambda second, start: (
        0.2 if second % (3 * start) < 0.75 * start else 1.0
    ),
    "the hour in which workers end": lambda second, _: 1.0,
    "an even noon": lambda second, _: 1.0,
    "the hour in which the machine was suspended": lambda second, _: (
        1.0 if second < 100 else 8.0 if second < 104 else 1.5
    ),
    "a rush beyond what the file allows": lambda second, _: 3.0 if second < 1200 else 1.0,
    "a quiet evening": lambda second, _: 0.125,
    "a later evening": lambda second, _: 0.125,
    "an hour of few requests": lambda second, _: 0.002,
    "a night without requests": lambda second, _: 0.0,
    "a night with a burst at its end": lambda second, _: 1.0 if second > 3500 else 0.0,
    "the end of the night": lambda second, _: 0.0,
    "a small morning": lambda second, _: 0.1,
    "the next morning": lambda second, _: 0.4,
    "the next noon": lambda second, _: 1.0,
}
"""Part of the demand of noon in each second of an hour, for workers that start in so many seconds."""
_LOST: Final = {("the hour in which workers end", 900): 2, ("the hour in which workers end", 2400): 10**9}
"""Moments at which the ready workers are divided by a number."""
_NOISY: Final = "the next noon"
_CANCELLED: Final = "the end of the night"
_SUSPENDED: Final = "the hour in which the machine was suspended"
_LIMITS: Final = {"a rush beyond what the file allows": 1.5}
"""Most workers that the file allows, as a multiple of those that noon needs."""
_GIVEN_UP: Final = {"a night with a burst at its end": 0.9}
"""Fraction of requests that may be given up: workers that start for a burst are ready after it."""
_STARTED: Final = {"an hour with lulls shorter than a start": 2}
"""Most workers started in an hour for each one needed; 4 in the other hours."""
_TURNS: Final = 4
"""Most changes of direction under an even load."""
_RIGHT: Final[Sequence[Mapping[str, float]]] = (
    {},
    {"down-seconds": 500, "up-seconds": 15, "room": 0.5},
    {"waiting": 0.5, "up-seconds": 2, "kv-usage": 0.7, "ttft-seconds": 1.0},
)
"""Options with which the core's policy is as good as others may be."""
_SLACK: Final = 1.5
_TIMED: Final = 5
_CALL_MS: Final = 50
"""Of the first proposals of an hour, the CPU time in milliseconds that one takes at most; the core takes 0.01."""


def require_ordinary_day(make: Callable[[], ScalingPolicy], group: Group, follows_load: Requirement) -> None:
    """Fail unless a day of a group has about as many workers, starts and waits as with the core's policy."""
    mine = account_of(lambda: _live(make, group, []), memory=False)
    follows_load.require()
    require_as_good(mine, _account(group), "the day", "8", _SLACK)


@cache
def _account(group: Group) -> DayAccount:
    """Return the account of the core's policy: of its options, the worst figures."""
    make = (partial(LoadPolicy, options) for options in _RIGHT)
    return worst_of([account_of(partial(_live, each, group, []), memory=False) for each in make])


def numbers_of(make: Callable[[], ScalingPolicy], group: Group) -> list[int]:
    """Return the number of workers in each second of hours in which the load rises and falls."""
    numbers: list[int] = []
    deque(_live(make, group, numbers, ("a rising hour", "a quiet evening")), maxlen=0)
    return numbers


def _live(
    make: Callable[[], ScalingPolicy], group: Group, numbers: list[int], hours: Sequence[str] = tuple(_HOURS)
) -> Generator[None, None, Mapping[str, float]]:
    policy, twin, other, figures = make(), make(), make(), dict[str, float]()
    draw = draws(group.demand)
    past, target, ready = list[tuple[GroupLoad, float, int]](), group.first, group.first * group.ready
    recent, before = deque[tuple[float, float]](maxlen=30), 0
    starting, waiting, running, clock = list[float](), 0.0, 0.4 * group.demand * group.ready, group.clock
    starting += [clock + group.start] * (target - ready)
    for hour, (name, share_of) in enumerate((name, _HOURS[name]) for name in hours):
        paid = waited = asked = started = lost = 0.0
        times, counts, limit = list[float](), list[int](), _LIMITS.get(name, 100.0) * group.needed
        is_even, demands = "even" in name.split(), [group.demand * share_of(at, group.start) for at in range(3600)]
        for second in range(3600):
            clock += 1
            if starting and starting[0] <= clock:
                ready += sum(at <= clock for at in starting)
                starting = [at for at in starting if at > clock]
            ready //= _LOST.get((name, second), 1)
            if name == _CANCELLED and second == 0:
                waiting = running = 0.0
            arrived = demands[second] * (1.0 if is_even else draw.uniform(0.9, 1.1)) / _ANSWER_SECONDS
            capacity = ready * min(_SLOTS, group.held)
            waiting += max(0.0, running - capacity)  # of workers that ended
            running = min(running, capacity) * (1 - 1 / _ANSWER_SECONDS)
            begun = min(waiting * (1 - 1 / _PATIENCE) + arrived, capacity - running)
            lost += waiting / _PATIENCE
            waiting, running = waiting * (1 - 1 / _PATIENCE) + arrived - begun, running + begun
            paid, waited, asked = paid + max(target, ready), waited + waiting, asked + arrived
            counts.append(target)
            recent.append((0.2 + waiting / max(running, 1.0) * _ANSWER_SECONDS, round(begun, 1)))
            if second % group.every or (name == _SUSPENDED and 103 < second < 1800):
                continue
            load = GroupLoad(
                role=group.role,
                target=target,
                ready=ready,
                running=round(running * draw.uniform(0.9, 1.1)) if name == _NOISY else round(running),
                waiting=round(waiting),
                slots=ready * _SLOTS,
                kv_usage=min(1.0, round(running) / max(1, ready * group.held)),
                ttft_seconds=max((late for late, count in recent if count), default=None) if round(running) else None,
            )
            now = clock + draw.random()
            began = time.thread_time()
            proposed = policy.propose(load, now)
            times.append(1000 * (time.thread_time() - began))
            if len(times) == _TIMED:
                require(min(times) < _CALL_MS, "8", f"proposals take {min(times):.0f} ms, {_CALL_MS} are allowed")
            other.propose(_IDLE, now)
            past.append((load, now, proposed))
            started += max(0, min(int(limit), proposed) - target)
            target = max(1, min(int(limit), proposed))
            if target < ready + len(starting):
                starting = starting[: max(0, target - ready)]
                ready = min(ready, target)
            starting += [clock + group.start] * (target - ready - len(starting))
        needed = -(-int(max(demands)) // min(_SLOTS, group.held))
        figures[f"workers in {name}"] = max(paid / 3600, 2 * needed + 1)
        figures[f"most workers in {name}"] = max(*counts, 2 * max(needed, before) + 1)
        figures[f"workers at the end of {name}"] = max(target, 2 * needed + 1)
        figures[f"requests given up in {name}, of all"] = max(lost / max(asked, 1.0), _GIVEN_UP.get(name, 0.1))
        removed = min(needed, counts[0], int(limit)) - min(counts)
        figures[f"workers removed although needed in {name}"] = max(removed, needed / 3)
        figures[f"workers started in {name}"] = max(started, _STARTED.get(name, 4) * group.needed)
        figures[f"seconds that each request waits in {name}"] = max(
            waited / max(asked, 1.0), min(2 + group.start / 8, 20)
        )
        changes = [after - before for before, after in pairwise(counts) if after != before]
        if is_even:
            figures[f"turns in {name}"] = max(sum(one * two < 0 for one, two in pairwise(changes)), _TURNS)
        numbers += counts
        before = needed
        _replay(twin, past, hour)
        past.clear()
        yield
    return figures


def _replay(policy: ScalingPolicy, past: Sequence[tuple[GroupLoad, float, int]], shift: int) -> None:
    """Compare numbers with those of another instance, in another world."""
    with ThreadPoolExecutor(1) as pool, another_world(shift=77 + shift, user=type(policy)):
        again = [*pool.map(lambda call: policy.propose(*call[:2]), past)]
    for (load, now, proposed), found in zip(past, again, strict=True):
        require(found == proposed, "8", f"two instances with equal calls differ at {now:,.0f} s: {found}, {proposed}")
        require(type(proposed) is int and proposed >= 0, "8", f"the number for {load} is {proposed!r}")
