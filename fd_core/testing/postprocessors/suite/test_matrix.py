"""Matrix: the row of each slot, protocol 1."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from fd_core.testing.postprocessors.matrices import Matrices, PostprocessTarget, SampledRows, random_rows

EOS = 2


def combinations(slots: int, k: int) -> list[SampledRows]:
    """Return steps for every combination of slots that are idle, revoked, accept no, some or all drafts, or are
    finished by an accepted end of text."""
    kinds = ["idle", "revoked", *((count, count) for count in sorted({0, k // 2, k})), (k, "finished")]
    steps = []
    for number, chosen in enumerate(product(kinds, repeat=slots)):
        order = range(slots) if number % 2 else range(slots - 1, -1, -1)
        rows = [slot for slot in order if isinstance(chosen[slot], tuple)]
        tokens = 10 + np.arange(slots * (1 + k)).reshape(slots, 1 + k)
        tokens[[slot for slot in rows if chosen[slot][1] == "finished"]] = EOS
        steps.append(
            SampledRows(
                tokens[rows].astype(np.int32),
                np.array([chosen[slot][0] for slot in rows], np.int32),
                np.array(rows, np.int32),
                revoked=np.array([slot for slot in order if chosen[slot] == "revoked"], np.int32),
            )
        )
    return steps


@pytest.mark.law("1.1", "1.2", "1.3")
@pytest.mark.parametrize("k", range(9))
def test_every_combination_of_rows(target: PostprocessTarget, k: int) -> None:
    Matrices(target, 3, k).check(*combinations(3, k))


@pytest.mark.law("1.1", "1.2", "1.3")
@pytest.mark.parametrize("k", [0, 1, 5])
@pytest.mark.parametrize("slots", [1, 2, 33, 65])
def test_every_slot(target: PostprocessTarget, slots: int, k: int) -> None:
    """Give each slot in turn the only row, the only idle state, and the only revocation."""
    matrices, rng = Matrices(target, slots, k), np.random.default_rng(k)
    for slot in range(slots):
        one, others = np.array([slot], np.int32), np.delete(np.arange(slots, dtype=np.int32), slot)
        for rows, revoked in ((one, others), (one, others[:0]), (others, one), (others, one[:0])):
            drawn = random_rows(rng, slots, k, rows=len(rows), revoked=0)
            matrices.check(SampledRows(drawn.sampled, drawn.accepted, rows, revoked=revoked))


@pytest.mark.law("1.1", "1.2", "1.3")
@pytest.mark.parametrize("k", [0, 3, 8, 16])
@pytest.mark.parametrize("slots", [40, 257, 1023, 4099])
def test_many_slots_in_no_order(target: PostprocessTarget, slots: int, k: int) -> None:
    """Exceed a warp, a byte, a launch of 1,024, and 2^16 cells."""
    matrices, rng = Matrices(target, slots, k), np.random.default_rng(slots + k)
    half, third = slots // 2, slots // 3
    for rows, revoked in ((half, third), (slots, 0), (0, slots), (1, 0), (slots - 1, 1), (1, slots - 1)):
        matrices.check(random_rows(rng, slots, k, rows=rows, revoked=revoked))


@pytest.mark.law("1.3")
@pytest.mark.parametrize("k", [0, 1, 8])
def test_a_batch_that_is_revoked_as_a_whole_is_answered(target: PostprocessTarget, k: int) -> None:
    matrices, rng = Matrices(target, 5, k), np.random.default_rng(k)
    matrices.check(*(random_rows(rng, 5, k, rows=0, revoked=revoked) for revoked in (5, 1, 0, 5)))


@pytest.mark.law("1.1", "1.9")
@pytest.mark.parametrize("k", [0, 1, 4])
def test_token_of_any_id_is_delivered(target: PostprocessTarget, k: int) -> None:
    """Deliver token 0, ends of text, and ids beyond 2^15, 2^16 and 2^24, which narrower types cannot represent."""
    numbers = [0, 1, EOS, 2**15, 2**16, 2**17 + 1, 2**24 + 1, 2**31 - 1]
    matrices, all_slots = Matrices(target, len(numbers), k), np.arange(len(numbers), dtype=np.int32)
    for turn in range(len(numbers)):
        tokens = np.roll(np.array(numbers, np.int32), turn)[:, None].repeat(1 + k, axis=1)
        matrices.check(SampledRows(tokens, np.full(len(numbers), k, np.int32), all_slots, revoked=all_slots[:0]))
    zeros = np.zeros((len(numbers), 1 + k), np.int32)
    matrices.check(SampledRows(zeros, all_slots % (1 + k), all_slots, revoked=all_slots[:0]))
