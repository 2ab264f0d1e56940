"""Steps launched ahead give the same results as steps run one by one, for any plan."""

from __future__ import annotations

from collections import deque
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fd_core.config import Limits
from fd_core.engine.device import LaunchingDevice
from fd_core.ops.contract import KVShape
from fd_core.runner.runner import Runner
from fd_core.types import Admission, BlockGrant, Reasoning, Revocation, SamplingParams, StepOutput, StepPlan
from tests.runner.queued import NullPack, QueuedModel, QueuedPack, QueuedPostprocess

VOCABULARY, SLOTS, BLOCK = 40, 5, 4
LIMITS = Limits(
    max_num_seqs=SLOTS,
    max_num_batched_tokens=40,
    max_model_len=36,
    block_size=BLOCK,
    num_kv_blocks=9 * SLOTS,
    vocab_size=VOCABULARY,
)


def any_params(rng: np.random.Generator) -> SamplingParams:
    """Draw sampling parameters of all kinds."""

    def sometimes(value: Any, otherwise: Any, share: float = 0.3) -> Any:
        return value if rng.random() < share else otherwise

    return SamplingParams(
        temperature=sometimes(0.0, 0.9, 0.4),
        seed=int(rng.integers(0, 2**63)),
        top_k=sometimes(7, 0),
        top_p=sometimes(0.8, 1.0),
        min_p=sometimes(0.05, 0.0),
        repetition_penalty=sometimes(1.3, 1.0),
        presence_penalty=sometimes(0.7, 0.0),
        frequency_penalty=sometimes(0.4, 0.0),
        min_tokens=sometimes(6, 0),
        stop_token_ids=sometimes((1, 5, 9), ()),
        logit_bias=sometimes({2: 3.0, 7: -4.0}, None),
        allowed_token_ids=sometimes(tuple(range(0, VOCABULARY, 2)), None, 0.15),
        bad_words_token_ids=sometimes(((4,), (6, 8), (3, 2)), (), 0.15),
        logprobs=sometimes(2, None),
        prompt_logprobs=sometimes(1, None, 0.15),
        reasoning=sometimes(Reasoning(end=(7, 9), max_tokens=5), None, 0.15),
    )


