"""An ordinary day of a router: users whose prompts grow and return, on workers that queue, cache, fail and restart."""

from __future__ import annotations

import gc
import heapq
import itertools
import math
import zlib
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any, Final

import numpy as np
from msgspec.structs import replace

from fd_core.plugins import ROUTER_POLICY, Plugins
from fd_core.plugins.builtin import fd_register_router_policies
from fd_core.router.config import RouterConfig
from fd_core.router.policies import Candidate, Candidates, RouterPolicy, RoutingContext
from fd_core.router.prefix_index import block_hasher, block_keys
from fd_core.router.router import Router
from fd_core.router.selection import IDLE, NoWorker, RouteRequest, Selection
from fd_core.router.workers import Role, RouterWorker
from fd_core.testing.hooks.purity import another_world
from fd_core.testing.kit.days.account import Day, DayAccount, account_of, require_as_good, worst_of
from fd_core.testing.kit.days.work import HOUR, DayTurn, Talk, each_talk, shown_parts
from fd_core.testing.kit.law import require
from fd_core.testing.stores.values import draws
from fd_core.types import IntArray

HOURS: Final = 8
"""Parts of a day; in each of them something happens to a worker."""
_USER: Final = "organization/"
"""Beginning of the names of sessions, which no log shows."""
_SOON: Final = 0.3
"""Seconds; shorter waits count as this one."""
_FEW: Final = 0.2
"""Fraction of requests; smaller ones count as this one."""
_MANY: Final = 60
"""Requests from which on their median is compared."""
_LONELY: Final = 0.34
"""Fraction of workers; smaller ones count as this one."""
_SOME: Final = 20
"""Requests from which on the share that moved is compared."""
_RETURNS: Final = ("continued", "much longer", "late", "undisturbed")
"""Requests of conversations whose worker is still there; other workers joined or left only before the last ones."""
_KEPT: Final = 10
"""Elements of containers that a policy may hold without workers and sessions."""
_NEXT_YEAR: Final = 1e9
_NEAR: Final = 4.0
"""Sum of the differences of all figures, as logarithms, of policies that are alike."""
_OF_CORE: Final = [each.name for each in fd_register_router_policies()]
_BLOCK: Final = 64
_TOKEN_SECONDS: Final = 0.04
_LONGEST: Final = 32_768
_BUSY: Final = 0.6
"""Part of the time in which workers compute prompts if a third of each is cached."""
_MUCH: Final = 16
"""Blocks of a long message, such as the result of a tool."""
_BREAK: Final = 1300.0
"""Seconds of breaks in each third conversation; sessions are remembered for longer, from their last use."""
_REPEATED: Final = 5
"""Each so many turns of those with an answer of some length, the client asks the same once more."""


@dataclass(frozen=True, eq=False)
class Fleet:
    """Workers of a day, and how its clients and its clock read."""

    workers: Mapping[Role, int]
    number: int
    """Conversations."""
    url: str = "http://worker{}:8000"
    session: str = f"{_USER}{{}}"
    start: float = 1.0
    blocks: int = 3000
    """Blocks of the pool of a worker."""
    slots: int = 48
    traced: bool = False
    """Its memory is measured, which takes long."""


EASY: Final = Fleet({"mixed": 4}, 250)
FLEETS: Final[Mapping[str, Fleet]] = {
    "many workers": Fleet(
        {"mixed": 20},
        900,
        url=f"https://{'inference.' * 6}cluster.local:8{{}}/{'path/' * 9}",  # GPUs of one host
        session=f"{_USER * 9}{{}}/conversation",
        start=2**32 / 1000 - HOUR / 2,
    ),
    "pairs": Fleet({"prefill": 5, "decode": 72}, 400, url="http://[2001:db8::{}]:8000", start=2**31 / 1000 - HOUR / 2),
    "two workers": Fleet({"mixed": 2}, 250, start=1e8, blocks=6000, slots=256, traced=True),
}


