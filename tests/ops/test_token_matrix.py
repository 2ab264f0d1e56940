import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fd_core.plugins import POSTPROCESS, installed_plugins
from fd_core.signals import Outcome, read
from tests.ops.packs import PACKS
from tests.runner.inputs.test_inputs import LIMITS


@st.composite
def steps(draw):
    """Draw a step of `num_slots` slots with up to k drafts: sampled tokens, drafts, slots, preempted slots."""
    num_slots, k = draw(st.integers(1, 6)), draw(st.integers(0, 4))
    slots = draw(st.permutations(range(num_slots)))
    rows = draw(st.integers(0, num_slots))
    released = draw(st.integers(0, num_slots - rows))
    tokens = st.integers(0, 2)  # includes token 0; a small vocabulary makes accepted drafts likely
    matrix = lambda width: np.array(  # noqa: E731 - a local shorthand
        draw(st.lists(st.lists(tokens, min_size=width, max_size=width), min_size=rows, max_size=rows)), np.int32
    ).reshape(rows, width)
    num_drafts = np.array(draw(st.lists(st.integers(0, k), min_size=rows, max_size=rows)), np.int32)
    used, taken = np.array(slots[:rows], np.int32), np.array(slots[rows : rows + released], np.int32)
    return num_slots, matrix(1 + k), matrix(k), num_drafts, used, taken


@pytest.mark.parametrize("pack", PACKS)
@settings(deadline=None, max_examples=150)
@given(steps())
def test_matrix_has_accepted_drafts_bonus_token_and_releases(pack, step):
    num_slots, sampled, drafts, num_drafts, slots, taken = step
    ops = PACKS[pack]()
    accepted = ops.verify(*map(ops.from_host, (sampled, drafts, num_drafts)))
    limits = msgspec.structs.replace(LIMITS, max_num_seqs=num_slots, max_drafts=drafts.shape[1])
    postprocess = installed_plugins().load(POSTPROCESS, ops.framework)(ops, limits)
    matrix = postprocess.token_matrix(ops.from_host(sampled), accepted, ops.from_host(slots), ops.from_host(taken))
    outcomes = read(ops.to_host(matrix))
    assert ops.to_host(matrix).dtype == np.int32
    assert ops.to_host(matrix).shape == (num_slots, sampled.shape[1])
    for row, slot in enumerate(slots.tolist()):
        right = 0
        while right < num_drafts[row] and drafts[row, right] == sampled[row, right]:
            right += 1
        assert ops.to_host(accepted)[row] == right
        assert outcomes.kinds[slot] == Outcome.TOKENS
        assert outcomes.tokens[slot, : outcomes.counts[slot]].tolist() == sampled[row, : 1 + right].tolist()
    assert {slot for slot in range(num_slots) if outcomes.kinds[slot] == Outcome.RELEASED} == set(taken.tolist())
    assert (outcomes.kinds == Outcome.EMPTY).sum() == num_slots - len(slots) - len(taken)
