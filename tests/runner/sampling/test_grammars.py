"""Grammars per slot: drafts are checked before verification, and each logit row gets the right mask."""

from __future__ import annotations

import numpy as np
import pytest

from fd_core.config import Limits
from fd_core.runner.batch import PersistentBatch
from fd_core.runner.inputs.inputs import Rows, resolve_rows
from fd_core.runner.sampling.grammars import SlotGrammars
from fd_core.structured import grammar
from fd_core.types import Admission, IntArray, Reasoning, SamplingParams, StepPlan
from tests.structured.bytewise import END_ID, VOCABULARY, bytes_compiler, ids

LIMITS = Limits(
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=64,
    block_size=8,
    num_kv_blocks=32,
    vocab_size=VOCABULARY,
    max_drafts=4,
)
ABC = grammar.regex("[ab]{0,9}c")
WORD = grammar.choice(["yes", "no"])


def admission(slot: int, made: str | None, delivered: str = "", reasoning: Reasoning | None = None) -> Admission:
    tokens = np.array([1, 2, *ids(delivered)], np.int32)
    params = SamplingParams(grammar=made, reasoning=reasoning)
    return Admission(slot, 1, tokens, 2, params, eos_token_ids=(END_ID,), computed=0)


def slots(*numbers: int) -> IntArray:
    return np.array(numbers, np.int32)


def shaped(grammars: SlotGrammars, slot: int, *guesses: int, ahead: int = 0) -> list[int]:
    drafts = np.zeros((1, 4), np.int32)
    drafts[0, : len(guesses)] = guesses
    counts = slots(len(guesses))
    grammars.shape_drafts(slots(slot), drafts, counts, slots(ahead))
    shaped_drafts: list[int] = drafts[0, : counts[0]].tolist()
    return shaped_drafts


@pytest.fixture
def grammars() -> SlotGrammars:
    return SlotGrammars(bytes_compiler(), VOCABULARY)


@pytest.mark.law("4")
def test_draft_forbidden_by_grammar_is_not_verified(grammars: SlotGrammars) -> None:
    grammars.admit(admission(0, ABC))
    assert shaped(grammars, 0, *ids("abxc")) == ids("ab")
    assert shaped(grammars, 0, *ids("x")) == []
    assert shaped(grammars, 3, *ids("xyz")) == ids("xyz"), "a slot without a grammar keeps its drafts"


def test_forced_tokens_replace_drafts_and_are_counted(grammars: SlotGrammars) -> None:
    grammars.admit(admission(1, WORD, "y"))
    assert shaped(grammars, 1, *ids("n")) == [*ids("es"), END_ID]
    delivered = np.array([[*ids("es"), END_ID, 5, 0]], np.int32)
    assert not list(grammars.extend(slots(1), delivered, slots(3), slots(3)))
    assert (grammars.stats.forced_drafted, grammars.stats.forced_accepted) == (3, 3)


def step(grammars: SlotGrammars, texts: dict[int, list[int]]) -> tuple[Rows, dict[int, set[int]]]:
    """Decode every slot with its drafts; return the allowed token ids by logit row."""
    batch = PersistentBatch(LIMITS)
    for slot, drafts in texts.items():
        batch.length[slot], batch.num_drafts[slot] = 5, len(drafts)
        batch.tokens[slot, 5 : 5 + len(drafts)] = drafts
    order = np.array(sorted(texts, reverse=True), np.int32)
    drafts = batch.num_drafts[order]
    plan = StepPlan(
        1, 0, order, order, np.full(len(order), 4, np.int32), drafts + 1, drafts, np.ones(len(order), np.bool_)
    )
    rows = resolve_rows(plan, batch, LIMITS)
    begun = grammars.begin(rows, batch.tokens)
    if begun is None:
        return rows, {}
    masks = begun()
    bits = np.unpackbits(masks.bits.view(np.uint8), axis=1, bitorder="little")[:, :VOCABULARY]
    return rows, {int(row): set(np.flatnonzero(mask).tolist()) for row, mask in zip(masks.rows, bits, strict=True)}


@pytest.mark.law("4")
def test_each_logit_row_gets_mask_of_its_slot_and_position(grammars: SlotGrammars) -> None:
    a, b, c = ids("abc")
    grammars.admit(admission(1, ABC, "a"))
    grammars.admit(admission(3, WORD))
    rows, allowed = step(grammars, {0: [7], 1: [b, c], 2: [], 3: [ids("y")[0]]})
    assert rows.logits_slots.tolist() == [3, 3, 2, 1, 1, 1, 0, 0]
    assert allowed == {
        0: {ids("y")[0], ids("n")[0]},
        1: {ids("e")[0]},
        3: {a, b, c},
        4: {a, b, c},
        5: {END_ID},
    }


@pytest.mark.law("4")
def test_grammar_after_reasoning_masks_later_drafts(grammars: SlotGrammars) -> None:
    grammars.admit(admission(0, ABC, reasoning=Reasoning(end=(9,))))
    _, allowed = step(grammars, {0: [5, 9, *ids("a")]})
    assert allowed[0] == allowed[1] == set(range(VOCABULARY)) - {END_ID}
    assert allowed[2] == allowed[3] == set(ids("abc"))


def test_new_request_in_slot_gets_its_own_grammar(grammars: SlotGrammars) -> None:
    grammars.admit(admission(0, WORD))
    grammars.admit(admission(0, None))
    assert not grammars.matchers and step(grammars, {0: []})[1] == {}
    grammars.admit(admission(0, ABC, "ab"))
    assert step(grammars, {0: []})[1] == {0: set(ids("abc"))}


def test_resumed_request_continues_its_grammar(grammars: SlotGrammars) -> None:
    grammars.admit(admission(0, WORD, "ye"))
    assert step(grammars, {0: []})[1] == {0: set(ids("s"))}


def test_forbidden_token_fails_only_its_slot(grammars: SlotGrammars) -> None:
    for slot in (0, 1):
        grammars.admit(admission(slot, WORD))
    tokens = np.array([ids("x"), ids("y")], np.int32)
    ((slot, message),) = grammars.extend(slots(0, 1), tokens, slots(0, 0), slots(0, 0))
    assert slot == 0 and "does not allow" in message
    assert step(grammars, {1: []})[1] == {0: set(ids("e"))}
