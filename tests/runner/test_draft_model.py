"""The draft model proposes its own greedy continuation in few forwards of bounded size."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fd_core.backends.null import NullModel
from fd_core.errors import ConfigError
from fd_core.runner.drafting.draft_model import SlotBlocks
from tests.runner.drafters import LIMITS, Watched, draft_model, extend, greedy, ids, propose

LONGEST = LIMITS["max_model_len"]
RESIDENCIES = st.tuples(st.integers(0, 3), st.lists(st.integers(0, 256), min_size=1, max_size=40))
TURNS = st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(RESIDENCIES | st.none(), TURNS), min_size=1, max_size=20),
    st.integers(1, 5),
    st.integers(1, 60),
    st.integers(12, 40),
    st.integers(0, 2**32 - 1),
)
def test_proposal_equals_greedy_continuation_of_draft_model(
    events: list, limit: int, budget: int, blocks: int, seed: int
) -> None:
    """With small budgets and caches, and any number of accepted drafts: correct or empty."""
    model, rng = Watched(), np.random.default_rng(seed)
    drafter = draft_model(model, max_num_batched_tokens=budget, num_kv_blocks=blocks)
    texts: dict[int, list[int]] = {}
    drafts: dict[int, list[int]] = {}
    for admitted, turn in events:
        if admitted is not None:
            slot, text = admitted
            texts[slot], drafts[slot] = list(text), []
            drafter.admit(slot, ids(text))
        more = {
            slot: [*drafts[slot][: rng.integers(0, limit + 1)], *rng.integers(0, 257, rng.integers(1, 3)).tolist()]
            for slot in turn
            if slot in texts and len(texts[slot]) + limit + 2 <= LONGEST
        }
        if not more:
            continue
        extend(drafter, more)
        before = len(model.computed)
        proposed = propose(drafter, list(more), limit)
        assert len(model.computed) - before <= limit
        assert sum(model.computed[before : before + 1]) <= budget
        for slot, guess in zip(more, proposed, strict=True):
            texts[slot] += more[slot]
            drafts[slot] = guess
            assert guess == greedy(texts[slot], len(guess))
            assert len(guess) in (0, min(limit, LONGEST - len(texts[slot])))


def test_slots_share_one_forward_per_draft() -> None:
    model = Watched()
    drafter = draft_model(model)
    for slot in range(4):
        drafter.admit(slot, ids([slot] * (slot + 3)))
    proposed = propose(drafter, range(4), 3)
    assert proposed == [greedy([slot] * (slot + 3), 3) for slot in range(4)]
    assert model.computed == [3 + 4 + 5 + 6, 4, 4]


def test_only_new_tokens_are_computed() -> None:
    model = Watched()
    drafter = draft_model(model)
    drafter.admit(0, ids([5] * 20))
    first = propose(drafter, [0], 3)[0]
    other = (first[1] + 1) % 257
    for delivered, missing in (([*first, 7], 2), ([other], 1)):
        del model.computed[:]
        extend(drafter, {0: delivered})
        propose(drafter, [0], 3)
        assert model.computed == [missing, 1, 1]


def test_kv_of_replaced_drafts_is_recomputed() -> None:
    drafter = draft_model()
    drafter.admit(0, ids([5] * 20))
    first = propose(drafter, [0], 4)[0]
    others = [(first[0] + 1) % 257, first[1], first[2]]
    extend(drafter, {0: others})
    assert propose(drafter, [0], 4) == [greedy([5] * 20 + others, 4)]


def test_chunked_prompt_does_not_stop_other_drafting() -> None:
    model = Watched()
    drafter = draft_model(model, max_num_batched_tokens=8)
    texts = {0: [1] * 4, 1: [2] * 30}
    drafter.admit(0, ids(texts[0]))
    drafter.admit(1, ids(texts[1]))
    assert propose(drafter, [1, 0], 2) == [[], greedy(texts[0], 2)]
    turns = 0
    while not propose(drafter, [1], 2)[0]:
        extend(drafter, {0: [9], 1: [9]})
        texts[0].append(9)
        texts[1].append(9)
        assert propose(drafter, [0], 2) == [greedy(texts[0], 2)]
        turns += 1
        assert turns < 10
    assert max(model.computed) == 8
    assert propose(drafter, [1], 2) == [greedy(texts[1], 2)]


def test_unverifiable_drafts_are_not_computed() -> None:
    drafter = draft_model(cheap_tokens=6)
    for slot in range(4):
        drafter.admit(slot, ids([slot]))
    assert [len(guess) for guess in propose(drafter, range(4), 3)] == [1, 1, 1, 1]
    assert [len(guess) for guess in propose(drafter, range(2), 3)] == [2, 2]
    assert draft_model(cheap_tokens=1).propose(ids([0]), 3)[1].tolist() == [0]


def test_drafting_stops_at_context_of_draft_model() -> None:
    drafter = draft_model(NullModel(max_positions=10))
    drafter.admit(0, ids([3] * 8))
    assert propose(drafter, [0], 5) == [greedy([3] * 8, 2)]
    extend(drafter, {0: [4, 4]})
    assert propose(drafter, [0], 5) == [[]]


def test_vocabulary_mismatch_is_rejected_with_both_sizes() -> None:
    with pytest.raises(ConfigError, match=r"257 tokens, got 100") as caught:
        draft_model(NullModel(vocab_size=100))
    assert caught.value.field == "--speculative-config"


def test_blocks_of_idle_slot_are_evicted() -> None:
    drafter = draft_model(num_kv_blocks=12)
    for slot in (0, 1):
        drafter.admit(slot, ids([slot] * 40))
        assert propose(drafter, [slot], 2) == [greedy([slot] * 40, 2)]
    assert propose(drafter, [0], 2) == [greedy([0] * 40, 2)]
    assert propose(drafter, [1, 0], 2) == [[], greedy([0] * 40, 2)], "slots of the same step keep theirs"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), max_size=40), st.integers(5, 20))
def test_block_is_free_or_held_by_one_slot(events: list[tuple[int, int]], num_blocks: int) -> None:
    blocks = SlotBlocks(4, num_blocks, 4, 20)
    for slot, tokens in events:
        blocks.begin_turn(ids([slot]))
        if tokens:
            assert blocks.reserve(slot, tokens), "blocks of idle slots are evicted"
        else:
            blocks.release(slot)
        held = [blocks.tables[row, : blocks._held[row]].tolist() for row in range(4)]
        assert sorted(itertools.chain(blocks._free, *held)) == list(range(num_blocks))
        assert len(held[slot]) >= -(-tokens // 4)
