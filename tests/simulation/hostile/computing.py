"""Computation in hostile worlds, the oracle that outputs are compared with, and the audit of every step."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

import numpy as np

from fd_core.backends.null import NullBackend, NullModel
from fd_core.config import EngineConfig, Limits
from fd_core.ops.contract import KVCache, StepInput
from fd_core.ops.weights import Adapter
from fd_core.runner.drafting import PerSlotDrafter
from fd_core.runner.postprocess.numpy_matrix import NumpyPostprocess
from fd_core.runner.runner import Runner
from fd_core.signals import PREEMPTED_TOKEN_ID
from fd_core.types import Admission, BlockGrant, IntArray, RequestSpec, StepOutput, StepPlan

__all__ = ["ADAPTERS", "AuditedComputer", "BrokenLaw", "Foreseeing", "Oracle", "adapted", "null_runner"]

_MASK = 2**64 - 1
_MULTIPLIER = 0x9E3779B97F4A7C15
MAX_STEPS = 5000
"""Steps of one engine beyond which it counts as looping forever."""


class BrokenLaw(AssertionError):
    """An invariant of the protocol does not hold."""

    def __init__(self, section: str, what: str) -> None:
        super().__init__(f"protocol {section}: {what}")
        self.section = section


ADAPTERS = ("wit", "wisdom")
"""Adapters that every engine serves, by name and by digest."""
_ADAPTED = 100
"""Added to the first token for each adapter slot, so that the whole text depends on the adapter."""


def adapted(text: IntArray, adapter: str) -> IntArray:
    """Return the tokens whose KV without an adapter is that of `text` with one."""
    if not adapter:
        return text
    return np.concatenate([text[:1] + _ADAPTED * (1 + ADAPTERS.index(adapter)), text[1:]])


class _AdaptableNull(NullModel):
    """The null model, with adapters."""

    def with_adapters(self, places: Sequence[Adapter | None]) -> _AdaptableNull:
        return self

    def states(self, step: StepInput, cache: KVCache) -> Any:
        if step.lora_slots is not None:
            begins = step.positions == 0
            step = replace(step, token_ids=step.token_ids + _ADAPTED * np.where(begins, step.lora_slots, 0))
        return super().states(step, cache)


@cache
def _model(vocab_size: int) -> _AdaptableNull:
    return _AdaptableNull(vocab_size)


@cache
def _ops():
    """Return the shared pack; a new one per runner would only repeat its configuration and hold no other state."""
    return type(NullBackend(EngineConfig(model="null")).make_ops())


def null_runner(limits: Limits, drafter: PerSlotDrafter | None = None) -> Runner:
    runner = Runner(_ops()(), _model(limits.vocab_size), limits, NumpyPostprocess, drafter)
    runner.adapters.replace(Adapter(name, 1, {}) for name in ADAPTERS)
    return runner


class Oracle:
    """Computes reference outputs: each request alone, without preemption, drafts or shared KV."""

    def __init__(self, vocab_size: int, max_model_len: int) -> None:
        self.texts: dict[str, list[int]] = {}
        """Prompt and output of each request submitted."""
        self.max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._model = _model(vocab_size)

    def answer(self, spec: RequestSpec) -> tuple[list[int], str]:
        """Return the tokens of the output and its finish reason."""
        params = spec.params
        plain = params.greedy and not params.penalized and not params.bad_words_token_ids and not params.logit_bias
        next_token = self._greedy(spec) if plain and not params.min_tokens else self._lone(spec)
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else spec.eos_token_ids)}
        tokens: list[int] = []
        most = min(params.max_tokens, self.max_model_len - len(spec.prompt))
        end = "length"
        while len(tokens) < most:
            tokens.append(next_token())
            if tokens[-1] in stops and len(tokens) > params.min_tokens:
                end = "stop"
                break
        self.texts[spec.request_id] = [*spec.prompt, *tokens]
        return tokens, end

    def _greedy(self, spec: RequestSpec):
        """Return a function yielding the most likely next token, from the hash of the text alone."""
        state = 0
        for token in adapted(np.array(spec.prompt), spec.adapter).tolist():
            state = (state * _MULTIPLIER + token + 1) & _MASK

        def following() -> int:
            nonlocal state
            token = int(self._model.head(np.array([[state]], np.uint64)).argmax())
            state = (state * _MULTIPLIER + token + 1) & _MASK
            return token

        return following

    def _lone(self, spec: RequestSpec):
        """Return a function yielding the next token of an otherwise idle runner."""
        length, size = len(spec.prompt), self.max_model_len
        runner = null_runner(
            Limits(
                max_num_seqs=1,
                max_num_batched_tokens=size,
                max_model_len=size,
                block_size=size,
                num_kv_blocks=1,
                vocab_size=self._vocab_size,
            )
        )
        prompt = np.array(spec.prompt, np.int32)
        zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
        admission = Admission(0, 1, prompt, length, spec.params, spec.eos_token_ids, 0, adapter=spec.adapter)
        step = 0

        def following() -> int:
            nonlocal step
            first = step == 0
            plan = StepPlan(
                epoch=1,
                step=step,
                slots=zero,
                gens=one,
                starts=zero if first else np.full(1, length + step - 1, np.int32),
                num_tokens=np.full(1, length, np.int32) if first else one,
                num_drafts=zero,
                samples=np.ones(1, np.bool_),
                admissions=(admission,) if first else (),
                grants=(BlockGrant(0, 0, zero),) if first else (),
            )
            step += 1
            return int(runner.execute(plan).tokens[0, 0])

        return following


class Foreseeing(PerSlotDrafter):
    """Drafts from the oracle, wrong at a given share of positions."""

    name = "foreseeing"

    def __init__(self, oracle: Oracle, num_slots: int, wrong: float) -> None:
        self._oracle = oracle
        self._known: list[list[int]] = [[] for _ in range(num_slots)]
        self._wrong = wrong

    def admit(self, slot: int, tokens: IntArray) -> None:
        self._known[slot] = tokens.tolist()

    def grow(self, slot: int, tokens: IntArray) -> None:
        self._known[slot] += tokens.tolist()

    def guess(self, slot: int, limit: int) -> IntArray:
        known = self._known[slot]
        count = len(known)
        for text in self._oracle.texts.values():
            if len(text) > count and text[:count] == known:
                right = text[count : count + limit]
                # Errors depend on the position alone, so that equal seeds give equal worlds.
                return np.array(
                    [
                        (token + 1) % 16 if (count + position) * 0.6180339887 % 1.0 < self._wrong else token
                        for position, token in enumerate(right)
                    ],
                    np.int32,
                )
        return np.empty(0, np.int32)


class PlanWatch(Protocol):
    """Observer that inspects plans before they are computed."""

    def announces(self, plan: StepPlan) -> None:
        """Inspect a plan about to be submitted."""


class AuditedComputer:
    """Computer that audits every plan and output."""

    def __init__(self, runner: Runner, limits: Limits, counts: Counter[str], revoked_requests: set[str]) -> None:
        """`revoked_requests` receives requests that lost a slot before their end."""
        self.watch: PlanWatch | None = None
        """Additional observer of plans."""
        self.failing = 0.0
        """Share of rows that fail."""
        self._failed: set[int] = set()
        """Slots whose request fails."""
        self._runner = runner
        self._revoked_requests = revoked_requests
        self._limits = limits
        self._counts = counts
        self._revoked: set[tuple[int, int]] = set()
        self._holder: dict[int, tuple[int, str]] = {}
        """Gen and request in each slot not known to be free."""
        self._steps = 0
        self._tables: dict[int, list[int]] = {}
        """Blocks of each slot, according to submitted plans."""
        self._touched: deque[dict[int, int]] = deque()
        """Blocks touched by each plan in flight, and the slot that uses them."""

    @property
    def cache(self) -> KVCache:
        return self._runner.cache

    def announce(self, plan: StepPlan) -> None:
        """Check that no block is granted for writing while a plan in flight touches it for another request."""
        if self.watch is not None:
            self.watch.announces(plan)
        computed = {}
        for admission in plan.admissions:
            self._tables[admission.slot] = []
            computed[admission.slot] = admission.computed // self._limits.block_size
        for grant in plan.grants:
            table = self._tables[grant.slot]
            del table[grant.offset :]
            table += grant.blocks.tolist()
            for block in table[max(grant.offset, computed.get(grant.slot, 0)) :]:
                for touched in self._touched:
                    if touched.get(block, grant.slot) != grant.slot or (block in touched and grant.slot in computed):
                        raise BrokenLaw("3.2", f"block {block} is granted to slot {grant.slot} while a step touches it")
        self._touched.append({block: slot for slot in plan.slots.tolist() for block in self._tables.get(slot, ())})

    def execute(self, plan: StepPlan) -> StepOutput:
        self._steps += 1
        self._touched.popleft()
        if self._steps > MAX_STEPS:
            raise BrokenLaw("2.4", f"an engine is not done after {MAX_STEPS} steps")
        if plan.total_tokens > self._limits.max_num_batched_tokens:
            raise BrokenLaw("2", f"{plan.total_tokens} tokens in a step, limit {self._limits.max_num_batched_tokens}")
        for admission in plan.admissions:
            self._admitted(admission)
        for revocation in plan.revocations:
            key = revocation.slot, revocation.gen
            if key in self._revoked:
                raise BrokenLaw("1.2", f"slot {revocation.slot} of gen {revocation.gen} is preempted twice")
            self._revoked.add(key)
            self._revoked_requests.add(self._holder[revocation.slot][1])
            if revocation.slot in plan.slots:
                raise BrokenLaw("1.3", f"slot {revocation.slot} is preempted and computed in one step")
        output = self._runner.execute(plan)
        released = np.flatnonzero((output.tokens == PREEMPTED_TOKEN_ID).any(axis=1)).tolist()
        if released != sorted(revocation.slot for revocation in plan.revocations):
            raise BrokenLaw("1.2", f"-9 releases slots {released}, not those preempted")
        output = self._with_failures(plan, output)
        counts = self._counts
        counts["take_backs"] += len(released)
        counts["steps"] += 1
        counts["prefill_chunks"] += int((~plan.samples).any())
        counts["drafts_verified"] += int(plan.num_drafts.any())
        counts["several_in_a_step"] += len(plan.slots) > 1
        if plan.num_drafts.any():
            counts["drafts_accepted"] += int((output.tokens[:, 1:] >= 0).any())
        return output

    def _with_failures(self, plan: StepPlan, output: StepOutput) -> StepOutput:
        """Fail some rows, in this step and in later ones until their slots are assigned to other requests."""
        self._failed -= {admission.slot for admission in plan.admissions}
        if self.failing:
            # Depends on the position alone, so that equal seeds give equal worlds.
            self._failed |= {slot for slot in plan.slots.tolist() if (self._steps + slot) * 0.618034 % 1 < self.failing}
        rows = [row for row, slot in enumerate(plan.slots.tolist()) if slot in self._failed]
        if not rows:
            return output
        self._counts["rows_failed"] += 1
        size, tables = self._limits.block_size, self._runner.batch.tables[0]
        for row in rows:
            positions = plan.starts[row] + np.arange(plan.num_tokens[row])
            self.cache.layer(0)[tables[plan.slots[row], positions // size], positions % size] = 0
        errors = tuple((int(plan.slots[row]), "a row that fails") for row in rows)
        return replace(output, errors=(*output.errors, *errors))

    def _admitted(self, admission: Admission) -> None:
        slot = admission.slot
        gen, _ = self._holder.get(slot, (0, ""))
        if admission.gen <= gen:
            raise BrokenLaw("1", f"slot {slot} is admitted with gen {admission.gen} after gen {gen}")
        self._holder[slot] = admission.gen, admission.request_id
        if len(admission.token_ids) > admission.prompt_len:
            self._counts["returned_with_tokens"] += 1
        if admission.computed:
            self._counts["admitted_with_kv"] += 1
