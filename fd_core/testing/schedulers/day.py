"""An ordinary day of a server: the users of `talks` in simulated time, with a scheduler, and with that of the core."""

from __future__ import annotations

import array
import heapq
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.ma  # so that no step does at its first call of `np.unique`

from fd_core.config import Limits
from fd_core.effects import operations
from fd_core.errors import BadRequest
from fd_core.kv.prefix import PrefixHasher
from fd_core.scheduling.contract import Scheduler, SchedulerSetup
from fd_core.scheduling.operations.kv_offloading import OffloadSelection
from fd_core.scheduling.policies import FairShare, Fcfs, Priority, SchedulingPolicy
from fd_core.scheduling.running.drafts import DraftControl
from fd_core.scheduling.scheduler import ContinuousBatchingScheduler
from fd_core.scheduling.victims import FewestTokens, LatestArrival, VictimPolicy
from fd_core.signals import MalformedOutput
from fd_core.testing.kit.days.account import DayAccount, account_of, require_as_good
from fd_core.testing.kit.days.work import HOUR, shown_parts, talks
from fd_core.testing.kit.growth import count_bytecodes, require_no_stall
from fd_core.testing.kit.law import broken, require
from fd_core.testing.schedulers.device import TOKEN_SECONDS, DayRequest, HashingDevice, TimedTiers, job_of, request_of
from fd_core.testing.schedulers.driver import SchedulerTarget
from fd_core.testing.schedulers.tiers import PEER
from fd_core.types import Delta, FinishReason, Phase, StepOutput, StepPlan

MakeScheduler = Callable[[SchedulerSetup], Scheduler]
_HOURS: Final = 8
_IDS: Final = 152_064
_TALKED: Final = 1500
"""Most tokens of the answers of a conversation, as each is a step."""
_FASTER: Final = 30.0
"""Pauses of users are shorter than theirs by this factor: a day has few steps, and as many requests at once."""
_STEP_SECONDS: Final = 0.02
_UNNOTICED: Final = 0.1
"""Seconds that no user notices."""
_PACES: Final = (0.25, 0.5, 0.25, 2.0)
"""Time to load a block, as a multiple of that to compute its tokens, hour by hour."""
_SAMPLED: Final = 48
"""Every so many steps, the bytecodes of the calls are counted."""


_COST: Final = "bytecodes of "
_LEAST: Final = "batch"
"""Habit of the least important requests."""
_DISPLACED: Final = 6.0
"""Times of the core's pauses that those may have where they are displaced."""
_SAMPLES: Final = 10
"""Fewest counts whose mean is a figure."""


