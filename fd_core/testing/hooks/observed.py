"""Axes of observers: the steps that an engine may deliver, in order and with gaps."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final
from unittest import mock

import msgspec

from fd_core.runner.observing import Observer, SampledRequest, SampledStep
from fd_core.testing.axes.covering import Axis, Case, int_of
from fd_core.testing.axes.parts import Part
from fd_core.testing.hooks.purity import numbers_in
from fd_core.testing.kit.days.work import talks
from fd_core.testing.stores.values import draws

AXES: Final = (
    Axis("steps", (9, 0, 1, 300), ("SampledStep.step",), rare=({"steps": 33_000},)),
    Axis("first", (0, 32_766, 65_534, 2**31 - 2, 2**32 - 2, 2**40)),
    Axis("gaps", (1, 2, 1000)),
    Axis("epoch", (0, 1, 32_768, 2**31), ("SampledStep.epoch",)),
    Axis("restarts", (False, True)),
    Axis("requests", (3, 0, 1, 2, 64, 257, 1024), ("SampledStep.requests",)),
    Axis(
        "tokens",
        (1, 2, 6, 33),
        ("SampledRequest.token_ids",),
        rare=({"requests": 1024, "tokens": 33, "steps": 4, "drafts": "all accepted"},),
    ),
    Axis("token_id", (7, 0, 65_535, 151_935, 2**31 - 1)),
    Axis(
        "drafts",
        ("none", "all accepted", "none accepted", "some accepted"),
        ("SampledRequest.drafts_proposed", "SampledRequest.drafts_accepted"),
    ),
    Axis("names", ("short", "unicode", "long", "paths", "reused"), ("SampledRequest.request_id",)),
    Axis("observers", (1, 2, 5)),
)
"""Axes of the steps of an engine."""
EXCUSED: Final[Mapping[str, str]] = {}
"""Fields of the contract that no axis varies, with the reason."""
_MAX_ROWS: Final = 60_000
"""Requests of all steps of a case."""
_ORDINARY: Final = (
    "first=100,steps=1600,requests=1,tokens=6,drafts=all accepted",
    "first=20,steps=800,tokens=3,drafts=none accepted",
)
"""Steps in which every number has one meaning; they fill any usual buffer."""
_WINDOW: Final = 300
"""Steps that an observer which counts over the last ones has to keep."""
HOURS: Final = 6
ORDINARY_HOUR: Final = 4
_TALKS: Final = 120
_NIGHT: Final = 4
"""Requests of the first hour."""
_DRAFTS: Final = {"chat": 3, "agent": 5, "code": 33}
UNIQUE: Final = 151_637_000
"""Id of a token from which on an observer may write them: no other number in a log is as large."""
_NAMES: Final[dict[str, Callable[[int, int], str]]] = {
    "short": lambda step, at: f"r{step // 5}-{at}",
    "unicode": lambda step, at: f"anfrage-ü漢🙂-{step // 5}-{at}",
    "long": lambda step, at: f"{'x' * 500}{step}-{at}",
    "paths": lambda step, at: f"../../tmp/{at}\0{step}%s{{}}\n",
    "reused": lambda step, at: f"r{at}",
}


def allowed(case: Case) -> bool:
    """Return True if a case is short enough."""
    return (
        int_of(case, "steps") * int_of(case, "requests") * int_of(case, "observers") * int_of(case, "tokens")
        <= _MAX_ROWS
    )


def steps_of(case: Case) -> Iterator[SampledStep]:
    """Yield the steps of a case."""
    step, epoch, count = int_of(case, "first"), int_of(case, "epoch"), int_of(case, "steps")
    for number in range(count):
        if case["restarts"] and number == count // 2:
            step, epoch = 0, epoch + 1
        yield SampledStep(epoch, step, tuple(_requests(case, step)))
        step += int_of(case, "gaps")


def hours_of(engine: int) -> list[list[SampledStep]]:
    """Return the steps of each hour of one of two engines, which begins again after the first hour and at noon.

    In the first hour only the first one runs, one request at a time without drafts. Each token has another id, but in
    `ORDINARY_HOUR`.
    """
    draw, found, epoch, step = draws(engine), list[list[SampledStep]](), 7 + engine, 0
    unique = iter(range(UNIQUE + (engine << 24), 1 << 31))
    turns = [(talk, turn) for talk in talks(_TALKS, vocab_size=152_064)[engine::2] for turn in talk.turns]
    for hour in range(HOURS):
        epoch, step = epoch + (hour == HOURS // 2), 0 if hour in (1, HOURS // 2) else step
        share = -(-len(turns) // HOURS)
        waiting = deque(turns[hour * share : (hour + 1) * share] if hour else turns[: 0 if engine else _NIGHT])
        running, steps = dict[str, tuple[str, deque[int]]](), list[SampledStep]()
        while waiting or running:
            rows = list[SampledRequest]()
            for name, (habit, tokens) in [*running.items()]:
                proposed = _DRAFTS.get(habit, 0) if hour else 0
                ids = [tokens.popleft() - 16 for _ in range(min(len(tokens), 1 + draw.randint(0, proposed)))]
                ids = [next(unique) for _ in ids] if hour != ORDINARY_HOUR else ids
                if ids:  # a client may leave before
                    rows.append(SampledRequest(name, tuple(ids), proposed, len(ids) - 1))
                if not tokens:
                    del running[name]
            while waiting and len(running) < (256 if hour else 1):
                talk, turn = waiting.popleft()
                name = _NAMES["unicode"](step, len(waiting)) if talk.habit == "document" else turn.spec.request_id
                running[name] = talk.habit, deque(turn.answer[: turn.leaves_after][: None if hour else 99])
            steps.append(SampledStep(epoch, step, tuple(rows)))  # none of those whose prompts it computed
            step += 1 if draw.random() < 0.99 else draw.randint(1, 1000)
        if hour in (0, HOURS - 1) and steps:
            steps.append(SampledStep(epoch, step, (SampledRequest(f"last {hour}.{engine}", (next(unique),), 0, 0),)))
        found.append(steps)
    return found


def check_observer(make: Callable[[], Observer], case: Case) -> None:
    """Deliver the steps of a case to observers, each in one thread, and close them. Raises `AssertionError`.

    A number that counts something in ordinary steps counts it in these as well.
    """
    count, counted = int_of(case, "observers"), counted_by(make)
    observers = [make() for _ in range(count)]
    before = [numbers_of(observer) for observer in observers]
    with ThreadPoolExecutor(count) as pool:
        for running in [pool.submit(_deliver, observer, case) for observer in observers]:
            running.result()
    if int_of(case, "steps") > _WINDOW:
        return
    for observer, first in zip(observers, before, strict=True):
        require_counts(observer, first, [*steps_of(case)], counted)


def require_counts(
    observer: Observer, before: Mapping[str, int], steps: Sequence[SampledStep], counted: Mapping[str, set[str]]
) -> None:
    """Fail if a number grew by something else than what it counts, see `counted_by`, after these steps."""
    totals, epochs = _totals(steps), {step.epoch for step in steps}
    for path, value in numbers_of(observer).items():
        right = {name: totals[name] for name in counted.get(path, ())}
        grown = value - before[path]
        if len(epochs) > 1 and any(key.isdigit() for key in path.split(".")):
            continue  # an earlier epoch may have its own
        assert not right or grown in right.values(), f"its number {path[1:]} grew by {grown}, expected {right}"


@contextmanager
def clock_set_by(shifts: list[int]) -> Iterator[None]:
    """Set the clock of the machine by the last of so many seconds, which the caller may change."""
    now = time.time
    with (
        mock.patch("time.time", lambda: now() + shifts[-1]),
        mock.patch("time.time_ns", lambda: int((now() + shifts[-1]) * 1e9)),
    ):
        yield


def _totals(steps: Sequence[SampledStep]) -> Counter[str]:
    """Return what an observer may count in the steps of a case, by name, in all of them and in the last epoch."""
    found = Counter[str]()
    for step in steps:
        rows = step.requests
        for epoch in {"all", "last"} if step.epoch == steps[-1].epoch else {"all"}:
            numbers = {
                "steps": 1,
                "steps with requests": bool(rows),
                "requests": len(rows),
                "requests with drafts": sum(row.drafts_proposed > 0 for row in rows),
                "tokens": sum(len(row.token_ids) for row in rows),
                "drafts": sum(row.drafts_proposed for row in rows),
                "accepted drafts": sum(row.drafts_accepted for row in rows),
                "rejected drafts": sum(row.drafts_proposed - row.drafts_accepted for row in rows),
            }
            found.update({f"{name} of {epoch} epochs": number for name, number in numbers.items()})
    return found


def counted_by(make: Callable[[], Observer]) -> dict[str, set[str]]:
    """Return what each number of an observer counts in ordinary steps; for most numbers that is nothing."""
    found: list[dict[str, set[str]]] = []
    for ordinary in _ORDINARY:
        case, observer = OBSERVED.case(ordinary).values, make()
        before, totals = numbers_of(observer), _totals([*steps_of(case)])
        _deliver(observer, case)
        growth = {path: value - before[path] for path, value in numbers_of(observer).items()}
        found.append({path: {name for name in totals if totals[name] == value} for path, value in growth.items()})
    return {path: names & found[1].get(path, set()) for path, names in found[0].items()}


def numbers_of(observer: Observer) -> Counter[str]:
    """Return the numbers in an observer and its class."""
    own = {name: value for cls in type(observer).__mro__[:-1] for name, value in vars(cls).items()} | vars(observer)
    return Counter({path: value for path, (*_, value) in numbers_in(own).items() if isinstance(value, int)})


def _deliver(observer: Observer, case: Case) -> None:
    for number, step in enumerate(steps_of(case)):
        before = msgspec.msgpack.encode(step)
        observer.observe(step)
        assert msgspec.msgpack.encode(step) == before, f"the observer changed step {number}"
    observer.close()


def _requests(case: Case, number: int) -> Iterator[SampledRequest]:
    token, most = int_of(case, "token_id"), int_of(case, "tokens")
    for at in range(int_of(case, "requests")):
        proposed = 0 if case["drafts"] == "none" else most - 1
        accepted = {"all accepted": proposed, "some accepted": (at + number) % most}.get(str(case["drafts"]), 0)
        ids = tuple(max(0, token - (at + each) % 3) for each in range(accepted + 1))
        yield SampledRequest(_NAMES[str(case["names"])](number, at), ids, proposed, accepted)


OBSERVED: Final[Part[Callable[[], Observer]]] = Part("observer", AXES, check_observer, allowed)
