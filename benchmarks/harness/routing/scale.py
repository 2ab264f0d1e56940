"""Cost of many workers to one router: its own modules, without HTTP, in processor time of this process."""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from fd_core.plugins import ROUTER_POLICY, Plugins
from fd_core.router.config import RouterConfig
from fd_core.router.gateway.requests.state import GatewayMetrics
from fd_core.router.router import Router
from fd_core.router.selection import RouteRequest, Selection
from fd_core.router.workers import RouterWorker
from fd_core.types import IntArray
from fd_core.types.kv_events import BEGINNING, KVEvent, KVPage, Removed, Stored, StoredBlocks

__all__ = ["Events", "Load", "Placing", "events", "placing", "shown"]

BLOCK_TOKENS = 32
"""Tokens in a block of a worker."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that are alike: a system prompt that every worker holds, and a conversation of one's own."""

    shared_tokens: int = 1024
    own_tokens: int = 1024
    in_flight: int = 4
    """Requests of each worker."""
    conversations: int = 4
    """Conversations that each worker holds."""


@dataclass(frozen=True, slots=True)
class Placing:
    """Milliseconds of one request in the router, and bytes that it stores."""

    select_ms: float
    """Choosing and counting, the median of those that were timed."""
    rest_ms: float
    """First token, verdict and release."""
    snapshot_ms: float
    """Everything for the live page."""
    metrics_ms: float
    metrics_bytes: int
    register_us: float
    """A worker registers again, as each does every ten seconds."""
    health_us: float
    """One result of a health check."""