class Plans:
    """Random valid plans without drafts: they do not depend on sampled tokens.

    A preempted slot is reused after its acknowledgement; a slot whose request ended is reused at once, although a step
    in flight may still compute it.
    """

    def __init__(self, seed: int, depth: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._depth = depth
        self._gens = np.zeros(SLOTS, np.int64)
        self._running: dict[int, list[int]] = {}
        """Per slot: tokens admitted, tokens computed, maximum length."""
        self._leaving: dict[int, int] = {}
        """Per slot: the step that acknowledges its preemption."""

    def some(self, count: int) -> list[StepPlan]:
        return [self._next(step) for step in range(count)]

    def _next(self, step: int) -> StepPlan:
        rng = self._rng
        revoked = [slot for slot in self._running if rng.random() < rng.choice([0.0, 0.1, 1.0], p=[0.7, 0.25, 0.05])]
        for slot in revoked:
            del self._running[slot]
            self._leaving[slot] = step
        for slot in [slot for slot in self._running if rng.random() < 0.06]:
            del self._running[slot]
        self._leaving = {slot: begun for slot, begun in self._leaving.items() if begun > step - self._depth}
        admissions, grants = [], []
        free = [slot for slot in range(SLOTS) if slot not in self._running and slot not in self._leaving]
        for slot in free:
            if rng.random() < 0.4:
                self._gens[slot] += 1
                length = int(rng.integers(1, 20))
                prompt = int(rng.integers(1, length + 1))
                tokens = rng.integers(0, VOCABULARY, length, np.int32)
                admissions.append(
                    Admission(slot, int(self._gens[slot]), tokens, prompt, any_params(rng), (11,), computed=0)
                )
                grants.append(BlockGrant(slot, 0, np.arange(9, dtype=np.int32) + 9 * slot))
                self._running[slot] = [length, 0, LIMITS.max_model_len]
        rows, left = [], LIMITS.max_num_batched_tokens
        for slot in rng.permutation(list(self._running)).tolist():
            admitted, computed, most = self._running[slot]
            if rng.random() < 0.1 or computed >= most or not left:
                continue
            count = 1 if computed >= admitted else int(min(rng.integers(1, admitted - computed + 1), left))
            self._running[slot][1] = computed + count
            left -= count
            rows.append((slot, computed, count, computed + count >= admitted))
        slots, starts, counts, samples = (np.array(column) for column in zip(*rows, strict=True)) if rows else [()] * 4
        return StepPlan(
            epoch=1,
            step=step,
            slots=np.array(slots, np.int32),
            gens=self._gens[np.array(slots, np.intp)].astype(np.int32),
            starts=np.array(starts, np.int32),
            num_tokens=np.array(counts, np.int32),
            num_drafts=np.zeros(len(rows), np.int32),
            samples=np.array(samples, np.bool_),
            admissions=tuple(admissions),
            grants=tuple(grants),
            revocations=tuple(Revocation(slot, int(self._gens[slot])) for slot in revoked),
        )


def queued_runner(limits: Limits = LIMITS, strange: int = 0) -> tuple[Runner, QueuedPack]:
    pack = QueuedPack()
    return Runner(pack, QueuedModel(VOCABULARY, pack, strange), limits, QueuedPostprocess), pack


def launched_ahead(plans: list[StepPlan], depth: int, strange: int) -> tuple[list[StepOutput], int]:
    """Compute plans with up to `depth` in flight; also count those launched after others."""
    runner, pack = queued_runner(strange=strange)
    device = LaunchingDevice(runner)
    outputs: list[StepOutput] = []
    flying: deque[StepPlan] = deque()
    ahead = 0
    for plan in plans:
        ahead += bool(flying) and runner.must_wait(plan) is None
        device.submit(plan)
        flying.append(plan)
        if len(flying) == depth:
            outputs.append(device.collect(5.0))
            flying.popleft()
    outputs += [device.collect(5.0) for _ in flying]
    assert pack.computed <= pack.queued
    return outputs, ahead


def plain(value: Any) -> Any:
    """Return a value as arrays that numpy can compare."""
    if is_dataclass(value):  # there are no drafts; steps report so once a request in any slot has a grammar
        return {each.name: plain(getattr(value, each.name)) for each in fields(value) if each.name != "drafts_ready"}
    return [plain(each) for each in value] if isinstance(value, tuple) else value


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([2, 2, 3]), st.sampled_from([0, 11, 60]))
@pytest.mark.law("1.1", "1.2", "1.3", "4")
def test_launch_ahead_equals_sequential_execution(seed: int, depth: int, strange: int) -> None:
    plans = Plans(seed, depth).some(40)
    runner = Runner(NullPack(), QueuedModel(VOCABULARY, strange=strange), LIMITS, QueuedPostprocess)
    expected = [runner.execute(plan) for plan in plans]
    found, _ = launched_ahead(plans, depth, strange)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_equal(plain(other), plain(one), f"step {one.step}, seed {seed}")


def test_random_plans_cover_launch_ahead_and_edge_cases() -> None:
    """Guards the property above against becoming vacuous."""
    plans, ahead, errors = 0, 0, 0
    seen: set[str] = set()
    for seed in range(12):
        mine = Plans(seed, 2).some(40)
        outputs, launched = launched_ahead(mine, 2, 11)
        plans, ahead = plans + len(mine), ahead + launched
        errors += sum(len(output.errors) for output in outputs)
        seen |= {
            name
            for plan in mine
            for each in plan.admissions
            for name in each.params.__struct_fields__
            if getattr(each.params, name) != getattr(SamplingParams(), name)
        }
    assert ahead > plans * 3 / 4
    assert errors > 20
    assert {"repetition_penalty", "min_tokens", "logprobs", "bad_words_token_ids", "reasoning"} <= seen


def prefill_and_decode(params: SamplingParams) -> tuple[StepPlan, StepPlan]:
    """Return the first two plans of a request."""
    tokens = np.array([1, 2, 3], np.int32)
    zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
    arrival = Admission(0, 1, tokens, 3, params, (), 0)
    blocks = np.arange(9, dtype=np.int32)
    prefill = StepPlan(1, 0, zero, one, zero, 3 * one, zero, one.astype(bool), (arrival,), (BlockGrant(0, 0, blocks),))
    return prefill, StepPlan(1, 1, zero, one, 3 * one, one, zero, one.astype(bool))


def decode(runner: Runner, params: SamplingParams) -> StepPlan:
    """Launch the prefill of a request; return the plan of its first decode."""
    prefill, plan = prefill_and_decode(params)
    runner.launch(prefill)
    return plan


