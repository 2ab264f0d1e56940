"""Axes of router policies: workers, loads, prompts, history and time; two instances have to agree in each case."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from msgspec.structs import replace

from fd_core.router.config import RouterConfig
from fd_core.router.policies import Candidate, Candidates, RouterPolicy, RoutingContext
from fd_core.router.selection import WorkerLoad
from fd_core.router.workers import ROLES, RouterWorker
from fd_core.testing.axes.covering import Axis, Case, int_of
from fd_core.testing.axes.parts import Part
from fd_core.testing.hooks.purity import another_world
from fd_core.testing.stores.values import draws
from fd_core.types import IntArray

_LOADS: Final[dict[str, Callable[[int, int], tuple[int, int, int]]]] = {
    "rising": lambda at, _: (at % 50, at % 3, 100 * (at % 7)),
    "idle": lambda at, _: (0, 0, 0),
    "equal": lambda at, _: (7, 3, 1000),
    "one idle": lambda at, count: (0, 0, 0) if at == count - 1 else (9, 1, 512),
    "one busy": lambda at, _: (40_000, 33_000, 70_000_000) if at == 0 else (1, 0, 0),
    "near 2^31": lambda at, _: (2**31 - 1 + at % 3, 2**15 + at % 2, 2**31 - 2 + at % 4),
    "near 2^32": lambda at, _: (2**16 - at % 3, 2**16 - 1, 2**32 - 1 + at % 5),
}
"""Requests, waiting requests and prefill tokens of a worker, by its index and the number of workers."""
_HITS: Final[dict[str, Callable[[int, int, int], tuple[int, int]]]] = {
    "falling": lambda at, _, blocks: (max(0, blocks - at), max(0, blocks - at)),
    "none": lambda at, count, blocks: (0, 0),
    "all": lambda at, count, blocks: (blocks, blocks),
    "one": lambda at, count, blocks: (blocks, blocks) if at == count - 1 else (0, 0),
    "expected": lambda at, _, blocks: (min(1, blocks), blocks if at % 2 else min(1, blocks)),
}
"""Hits and expected hits of a worker, by its index, the number of workers, and the blocks of the prompt."""
_URLS: Final[dict[str, Callable[[int], str]]] = {
    "names": lambda at: f"http://worker{at}",
    "ports": lambda at: f"http://127.0.0.1:{8000 + at}",
    "ipv6": lambda at: f"http://[2001:db8::{at:x}]:8000",
    "long": lambda at: f"https://{'w' * 60}.{at}.cluster.local:8443/{'path/' * 30}",
    "unordered": lambda at: f"http://w{at * 7919 % 10_007}",
}
_SESSIONS: Final = (None, "s", "", "ü漢" * 9, "x" * 10_000, "four in turn", "each its own")

_WEIGHTS: Final = (
    *("hit_ratio_weight", "load_balance_weight", "waiting_weight"),
    *("balance_abs_threshold", "balance_rel_threshold", "prefix_hash_slack"),
)
"""Settings that may be 0."""

AXES: Final = (
    Axis("workers", (3, 1, 2, 64, 65, 257, 1000), ("RoutingContext.candidates",)),
    Axis(
        "loads",
        tuple(_LOADS),
        ("WorkerLoad.requests", "WorkerLoad.waiting", "WorkerLoad.prefill_tokens", "Candidate.load"),
    ),
    Axis("hits", tuple(_HITS), ("Candidate.hits", "Candidate.expected_hits")),
    Axis("urls", tuple(_URLS), ("RouterWorker.url", "Candidate.worker")),
    Axis("role", ROLES, ("RouterWorker.role",)),
    Axis("tokens", (256, 1, 63, 65, 4097, 100_000), ("RoutingContext.tokens", "RoutingContext.keys")),
    Axis("token_ids", ("small", "zero", "near 2^31", "alike")),
    Axis("block_size", (64, 1, 16, 65_536), ("RouterConfig.cache_block_size",)),
    Axis("max_sessions", (65_536, 1, 2), ("RouterConfig.max_sessions",)),
    Axis("weights", ("as set", "zero", "large"), tuple(f"RouterConfig.{name}" for name in _WEIGHTS)),
    Axis("session", _SESSIONS, ("RoutingContext.session",)),
    Axis("random", (0.25, 0.0, 2**-53, 0.5, 1 / 3, 1 - 2**-53), ("RoutingContext.random",)),
    Axis(
        "now",
        (1.0, 0.0, 32_767.5, 2_147_483_647.0, 4_294_967_296.5, 1e12),
        ("RoutingContext.now", "RouterPolicy.sweep.now"),
    ),
    Axis("calls", (3, 1, 40)),
    Axis("pace", (1.0, 0.0, 1e-3, 1000.0, 1e6)),
    Axis(
        "change",
        ("none", "one leaves", "the last leaves", "one is away", "one returns", "one joins", "all return", "reversed"),
        ("RouterWorker.incarnation",),
    ),
    Axis("made", ("of columns", "of candidates")),
    Axis("swept", ("after departures", "before each call")),
    Axis("departed", ("at once", "a call later")),
)
"""Axes of a sequence of calls."""
EXCUSED: Final[Mapping[str, str]] = {
    f"RouterConfig.{name}": "a setting of the router, or a weight of a policy of the core, whose own tests vary it"
    for name in RouterConfig.__struct_fields__
    if name not in ("cache_block_size", "max_sessions", *_WEIGHTS)
}
"""Fields of the contract that no axis varies, with the reason."""
_MOST_VIEWS: Final = 100
"""Objects that are made to find a free address."""
_MAX_SHOWN: Final = 20_000
"""Candidates that a case shows to a policy."""


@dataclass(frozen=True, slots=True)
class PolicyUnderTest:
    """A policy and its settings."""

    cls: type[RouterPolicy]
    config: RouterConfig


def allowed(case: Case) -> bool:
    """Return True if a case takes less than about a second."""
    calls, workers, tokens = (int_of(case, name) for name in ("calls", "workers", "tokens"))
    blocks = tokens // int_of(case, "block_size")
    return calls * workers <= _MAX_SHOWN and calls * (tokens / 20 + blocks) <= 3e5


def choices(policy: PolicyUnderTest, case: Case) -> list[int]:
    """Return the indices of the workers that a new instance chooses in a case. Raises `AssertionError`."""
    made = _PolicyInstance(policy, case)
    return [made.choose(*call) for call in made.calls]


def check_policy(policy: PolicyUnderTest, case: Case) -> None:
    """Compare two instances that get equal calls, the second one in another world. Raises `AssertionError`.

    For the second one, `Candidates.once` works everything out again in each call, which changes no choice, and no call
    reuses the memory of an earlier one. A third one, for the workers of another role, is called in between: instances
    share no state.
    """
    one, other = _PolicyInstance(policy, case), _PolicyInstance(policy, case, works_out_again=True)
    urls = "names" if case["urls"] == "ports" else "ports"
    of_another_role = _PolicyInstance(policy, {**case, "urls": urls, "change": "none"})
    held = list[object]()
    with ThreadPoolExecutor(1) as pool:
        for number, (call, again) in enumerate(zip(one.calls, other.calls, strict=True)):
            held.append(again)
            chosen = one.choose(*call)
            of_another_role.choose(*next(of_another_role.calls))
            with another_world(shift=77 + number):
                if case["swept"] == "before each call":  # frees memory, and changes no choice
                    pool.submit(other.sweep, again[1].now).result()
                also = pool.submit(other.choose, *again).result()
            assert chosen == also, f"two instances with equal calls differ at call {number}: workers {chosen}, {also}"


class _PolicyInstance:
    """A new instance of a policy, and its calls."""

    def __init__(self, policy: PolicyUnderTest, case: Case, *, works_out_again: bool = False) -> None:
        sizes = {"cache_block_size": case["block_size"], "max_sessions": case["max_sessions"]}
        weight = {"zero": 0.0, "large": 1e9}.get(str(case["weights"]))
        config = replace(policy.config, **sizes, **({} if weight is None else dict.fromkeys(_WEIGHTS, weight)))
        self._policy = policy.cls(config)
        self.calls = _contexts(policy.cls, config, case, works_out_again=works_out_again)

    def sweep(self, now: float) -> None:
        self._policy.sweep(now)

    def choose(self, workers: list[RouterWorker], context: RoutingContext, gone: list[RouterWorker]) -> int:
        """Return the index of the chosen candidate, after workers departed."""
        for worker in gone:
            self._policy.departed(worker)
            self._policy.departed(replace(worker, url=f"{worker.url}0", incarnation=-1))  # which it never saw
        if gone:
            self._policy.sweep(context.now)
        choice = self._policy.choose(context)
        at = next((at for at, candidate in enumerate(context.candidates) if candidate is choice), None)
        assert at is not None, f"the policy chose {choice!r:.80}, which is no candidate"
        assert context.candidates.workers == tuple(workers), "the policy changed the candidates"
        return at


def _contexts(
    cls: type[RouterPolicy], config: RouterConfig, case: Case, *, works_out_again: bool
) -> Iterator[tuple[list[RouterWorker], RoutingContext, list[RouterWorker]]]:
    """Yield the workers, the context and the departed workers of each call, all of them new objects."""
    count, calls, role = int_of(case, "workers"), int_of(case, "calls"), str(case["role"])
    url, incarnation = _URLS[str(case["urls"])], itertools.count()
    workers = [RouterWorker(url(at), role, next(incarnation)) for at in range(count)]  # type: ignore[arg-type]
    draw, once = draws(count), dict[Callable[..., Any], Any]()
    now, pace = float(case["now"] or 0), float(case["pace"] or 0)
    addresses, left = set[int](), list[RouterWorker]()
    for call in range(calls):
        gone, left = left, []
        if call >= calls // 2 and (call - calls // 2) % 5 == 0:
            workers, left = _changed(str(case["change"]), workers, url, incarnation)
            gone, left = (left, []) if case["departed"] == "at once" else (gone, left)
            once = {}
        away = case["change"] == "one is away" and count > 1  # it is unhealthy, or has failed this request
        shown = workers[call % 2 :] if away else workers
        if works_out_again or away:
            once = {}
        prompt = call * call % 11  # some are new, others as before, without a period; each is a new object
        tokens = _prompt(str(case["token_ids"]), int_of(case, "tokens"), prompt)
        tokens = tokens if works_out_again else _at_old_address(tokens, addresses)
        blocks = len(tokens) // config.cache_block_size
        candidates = _candidates(case, shown, blocks if cls.uses_prefix else None, once, call)
        keys = tuple(b"%d/%d" % (prompt, block) for block in range(blocks)) if cls.uses_prefix else ()
        number = case["random"] if call >= calls - 3 else draw.random()
        session = {"each its own": f"s{call}", "four in turn": f"s{call % 4}"}.get(
            str(case["session"]), case["session"]
        )
        yield shown, RoutingContext(candidates, tokens, keys, session, float(number or 0), now + call * pace), gone  # type: ignore[arg-type]


def _at_old_address(tokens: IntArray, addresses: set[int]) -> IntArray:
    """Return the tokens as an object at the address of an earlier one that was freed, if there is one."""
    views: list[IntArray] = []
    while len(views) < _MOST_VIEWS and not (views and id(views[-1]) in addresses):
        views.append(tokens.view())
    addresses.add(id(views[-1]))
    return views[-1]


def _candidates(
    case: Case, workers: list[RouterWorker], blocks: int | None, once: dict[Callable[..., Any], Any], call: int
) -> Candidates:
    """Return candidates whose loads and hits move by one worker with each call."""
    places = [(at - call) % len(workers) for at in range(len(workers))]
    loads = [_LOADS[str(case["loads"])](at, len(workers)) for at in places]
    hits = [_HITS[str(case["hits"])](at, len(workers), blocks or 0) for at in places]
    if case["made"] == "of candidates":
        rows = zip(workers, loads, hits, strict=True)
        return Candidates.of(Candidate(worker, WorkerLoad(*load), *pair) for worker, load, pair in rows)
    columns = np.array(hits, np.int64).T
    known = {} if blocks is None else {"hits": columns[0], "expected_hits": columns[1]}
    return Candidates(tuple(workers), np.array(loads, np.int64).T, **known, worked_out=once)


def _changed(
    change: str, workers: list[RouterWorker], url: Callable[[int], str], incarnation: Iterator[int]
) -> tuple[list[RouterWorker], list[RouterWorker]]:
    """Return the workers after a change, and those that departed."""
    first, last = workers[0], workers[-1]
    match change:
        case "one leaves" | "the last leaves" if len(workers) > 1:
            gone = first if change == "one leaves" else last
            return [worker for worker in workers if worker is not gone], [gone]
        case "one returns":
            return [replace(first, incarnation=next(incarnation)), *workers[1:]], [first]
        case "all return":
            return [replace(worker, incarnation=next(incarnation)) for worker in workers], workers
        case "one joins":
            return [*workers, replace(first, url=url(len(workers)), incarnation=next(incarnation))], []
        case "reversed":
            return workers[::-1], []
    return workers, []


def _prompt(kind: str, length: int, number: int) -> Any:
    match kind:
        case "zero":
            tokens = np.zeros(length, np.int32)
        case "near 2^31":
            tokens = (2**31 - 1 - np.arange(length, dtype=np.int64)).astype(np.int32)
        case "alike":
            tokens = np.full(length, 9, np.int32)
            tokens[-1] = number
        case _:
            tokens = (np.arange(length, dtype=np.int32) + 17 * number) % 32_000
    tokens.flags.writeable = False
    return tokens


ROUTING: Final[Part[PolicyUnderTest]] = Part("router", AXES, check_policy, allowed)