def placing(workers: int, policy: str, *, kv_events: bool, load: Load, times: int = 200) -> Placing:
    """Place requests on `workers` workers at a steady load; with `kv_events` workers publish their KV blocks."""
    draw = random.Random(1)
    router = _router(policy)
    members = _members(router, workers)
    shared = _tokens(draw, load.shared_tokens)
    own = [_tokens(draw, load.own_tokens) for _ in range(min(workers * load.conversations, 4000))]
    if kv_events:
        _publish(router, members, shared, own, load)
    running: list[Selection] = []
    selecting, resting = [], []
    for number in range(workers * load.in_flight + times):
        tail = own[draw.randrange(len(own))]
        request = RouteRequest(np.concatenate([shared, tail]), session=str(number % len(own)))
        taken, chosen = _timed(partial(router.select, request, 1.0, draw.random()))
        assert isinstance(chosen, Selection)
        running.append(chosen)
        if len(running) > workers * load.in_flight:
            ended = running.pop(draw.randrange(len(running)))
            rest, _ = _timed(partial(_end, router, ended))
            selecting.append(taken)
            resting.append(rest)
        else:
            chosen.first_token()
    metrics = GatewayMetrics(router)
    text = asyncio.run(metrics.text())
    worker = members[len(members) // 2]
    return Placing(
        select_ms=1e3 * statistics.median(selecting),
        rest_ms=1e3 * statistics.median(resting),
        snapshot_ms=1e3 * _least(router.snapshot),
        metrics_ms=1e3 * _least(lambda: list(metrics.collect())),
        metrics_bytes=len(text),
        register_us=1e6 * _least(partial(router.register, worker.url, "mixed", 1.0, instance=_instance(worker))),
        health_us=1e6 * _least(partial(router.health, worker, True, 1.0, instance=_instance(worker))),
    )


@dataclass(frozen=True, slots=True)
class Events:
    """Cost of KV events to a router, for each block of a worker."""

    stored_us: float
    """A stored block: its event decoded and applied, in events of a whole prompt each."""
    removed_us: float
    wire_bytes: float
    """Bytes of a stored block on the wire."""
    reported_bytes: float
    """Memory in the router for a block that a worker reports."""
    served_bytes: float
    """Memory in the router for a block of a prompt that a worker served, if workers do not report."""
    late_ms: float
    """Milliseconds of a new router to apply all blocks of one worker."""


def events(blocks: int, prompt_blocks: int = 64, workers: int = 4) -> Events:
    """Let `workers` workers hold `blocks` blocks each, in prompts of so many blocks."""
    draw = random.Random(2)
    router = _router("cache_aware")
    members = _members(router, workers)
    pages = [list(_stored(draw, blocks // prompt_blocks, prompt_blocks)) for _ in members]
    wire = [[msgspec.msgpack.encode(_page((event,))) for event in page] for page in pages]
    decoder = msgspec.msgpack.Decoder(KVPage)
    count = len(members) * (blocks // prompt_blocks) * prompt_blocks

    def follow() -> None:
        for worker in members:
            router.reported_kv.begin(worker, BLOCK_TOKENS, _instance(worker))
        for worker, page in zip(members, wire, strict=True):
            for data in page:
                for event in decoder.decode(data).events:
                    router.reported_kv.apply(worker, event)

    taken, _ = _timed(follow)
    for worker in members:
        router.reported_kv.end(worker)
    held = _grown(follow)
    late = StoredBlocks(BLOCK_TOKENS)
    for event in pages[0]:
        late.apply(event)
    whole = msgspec.msgpack.encode(_page(late.events()))

    def catch_up() -> None:
        router.reported_kv.begin(members[0], BLOCK_TOKENS, _instance(members[0]))
        for event in decoder.decode(whole).events:
            router.reported_kv.apply(members[0], event)

    caught, _ = _timed(catch_up)
    removed = [[Removed(event.keys) for event in page] for page in pages]

    def lose() -> None:
        for worker, page in zip(members, removed, strict=True):
            for event in page:
                router.reported_kv.apply(worker, event)

    lost, _ = _timed(lose)
    served = _grown(partial(_serve, router, pages[0], draw))
    return Events(
        stored_us=1e6 * taken / count,
        removed_us=1e6 * lost / count,
        wire_bytes=sum(len(data) for page in wire for data in page) / count,
        reported_bytes=held / count,
        served_bytes=served / (blocks // prompt_blocks * prompt_blocks * BLOCK_TOKENS // 64),
        late_ms=1e3 * caught,
    )


def shown(ms: float) -> str:
    """Return milliseconds with as many digits as mean something."""
    return f"{ms:.3f}" if ms < 0.1 else f"{ms:.2f}" if ms < 10 else f"{ms:,.0f}"


def _router(policy: str) -> Router:
    plugins = Plugins.discover([])
    return Router(RouterConfig(policy=policy), partial(plugins.load, ROUTER_POLICY))


def _instance(worker: RouterWorker) -> str:
    return f"process of {worker.url}"


def _members(router: Router, count: int) -> list[RouterWorker]:
    made = []
    for number in range(count):
        worker = router.register(f"http://fd-core-mixed-{number}.fd-core-mixed.llm.svc:8000", "mixed", 0.0)
        made.append(router.health(worker, True, 0.0, instance=_instance(worker)))
        router.registry.serves(made[-1], ["a model"])
    return made


def _tokens(draw: random.Random, count: int) -> IntArray:
    return np.frombuffer(draw.randbytes(4 * count), "<i4") & 0x1FFFF


def _end(router: Router, selection: Selection) -> None:
    with selection:
        selection.first_token()
        router.served(selection, 1.0)


def _publish(
    router: Router, members: Sequence[RouterWorker], shared: IntArray, own: Sequence[IntArray], load: Load
) -> None:
    for number, worker in enumerate(members):
        router.reported_kv.begin(worker, BLOCK_TOKENS, _instance(worker))
        parent = _report(router, worker, BEGINNING, shared, b"s")
        for each in range(load.conversations):
            tail = (number * load.conversations + each) % len(own)
            _report(router, worker, parent, own[tail], b"o%d" % tail)


def _report(router: Router, worker: RouterWorker, parent: bytes, tokens: IntArray, name: bytes) -> bytes:
    keys = tuple(b"%s-%d" % (name, block) for block in range(len(tokens) // BLOCK_TOKENS))
    router.reported_kv.apply(worker, Stored(parent, keys, tokens.astype("<i4").tobytes()))
    return keys[-1]


def _stored(draw: random.Random, prompts: int, blocks: int) -> Iterator[Stored]:
    for _ in range(prompts):
        keys = tuple(draw.randbytes(16) for _ in range(blocks))
        yield Stored(BEGINNING, keys, _tokens(draw, blocks * BLOCK_TOKENS).astype("<i4").tobytes())


def _page(events: tuple[KVEvent, ...]) -> KVPage:
    return KVPage(instance="one", reading="r" * 32, block_size=BLOCK_TOKENS, next=1, events=events)


def _serve(router: Router, page: Sequence[Stored], draw: random.Random) -> None:
    """Route the prompts of a page to a worker that publishes no events."""
    for event in page:
        chosen = router.select(RouteRequest(np.frombuffer(event.tokens, "<i4")), 1.0, draw.random())
        assert isinstance(chosen, Selection)
        _end(router, chosen)


def _timed(work: Callable[[], object]) -> tuple[float, object]:
    begun = time.process_time()
    result = work()
    return time.process_time() - begun, result


def _least(work: Callable[[], object], times: int = 7) -> float:
    """Return the least processor seconds of a call; those too short to be seen by the clock are repeated."""
    once = max(_timed(work)[0], 1e-7)
    repeats = max(1, min(2000, int(2e-3 / once)))

    def repeated() -> None:
        for _ in range(repeats):
            work()

    return min(_timed(repeated)[0] for _ in range(times)) / repeats


def _grown(work: Callable[[], object]) -> int:
    """Return the bytes that a call leaves allocated."""
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    work()
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return grown