@dataclass
class _DayWorker:
    """A worker that computes prompts one by one, and answers in slots."""

    fleet: Fleet
    rate: float
    """Prompt tokens per second."""
    held: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    """Blocks, least recently used first."""
    free_at: float = 0.0
    slots: list[float] = field(default_factory=list)
    """Times at which slots are free."""

    def prefill(self, now: float, keys: tuple[bytes, ...], length: int) -> tuple[float, int]:
        """Return the time at which a prompt is computed, and the tokens that were not cached."""
        hits = sum(1 for _ in itertools.takewhile(self.held.__contains__, keys))
        missing = max(1, length - hits * _BLOCK)
        self.free_at = max(now, self.free_at) + missing / self.rate
        for key in reversed(keys):
            self.held[key] = None
            self.held.move_to_end(key)
        while len(self.held) > self.fleet.blocks:
            self.held.popitem(last=False)
        return self.free_at, missing

    def answer(self, now: float, tokens: int) -> tuple[float, float]:
        """Return the times at which an answer begins and ends."""
        begun = max(now, heapq.heappop(self.slots)) if len(self.slots) >= self.fleet.slots else now
        heapq.heappush(self.slots, begun + tokens * _TOKEN_SECONDS)
        return begun, begun + tokens * _TOKEN_SECONDS


@dataclass
class _PolicyTwins:
    """Two instances of a policy; the second gets the calls of each hour after its end, in another world."""

    cls: type[RouterPolicy]
    config: RouterConfig
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.one, self.other = self.cls(self.config), self.cls(self.config)
        self.uses_prefix = self.one.uses_prefix

    def choose(self, context: RoutingContext) -> Candidate:
        chosen = self.one.choose(context)
        at = next((at for at, each in enumerate(context.candidates) if each is chosen), None)
        require(at is not None, "7.2", f"the policy chose {chosen!r:.80}, which is no candidate")
        self.calls.append((context, at))
        return chosen

    def departed(self, worker: RouterWorker) -> None:
        self.one.departed(worker)
        self.calls.append((worker,))

    def sweep(self, now: float) -> None:
        self.one.sweep(now)

    def replay(self, hour: int) -> None:
        """Compare choices of two instances. The second one's arrays are new, and nothing is worked out before."""
        with ThreadPoolExecutor(1) as pool, another_world(shift=77 + hour, user=self.cls):
            pool.submit(self._replay).result()
        self.calls.clear()

    def _replay(self) -> None:
        for number, (given, *known) in enumerate(self.calls):
            if isinstance(given, RouterWorker):
                self.other.departed(replace(given))
                continue
            if number % 7 == 0:
                self.other.sweep(given.now)
            made = [replace(each, worker=replace(each.worker)) for each in given.candidates]
            again = self.other.choose(replace_fields(given, candidates=Candidates.of(made), tokens=given.tokens.copy()))
            found = made[known[0]] is again
            require(found, "7.2", f"two instances with equal calls differ at {given.now:,.0f} s")


@dataclass
class _RoutedTurn:
    """A request on its way."""

    talk: Talk
    number: int
    request: RouteRequest
    keys: tuple[bytes, ...]
    again: bool
    """It repeats the one before."""


@lru_cache(maxsize=2)  # of a fleet and of the easy day
def _work(number: int) -> tuple[list[Talk], dict[str, tuple[IntArray, tuple[bytes, ...]]]]:
    """Return conversations, and the tokens and keys of each of their prompts."""
    found, hasher, prompts = list[Talk](), block_hasher(_BLOCK), dict[str, tuple[IntArray, tuple[bytes, ...]]]()
    for talk in each_talk(number, hours=1, longest=_LONGEST):
        turns = list[DayTurn]()
        for turn in talk.turns:
            tokens = np.array(turn.spec.prompt, np.int32)
            tokens.flags.writeable = False
            prompts[turn.spec.request_id] = tokens, block_keys(hasher, tokens, turn.spec.cache_salt)
            spec = replace(turn.spec, prompt=())  # which takes several times the memory of the array
            turns.append(DayTurn(turn.pause, spec, (0,) * len(turn.answer), turn.leaves_after))
        found.append(Talk(talk.habit, talk.session, turns))
    return sorted(found, key=lambda talk: talk.turns[0].pause), prompts


