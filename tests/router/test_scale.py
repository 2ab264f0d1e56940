"""What a request costs does not grow with the workers, but for a few passes over their list."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from fd_core.kv.events import BEGINNING, Stored
from fd_core.router.router import Router
from fd_core.router.selection import NoWorker
from tests.router.helpers import add, chosen, refused, request, router_of, serve

PROMPT = list(range(64))


def calls(router: Router) -> int:
    """Return how many Python functions one selection calls; what is done for each worker must not be one of them."""
    count = 0

    def seen(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        selection = chosen(router.select(request(PROMPT, model="m"), 1.0, 0.5))
    finally:
        sys.setprofile(before)
    selection.release()
    return count


def fleet(count: int, policy: str, *, told: bool) -> Router:
    router = router_of(mixed=count, policy=policy, cache_block_size=4)
    for worker in router.workers():
        router.serves(worker, ["m"])
        if told:
            router.reported_kv.begin(worker, 4, "p")
            event = Stored(BEGINNING, tuple(b"%d" % block for block in range(8)), np.arange(32, dtype="<i4").tobytes())
            router.reported_kv.apply(worker, event)
    for number in range(20):
        serve(router, PROMPT[: 8 + number], rng=number / 20)
    chosen(router.select(request(PROMPT, model="m"), 1.0, 0.5)).release()
    return router


@pytest.mark.parametrize("policy", ["request_num", "process_tokens", "cache_aware"])
@pytest.mark.parametrize("told", [False, True])
def test_choosing_calls_no_function_for_each_worker(policy: str, told: bool) -> None:
    few, many = (calls(fleet(count, policy, told=told)) for count in (10, 300))
    assert many <= few + 50


def test_every_change_of_a_worker_is_seen_by_the_next_request() -> None:
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
    assert choices(6.0) == {one.url}, "it says that it is something else"
    router.deregister(one.url, 6.0)
    refused(router.select(request(), 6.0, 0.0))
