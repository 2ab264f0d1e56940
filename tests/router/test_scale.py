"""The cost of a request is independent of the number of workers, except for numpy passes over columns."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest

from fd_core.plugins import builtin
from fd_core.router.router import Router
from fd_core.router.selection import NoWorker
from fd_core.types.kv_events import BEGINNING, Stored
from tests.router.helpers import add, chosen, refused, request, router_of, serve

PROMPT = list(range(64))
POLICIES = [entry.name for entry in builtin.fd_register_router_policies()]


class Cost(NamedTuple):
    """Count what Python does in one selection; passes of numpy over columns count as one call."""

    calls: int
    opcodes: int  # those of loops within a line included


def cost(router: Router) -> Cost:
    """Return the cost of one selection, without that of a garbage collection that happens to begin in it."""
    counts: Counter[str] = Counter()

    def seen(frame: FrameType, event: str, _argument: Any) -> Any:
        counts[event] += 1
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return seen

    before = sys.gettrace()
    gc.disable()
    sys.settrace(seen)
    try:
        selection = chosen(router.select(request(PROMPT, model="m"), 1.0, 0.5))
    finally:
        sys.settrace(before)
        gc.enable()
    selection.release()
    return Cost(counts["call"], counts["opcode"])


def fleet(count: int, policy: str, *, published: bool) -> Router:
    router = router_of(mixed=count, policy=policy, cache_block_size=4)
    for worker in router.workers():
        router.serves(worker, ["m"])
        if published:
            router.reported_kv.begin(worker, 4, "p")
            event = Stored(BEGINNING, tuple(b"%d" % block for block in range(8)), np.arange(32, dtype="<i4").tobytes())
            router.reported_kv.apply(worker, event)
    for number in range(20):
        serve(router, PROMPT[: 8 + number], rng=number / 20)
    chosen(router.select(request(PROMPT, model="m"), 1.0, 0.5)).release()
    return router


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("published", [False, True])
def test_selection_does_no_work_per_worker(policy: str, published: bool) -> None:
    few, many = (cost(fleet(count, policy, published=published)) for count in (10, 300))
    assert many.calls <= few.calls + 5
    assert many.opcodes <= few.opcodes + 300


def test_selection_with_an_open_breaker_does_no_work_per_worker() -> None:
    router = fleet(300, "request_num", published=False)
    with chosen(router.select(request(model="m"), 1.0, 0.0)) as selection:
        router.failed(selection, selection.decode, 1.0, severe=True)
    chosen(router.select(request(model="m"), 1.0, 0.0)).release()
    assert cost(router).calls < 100


def test_every_worker_change_is_seen_by_the_next_request() -> None:
    router = router_of(mixed=2, policy="request_num", circuit_open_secs=5.0)

    def choices(now: float, model: str = "m") -> set[str]:
        found = set()
        for draw in (0.0, 0.9):
            answer = router.select(request(model=model), now, draw)
            if not isinstance(answer, NoWorker):
                found.add(answer.decode.url)
                answer.release()
        return found

    one, two = router.workers()
    both = {one.url, two.url}
    assert choices(0.0) == both
    router.leaving(one)
    assert choices(0.0) == {two.url}
    one = add(router, one.url, instance="again")
    assert choices(0.0) == both
    router.serves(one, ["m"])
    router.serves(two, ["other"])
    assert choices(0.0) == {one.url} and choices(0.0, "other") == {two.url}
    router.serves(two, ["m", "other"])
    assert choices(0.0) == both
    with chosen(router.select(request(), 0.0, 0.0)) as selection:
        failed = selection.decode
        router.failed(selection, failed, 0.0, severe=True)
    assert choices(0.0) == both - {failed.url}
    assert choices(6.0) == both, "time alone closes the breaker"
    router.health(two, False, 6.0)
    assert choices(6.0) == {one.url}
    router.health(two, True, 6.0, role="decode")
    assert choices(6.0) == {one.url}, "it reports another role"
    router.deregister(one.url, 6.0)
    refused(router.select(request(), 6.0, 0.0))
