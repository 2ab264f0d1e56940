"""Lifetime: counters, memory and cost after many requests, and with many that wait."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Mapping
from typing import Any, Final

import pytest

from fd_core.config import Limits
from fd_core.kv.prefix import PrefixHasher
from fd_core.scheduling.contract import SchedulerSetup
from fd_core.scheduling.operations.kv_offloading import OffloadSelection
from fd_core.scheduling.policies import FairShare, Fcfs, SchedulingPolicy
from fd_core.scheduling.requests import QueuedRequest
from fd_core.scheduling.victims import FewestTokens
from fd_core.testing.kit.law import require
from fd_core.testing.schedulers.driver import SchedulerTarget
from fd_core.testing.schedulers.scripted import CountedInt, ScriptedRun, count_bytecodes, count_bytes
from fd_core.testing.stepping.texts import greedy
from fd_core.types import FinishReason, RequestSpec

_LIFE = 66_000
"""Requests of a slot: more than 2^16 steps, generations and arrivals."""
_SERVED = 1000
"""Requests after which memory is compared."""
_MAX_BYTES = 4
"""Bytes that may remain of each request on average."""
_FEW, _MANY = 64, 2048
"""Numbers of waiting requests whose costs are compared."""


class _Counted(Fcfs):
    def rank(self, request: QueuedRequest) -> tuple[int, ...]:
        return (CountedInt(request.arrival),)


def _run(
    target: SchedulerTarget, policy: SchedulingPolicy | None = None, keep: OffloadSelection | None = None, **limits: int
) -> ScriptedRun:
    chosen = Limits(**{**_SMALL, **limits})
    hasher = None if "prefix_caching" in target.lacks else PrefixHasher(block_size=chosen.block_size, identity="kit")
    keep = None if "storage" in target.lacks else keep
    setup = SchedulerSetup(limits=chosen, policy=policy or Fcfs(), victims=FewestTokens(), hasher=hasher, keep_kv=keep)
    return ScriptedRun(target.make, setup)


_SMALL: dict[str, int] = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 64,
    "max_model_len": 64,
    "block_size": 4,
    "num_kv_blocks": 16,
    "vocab_size": 257,
}


def _short(number: int) -> RequestSpec:
    """Return a request of one token; its prompt and id are those of no other one."""
    return greedy(f"request {number}", (number % 250, number // 250 % 250, number // 62_500, 7, 8), 1)


def _serve(run: ScriptedRun, first: int, upto: int) -> None:
    """Serve requests one after the other, each in one step, and check what a client gets."""
    for number in range(first, upto):
        spec = _short(number)
        run.perform(run.scheduler.add(spec).operations)
        plan, deltas = run.step()
        what = f"request {number} of one slot"
        if plan is None or len(plan.admissions) != 1:
            raise AssertionError(f"{what}: expected a plan that admits it, got {plan}")
        require(plan.step == number, "1.5", f"{what}: expected step {number}, got {plan.step}")
        gen = plan.admissions[0].gen
        require(gen == int(plan.gens[0]) > number, "1.5", f"{what} has gen {gen}, after {number} others")
        got = [(each.request_id, each.token_ids, each.finish_reason) for each in deltas]
        right = [(spec.request_id, (number % 251,), FinishReason.LENGTH)]
        require(got == right, "1.1", f"{what}: expected {right}, got {got}")


@pytest.mark.law("1.1", "1.5", "3.6")
@pytest.mark.fd_pairs
def test_counters_grow_beyond_sixteen_bits(target: SchedulerTarget) -> None:
    run = _run(target)
    _serve(run, 0, _LIFE)
    require(run.scheduler.held().idle, "3.6", f"after {_LIFE} requests it holds {run.scheduler.held()}")
    run.scheduler.add(greedy("whole pool", range(63), 1))
    plan, _ = run.step()
    blocks = 0 if plan is None else sum(len(grant.blocks) for grant in plan.grants)
    require(blocks == 16, "3.6", f"after {_LIFE} requests, one that needs all 16 blocks gets {blocks}")


@pytest.mark.law("3.6")
def test_memory_does_not_grow_with_requests(target: SchedulerTarget) -> None:
    run, served = _run(target, FairShare(), OffloadSelection(False, True, False)), 300
    _serve(run, 0, served)
    tracemalloc.start()
    try:
        sizes = []
        for count in (200, _SERVED):  # the first ones fill what grows to a limit
            _serve(run, served, served + count)
            served += count
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    grown = sizes[1] - sizes[0]
    require(grown <= _SERVED * _MAX_BYTES, "3.6", f"after {_SERVED} requests that ended it holds {grown} bytes more")


_WAITING: Final[Mapping[str, Callable[[int], RequestSpec]]] = {
    "slots": lambda number: greedy(f"waits {number}", (number % 250, number // 250, 1), 8),
    "turns": lambda number: greedy(f"waits {number}", (number % 250, number // 250, 1), 8, tenant=f"tenant {number}"),
    "prefix": lambda number: greedy(f"waits {number}", range(12), 8),
    "grammars": lambda number: greedy(f"waits {number}", (number % 250, 1), 8, grammar=f"start: /{number}/"),
}
"""Requests by number, by what they wait for."""


@pytest.mark.law("2.6")
@pytest.mark.parametrize("waits_for", list(_WAITING))
def test_cost_does_not_grow_with_waiting_requests(target: SchedulerTarget, waits_for: str) -> None:
    """Count the bytecodes and the memory of each call."""
    waiting, costs = _WAITING[waits_for], list[dict[str, int]]()
    for count in (_FEW, _MANY):
        policy = FairShare() if waits_for == "turns" else _Counted()
        run = _run(target, policy, max_num_seqs=8, max_model_len=400, num_kv_blocks=800)
        scheduler = run.scheduler
        for number in range(8):
            scheduler.add(greedy(f"runs {number}", (250, number), 300))
        run.step()
        for number in range(count):
            run.perform(scheduler.add(waiting(number)).operations)
        for _ in range(20):
            run.step()
        costs.append(_costs_of(run, count, waiting))
    few, many = costs
    grown = {name: (few[name], many[name]) for name in few if many[name] > 1.5 * few[name] + 1000}
    what = f"(bytecodes, or bytes) of {grown} with {_FEW} and {_MANY} waiting requests"
    require(not grown, "2.6", f"the cost of a call grows with the queue: {what}")


def _costs_of(run: ScriptedRun, count: int, waiting: Callable[[int], RequestSpec]) -> dict[str, int]:
    """Return the cost of each call, the least of several: a table or a heap may grow in one of them."""
    scheduler, found = run.scheduler, dict[str, list[int]]()

    def measure(name: str, call: Callable[[], Any]) -> None:
        results: list[Any] = []
        found.setdefault(name, []).append(count_bytecodes(lambda: results.append(call())))
        if name == "plan":
            plan, _ = results[0]
            results.clear()
            measure("commit", lambda: scheduler.commit(plan, run.output(plan)))

    def measure_bytes(name: str, call: Callable[[], Any]) -> Any:
        results: list[Any] = []
        found.setdefault(f"{name} (memory)", []).append(count_bytes(lambda: results.append(call())))
        return results[0]

    for number in range(5):
        measure("plan", scheduler.plan)
        measure("add", lambda: scheduler.add(waiting(count + number)))  # noqa: B023 - called at once
        measure("abort", lambda: scheduler.abort(f"waits {count // 2 + number}"))  # noqa: B023
        measure("has_work", lambda: scheduler.has_work)
        if len(run.compiling) > 1:
            measure("complete", run.compiled)
        plan = measure_bytes("plan", scheduler.plan)[0]
        output = run.output(plan)
        measure_bytes("commit", lambda: scheduler.commit(plan, output))  # noqa: B023
    return {name: min(each) for name, each in found.items()}
