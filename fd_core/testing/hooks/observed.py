"""Axes of observers: the steps that an engine may deliver, in order and with gaps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from fd_core.runner.observing import Observer, SampledRequest, SampledStep
from fd_core.testing.axes.covering import Axis, Case, int_of
from fd_core.testing.axes.parts import Part

AXES: Final = (
    Axis("steps", (9, 0, 1, 300), ("SampledStep.step",), rare=({"steps": 33_000},)),
    Axis("first", (0, 32_766, 65_534, 2**31 - 2, 2**32 - 2, 2**40)),
    Axis("gaps", (1, 2, 1000)),
    Axis("epoch", (0, 1, 32_768, 2**31), ("SampledStep.epoch",)),
    Axis("restarts", (False, True)),
    Axis("requests", (3, 0, 1, 2, 64, 257, 1024), ("SampledStep.requests",)),
    Axis("tokens", (1, 2, 6, 33), ("SampledRequest.token_ids",)),
    Axis("token_id", (7, 0, 65_535, 151_935, 2**31 - 1)),
    Axis(
        "drafts",
        ("none", "all accepted", "none accepted"),
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


def check_observer(make: Callable[[], Observer], case: Case) -> None:
    """Deliver the steps of a case to observers, each in one thread, and close them. Raises `AssertionError`."""
    count = int_of(case, "observers")
    observers = [make() for _ in range(count)]
    with ThreadPoolExecutor(count) as pool:
        for running in [pool.submit(_deliver, observer, case) for observer in observers]:
            running.result()


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
        accepted = proposed if case["drafts"] == "all accepted" else 0
        ids = tuple(max(0, token - (at + each) % 3) for each in range(accepted + 1))
        yield SampledRequest(_NAMES[str(case["names"])](number, at), ids, proposed, accepted)


OBSERVED: Final[Part[Callable[[], Observer]]] = Part("observer", AXES, check_observer, allowed)
