"""Hundreds of random legal plans compared with the oracle; the seed is the test's parameter."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pytest

from fd_core.engine.core import Engine
from fd_core.engine.device import make_device
from fd_core.signals import Outcome, read
from fd_core.testing.kit.judging import Judge
from fd_core.testing.kit.target import Target
from fd_core.testing.models.checkpoints import LONG_CASE
from fd_core.testing.models.texts import plan_of
from fd_core.types import Admission, BlockGrant, RequestSpec, Revocation, SamplingParams, StepOutput, StepPlan

ROOM: dict[str, Any] = {"max_num_seqs": 67, "max_model_len": 2176, "max_num_batched_tokens": 701}
BLOCK_SIZES = [16, 32, 5, 128, 1, 64]
"""By seed."""
LENGTHS = [1, 2, 15, 16, 17, 31, 33, 47, 64, 65, 100, 127, 128, 129, 255, 257, 300, 640, 641, 2049, 2100]
PREFIX = [(11 * place) % 241 for place in range(80)]


_MODES: Final = ("anything", "decodes", "trickle", "wide", "one row", "nothing")
_SHARES: Final = (0.45, 0.25, 0.1, 0.1, 0.05, 0.05)
"""Weights of plans with all kinds of rows, only decodes, prompts token by token, few large chunks, one row or none."""
_ALONE: Final = 5
"""Of 16 plans, one that computes no row."""


@dataclass(slots=True)
class _Text:
    """A request and its tokens so far, over all slot occupancies."""

    spec: RequestSpec
    delivered: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [*self.spec.prompt, *self.delivered]

    @property
    def longest(self) -> int:
        return len(self.spec.prompt) + self.spec.params.max_tokens

    @property
    def ended(self) -> bool:
        return len(self.delivered) == self.spec.params.max_tokens


@dataclass(slots=True)
class _Occupancy:
    """A slot occupancy; token counts include the maximum of steps in flight."""

    text: _Text
    slot: int
    gen: int
    admitted: int
    computed: int
    """Tokens of the admission that are computed after all plans so far."""
    blocks: list[int] = field(default_factory=list)
    granted: int = 0
    flying: deque[int] = field(default_factory=deque)
    """Maximum number of delivered tokens of each sampling row in flight."""
    rows: int = 0

    @property
    def most(self) -> int:
        """Maximum number of tokens in the runner at the next plan."""
        return len(self.text.tokens) + sum(self.flying)


class RandomPlans:
    """Admits, computes and revokes at random; checks the format of each output, and finally the texts.

    Slots are reused at once and in random order, rows are shuffled, blocks are granted early or as late as possible,
    shared between common prefixes, and taken from both ends of the pool, including block 0 and the last one.
    """

    def __init__(self, engine: Engine, judge: Judge, seed: int) -> None:
        self._runner = engine.probe().runner
        self._limits = self._runner.limits
        self._watchdog = engine.probe().watchdog_seconds
        self._judge = judge
        self._rng = np.random.default_rng(seed)
        self._device = make_device(self._runner, 2, "memory")
        self._step = 0
        self._gen = 0
        self._stays: dict[int, _Occupancy] = {}
        self._draining: dict[int, _Occupancy] = {}
        self._waiting = [_Text(spec) for spec in judge.specs.values()]
        self._owners: Counter[int] = Counter()
        self._flying: deque[tuple[StepPlan, list[_Occupancy]]] = deque()
        self.seen: Counter[str] = Counter()
        """Counts of events, so that a test can assert that they occurred."""

    def run(self, plans: int) -> None:
        """Compute `count` plans and judge the texts."""
        try:
            for _ in range(plans):
                self._submit()
                while len(self._flying) > self._rng.integers(0, 2):
                    self._collect()
            while self._flying:
                self._collect()
        finally:
            self._device.close()
        texts = [*self._waiting, *(occupancy.text for occupancy in self._stays.values())]
        self._judge.check({text.spec.request_id: text.delivered for text in texts})

    def _submit(self) -> None:
        mode = str(self._rng.choice(_MODES, p=_SHARES))
        if self._step % 16 == _ALONE:  # accepted drafts decide how long there is something to revoke
            mode = "nothing"
        revoked = self._revoke(some=mode == "nothing")
        admissions = self._admit()
        rows = [] if mode == "nothing" else self._rows(mode)
        occupancies, columns, grants = [], [], []
        for occupancy, count, draft in rows:
            own = count - draft
            prefill = occupancy.computed < occupancy.admitted
            start = occupancy.computed if prefill else occupancy.most - 1
            done = not prefill or occupancy.computed + own == occupancy.admitted
            grants += self._grow(occupancy, start + count)
            occupancies.append(occupancy)
            columns.append((occupancy.slot, occupancy.gen, start, count, draft, done))
            occupancy.rows += 1
            if prefill:
                occupancy.computed += own
            if done:
                occupancy.flying.append(1 + draft)
        size = self._limits.block_size
        shared = [
            BlockGrant(each.slot, 0, np.array(self._stays[each.slot].blocks[: each.computed // size], np.int32))
            for each in admissions
            if each.computed
        ]
        plan = plan_of(
            self._step,
            columns,
            admissions=tuple(admissions),
            grants=tuple(shared + grants),
            revocations=tuple(Revocation(occupancy.slot, occupancy.gen) for occupancy in revoked),
        )
        self._step += 1
        self.seen[mode] += 1
        self.seen["rows of 50 and more"] += len(rows) >= 50
        self.seen["tokens of 600 and more"] += plan.total_tokens >= 600
        self.seen["drafts"] += int(plan.num_drafts.sum())
        self.seen["revocations"] += len(revoked)
        self.seen["revocations alone"] += bool(revoked) and not rows
        self.seen["admissions"] += len(admissions)
        self._flying.append((plan, occupancies))
        self._device.submit(plan)

    def _revoke(self, *, some: bool) -> list[_Occupancy]:
        """Revoke slots: often none, unless there must be `some`, sometimes one, rarely all."""
        share = self._rng.choice([0.0, 0.03, 1.0], p=[0.6, 0.385, 0.015])
        chosen = [occupancy for occupancy in self._stays.values() if self._rng.random() < share]
        if some and not chosen:
            chosen = [*self._stays.values()][:1]
        for occupancy in chosen:
            del self._stays[occupancy.slot]
            self._draining[occupancy.slot] = occupancy
        return chosen

    def _admit(self) -> list[Admission]:
        limits, admissions = self._limits, []
        free = [slot for slot in range(limits.max_num_seqs) if slot not in self._stays and slot not in self._draining]
        self._rng.shuffle(free)
        for slot in free[: int(self._rng.choice([0, 1, 3, len(free)], p=[0.3, 0.2, 0.2, 0.3]))]:
            ready = [index for index, text in enumerate(self._waiting) if not text.ended]
            if not ready:
                break
            text = self._waiting[int(self._rng.choice(ready))]
            shared = self._shared_blocks(text) if self._rng.random() < 0.6 else []
            if -(-text.longest // limits.block_size) - len(shared) > limits.num_kv_blocks - len(self._owners):
                break
            self._waiting.remove(text)
            self._gen += 1
            known = np.array(text.tokens, np.int32)
            occupancy = _Occupancy(
                text, slot, self._gen, len(known), len(shared) * limits.block_size, list(shared), len(shared)
            )
            self._owners.update(shared)
            # All of its blocks are reserved, and granted on growth.
            fresh = self._take(-(-text.longest // limits.block_size) - len(shared))
            occupancy.blocks += fresh
            self._stays[slot] = occupancy
            self.seen["shared blocks"] += len(shared)
            admissions.append(
                Admission(slot, occupancy.gen, known, len(text.spec.prompt), text.spec.params, (), occupancy.computed)
            )
        return admissions

    def _take(self, count: int) -> list[int]:
        free = [block for block in range(self._limits.num_kv_blocks) if not self._owners[block]]
        self._rng.shuffle(free)
        # Blocks are taken from the ends of the pool first, so that those are always in use.
        free.sort(key=lambda block: block not in (0, self._limits.num_kv_blocks - 1))
        chosen = free[:count]
        self._rng.shuffle(chosen)
        self._owners.update(chosen)
        return chosen

    def _shared_blocks(self, text: _Text) -> list[int]:
        """Return the blocks of another request that hold, or will hold, the same leading tokens."""
        size, known = self._limits.block_size, text.tokens
        for occupancy in self._stays.values():
            theirs, count = occupancy.text.tokens, 0
            whole = min(occupancy.computed, len(known) - 1) // size
            while (
                count < whole and theirs[count * size : (count + 1) * size] == known[count * size : (count + 1) * size]
            ):
                count += 1
            if count:
                return occupancy.blocks[:count]
        return []

    def _grow(self, occupancy: _Occupancy, tokens: int) -> list[BlockGrant]:
        """Grant blocks for `tokens` tokens, sometimes more."""
        needed = -(-tokens // self._limits.block_size)
        if needed <= occupancy.granted:
            return []
        offset, occupancy.granted = (
            occupancy.granted,
            min(needed + int(self._rng.integers(0, 3)), len(occupancy.blocks)),
        )
        return [BlockGrant(occupancy.slot, offset, np.array(occupancy.blocks[offset : occupancy.granted], np.int32))]

    def _rows(self, mode: str) -> list[tuple[_Occupancy, int, int]]:
        """Choose (stay, tokens including drafts, drafts) within the budget."""
        occupancies, rows = list(self._stays.values()), []
        self._rng.shuffle(occupancies)
        left = self._limits.max_num_batched_tokens
        for occupancy in occupancies:
            prefill = occupancy.computed < occupancy.admitted
            rest = occupancy.admitted - occupancy.computed
            room = occupancy.text.longest - occupancy.most
            if left < 1 or (mode == "decodes" and prefill) or (not prefill and room < 1):
                continue
            if mode in ("anything", "decodes") and self._rng.random() < 0.1:
                continue
            draft = 0
            if prefill:
                count = min(rest, left)
                if mode == "trickle":
                    count = 1
                elif mode != "wide" and self._rng.random() < 0.6:
                    count = int(self._rng.integers(1, count + 1))
            else:
                draft = int(self._rng.integers(0, min(self._limits.max_drafts, room - 1, left - 1) + 1))
                draft = 0 if mode == "trickle" else draft
                count = 1 + draft
            rows.append((occupancy, count, draft))
            left -= count
            if mode == "one row":
                break
        return rows

    def _collect(self) -> None:
        plan, occupancies = self._flying.popleft()
        output = self._device.collect(self._watchdog)
        assert output.step == plan.step
        assert not output.errors
        outcomes = read(output.tokens, output.errors)
        right = np.full(self._limits.max_num_seqs, Outcome.EMPTY, np.uint8)
        right[plan.slots[plan.samples]] = Outcome.TOKENS
        right[[back.slot for back in plan.revocations]] = Outcome.RELEASED
        wrong = np.flatnonzero(outcomes.kinds != right).tolist()
        assert not wrong, f"step {plan.step}, slots {wrong}: expected {right[wrong]}, got {outcomes.kinds[wrong]}"
        for occupancy, samples, drafts in zip(
            occupancies, plan.samples.tolist(), plan.num_drafts.tolist(), strict=True
        ):
            occupancy.rows -= 1
            if samples:
                occupancy.flying.popleft()
                count = int(outcomes.counts[occupancy.slot])
                assert 1 <= count <= 1 + drafts, f"step {plan.step}: {count} tokens for {drafts} drafts"
                begin = len(occupancy.text.delivered)
                occupancy.text.delivered += outcomes.tokens[occupancy.slot, :count].tolist()
                self.seen["accepted"] += count - 1
                self._check_scores(occupancy, output, begin, count=count)
        for back in plan.revocations:
            self._leave(self._draining.pop(back.slot))
        for occupancy in [
            occupancy for occupancy in self._stays.values() if occupancy.text.ended and not occupancy.rows
        ]:
            del self._stays[occupancy.slot]
            self._leave(occupancy)

    def _leave(self, occupancy: _Occupancy) -> None:
        """Free slot and blocks; a request that has not ended is queued again."""
        assert not occupancy.rows
        self._owners.subtract(occupancy.blocks)
        self._owners = +self._owners
        if occupancy.text.ended:
            self._judge.check({occupancy.text.spec.request_id: occupancy.text.delivered})
            occupancy.text = _Text(occupancy.text.spec)
            self.seen["ended"] += 1
        self._waiting.append(occupancy.text)

    def _check_scores(self, occupancy: _Occupancy, output: StepOutput, begin: int, count: int) -> None:
        wanted, name = occupancy.text.spec.params.logprobs, occupancy.text.spec.request_id
        if wanted is None or occupancy.text.delivered != self._judge.texts[name][: begin + count]:
            return
        assert output.logprobs is not None, f"{name} requested log-probabilities"
        rows = np.flatnonzero(output.logprobs.slots == occupancy.slot)
        columns = output.logprobs.columns[rows].tolist()
        assert columns[:count] == list(range(count)), f"{name}: scores of columns {columns} for {count} tokens"
        for column, row in enumerate(rows[:count].tolist()):
            ids, top = output.logprobs.top_ids[row, :wanted], output.logprobs.top[row, :wanted]
            self._judge.check_scores(
                name, begin + column, float(output.logprobs.chosen[row]), top_ids=ids.tolist(), top=top.tolist()
            )
            self.seen["scores"] += 1


def requests(exact: bool, count: int = 80, lengths: Sequence[int] = LENGTHS) -> list[RequestSpec]:
    """Return prompts of some lengths and of random ones, a third with a common prefix; with `exact`, most are sampled,
    filtered, penalized."""
    rng = np.random.default_rng(5)
    found = []
    for index in range(count):
        length = lengths[index] if index < len(lengths) else int(rng.integers(1, min(max(lengths), 120)))
        prompt = rng.integers(0, 250, length).tolist()
        if index % 3 == 0:
            prompt[: len(PREFIX)] = PREFIX[: len(prompt)]
        params: dict[str, Any] = {"temperature": 0.0, "max_tokens": int(rng.integers(2, 28)), "ignore_eos": True}
        if exact and index % 4:
            params |= {
                "temperature": float(rng.choice([0.5, 1.0, 1.7])),
                "top_k": int(rng.choice([0, 1, 40, 5000])),
                "top_p": float(rng.choice([0.3, 0.95, 1.0])),
                "min_p": float(rng.choice([0.0, 0.05])),
                "seed": int(rng.integers(0, 2**63)),
            }
        if index % 5 == 1:
            params |= {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": -0.2}
        if index % 7 == 2:
            params |= {"logit_bias": {int(token): 4.0 for token in rng.integers(0, 256, 5)}}
        if index % 3 == 1:
            params |= {"logprobs": int(rng.choice([0, 1, 5, 20]))}
        found.append(RequestSpec(request_id=f"r{index}", prompt=tuple(prompt), params=SamplingParams(**params)))
    return found


def run_random_plans(
    target: Target, seed: int, k: int, specs: list[RequestSpec], tokens: int, plans: int = 60, **room: Any
) -> RandomPlans:
    """Compute random plans over requests, in a cache of so many tokens, and judge outputs and texts."""
    size = BLOCK_SIZES[seed]
    alone = room | {"max_num_seqs": len(specs), "block_size": 16, "num_kv_blocks": 1100}
    judge = Judge.of(target, f"plans of {len(specs)}", LONG_CASE, specs, **alone)
    room |= {"block_size": size, "num_kv_blocks": tokens // size + 50}
    with target.engine(k, judge.whole(), 0.3, case=LONG_CASE, **room) as engine:
        found = RandomPlans(engine, judge, seed)
        found.run(plans)
    return found


@pytest.mark.parametrize("k", [0, 5])
@pytest.mark.parametrize("seed", range(6))
def test_random_plans_deliver_the_right_texts(target: Target, seed: int, k: int) -> None:
    plans = run_random_plans(target, seed, k, requests(target.exact), 16_384, **ROOM)
    for what in ("rows of 50 and more", "tokens of 600 and more", "revocations", "ended", "trickle"):
        assert plans.seen[what], f"no plan had {what}"
    assert (plans.seen["shared blocks"] > 0) == (BLOCK_SIZES[seed] < len(PREFIX))
    assert (plans.seen["accepted"] > 0) == (k > 0)
