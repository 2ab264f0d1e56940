"""A failure of one request ends only that request; all others get the correct text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from fd_core.backends.null import NullModel
from fd_core.config import Limits
from fd_core.ops.contract import Array, KVCache, StepInput
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.runner.drafting import Drafter, PerSlotDrafter, SlotError
from fd_core.runner.postprocess.numpy_matrix import NumpyPostprocess
from fd_core.runner.runner import Runner
from fd_core.types import Admission, BlockGrant, IntArray, SamplingParams, StepOutput, StepPlan

SLOTS, VOCABULARY = 3, 40
LIMITS = Limits(
    max_num_seqs=SLOTS,
    max_num_batched_tokens=60,
    max_model_len=40,
    block_size=4,
    num_kv_blocks=10 * SLOTS,
    vocab_size=VOCABULARY,
    max_drafts=2,
)


class Counting(NullModel):
    """Token t is followed by t + 1; logits at chosen positions of chosen slots are abnormal."""

    def __init__(self, strange: Callable[[int, int], float | None] = lambda *_: None) -> None:
        super().__init__(VOCABULARY)
        self._strange = strange

    def forward(self, step: StepInput, cache: KVCache) -> Array:
        logits = np.zeros((len(step.logits_rows), VOCABULARY), np.float32)
        for row, at in enumerate(step.logits_rows.tolist()):
            logits[row, (step.token_ids[at] + 1) % VOCABULARY] = 5.0
            slot = int(np.searchsorted(step.query_start, at, side="right")) - 1
            value = self._strange(slot, int(step.positions[at]))
            if value is not None:
                logits[row, slice(None) if value == -np.inf else 7] = value
        return logits


class Guessing(PerSlotDrafter):
    """Drafts the last token plus 1, or a wrong increment; raises on demand."""

    name = "guessing"

    def __init__(self, raises: Callable[[str, int, int], None] = lambda *_: None, wrong: int = 0) -> None:
        self._raises = raises
        self._wrong = wrong
        self._texts: dict[int, list[int]] = {}

    def admit(self, slot: int, tokens: IntArray) -> None:
        self._raises("admit", slot, len(tokens))
        self._texts[slot] = tokens.tolist()

    def grow(self, slot: int, tokens: IntArray) -> None:
        self._raises("grow", slot, len(self._texts[slot]))
        self._texts[slot] += tokens.tolist()

    def guess(self, slot: int, limit: int) -> IntArray:
        self._raises("guess", slot, len(self._texts[slot]))
        last = self._texts[slot][-1] + self._wrong
        return (np.arange(last + 1, last + 1 + limit) % VOCABULARY).astype(np.int32)


class Steps:
    """Three requests in one batch; slot 1 has special parameters until it is admitted again."""

    def __init__(self, model: NullModel, drafter: Drafter | None = None, **params: Any) -> None:
        limits = msgspec.structs.replace(LIMITS, max_drafts=LIMITS.max_drafts if drafter is not None else 0)
        self.runner = Runner(NumpyOps(), model, limits, NumpyPostprocess, drafter)
        self.step = 0
        self.texts: dict[int, list[int]] = {}
        self.errors: dict[int, list[str]] = {slot: [] for slot in range(SLOTS)}
        self._params = params

    def run(self, *admitted: int) -> StepOutput:
        """Compute a step of all slots."""
        for slot in admitted:
            self.texts[slot], self.errors[slot] = [], []
        slots = np.arange(SLOTS, dtype=np.int32)
        fresh = np.isin(slots, admitted)
        drafts = np.where(fresh, 0, self.runner.limits.max_drafts).astype(np.int32)
        # Like a scheduler unaware of the failure: everything in flight may have been delivered.
        lost = [len(self.errors[slot]) * (1 + self.runner.limits.max_drafts) for slot in range(SLOTS)]
        lengths = np.array([2 + len(self.texts[slot]) + lost[slot] for slot in range(SLOTS)], np.int32)
        plan = StepPlan(
            epoch=1,
            step=self.step,
            slots=slots,
            gens=np.ones(SLOTS, np.int32),
            starts=np.where(fresh, 0, lengths - 1).astype(np.int32),
            num_tokens=np.where(fresh, 2, 1 + drafts).astype(np.int32),
            num_drafts=drafts,
            samples=np.ones(SLOTS, np.bool_),
            admissions=tuple(self._admission(slot) for slot in admitted),
            grants=tuple(BlockGrant(slot, 0, np.arange(10, dtype=np.int32) + 10 * slot) for slot in admitted),
        )
        self.step += 1
        output = self.runner.execute(plan)
        failed = dict(output.errors)
        for slot in range(SLOTS):
            if slot in failed:
                self.errors[slot].append(failed[slot])
            else:
                self.texts[slot] += [token for token in output.tokens[slot].tolist() if token >= 0]
        return output

    def _admission(self, slot: int) -> Admission:
        own = self._params if slot == 1 and self.step == 0 else {}
        prompt = np.array([10 * slot, 10 * slot + 1], np.int32)
        return Admission(slot, 1, prompt, 2, SamplingParams(temperature=0.0, **own), (), 0)

    def check(self, *, failed: int, after: int) -> None:
        """Check that one slot's text ended after some tokens while the others continued."""
        assert [slot for slot, messages in self.errors.items() if messages] == [failed]
        assert len(self.texts[failed]) == after
        for slot, text in self.texts.items():
            assert text == [(10 * slot + 2 + position) % VOCABULARY for position in range(len(text))]
            assert slot == failed or len(text) >= self.step


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("drafts", [False, True])
def test_non_finite_logits_end_their_request(value: float, drafts: bool) -> None:
    steps = Steps(Counting(lambda slot, at: value if slot == 1 and at == 4 else None), Guessing() if drafts else None)
    steps.run(0, 1, 2)
    for _ in range(4):
        steps.run()
    # No token can be sampled after position 4. With drafts, the tokens of its step are lost with it.
    steps.check(failed=1, after=1 if drafts else 3)


