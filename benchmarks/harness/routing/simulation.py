"""The users and workers of `load.replay` and `fake_worker` without processes or a clock: a policy alone. Pure."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from fd_core.kv.events import BEGINNING, KVEvent, Removed, Stored
from fd_core.router.config import RouterConfig
from fd_core.router.policies import Candidate, RouterPolicy, RoutingContext
from fd_core.router.prefix_index import block_hasher, block_keys
from fd_core.router.router import Router
from fd_core.router.selection import RouteRequest, Selection
from fd_core.router.workers import RouterWorker

from .cache import BLOCK_TOKENS, CHARS_PER_TOKEN, PrefixCache
from .fake_worker import Settings
from .figures import Played
from .load import Think

Event = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One turn, as the router and as a worker see it."""

    request: RouteRequest
    blocks: tuple[bytes, ...]


def prompt_of(text: str, session: str) -> Prompt:
    """Return a prompt whose tokens are four bytes of its text each."""
    data = text.encode()
    padded = data + bytes(-len(data) % CHARS_PER_TOKEN)
    request = RouteRequest(np.frombuffer(padded, "<i4").astype(np.int32), session)
    return Prompt(request, block_keys(block_hasher(BLOCK_TOKENS), request.tokens))


class LongestMatch(RouterPolicy):
    """The rule of SGLang's router: who was given the longest match, if it is above a share; else who was given least.

    See `cache_aware` of sglang-router 0.3; its thresholds of imbalance are left out, which these loads do not reach.
    """

    uses_prefix = True
    share = 0.3

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        self._given: dict[RouterWorker, set[bytes]] = {}

    def choose(self, context: RoutingContext) -> Candidate:
        """The longest match, or the smallest tree."""
        given = {one.worker: self._given.setdefault(one.worker, set()) for one in context.candidates}

        def match(one: Candidate) -> int:
            return sum(1 for _ in itertools.takewhile(given[one.worker].__contains__, context.keys))

        best = max(context.candidates, key=match)
        if match(best) <= self.share * len(context.keys):
            best = min(context.candidates, key=lambda one: len(given[one.worker]))
        given[best.worker].update(context.keys)
        return best


class _Engine:
    """A simulated worker."""

    def __init__(self, settings: Settings, at: Callable[[float, Event], None]) -> None:
        self.settings = settings
        self.cache = PrefixCache(settings.cache_blocks)
        self.tell: Callable[[KVEvent], object] = lambda _: None
        self._at = at
        self._running = 0
        self._waiting: deque[Event] = deque()
        self._prefills: deque[Event] = deque()
        self._prefilling = False

    def generate(self, now: float, prompt: Prompt, tokens: int, first: Event, done: Event) -> None:
        """Call `first` when the first token is there, and `done` with the last one."""

        def enter(now: float) -> None:
            self._running += 1
            self._prefills.append(prefill)
            self._prefill_next(now)

        def prefill(now: float) -> None:
            taken = self.cache.take(prompt.blocks, len(prompt.request.tokens))
            if prompt.blocks:
                told = prompt.request.tokens[: len(prompt.blocks) * BLOCK_TOKENS]
                self.tell(Stored(BEGINNING, prompt.blocks, told.tobytes()))
            self.tell(Removed(tuple(name for name in taken.evicted if isinstance(name, bytes))))
            self._at(now + taken.computed / self.settings.prefill_tps, prefilled)

        def prefilled(now: float) -> None:
            self._prefilling = False
            first(now)
            self._at(now + self.settings.decode_s * (tokens - 1), leave)
            self._prefill_next(now)

        def leave(now: float) -> None:
            self._running -= 1
            done(now)
            if self._waiting:
                self._waiting.popleft()(now)

        if self._running < self.settings.slots:
            enter(now)
        else:
            self._waiting.append(enter)

    def _prefill_next(self, now: float) -> None:
        if not self._prefilling and self._prefills:
            self._prefilling = True
            self._prefills.popleft()(now)


def simulate(
    name: str,
    policy: type[RouterPolicy],
    played: Sequence[tuple[str, Sequence[Prompt]]],
    *,
    workers: int,
    settings: Settings,
    think: Think,
    tokens: int,
    told: bool,
) -> Played:
    """Play conversations, each a name and its turns; with `told` workers say what they hold and what they drop.

    Raises `RuntimeError` if the router finds no worker.
    """
    router = Router(RouterConfig(max_index_blocks=1 << 20), lambda _: policy)
    draw = random.Random(f"{think.seed}/router")
    events: list[tuple[float, int, Event]] = []
    numbers = itertools.count()

    def at(when: float, event: Event) -> None:
        heapq.heappush(events, (when, next(numbers), event))

    engines: dict[str, _Engine] = {}
    for number in range(workers):
        worker = router.register(f"http://{number}", "mixed", 0.0)
        router.health(worker, True, 0.0)
        engine = engines[worker.url] = _Engine(settings, at)
        if told:
            router.reported_kv.begin(worker, BLOCK_TOKENS, "one")
            engine.tell = partial(router.reported_kv.apply, worker)
    waiting = list(reversed(played))
    first_s: list[float] = []

    def user(now: float) -> None:
        if waiting:
            conversation, turns = waiting.pop()
            turn(now, random.Random(f"{think.seed}/{conversation}"), list(reversed(turns)))

    def turn(now: float, pause: random.Random, turns: list[Prompt]) -> None:
        if not turns:
            user(now)
            return
        prompt = turns.pop()
        chosen = router.select(prompt.request, now, draw.random())
        if not isinstance(chosen, Selection):
            raise RuntimeError(chosen.message)

        def first(then: float) -> None:
            chosen.first_token()
            first_s.append(then - now)

        def done(then: float) -> None:
            router.served(chosen, then)
            chosen.release()
            at(then + pause.expovariate(1 / think.mean_s), lambda later: turn(later, pause, turns))

        engines[chosen.decode.url].generate(now, prompt, tokens, first, done)

    for number in range(think.users):
        at(think.mean_s * number / think.users, user)
    now = 0.0
    while events:
        now, _, event = heapq.heappop(events)
        event(now)
    seen = tuple(
        {"prompt_tokens": one.cache.seen.prompt_tokens, "cached_tokens": one.cache.seen.cached_tokens}
        for one in engines.values()
    )
    return Played(name, think.seed, think.users, tuple(first_s), now, 0.0, seen)
