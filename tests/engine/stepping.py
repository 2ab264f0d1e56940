"""An engine on the null backend whose planning and answering are apart, so that a test decides what is in flight.

Every plan and every answer is audited through back doors: the budget is counted where the model computes, a block is
never granted while a step in flight touches it, what the prefix index names is what the cache holds, and a take-back
that was not answered keeps its slot.
"""

from __future__ import annotations

import enum
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from fd_core.backends.null import NullModel, _chain
from fd_core.config import SpeculativeConfig
from fd_core.engine.core import Engine
from fd_core.kv.effects import Load
from fd_core.kv.prefix import PrefixHasher
from fd_core.scheduling.requests import State
from fd_core.types import RequestSpec, SamplingParams, StepOutput, StepPlan
from tests.engine.helpers import Texts, null_engine
from tests.engine.knowing import KnowingDrafter

if TYPE_CHECKING:
    from tests.engine.stored import ScriptedTiers

SMALL = {"max_num_seqs": 4, "num_kv_blocks": 16, "block_size": 4, "max_model_len": 64, "max_num_batched_tokens": 24}
"""Room for one request of the largest size."""


def small_engine(specs: list[RequestSpec], k: int = 0, wrong: float = 0.0, seed: int = 0, **settings: Any) -> Engine:
    """A small engine; with k > 0 its drafter knows the texts of `specs`."""
    values: dict[str, Any] = SMALL | settings
    if k:
        values["speculative"] = SpeculativeConfig(method="ngram", num_speculative_tokens=k, cheap_tokens=1000)
    engine = null_engine(**values)
    if k:
        engine._device.runner._drafter = KnowingDrafter(values["max_num_seqs"], specs, wrong, seed)
    return engine


def greedy(name: str, prompt: Iterable[int], max_tokens: int, **changes: Any) -> RequestSpec:
    """A request whose text goes on for exactly `max_tokens`, unless `stop_token_ids` end it."""
    params = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
    spec = {name: changes.pop(name) for name in ("cache_salt", "priority", "tenant") if name in changes}
    return RequestSpec(request_id=name, prompt=tuple(prompt), params=SamplingParams(**(params | changes)), **spec)


def scripted(spec: RequestSpec) -> list[int]:
    """The greedy text of a request, straight from the model: no scheduler, no runner, no cache."""
    model = NullModel()
    ends = {*spec.params.stop_token_ids, *(() if spec.params.ignore_eos else spec.eos_token_ids)}
    state = _chain(np.uint64(0), np.array(spec.prompt, np.int32))[-1]
    text: list[int] = []
    while len(text) < spec.params.max_tokens and not (text and text[-1] in ends):
        text.append(int(np.argmax(model._logits(np.array([state]))[0])))
        state = _chain(state, np.array(text[-1:], np.int32))[-1]
    return text


class How(enum.Enum):
    """How an operation ends."""

    WELL = enum.auto()
    IN_PART = enum.auto()
    BADLY = enum.auto()