def test_logits_after_rejected_draft_are_ignored() -> None:
    steps = Steps(Counting(lambda slot, at: np.nan if slot == 1 and at == 3 else None), Guessing(wrong=2))
    steps.run(0, 1, 2)
    assert steps.run().errors == ()
    assert [len(text) for text in steps.texts.values()] == [2, 2, 2]


def test_failed_request_fails_until_slot_is_readmitted() -> None:
    steps = Steps(Counting(lambda slot, at: np.nan if slot == 1 and at == 2 and steps.step < 4 else None))
    steps.run(0, 1, 2)
    for _ in range(2):
        assert [slot for slot, _ in steps.run().errors] == [1]
    for admitted in [(1,), (), (), ()]:
        assert steps.run(*admitted).errors == ()
    assert steps.texts[1] == [12, 13, 14, 15]


@pytest.mark.parametrize("when", ["admit", "grow", "guess"])
def test_drafter_error_ends_only_its_request(when: str) -> None:
    def raises(what: str, slot: int, length: int) -> None:
        if what == when and slot == 1 and (what == "admit" or length >= 3):
            raise KeyError("lost")

    steps = Steps(Counting(), Guessing(raises))
    steps.run(0, 1, 2)
    for _ in range(4):
        steps.run()
    steps.check(failed=1, after={"admit": 0, "grow": 1, "guess": 0}[when])
    assert "guessing failed: KeyError: 'lost'" in steps.errors[1][0]
    assert len(steps.texts[0]) == len(steps.texts[2]) == 13, "the others still get drafts"


def test_drafter_naming_unknown_slot_is_an_engine_fault() -> None:
    class Astray(Guessing):
        def propose(self, slots: IntArray, limit: int) -> tuple[IntArray, IntArray]:
            raise SlotError(7, "who?")

    with pytest.raises(SlotError):
        Steps(Counting(), Astray()).run(0, 1, 2)


@pytest.mark.parametrize("wrong", [VOCABULARY, 2**31 - 1, -1, -(2**31)])
def test_drafts_are_cut_at_first_invalid_token_id(wrong: int) -> None:
    class Beyond(Guessing):
        def guess(self, slot: int, limit: int) -> IntArray:
            found = super().guess(slot, limit)
            found[1:] = wrong
            return found

    steps = Steps(Counting(), Beyond())
    steps.run(0, 1, 2)
    output = steps.run()
    assert output.errors == () and steps.runner.batch.num_drafts.tolist() == [1, 1, 1]
    assert [len(text) for text in steps.texts.values()] == [3, 3, 3], "the draft before it was verified"


def test_invalid_sampling_parameters_end_their_request() -> None:
    steps = Steps(Counting(), None, logit_bias={VOCABULARY: 1.0})
    steps.run(0, 1, 2)
    steps.run()
    steps.check(failed=1, after=0)
    assert "logit_bias has token 40, which exceeds the vocabulary of 40" in steps.errors[1][0]


def test_stop_token_outside_vocabulary_is_accepted() -> None:
    steps = Steps(Counting(), None, min_tokens=3, stop_token_ids=(VOCABULARY, 12))
    steps.run(0, 1, 2)
    assert steps.texts[1] not in ([], [12])
    assert not steps.errors[1]
