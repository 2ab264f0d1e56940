"""Lifetime: counters, memory and cost after many requests, and with many that wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import msgspec
import pytest

from fd_core.errors import BadRequest
from fd_core.kv.prefix import PrefixHasher
from fd_core.scheduling.contract import SchedulerSetup
from fd_core.scheduling.operations.kv_offloading import OffloadSelection
from fd_core.scheduling.policies import FairShare, Fcfs, Priority, SchedulingPolicy
from fd_core.scheduling.requests import QueuedRequest
from fd_core.scheduling.scheduler import ContinuousBatchingScheduler
from fd_core.scheduling.victims import FewestTokens
from fd_core.testing.hooks.purity import require_freed
from fd_core.testing.kit.growth import count_bytecodes, count_bytes, cpu_seconds, require_bounded, require_no_stall
from fd_core.testing.kit.law import broken, require
from fd_core.testing.kit.requirements import lacks
from fd_core.testing.models.small import small_limits
from fd_core.testing.models.texts import greedy
from fd_core.testing.schedulers.driver import SchedulerTarget
from fd_core.testing.schedulers.scripted import CountedInt, ScriptedRun
from fd_core.types import FinishReason, RequestSpec, SamplingParams, StepPlan

_LIFE = 66_000
"""Requests of a slot: more than 2^16 steps, generations and arrivals."""
_BUDGET: Final = 32_768
"""Tokens of a step of a large engine."""
_LONGEST: Final = 2**17
"""Tokens of a long context."""
_PLANS: Final = 5000
"""Plans through which a request may wait."""
_FEW, _MANY = 64, 2048
_STEP_MS = 5
"""Milliseconds in which a scheduler has to plan and commit a step of few requests; the core takes 0.1."""
_OF_CORE = 12
"""Times of a step of the core that one of another scheduler may take, where it has one request."""
_ADD_MS = 0.001
"""The same for each token of a prompt that is added; the core takes 0.00005."""
_POOL = 200_000
"""Blocks of a large engine."""
_CROWD = 10_000


class _Counted(Fcfs):
    def rank(self, request: QueuedRequest) -> tuple[int, ...]:
        return (CountedInt(request.arrival),)


def _run(
    target: SchedulerTarget, policy: SchedulingPolicy | None = None, keep: OffloadSelection | None = None, **limits: Any
) -> ScriptedRun:
    chosen = small_limits(**{"max_num_seqs": 1, "max_num_batched_tokens": 64, **limits})
    hasher = None if "prefix_caching" in target.lacks else PrefixHasher(block_size=chosen.block_size, identity="kit")
    keep = None if "storage" in target.lacks else keep
    setup = SchedulerSetup(limits=chosen, policy=policy or Fcfs(), victims=FewestTokens(), hasher=hasher, keep_kv=keep)
    return ScriptedRun(target.make, setup)


def _within(target: SchedulerTarget, budget: int, context: int) -> dict[str, Any]:
    """Return limits, reduced to the envelope of the scheduler."""
    most = target.envelope
    budget = min(budget, most.max_num_batched_tokens or budget)
    return {"max_num_batched_tokens": budget, "max_model_len": min(context, most.max_model_len or context)}


def _short(number: int) -> RequestSpec:
    """Return a request of one token; its prompt, id, tenant, salt and adapter are those of no other one."""
    prompt, name = (number % 250, number // 250 % 250, number // 62_500, 7, 8), str(number)
    return greedy(f"request {number}", prompt, 1, tenant=name, cache_salt=name, adapter=name)


def _serve(run: ScriptedRun, first: int, upto: int) -> None:
    """Serve requests one after the other, each in one step and with its grammar, and check what a client gets."""
    for number in range(first, upto):
        params = SamplingParams(temperature=0.0, max_tokens=1, grammar=f"start: /{number}/")
        spec = msgspec.structs.replace(_short(number), params=params)
        run.perform(run.scheduler.add(spec).operations)
        for _ in range(len(run.compiling)):
            run.compiled()
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
    """Each request begins operations: it compiles a grammar, is looked up and is saved."""
    run = _run(target, keep=OffloadSelection(True, True, True))
    try:
        _serve(run, 0, _LIFE)
    except (OverflowError, IndexError) as error:
        broken("1.5", f"it fails after many requests: {error}")
    require(run.scheduler.held().idle, "3.6", f"after {_LIFE} requests it holds {run.scheduler.held()}")
    run.perform(run.scheduler.add(greedy("whole pool", range(63), 1)).operations)
    plan, _ = run.step()
    blocks = 0 if plan is None else sum(len(grant.blocks) for grant in plan.grants)
    require(blocks == 16, "3.6", f"after {_LIFE} requests, one that needs all 16 blocks gets {blocks}")


@pytest.mark.law("2.1")
def test_whole_prompts_are_not_divided(target: SchedulerTarget) -> None:
    target.require("whole_prompts")
    run = _run(target, max_num_seqs=8, max_num_batched_tokens=20, whole_prompts=True)
    lengths = (12, 9, 20, 3, 18, 1)
    for number, length in enumerate(lengths):
        run.perform(run.scheduler.add(greedy(f"text {number}", range(40 * number, 40 * number + length), 1)).operations)
    ended = 0
    for _ in range(4 * len(lengths)):
        plan, deltas = run.step()
        if plan is not None:
            whole = {admission.slot: len(admission.token_ids) for admission in plan.admissions}
            computed = dict(zip(plan.slots.tolist(), plan.num_tokens.tolist(), strict=True))
            require(computed == whole, "2.1", f"prompts of {whole} tokens, by slot, are computed as {computed}")
        ended += sum(each.finish_reason is not None for each in deltas)
    require(ended == len(lengths), "1.1", f"{ended} of {len(lengths)} texts ended")


@pytest.mark.law("2.1")
def test_prompt_that_runs_alone_fills_a_large_budget(target: SchedulerTarget) -> None:
    room = _within(target, _BUDGET, 2 * _BUDGET)
    budget = min(room["max_num_batched_tokens"], room["max_model_len"] // 2)
    room = {"max_num_batched_tokens": budget, "max_model_len": 2 * budget}
    run = _run(target, block_size=16, num_kv_blocks=budget // 8 + 16, **room)
    for length in (budget - 1, budget, budget + 1):
        run.scheduler.add(greedy(f"prompt {length}", [(length + at * at) % 251 for at in range(length)], 1))
        chunks = [plan.total_tokens for _ in range(3) if (plan := run.step()[0]) is not None]
        right = [budget, 1] if length > budget else [length]
        what = f"a prompt of {length} tokens, a budget of {budget} and enough blocks"
        require(chunks == right, "2.1", f"{what}: expected steps of {right} tokens, got {chunks}")


@pytest.mark.law("2.1", "3.3", "5.2")
@pytest.mark.parametrize("block_size", [1, 16, 128])
def test_prefix_of_any_length_is_used_again(target: SchedulerTarget, block_size: int) -> None:
    """Prompts of each power of four, up to 2^17 tokens, are looked up in the store, and return with more tokens."""
    target.require("prefix_caching")
    room = _within(target, _BUDGET, _LONGEST)
    longest = room["max_model_len"] - 8
    room |= {"block_size": block_size, "num_kv_blocks": 3 * longest // block_size + 16}
    run = _run(target, keep=OffloadSelection(True, True, True), **room)
    for length in (*(size for size in (4**bits for bits in range(1, 9)) if size < longest), longest):
        prompt = [(length + at * at) % 251 for at in range(length)]
        computed, looked_up = list[int](), run.looked_up
        for name, tokens in (("first", prompt), ("again", [*prompt, 1, 2, 3])):
            run.perform(run.scheduler.add(greedy(f"{name} {length}", tokens, 1)).operations)
            plans = [run.step()[0] for _ in range(8 + length // room["max_num_batched_tokens"])]
            computed.append(sum(plan.total_tokens for plan in plans if plan is not None))
            require(run.scheduler.held().idle, "1.1", f"a prompt of {len(tokens):,} tokens did not end")
        most = length + 3 - length // block_size * block_size
        what = f"a prompt of {length:,} tokens returns with 3 more, in blocks of {block_size}"
        require(computed[1] <= most, "2.1", f"{what}: expected {most} tokens to be computed, got {computed[1]:,}")
        sought = run.looked_up - looked_up
        least = 0 if "storage" in target.lacks else (length - 1) // block_size
        require(sought >= least, "5.2", f"{what}: {sought:,} blocks are looked up, expected {least:,}")


@pytest.mark.law("8")
def test_priority_holds_however_long_others_wait(target: SchedulerTarget) -> None:
    """One slot serves a backlog of low priority; now and then another request arrives, and is admitted next."""
    run, urgent = _run(target, Priority()), list[str]()
    for number in range(_PLANS // 8):
        prompt = (number % 250, number // 250, 1)
        run.perform(run.scheduler.add(greedy(f"waits {number}", prompt, 8, priority=10)).operations)
    for number in range(_PLANS):
        if number % 100 == 0:
            urgent.append(f"urgent {number}")
            prompt = (number // 100, 2, 2)
            run.perform(run.scheduler.add(greedy(urgent[-1], prompt, 2, priority=0)).operations)
        plan, _ = run.step()
        for admission in () if plan is None else plan.admissions:
            admitted, first = admission.request_id, urgent[:1] or [admission.request_id]
            require([admitted] == first, "8", f"plan {number} admits {admitted!r}, although {first} is before it")
            urgent[:] = urgent[1:]
    require(len(urgent) < 2, "8", f"{len(urgent)} requests of the highest priority were not admitted")


def _abort(run: ScriptedRun, first: int, upto: int) -> None:
    """Abort every other request while it waits, the others after their first token."""
    for number in range(first, upto):
        spec = msgspec.structs.replace(_short(number), params=SamplingParams(max_tokens=9))
        run.perform(run.scheduler.add(spec).operations)
        if number % 2:
            run.step()
        run.scheduler.abort(spec.request_id)
        run.step()
        left = run.scheduler.request_ids()
        require(not left, "1.7", f"{left} did not end, although aborted")


def _preempt(run: ScriptedRun, first: int, upto: int) -> None:
    """Preempt each request by a pause; abort every other one while it waits, the others after their return."""
    for number in range(first, upto):
        spec = msgspec.structs.replace(_short(number), params=SamplingParams(max_tokens=9))
        run.perform(run.scheduler.add(spec).operations)
        run.step()
        run.scheduler.pause()
        run.step()
        if number % 2:
            run.scheduler.resume()
            run.step()
        run.scheduler.abort(spec.request_id)
        run.scheduler.resume()
        run.step()
        left = run.scheduler.request_ids()
        require(not left, "1.7", f"{left} did not end, although aborted")


_ENDS: Final = {"served": _serve, "aborted": _abort, "preempted": _preempt}


@pytest.mark.law("3.6")
@pytest.mark.parametrize("how", _ENDS)
def test_memory_does_not_grow_with_requests(target: SchedulerTarget, how: str) -> None:
    end, run = _ENDS[how], _run(target, FairShare(), OffloadSelection(False, True, False))
    if how == "preempted":
        try:
            run.scheduler.pause()
        except BadRequest as error:
            lacks(f"{error}")
        run.scheduler.resume()
    require_bounded(lambda number: end(run, number, number + 1), 200, "requests that ended")
    require_freed(lambda: _run(target).scheduler)


@pytest.mark.law("1.7")
def test_id_of_a_request_that_ended_while_it_drains_is_free(target: SchedulerTarget) -> None:
    """Its last token is in flight when it is aborted; its id is used again before its slot is released."""
    run, spec = _run(target, max_num_seqs=2, pipeline_depth=2), greedy("again", (1, 2, 3), 1)
    run.scheduler.add(spec)
    first = run.plan()
    run.scheduler.abort("again")
    second = run.plan()
    if first is None or second is None:
        raise AssertionError("expected a plan with a request, and one that revokes its slot")
    run.commit(first)
    run.scheduler.add(spec)
    run.commit(second)
    ends = [delta.finish_reason for _ in range(3) for delta in run.step()[1]]
    require(ends == [FinishReason.LENGTH], "1.7", f"a request with the id of one that ended while it drained: {ends}")


@pytest.mark.law("2.6")
def test_cost_does_not_grow_with_the_texts(target: SchedulerTarget) -> None:
    """Count the bytecodes and the memory of sixteen steps of eight requests after few and after many tokens."""
    run = _run(target, max_num_seqs=8, max_model_len=2100, num_kv_blocks=8 * 525)
    for number in range(8):
        run.scheduler.add(greedy(f"r{number}", (number, 1), 2090))
    costs, steps = [], 0
    for first in (64, 1900):
        while steps < first:
            run.step()
            steps += 1
        code = size = 0
        for _ in range(16):
            plans = list[StepPlan | None]()
            code += count_bytecodes(lambda: plans.append(run.scheduler.plan()[0]))  # noqa: B023 - called at once
            plan = plans[0]
            assert plan is not None
            output = run.output(plan)
            code += count_bytecodes(lambda: run.scheduler.commit(plan, output))  # noqa: B023
        for _ in range(16):
            size += count_bytes(run.step)
        steps += 32
        costs.append((code, size))
    (few, less), (many, more) = costs
    require(many <= 1.5 * few + 4000, "2.6", f"steps of short texts take {few} bytecodes, those of long ones {many}")
    require(more <= 1.5 * less + 2**16, "2.6", f"steps of short texts take {less} bytes, those of long ones {more}")


_WAITING: Final[Mapping[str, Callable[[int], RequestSpec]]] = {
    "slots": lambda number: greedy(f"waits {number}", (number % 250, number // 250, 1), 8),
    "turns": lambda number: greedy(f"waits {number}", (number % 250, number // 250, 1), 8, tenant=f"tenant {number}"),
    "prefix": lambda number: greedy(f"waits {number}", range(12), 8),
    "grammars": lambda number: greedy(f"waits {number}", (number % 250, 1), 8, grammar=f"start: /{number}/"),
    "context": lambda number: greedy(f"waits {number}", (number % 250, number // 250, 1), 2**31 - 1),
}
"""Requests by number, by what they wait for; those of `context` set no limit of tokens, and it grows as they do."""


@pytest.mark.law("2.6")
@pytest.mark.parametrize("waits_for", list(_WAITING))
def test_cost_does_not_grow_with_waiting_requests(target: SchedulerTarget, waits_for: str) -> None:
    """Count the bytecodes and the memory of each call; the blocks become more as the requests do."""
    waiting, costs = _WAITING[waits_for], list[dict[str, int]]()
    for count in (_FEW, _MANY):
        policy = FairShare() if waits_for == "turns" else _Counted()
        context = min(400 * count // _FEW, target.envelope.max_model_len or 1 << 30) if waits_for == "context" else 400
        run = _run(target, policy, max_num_seqs=8, max_model_len=context, num_kv_blocks=800 * count // _FEW)
        scheduler = run.scheduler
        for number in range(8):
            scheduler.add(greedy(f"runs {number}", (250, number), 300))
        run.step()
        for number in range(count):
            run.perform(scheduler.add(waiting(number)).operations)
        for _ in range(20):
            run.step()
        with require_no_stall("a step", "2.6"):
            run.step()
        costs.append(_costs_of(run, count, waiting))
    few, many = costs
    grown = {name: (few[name], many[name]) for name in few if many[name] > 1.5 * few[name] + 1000}
    what = f"(bytecodes, or bytes) of {grown} with {_FEW} and {_MANY} waiting requests, and as many times the blocks"
    require(not grown, "2.6", f"the cost of a call grows with the queue or the pool: {what}")


@pytest.mark.timing
@pytest.mark.fd_alone
@pytest.mark.law("2.6")
@pytest.mark.parametrize("waiting", [0, _CROWD])
def test_a_step_of_one_request_takes_about_as_long_as_with_the_core(target: SchedulerTarget, waiting: int) -> None:
    """A time, as no bytecode shows what runs in C, in units of what this machine needs, which cancels its load.

    As after an hour, all blocks of the pool have cached prefixes, of which each step evicts one.
    """
    core, room = SchedulerTarget("continuous", ContinuousBatchingScheduler), _within(target, _BUDGET, _BUDGET)
    runs = [_run(each, block_size=1, num_kv_blocks=_POOL, **room) for each in (target, core)]
    length = room["max_model_len"] - 8

    def step(run: ScriptedRun) -> None:
        run.step()
        run.scheduler.held()

    def read(run: ScriptedRun) -> None:
        scheduler = run.scheduler
        _ = scheduler.has_work, scheduler.held(), scheduler.stats()
        if not waiting:  # these may list all requests
            _ = scheduler.request_ids(), scheduler.activities()

    for run in runs:
        for first in range(2, _POOL, length):
            prompt = [(first + at * at) % 251 for at in range(min(length, _POOL - first))]
            run.scheduler.add(greedy(f"cached {first}", prompt, 1))
            while run.step()[0] is not None:
                pass
        run.scheduler.add(greedy("runs", (1, 2), 390))
        for _ in range(16):
            run.step()
    for number in range(waiting):
        runs[0].perform(runs[0].scheduler.add(_WAITING["slots"](number)).operations)
    for call, name in ((step, "a step of one request"), (read, "reading the gauges")):
        times = [[1e6 * cpu_seconds(partial(call, run)) for run in runs] for _ in range(9)]
        took, right = (min(each) for each in zip(*times, strict=True))
        what = f"{name} while {waiting:,} wait takes {took:.0f} us of the processor, the core's {right:.0f}"
        require(took <= _OF_CORE * right, "2.6", f"{what}, expected at most {_OF_CORE} times as long: the device waits")


@pytest.mark.timing
@pytest.mark.fd_alone
@pytest.mark.law("2.6")
@pytest.mark.parametrize(("tokens", "blocks"), [(2, 100 * _FEW), (20_000, _POOL)])
def test_a_step_of_a_full_batch_takes_little_time(target: SchedulerTarget, tokens: int, blocks: int) -> None:
    """Decode in all of 64 slots, after short prompts, and after long ones in a large pool: the device may wait for the
    plan."""
    room: dict[str, Any] = {"max_num_batched_tokens": 8 * _FEW + 64 * tokens, "max_model_len": tokens + 400}
    run = _run(target, max_num_seqs=_FEW, num_kv_blocks=blocks, block_size=4 if tokens < 64 else 16, **room)
    specs = iter([greedy(f"runs {number}", ([250, number] * tokens)[-tokens:], 300) for number in range(_FEW)])
    added = min(1000 * cpu_seconds(lambda: run.scheduler.add(next(specs))) for _ in range(_FEW // 7))
    most = max(_STEP_MS, tokens * _ADD_MS)
    what = f"a request of {tokens:,} tokens takes {added:.1f} ms of the processor, expected less than {most:g}"
    require(added < most, "2.6", f"adding {what}: steps wait for it")
    for spec in specs:
        run.scheduler.add(spec)
    for _ in range(5):
        run.step()
    took = 1000 * min(cpu_seconds(run.step) for _ in range(3))
    what = f"a step of {_FEW} requests, each of {tokens:,} tokens, in a pool of {blocks:,} blocks"
    require(took < _STEP_MS, "2.6", f"{what} takes {took:.1f} ms of the processor, expected less than {_STEP_MS}")


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
        measure("held", scheduler.held)
        measure("stats", scheduler.stats)
        measure("phases", lambda: scheduler.phases("runs 1"))
        if len(run.compiling) > 1:
            measure("complete", run.compiled)
        plan = measure_bytes("plan", scheduler.plan)[0]
        output = run.output(plan)
        measure_bytes("commit", lambda: scheduler.commit(plan, output))  # noqa: B023
        measure_bytes("add", lambda: scheduler.add(waiting(count + 5 + number)))  # noqa: B023
    return {name: min(each) for name, each in found.items()}