class Stepper:
    """Plans, executes and answers one step at a time, with an audit after each."""

    def __init__(self, engine: Engine, *, eager: bool = False) -> None:
        """`eager` admits whoever fits, without looking ahead: much more preemption."""
        self.engine = engine
        self.scheduler, self.outputs, self.runner = engine._scheduler, engine._outputs, engine._device.runner
        self.limits = self.scheduler.limits
        # A test plays the tiers itself, or there are none.
        self.scheduler.storage = None
        self.in_flight: deque[tuple[StepPlan, StepOutput]] = deque()
        self.texts = Texts()
        self.tiers: ScriptedTiers | None = None
        self.computed: list[int] = []
        """Tokens that the model computed, step by step."""
        self._touched: dict[int, set[int]] = {}
        """Blocks that each step in flight reads or writes."""
        self._ways = itertools.cycle(How)
        self.runner._forward = self._counting(self.runner._forward)
        if eager:
            self.scheduler._growth_with = lambda *_: 0  # type: ignore[method-assign]  # a back door

    def submit(self, *specs: RequestSpec) -> None:
        for spec in specs:
            self.texts.take(self.engine.submit(spec))

    def abort(self, request_id: str) -> None:
        self.texts.take(self.engine.abort([request_id]))
        self.audit()

    def plan(self) -> StepPlan | None:
        """Plan a step and execute it; its answer stays in flight."""
        plan = self.scheduler.plan()
        if plan is None:
            self.perform()
            return None
        self.perform()
        self._check_grants(plan)
        before = len(self.computed)
        self.in_flight.append((plan, self.runner.execute(plan)))
        assert sum(self.computed[before:]) <= min(plan.total_tokens, self.limits.max_num_batched_tokens)
        self._touched[plan.step] = {
            block
            for slot, start, count in zip(plan.slots, plan.starts, plan.num_tokens, strict=True)
            for block in self.runner._batch.tables[slot, : -(-(start + count) // self.limits.block_size)].tolist()
        }
        self.audit()
        return plan

    def answer(self) -> StepPlan:
        """Commit the oldest answer."""
        plan, output = self.receive()
        self.texts.take(self.outputs.commit(plan, output))
        self.perform()
        self.audit()
        return plan

    def perform(self) -> None:
        """Hand the scheduler's effects to whoever plays the tiers."""
        effects = self.scheduler.take_effects()
        if self.tiers is not None:
            self.tiers.perform(effects)

    def complete(self, index: int, how: How) -> None:
        """End an operation outside steps."""
        assert self.tiers is not None
        self.scheduler.completed(self.tiers.complete(index, how))
        self.audit()

    def receive(self) -> tuple[StepPlan, StepOutput]:
        """Take the oldest answer out of flight without committing it."""
        plan, output = self.in_flight.popleft()
        del self._touched[plan.step]
        return plan, output

    def run(self, depth: int, max_steps: int = 20_000, watch: Callable[[StepPlan], None] = lambda _: None) -> Texts:
        """Keep `depth` steps in flight until nothing is left to do; `watch` sees each plan."""
        for _ in range(max_steps):
            while len(self.in_flight) < depth and (plan := self.plan()) is not None:
                watch(plan)
            if self.in_flight:
                self.answer()
            elif self.tiers is None or not self.tiers.pending:
                break
            if self.tiers is not None and self.tiers.pending:
                self.complete(0, next(self._ways))
        assert not self.engine.has_work, "the engine did not come to rest"
        self.check_idle()
        return self.texts

    def state_of(self, request_id: str) -> State | None:
        request = self.scheduler._requests.get(request_id)
        return None if request is None else request.state

    def request_in(self, slot: int) -> str:
        request = self.scheduler.slots.requests[slot]
        assert request is not None
        return request.spec.request_id

    def check_idle(self) -> None:
        stats = self.engine.stats()
        gauges = (stats.running, stats.waiting, stats.take_backs_in_flight)
        assert gauges == (0, 0, 0)
        assert (stats.kv_blocks_used, stats.kv_blocks_fenced, stats.stale_outputs) == (0, 0, 0)
        assert not self.scheduler._computing
        assert self.scheduler.storage is None or not self.scheduler.storage.busy

    # Audits -----------------------------------------------------------------------------------------------

    def audit(self) -> None:
        self.engine.check_integrity()
        slots = self.scheduler.slots
        assert int(slots.occupied.sum()) <= self.limits.max_num_seqs
        for plan, _ in self.in_flight:
            for back in plan.take_backs:
                assert slots.draining[back.slot] and slots.gen[back.slot] == back.gen, "left before its -9"
        free = set(self.scheduler.pool._blank[: self.scheduler.pool._num_blank].tolist())
        free |= set(self.scheduler.pool._cached)
        for step, blocks in self._touched.items():
            assert not blocks & free, f"step {step} in flight touches blocks that are free"
        if self.tiers is not None:
            self._check_operations(free)
        for slot in np.flatnonzero(slots.running).tolist():
            self._check_settled(slot)

    def _check_operations(self, free: set[int]) -> None:
        """Blocks of an operation belong to it, and what is being loaded is touched by no step."""
        assert self.tiers is not None
        for operation in self.tiers.pending:
            blocks = set(getattr(operation, "blocks", np.empty(0)).tolist())
            assert not blocks & free, "a block is free while an operation reads or writes it"
            if isinstance(operation, Load):
                assert not any(blocks & touched for touched in self._touched.values())

    def _check_settled(self, slot: int) -> None:
        """What a slot registered is known, hashed from the known tokens, and held by the cache."""
        slots, size = self.scheduler.slots, self.limits.block_size
        settled, known = int(slots.settled[slot]), int(slots.known[slot])
        assert settled < known <= slots.limit[slot]
        hasher, request = self.scheduler._hasher, slots.requests[slot]
        if hasher is None or request is None or not slots.registered[slot]:
            return
        tokens = slots.tokens[slot, :known]
        assert request.chain[: known // size] == _keys(hasher, request.root, tokens)[: len(request.chain)]
        hashes = _chain(np.uint64(0), tokens)[size - 1 :: size]
        held = self.runner.cache.layer(0)[slots.tables[slot, : slots.registered[slot]], size - 1]
        assert held.tolist() == hashes[: slots.registered[slot]].tolist(), "a known prefix is not in its blocks"

    def _check_grants(self, plan: StepPlan) -> None:
        busy = set().union(*self._touched.values())
        matched = {admission.slot: admission.computed // self.limits.block_size for admission in plan.admissions}
        for grant in plan.grants:
            shared = matched.get(grant.slot, 0) if grant.offset == 0 else 0
            fresh = set(grant.blocks[shared:].tolist())
            assert not fresh & busy, "a block was granted while a step in flight touches it"

    def _counting(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def counted(step: Any, cache: Any) -> Any:
            self.computed.append(len(step.token_ids))
            return forward(step, cache)

        return counted


def _keys(hasher: PrefixHasher, root: bytes, tokens: Any) -> list[bytes]:
    chain: list[bytes] = []
    hasher.extend(chain, root, tokens, len(tokens))
    return chain