class _RouterDay:
    """A day of a router with a policy."""

    def __init__(self, cls: type[RouterPolicy], config: RouterConfig, fleet: Fleet) -> None:
        self.twins: list[_PolicyTwins] = []
        self.fleet, self.draw = fleet, draws(fleet.number)
        names = dict.fromkeys(("policy", "prefill_policy", "decode_policy"), cls.__name__)
        self.router = Router(replace(config, **names), lambda _: self._twins(cls))  # type: ignore[arg-type, return-value]
        self.talks, self.prompts = _work(fleet.number)
        total = sum(map(len, (tokens for tokens, _ in self.prompts.values())))
        computing = fleet.workers.get("mixed", 0) + fleet.workers.get("prefill", 0)
        self.rate = 0.67 * total / (computing * HOUR * _BUSY)
        self.there: dict[RouterWorker, _DayWorker] = {}
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.order = itertools.count()
        self.waits: defaultdict[str, list[float]] = defaultdict(list)
        self.computed, self.asked = Counter[str](), Counter[str]()
        self.served, self.of_sessions = Counter[RouterWorker](), Counter[RouterWorker]()
        self.homes: dict[str, tuple[RouterWorker, int, int]] = {}
        self.changes = 0
        """Hours after which other workers joined or left."""
        self.moves, self.returns = Counter[str](), Counter[str]()
        self.joined = dict.fromkeys(fleet.workers, 0)
        for role, count in fleet.workers.items():
            for _ in range(count):
                self._join(role, fleet.start)

    def _twins(self, cls: type[RouterPolicy]) -> Callable[[RouterConfig], _PolicyTwins]:
        def make(config: RouterConfig) -> _PolicyTwins:
            self.twins.append(_PolicyTwins(cls, config))
            return self.twins[-1]

        return make

    def _join(self, role: Role, now: float, url: str = "", instance: str = "first") -> None:
        if not url:
            self.joined[role] += 1
            url = self.fleet.url.format(f"{len(role)}{self.joined[role]}")
        worker = self.router.register(url, role, now, instance=instance)
        kv_port = 7001 if role == "prefill" else None
        after = self.router.health(worker, True, now, instance=instance, role=role, kv_port=kv_port)
        self.there[after] = _DayWorker(self.fleet, self.rate)

    def live(self) -> Generator[None, None, Mapping[str, float]]:
        """Live the day, an hour at a time."""
        start = self.fleet.start
        for talk in self.talks:
            self._at(start + talk.turns[0].pause, lambda now, talk=talk: self._ask(talk, 0, now))  # type: ignore[misc]
        for hour in range(HOURS):
            end = start + (hour + 1) * HOUR / HOURS if hour + 1 < HOURS else math.inf
            while self.events and self.events[0][0] < end:
                now, _, event = heapq.heappop(self.events)
                event(now)
            for role in self.fleet.workers if end < math.inf else ():
                self._change(role, hour, end)
            if end == math.inf:
                for worker in self.router.workers():
                    self.router.deregister(worker.url, now)
            for each in self.twins:
                each.replay(hour)
            yield
        state = self.router.snapshot()
        require(state.total == IDLE, "7.1", f"after the day, these requests are counted: {state.total}")
        return self._figures()

    def _at(self, time: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (time, next(self.order), event))

    def _change(self, role: Role, hour: int, now: float) -> None:
        """Let something happen to a worker: a restart, a departure, one that joins, all that restart, or illness."""
        there = [each for each in self.router.workers() if each.role == role and each in self.there]
        self.changes += hour < 3
        if len(there) < 2:
            return
        match hour:
            case 0:  # another one takes its place
                self.router.deregister(there[0].url, now)
                self._join(role, now)
            case 1:
                self.router.deregister(there[-1].url, now)
            case 2:
                self._join(role, now)
            case 3:
                for each in there[len(there) // 2 :]:
                    self._join(role, now, each.url, f"second {hour}")
            case 4:
                self.router.health(there[0], False, now, failure="slow")
                self._at(now + 60.0, lambda later: self._join(role, later, there[0].url, "third"))
            case 5:
                self._join(role, now, there[0].url, f"second {hour}")
            case _:
                pass

    def _ask(self, talk: Talk, number: int, now: float, again: bool = False) -> None:
        turn = talk.turns[number]
        tokens, keys = self.prompts[turn.spec.request_id]
        session = self.fleet.session.format(talk.session) if talk.session else None
        request = RouteRequest(tokens, session, turn.spec.cache_salt, output_tokens=turn.spec.params.max_tokens)
        selection = self.router.select(request, now, self.draw.random())
        asked = _RoutedTurn(talk, number, request, keys, again)
        while isinstance(selection, Selection) and self.draw.random() < 0.01:
            if self.draw.random() < 0.5:
                self.router.declined(selection, selection.workers[0])
            else:
                self.router.failed(selection, selection.workers[0], now)
            selection.release()
            selection = self.router.retry(selection, now, self.draw.random())
        if isinstance(selection, NoWorker):
            self._next(asked, now)
            return
        self._serve(asked, selection, now)

    def _serve(self, asked: _RoutedTurn, selection: Selection, now: float) -> None:
        turn, habit = asked.talk.turns[asked.number], asked.talk.habit
        first, last = (self.there[each] for each in (selection.prefill, selection.decode))
        begun, computed = first.prefill(now, asked.keys, len(asked.request.tokens))
        begun, end = last.answer(begun, len(turn.answer) if turn.leaves_after is None else turn.leaves_after)
        self.waits[habit].append(begun - now)
        self.computed[habit] += computed
        self.asked[habit] += len(asked.request.tokens)
        self.served.update(selection.workers)
        self.of_sessions.update(selection.workers if asked.request.session else ())
        name = turn.spec.request_id.partition(".")[0]
        home, before, changes = self.homes.get(name, (None, 0, 0))
        if home in self.router.workers():
            is_late = self._has_break(asked.talk, asked.number - 1)
            kind = "late" if is_late else "much longer" if len(asked.keys) - before > _MUCH else "continued"
            kind = kind if changes == self.changes else "undisturbed"
            what = (
                f"{'repeated' if asked.again else kind} requests with{'' if asked.request.session else 'out'} a session"
            )
            self.returns[what] += 1
            self.moves[what] += home != selection.prefill
        self.homes[name] = selection.prefill, len(asked.keys), self.changes
        self._at(begun, lambda _: selection.first_token())
        self._at(end, lambda later: self._end(asked, selection, later))

    def _end(self, asked: _RoutedTurn, selection: Selection, now: float) -> None:
        with selection:
            selection.first_token()
            if selection.mode == "pd":
                self.router.prefilled(selection, now)
            if asked.talk.turns[asked.number].leaves_after is None:
                self.router.served(selection, now)
        self._next(asked, now)

    def _next(self, asked: _RoutedTurn, now: float) -> None:
        talk, number = asked.talk, asked.number
        if not asked.again and number % _REPEATED == 1:
            self._at(now + 1.0, lambda later: self._ask(talk, number, later, again=True))
        elif number + 1 < len(talk.turns):
            pause = _BREAK if self._has_break(talk, number) else talk.turns[number + 1].pause
            self._at(now + pause, lambda later: self._ask(talk, number + 1, later))

    def _has_break(self, talk: Talk, number: int) -> bool:
        return number in (1, 3) and not zlib.crc32(talk.turns[0].spec.request_id.encode()) % 3

    def _figures(self) -> Mapping[str, float]:
        found: dict[str, float] = {}
        for habit, waits in self.waits.items():
            if len(waits) >= _MANY:
                found[f"median seconds until answers of {habit} began"] = max(_SOON, float(np.percentile(waits, 50)))
                found[f"computed of each prompt token of {habit}"] = self.computed[habit] / self.asked[habit]
        every = [each for waits in self.waits.values() for each in waits]
        for share in (50, 90, 99):
            found[f"seconds until the {share}th of 100 answers began"] = max(_SOON, float(np.percentile(every, share)))
        for kind, other in itertools.product(("repeated", *_RETURNS), ("with", "without")):
            what = f"{kind} requests {other} a session"
            moved = self.moves[what] / self.returns[what] if self.returns[what] >= _SOME else 0.0
            found[f"share of {what} that moved"] = max(_FEW, moved)
        for role in self.fleet.workers:
            counts = [self.served[each] for each in self.there if each.role == role]
            found[f"{role} workers that served none"] = counts.count(0)
            alone = sum(not self.of_sessions[each] for each in self.there if each.role == role) / len(counts)
            found[f"share of {role} workers that served no session"] = max(_LONELY, alone)
            found[f"most requests of a {role} worker, of the mean"] = max(counts) / float(np.mean(counts))
        for twins in self.twins:
            twins.one.sweep(_NEXT_YEAR)
        kept = max(_elements(each.one) - _elements(each.cls(each.config)) for each in self.twins)
        found["elements that policies keep after the end"] = max(_KEPT, kept)
        return found


def _elements(policy: RouterPolicy) -> int:
    """Return the number of elements of all containers that a policy holds, itself or through its objects."""
    count, seen, left = 0, set[int](), [value for name, value in vars(policy).items() if name != "config"]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, type | ModuleType | FunctionType):
            continue
        seen.add(id(each))
        count += len(each) if isinstance(each, Collection) and not isinstance(each, str | bytes) else 0
        left += gc.get_referents(each)
    return count