@pytest.mark.parametrize(
    ("params", "late"),
    [
        (SamplingParams(), False),
        (SamplingParams(presence_penalty=1.0, min_tokens=9, logit_bias={3: 1.0}, logprobs=2), False),
        (SamplingParams(allowed_token_ids=(3, 4), bad_words_token_ids=((5,),)), False),
        (SamplingParams(bad_words_token_ids=((5, 6),)), True),
        (SamplingParams(reasoning=Reasoning(end=(7,), max_tokens=5)), True),
    ],
)
def test_only_sampling_waits_for_a_token_in_flight(params: SamplingParams, late: bool) -> None:
    runner, _ = queued_runner()
    assert runner.launches_ahead
    plan = decode(runner, params)
    assert runner.must_wait(plan) is None
    assert (runner.launch(plan).sampled is None) == late


def test_slot_with_new_request_does_not_wait() -> None:
    runner, _ = queued_runner()
    decode(runner, SamplingParams(bad_words_token_ids=((5, 6),)))
    zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
    arrival = Admission(0, 2, np.array([4, 5], np.int32), 2, SamplingParams(bad_words_token_ids=((5, 6),)), (), 0)
    plan = StepPlan(1, 1, zero, 2 * one, zero, 2 * one, zero, one.astype(bool), (arrival,))
    assert runner.must_wait(plan) is None
    assert runner.launch(plan).sampled is not None


def test_late_failure_does_not_affect_next_request_in_slot() -> None:
    """The steps that computed it report it, and the new request's grammar is kept."""
    runner, _ = queued_runner(strange=1)
    zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
    plans = []
    for gen, params in ((1, SamplingParams()), (2, SamplingParams(reasoning=Reasoning(end=(7,), max_tokens=5)))):
        arrival = Admission(0, gen, np.array([1, 2], np.int32), 2, params, (), 0)
        grant = BlockGrant(0, 0, np.arange(9, dtype=np.int32))
        samples = np.array([gen == 1])
        count = one + samples
        plans.append(StepPlan(1, gen, zero, gen * one, zero, count, zero, samples, (arrival,), (grant,)))
    first, second = map(runner.launch, plans)
    assert [slot for slot, _ in runner.finish(first).errors] == [0]
    assert runner.finish(second).errors == ()
    assert runner._grammars.among(zero).tolist() == [0]


@pytest.mark.parametrize("computes", [False, True])
def test_drafters_with_a_model_make_every_step_wait(computes: bool) -> None:
    from tests.runner.test_failures import Guessing

    drafter = Guessing()
    if computes:
        drafter.kv_shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=8, block_size=BLOCK)
    limits = msgspec.structs.replace(LIMITS, max_drafts=2)
    pack = QueuedPack()
    runner = Runner(pack, QueuedModel(VOCABULARY, pack), limits, QueuedPostprocess, drafter)
    assert ("model" in (runner.must_wait(decode(runner, SamplingParams())) or "")) == computes


def test_drafter_is_given_no_token_in_flight_after_a_failure() -> None:
    from tests.runner.test_failures import Guessing

    def fail(event: str, slot: int, length: int) -> None:
        if (event, slot) == ("grow", 1):
            raise ValueError

    drafter, pack = Guessing(fail), QueuedPack()
    limits = msgspec.structs.replace(LIMITS, max_drafts=2)
    runner = Runner(pack, QueuedModel(VOCABULARY, pack), limits, QueuedPostprocess, drafter)
    slots, zero, one = np.arange(2, dtype=np.int32), np.zeros(2, np.int32), np.ones(2, np.int32)
    tokens = np.array([1, 2, 3], np.int32)
    admissions = tuple(Admission(slot, 1, tokens, 3, SamplingParams(), (), 0) for slot in range(2))
    grants = tuple(BlockGrant(slot, 0, np.arange(9, dtype=np.int32) + 9 * slot) for slot in range(2))
    samples = one.astype(bool)
    first = runner.launch(StepPlan(1, 0, slots, one, zero, 3 * one, zero, samples, admissions, grants))
    runner.launch(StepPlan(1, 1, slots, one, 3 * one, one, zero, samples))
    assert [slot for slot, _ in runner.finish(first).errors] == [1]
    assert len(drafter._texts[0]) == 4