@dataclass(frozen=True)
class Server:
    """Settings of a server, and its users."""

    limits: Mapping[str, int]
    conversations: int
    seconds: float
    """Length of the day."""
    policy: Callable[[], SchedulingPolicy] = Fcfs
    victims: Callable[[], VictimPolicy] = FewestTokens
    keep: OffloadSelection | None = None
    stored: int = 0
    """Blocks that the store holds."""
    paired: bool = False
    setup: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of `SchedulerSetup`."""
    orders: bool = False
    """True if an operator pauses it, for each kind of order."""

    @property
    def sizes(self) -> Limits:
        sizes: dict[str, Any] = {"vocab_size": _IDS, "max_model_len": 131_072, **self.limits}
        return Limits(**sizes)

    def within(self, target: SchedulerTarget) -> Server:
        """Return it with what a scheduler supports; one of fewer slots has fewer users."""
        sizes, lacks, setup = msgspec.structs.asdict(self.sizes), target.lacks, dict(self.setup)
        most = {name: limit for name, limit in target.envelope.limits().items() if sizes.get(name, 0) > limit}
        users = self.conversations * most.get("max_num_seqs", 1 << 30) // sizes["max_num_seqs"]
        if "prefix_caching" in lacks:
            setup |= {"hasher": None, "kv_events": False}
        return replace(
            self,
            limits={**self.limits, **most},
            conversations=min(self.conversations, max(users, 4)),
            keep=self.keep if lacks.keys().isdisjoint({"storage", "prefix_caching"}) else None,
            paired=self.paired and lacks.keys().isdisjoint({"pairs", "prefix_caching"}),
            setup=setup,
        )


def _limits(slots: int, budget: int, block: int, blocks: int, **more: int) -> dict[str, int]:
    sizes = {"max_num_seqs": slots, "max_num_batched_tokens": budget, "block_size": block, "num_kv_blocks": blocks}
    return {**sizes, **more}


SERVERS: Final[Mapping[str, Server]] = {
    "defaults": Server(_limits(256, 8192, 16, 30_000, pipeline_depth=2), 130, 16.0),
    "store": Server(
        _limits(64, 8192, 32, 4200, pipeline_depth=2),
        100,
        60.0,
        policy=Priority,
        keep=OffloadSelection(preempted=True, finished=True, persist=True),
        stored=10_000,
        setup={"kv_events": True, "first_step": 2**31 - 700},
        orders=True,
    ),
    "drafts": Server(
        _limits(24, 2048, 16, 530, max_model_len=8192, max_drafts=3),
        70,
        36.0,
        policy=FairShare,
        victims=LatestArrival,
        setup={"epoch": 2**31 - 1},
    ),
    "pairs": Server(_limits(32, 8192, 64, 4100, pipeline_depth=2), 60, 60.0, paired=True, orders=True),
    "crowded": Server(_limits(16, 2048, 16, 2100, max_model_len=32_768), 70, 18.0),
}
"""One for each thing that hides others: room; a store, with orders of an operator; drafts and tenants in a small pool;
other workers; more users than it has room for."""


class _Turn(NamedTuple):
    request: DayRequest
    habit: str
    pause: float
    """Seconds after the turn before, or of the day."""
    leaves_after: int | None
    """Tokens after which the client leaves."""


@cache
def _talks(conversations: int, context: int, longest: int, seconds: float, paired: bool) -> list[list[_Turn]]:
    """Return the turns of each conversation, of long ones the first ones; `longest` is the most tokens of one."""
    found = list[list[_Turn]]()
    for at, talk in enumerate(talks(conversations, hours=_HOURS, vocab_size=_IDS, longest=longest)):
        turns, talked = list[_Turn](), 0
        for turn in talk.turns:
            spec, params = turn.spec, turn.spec.params
            talked += len(turn.answer)
            most = min(params.max_tokens, context - len(spec.prompt), _TALKED + 100)
            spec = msgspec.structs.replace(spec, params=msgspec.structs.replace(params, max_tokens=most))
            if paired:
                spec = job_of(spec) if at % 3 == 0 else msgspec.structs.replace(spec, prefill_at=PEER * (at % 3 - 1))
            if talked <= _TALKED:
                pause = turn.pause / _FASTER if turns else turn.pause / (_HOURS * HOUR) * seconds
                fails = talk.habit == "batch" and at % 3 == 0
                request = request_of(spec, turn.answer, fails=fails and spec.prefill_job is None)
                leaves = turn.leaves_after if spec.prefill_job is None or turn.leaves_after is None else 0
                turns.append(_Turn(request, talk.habit, pause, leaves))
        found += [turns] if turns else []
    return found


@dataclass
class _Open:
    """A request that has not ended."""

    turn: _Turn
    added: float
    number: tuple[int, int]
    """Of its conversation, and of the turn."""
    got: int = 0
    last: float = 0.0
    pause: float = 0.0
    """Longest one between its tokens so far."""
    aborted: bool = False


class ServerDay:
    """The day of one server with one scheduler; it is lived once."""

    def __init__(self, server: Server, make: MakeScheduler) -> None:
        self.server, self._make, self._sizes = server, make, (sizes := server.sizes)
        longest = min(sizes.max_model_len, sizes.num_kv_blocks * sizes.block_size) - 2
        self._talks = _talks(server.conversations, sizes.max_model_len, longest, server.seconds, server.paired)
        known = {each.request.spec.request_id: each.request for turns in self._talks for each in turns}
        self._device = HashingDevice(sizes, known)
        self.tiers = TimedTiers(self._device, server.stored)
        self.now = 0.0
        self._begins = [(turns[0].pause, number, 0) for number, turns in enumerate(self._talks)]
        heapq.heapify(self._begins)
        self._open: dict[str, _Open] = {}
        self._flying: deque[tuple[StepPlan, StepOutput]] = deque()
        self._steps = 0
        self._counts = defaultdict[str, float](float)
        self._seconds: dict[str, list[float]] = {}
        """Waits and pauses by the habit of users."""
        self._codes: dict[str, list[int]] = {}
        self.took = array.array("d")
        """CPU time of each call."""
        self.batches = True
        """True if nothing was admitted while another request ran, unless its KV arrived only then."""

    def secrets(self) -> list[bytes]:
        """Return parts of prompts, which no log shows."""
        return shown_parts(each.request.spec.prompt for turns in self._talks for each in turns)

    def live(self) -> Generator[None, None, Mapping[str, float]]:
        """Live the day, hour by hour; return the figures."""
        self.scheduler = self._make(self._setup())
        for hour in range(_HOURS + 1):
            end = (hour + 1) * self.server.seconds / _HOURS if hour < _HOURS else float("inf")
            if self.server.keep is not None:
                self._measure(_PACES[hour % len(_PACES)])
            # Modules may be imported where something is used first.
            with require_no_stall("a call of a step", "2.6") if 2 * hour > _HOURS else nullcontext():
                while self.now < end and (self._begins or self._open or self._flying or self.tiers.next < float("inf")):
                    self._go_on()
            if self.server.orders and hour in _ORDERS:
                self._order(hour)
            self._device.check_running(self._open)
            yield
        held = self.scheduler.held()
        require(held.idle and not self.scheduler.has_work, "3.6", f"after the day, it holds {held}")
        return self._figures()

    def _measure(self, times: float) -> None:
        """Report the paces of computing and loading, as an engine does."""
        each = self.tiers.load_seconds = times * TOKEN_SECONDS * self._sizes.block_size
        for pace in (operations.PrefillPaceMeasured(TOKEN_SECONDS), operations.LoadPaceMeasured(each, each, 0.002)):
            self._deliver(self.scheduler.complete(pace))

    def _setup(self) -> SchedulerSetup:
        server, sizes, k = self.server, self._sizes, self._sizes.max_drafts
        chosen = {"hasher": PrefixHasher(block_size=sizes.block_size, identity="kit"), **server.setup}
        return SchedulerSetup(
            limits=sizes,
            policy=server.policy(),
            victims=server.victims(),
            drafts=DraftControl(sizes.max_num_seqs, k, 1000) if k else None,
            keep_kv=server.keep,
            paired=server.paired,
            clock=lambda: self.now,
            **chosen,
        )

    def _go_on(self) -> None:
        """Do what is due, and plan a step, commit one, or wait for what happens next."""
        while self._begins and self._begins[0][0] <= self.now:
            self._add(*heapq.heappop(self._begins)[1:])
        for completion in self.tiers.ended(self.now):
            self._deliver(self._call("complete", lambda: self.scheduler.complete(completion)))  # noqa: B023
        full = len(self._flying) == self._sizes.pipeline_depth
        if not full and self._call("has_work", lambda: self.scheduler.has_work) and self._plan():
            return
        if self._flying:
            self._commit()
            return
        following = min(self._begins[0][0] if self._begins else float("inf"), self.tiers.next)
        if following < float("inf"):
            self.now = max(self.now, following)
        elif left := sorted(self._open):
            broken("2.2", f"{len(left)} requests wait, and nothing is left to happen: {left[:3]}")

    def _call(self, name: str, call: Callable[[], Any], *, counts: bool | None = None) -> Any:
        """Call the scheduler; count the bytecodes in some steps, or if it `counts`."""
        if self._steps % _SAMPLED if counts is None else not counts:
            began = time.thread_time()
            result = call()
            self.took.append(time.thread_time() - began)
            return result
        results = list[Any]()
        self._codes.setdefault(name, []).append(count_bytecodes(lambda: results.append(call())))
        return results[0]

    def _add(self, number: int, at: int) -> None:
        turn = self._talks[number][at]
        spec = turn.request.spec
        # A prompt of its own, as received from a client: memory that holds it is not the day's.
        spec = msgspec.structs.replace(spec, prompt=(*spec.prompt[:-1], spec.prompt[-1]))
        self._open[spec.request_id] = _Open(turn, self.now, (number, at))
        self._begin(self._call("add", lambda: self.scheduler.add(spec), counts=len(spec.prompt) % 8 == 0))
        if turn.leaves_after == 0:
            self._abort(spec.request_id)

    def _begin(self, effects: operations.Effects) -> None:
        self._counts["events"] += len(effects.events)
        self.tiers.begin(self.now, effects.operations)

    def _abort(self, name: str) -> None:
        self._open[name].aborted = True
        self._deliver(self._call("abort", lambda: self.scheduler.abort(name), counts=True))

    def _plan(self) -> StepPlan | None:
        plan, effects = self._call("plan", self.scheduler.plan)
        self._begin(effects)
        if plan is not None:
            self._steps += 1
            own = sum(admission.request_id not in self.tiers.awaited for admission in plan.admissions)
            self.batches = self.batches and not (own and len(plan.admissions) < len(plan.slots))
            self._flying.append((plan, self._device.execute(plan)))
        return plan

    def _commit(self) -> None:
        plan, output = self._flying.popleft()
        self.now += _STEP_SECONDS + TOKEN_SECONDS * plan.total_tokens
        try:
            deltas, effects = self._call("commit", lambda: self.scheduler.commit(plan, output))
        except MalformedOutput as error:
            broken("1.2", f"it takes the output of step {plan.step} for malformed: {error}")
        self._begin(effects)
        for name in [delta.request_id for delta in deltas if self._deliver(delta)]:
            self._abort(name)
        if self._steps % _SAMPLED == 0:
            self._look()

    def _look(self) -> None:
        """Read what the endpoints of a server show."""
        scheduler = self.scheduler
        self._call("stats", scheduler.stats)
        self._call("activities", scheduler.activities)
        held, names = self._call("held", scheduler.held), self._call("request_ids", scheduler.request_ids)
        require(set(names) >= self._open.keys(), "3.6", "it has forgotten requests that have not ended")
        used, total = held.owned + held.fenced + held.cached, self._sizes.num_kv_blocks
        require(used <= total, "3.2", f"it reports {used:,} used blocks of {total:,}")
        for name in names[:1]:
            self._call("phases", lambda: scheduler.phases(name))  # noqa: B023

    def _deliver(self, delta: Delta | None) -> bool:
        """Take a delta; return True if the client leaves now."""
        if delta is None:
            return False
        name, mine = delta.request_id, self._open.get(delta.request_id)
        if mine is None:
            broken("1.7", f"{name} gets {delta} after its end")
        if delta.token_ids:
            mine.turn.request.check(delta, mine.got)
            if mine.got:
                mine.pause = max(mine.pause, self.now - mine.last)
            else:
                self._seconds.setdefault(f"{mine.turn.habit} waits", []).append(self.now - mine.added)
            mine.got, mine.last = mine.got + len(delta.token_ids), self.now
        if delta.finish_reason is not None:
            self._end(name, mine, delta)
            return False
        leaves = mine.turn.leaves_after
        return leaves is not None and not mine.aborted and 0 < leaves <= mine.got

    def _end(self, name: str, mine: _Open, delta: Delta) -> None:
        request, found, (number, at) = mine.turn.request, delta.finish_reason, mine.number
        complete = found in (FinishReason.STOP, FinishReason.LENGTH)
        right = FinishReason.ERROR if request.fails else request.reason
        expected = {FinishReason.ABORT, right} if mine.aborted else {right}
        require(found in expected, "1.7", f"{name} ended by {found}, expected {expected}")
        require(not complete or mine.got == len(request.text), "4", f"{name} ended after {mine.got} tokens")
        took = self.now - mine.added
        timed = sum(delta.phases or (took,))
        self._counts["seconds that requests wait"] += timed - (delta.phases or (took,))[Phase.COMPUTING]
        require(abs(timed - took) < 1e-6, "3.6", f"{name} took {took:.3f} s, of which {timed:.3f} are in phases")
        if mine.pause:
            self._seconds.setdefault(f"{mine.turn.habit} pauses", []).append(mine.pause)
        del self._open[name]
        if at + 1 < len(self._talks[number]):
            heapq.heappush(self._begins, (self.now + self._talks[number][at + 1].pause, number, at + 1))

    def _order(self, hour: int) -> None:
        """Pause, as an engine does to sleep or to load other weights, and go on."""
        scheduler = self.scheduler
        with suppress(BadRequest):
            scheduler.pause()
            for _ in range(1000):
                held = scheduler.held()
                if not (self._flying or held.running or held.loading or held.draining or held.fenced):
                    break
                for completion in self.tiers.ended(self.now):
                    self._deliver(scheduler.complete(completion))
                self._plan()
                if self._flying:
                    self._commit()
                elif self.tiers.next < float("inf"):
                    self.now = max(self.now, self.tiers.next)
            else:
                broken("1.2", f"paused, it holds {scheduler.held()}")
            with suppress(BadRequest):
                if (order := _ORDERS[hour]) is not None:
                    effects = order(scheduler)
                    self._device.weights += np.uint64(order is _ORDERS[4])
                    self._begin(effects)
            scheduler.resume()

    def _figures(self) -> dict[str, float]:
        counts: dict[str, float] = {**self._device.figures, **self.tiers.figures, **self._counts}
        found = {name: 1.0 + number for name, number in counts.items()} | {"seconds of the day": self.now}
        for name, seconds in self._seconds.items():
            found |= {f"{name}, p{part}": _UNNOTICED + float(np.percentile(seconds, part)) for part in (50, 99)}
        codes = {name: each for name, each in self._codes.items() if len(each) >= _SAMPLES}
        return found | {f"{_COST}{name}": 100.0 + float(np.mean(each)) for name, each in codes.items()}


_ORDERS: Final[Mapping[int, Callable[[Scheduler], operations.Effects] | None]] = {
    2: None,
    4: lambda scheduler: scheduler.change_weights(b"other"),
    6: lambda scheduler: scheduler.forget_prefixes(),
}
"""By the hour."""


def require_ordinary_day(
    make: MakeScheduler, server: Server, cores: Sequence[Server], what: str, *, displaces: bool = False
) -> None:
    """Fail if users or the host notice a difference to the worst of the same days with plugins of the core, `cores`.

    A scheduler that admits none while others run is compared with one of the core that does the same. Where a policy
    `displaces` running requests, the least important ones may pause for longer.
    """
    day = ServerDay(server, make)
    mine = account_of(day.live, *day.secrets())
    rights = [_account(each, batches=day.batches) for each in cores]
    accounts, names = (mine, *rights), sorted({name for each in (mine, *rights) for name in each.figures})
    names = [each for each in names if _COST not in each or all(each in account.figures for account in accounts)]
    worst = {name: max(each.figures.get(name, 1.0) for each in rights) for name in names}
    core = rights[0]._replace(
        figures=worst, peak=max(each.peak for each in rights), grown=max(each.grown for each in rights)
    )
    mine = mine._replace(figures={name: mine.figures.get(name, 0.0) for name in names})
    slack = {name: slack_of(name) for name in (*names, "peak", "grown")}
    slack |= {name: _DISPLACED for name in names if displaces and name.startswith(f"{_LEAST} pauses")}
    require_as_good(mine, core, what, "2.2", slack)


_ACCOUNTS: Final[dict[tuple[str, bool], DayAccount]] = {}


def _account(server: Server, *, batches: bool) -> DayAccount:
    key = repr(server), batches
    if key not in _ACCOUNTS:
        _ACCOUNTS[key] = account_of(ServerDay(server, _AdmitsBatches if batches else ContinuousBatchingScheduler).live)
    return _ACCOUNTS[key]


class _AdmitsBatches(ContinuousBatchingScheduler):
    """Requests enter together, when the last one before them has left."""

    def admit(self, builder: Any, step: int) -> None:
        held = self.held()
        if not held.loading + held.running + held.draining:
            super().admit(builder, step)


def slack_of(figure: str) -> float:
    """Return the times of the core's figure that one of a right scheduler may have."""
    if figure.startswith(_COST):
        return 6.0
    return 1.25 if figure in ("tokens computed", "drafts rejected", "seconds of the day") else 2.0