def _secrets(fleet: Fleet) -> list[bytes]:
    """Return what no log shows: names of sessions, and prompts."""
    _, prompts = _work(fleet.number)
    return [_USER.encode(), *shown_parts(tokens[:64].tolist() for tokens, _ in prompts.values())]


def day_of(cls: type[RouterPolicy], config: RouterConfig, fleet: Fleet) -> Day:
    """Return the day of a policy; each call lives it anew."""
    _work(fleet.number)
    return lambda: _RouterDay(cls, config, fleet).live()


def require_ordinary_day(cls: type[RouterPolicy], config: RouterConfig, fleet: Fleet) -> None:
    """Fail unless users fare about as well as with those policies of the core that are near in an easy day.

    Where prompts that are repeated at once return to their workers, so must those that grow, also after a break, and
    after another worker joined or left.
    """
    days = (day_of(cls, config, each) for each in (fleet, EASY))
    mine, easy = (
        account_of(day, *_secrets(fleet), memory=traced)
        for day, traced in zip(days, (fleet.traced, False), strict=True)
    )
    for kind, other in itertools.product(_RETURNS, ("with", "without")):
        moved, again = (
            mine.figures[f"share of {each} requests {other} a session that moved"] for each in (kind, "repeated")
        )
        what = f"{moved:.0%} of {kind} requests {other} a session move, {again:.0%} of those repeated at once"
        require(again > 0.25 or moved <= 0.5, "7.2", what)
    slack = {name: 3.5 if "seconds" in name else 1.5 for name in mine.figures} | {"peak": 1.1, "grown": 1.1}
    slack |= {name: 1 / _FEW for name in slack if "undisturbed" in name}  # few requests, which only the above compares
    require_as_good(mine, _bar(easy, config, fleet), f"a day with {cls.__name__}", "7.2", slack)


def _bar(easy: DayAccount, config: RouterConfig, fleet: Fleet) -> DayAccount:
    """Return the worst figures, in a fleet, of those policies of the core that are about as near as the nearest."""
    far = {each: _distance(easy.figures, _account(each, config, EASY).figures) for each in _OF_CORE}
    near = [_account(each, config, fleet) for each in far if far[each] <= _NEAR + 2 * min(far.values())]
    worst = worst_of(near)
    if fleet.traced:  # the router's index takes memory if a policy uses prefixes
        peak = max(_account(each, config, fleet).peak for each in _OF_CORE)
        return worst._replace(peak=peak)
    return worst


def _distance(mine: Mapping[str, float], other: Mapping[str, float]) -> float:
    return sum(abs(math.log((0.1 + each) / (0.1 + other[name]))) for name, each in mine.items())


@lru_cache(maxsize=64)
def _account(name: str, config: RouterConfig, fleet: Fleet) -> DayAccount:
    return account_of(day_of(Plugins.discover([]).load(ROUTER_POLICY, name), config, fleet), memory=fleet.traced)
