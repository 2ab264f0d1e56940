"""Sampling over vocabularies beyond 2^16 and 2^17, in batches beyond any tile: the same tokens as the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fd_core.ops.contract import Ops, SampleInput
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.testing.kit.target import Target
from fd_core.testing.models.arrays import Floats, assert_same, assert_within, on_device, penalty_input, sample_input
from fd_core.testing.postprocessors.matrices import Matrices, PostprocessTarget, random_rows
from fd_core.types import IntArray

SIZES = {"vocab_size": 140_003, "max_num_seqs": 131}
VOCABULARIES = [70_001, 140_003]
ROWS = 41
ORACLE = NumpyOps()


def random_logits(rows: int, vocabulary: int, seed: int) -> Floats:
    """Return logits of several temperatures; every third row is rounded to produce ties."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((rows, vocabulary), np.float32) * rng.choice([0.2, 1.0, 4.0], (rows, 1))
    logits[::3] = np.round(logits[::3] * 2) / 2  # including -0.0 and 0.0
    found: Floats = logits.astype(np.float32)
    return found


def drawn(rows: int, seed: int, **columns: Any) -> SampleInput:
    """Return parameters of sampling rows with distinct seeds and positions, including the largest."""
    rng = np.random.default_rng(seed)
    seeds, positions = rng.integers(0, 2**64, rows, dtype=np.uint64), rng.integers(0, 2**31, rows)
    seeds[0], positions[0] = 2**64 - 1, 2**31 - 1
    positions[-1] = 0
    return sample_input(rows, **{"seeds": seeds, "positions": positions, **columns})


def check_choice(ops: Ops, logits: Floats, parameters: SampleInput) -> IntArray:
    """Compare tokens and peaks with the oracle's; return the tokens."""
    tokens, peaks = (ops.to_host(each) for each in ops.sample(ops.from_host(logits.copy()), on_device(ops, parameters)))
    right, right_peaks = ORACLE.sample(logits, parameters)
    rows = np.flatnonzero(tokens != right).tolist()
    assert not rows, f"rows {rows}: expected {right[rows].tolist()}, got {tokens[rows].tolist()}"
    assert_same(peaks, right_peaks)
    found: IntArray = tokens
    return found


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_every_filter_at_once_over_a_large_vocabulary(ops: Ops, vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    columns = {
        "temperature": rng.choice([0.0, 0.3, 1.0, 2.5], ROWS),
        "top_k": rng.choice([0, 1, 50, 16_384, 16_385, 65_536, vocabulary], ROWS),
        "top_p": rng.choice([0.1, 0.9, 0.9999, 1.0], ROWS),
        "min_p": rng.choice([0.0, 1e-5, 0.2], ROWS),
    }
    check_choice(ops, random_logits(ROWS, vocabulary, 1), drawn(ROWS, 2, **columns))


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_draws_reach_every_part_of_a_large_vocabulary(ops: Ops, vocabulary: int) -> None:
    """Sample without a filter from nearly equal logits, so that sums cover the whole vocabulary."""
    tokens = check_choice(ops, random_logits(ROWS, vocabulary, 3) * np.float32(0.01), drawn(ROWS, 4))
    assert len(set((tokens // 2**13).tolist())) > 5


@pytest.mark.parametrize("top_k", [1, 2, 16_384, 16_385, 65_537, 140_001, 140_002, 140_003, 2**31 - 1])
def test_top_k_cuts_a_large_vocabulary_exactly(ops: Ops, top_k: int) -> None:
    """Use logits that decrease from the last id to the first, so that the upper end is kept."""
    vocabulary, rows = VOCABULARIES[-1], 9
    logits = np.tile(np.linspace(-0.001, 0.001, vocabulary, dtype=np.float32), (rows, 1))
    tokens = check_choice(ops, logits, drawn(rows, top_k % 97, top_k=top_k))
    assert tokens.min() >= vocabulary - top_k


@pytest.mark.parametrize("top_k", [1, 40_000, 100_000])
def test_ties_over_a_large_vocabulary_go_to_the_lower_ids(ops: Ops, top_k: int) -> None:
    """Use equal logits, except for the sign of zero, so that the lower end is kept."""
    vocabulary, rows = VOCABULARIES[-1], 13
    logits = np.zeros((rows, vocabulary), np.float32)
    logits[:, 1::2] = -0.0
    assert check_choice(ops, logits, drawn(rows, 5, top_k=top_k)).max() < top_k
    assert check_choice(ops, logits, drawn(rows, 5, top_p=0.25)).max() <= vocabulary // 4 + 1
    assert check_choice(ops, logits, drawn(rows, 6, temperature=0.0)).max() == 0


@pytest.mark.parametrize("rows", [1, 40, 41, 67, 131])
def test_greedy_finds_the_largest_logit_wherever_it_is(ops: Ops, rows: int) -> None:
    """Peaks at first and last id, around 2^15, 2^16 and 2^17 and at tile boundaries; two peaks for ties."""
    vocabulary = VOCABULARIES[-1]
    edges = [0, 1, 31, 127, 128, 1023, 1024, 2**15 - 1, 2**15, 2**16 - 1, 2**16, 2**17 - 1, 2**17, vocabulary - 1]
    logits = np.zeros((rows, vocabulary), np.float32)
    best = np.array([edges[row % len(edges)] for row in range(rows)])
    logits[np.arange(rows), best] = 0.5
    tied = np.arange(rows) % 3 == 1
    logits[tied, np.maximum(best[tied], vocabulary - 1 - best[tied])] = 0.5
    right = np.where(tied, np.minimum(best, np.maximum(best, vocabulary - 1 - best)), best)
    assert_same(check_choice(ops, logits, sample_input(rows, temperature=0.0)), right)
    if rows > 41:  # the oracle sorts slowly
        return
    mixed = sample_input(rows, temperature=(np.arange(rows) % 2).astype(np.float32), top_k=1)
    assert_same(check_choice(ops, logits, mixed), right)


@pytest.mark.parametrize("rows", [40, 67, 131])
def test_a_row_of_a_large_batch_is_chosen_as_if_alone(ops: Ops, rows: int) -> None:
    """Mix greedy, sampled and filtered rows in a batch that is not a multiple of any tile."""
    vocabulary = 5003
    rng = np.random.default_rng(rows)
    columns = {
        "temperature": rng.choice([0.0, 1.0], rows),
        "top_k": rng.choice([0, 30], rows),
        "top_p": rng.choice([1.0, 0.8], rows),
    }
    logits, parameters = random_logits(rows, vocabulary, 7), drawn(rows, 8, **columns)
    together = check_choice(ops, logits, parameters)
    for row in (0, 31, 32, rows - 2, rows - 1):
        alone = {name: getattr(parameters, name)[row] for name in (*columns, "seeds", "positions")}
        tokens, _ = ops.sample(ops.from_host(logits[row : row + 1].copy()), on_device(ops, sample_input(1, **alone)))
        assert ops.to_host(tokens).tolist() == [together[row]]


@pytest.mark.parametrize("place", [0, 65_536, 140_002])
def test_one_strange_logit_of_a_large_vocabulary_shows_in_its_peak(ops: Ops, place: int) -> None:
    logits = random_logits(5, VOCABULARIES[-1], 9)
    logits[1, place], logits[3, place] = np.nan, np.inf
    logits[2] = -np.inf
    logits[4] = -np.inf
    logits[4, place] = -3.0
    for heat in (0.0, 1.0):
        tokens, peaks = map(
            ops.to_host, ops.sample(ops.from_host(logits.copy()), on_device(ops, drawn(5, 1, temperature=heat)))
        )
        assert np.isfinite(peaks).tolist() == [True, False, False, False, True]
        assert tokens[4] == place, "the only allowed token"
        assert ((tokens >= 0) & (tokens < logits.shape[1])).all()


@pytest.mark.parametrize("top_n", [0, 1, 20])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_log_probabilities_over_a_large_vocabulary(ops: Ops, vocabulary: int, top_n: int) -> None:
    logits = random_logits(ROWS, vocabulary, 10)
    logits[1, [vocabulary - 1, 2**16, 3]] = 30.0  # a tie at the top
    tokens = np.random.default_rng(11).integers(0, vocabulary, ROWS).astype(np.int32)
    tokens[:2] = vocabulary - 1, 2**16
    given = ops.from_host(logits.copy())
    chosen, top_ids, top = map(ops.to_host, ops.logprobs(given, ops.from_host(tokens), top_n))
    right_chosen, right_ids, right_top = ORACLE.logprobs(logits, tokens, top_n)
    assert_same(top_ids, right_ids)
    assert_within(chosen, right_chosen, atol=2e-4)
    assert_within(top, right_top, atol=2e-4)
    ranks = ops.to_host(ops.ranks(given, ops.from_host(tokens)))
    assert_same(ranks, ORACLE.ranks(logits, tokens))
    assert_same(ops.to_host(given), logits, "the logits were modified")


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_penalties_over_a_large_vocabulary(ops: Ops, vocabulary: int) -> None:
    """Penalize rows in random order, with counts in another order, drafts with the last id, and some rows without a
    penalty."""
    rng = np.random.default_rng(12)
    logits = random_logits(ROWS, vocabulary, 13)
    counts = np.zeros((50, vocabulary), np.int32)
    for row in counts:
        row[rng.integers(0, vocabulary, 900)] = rng.integers(1, 2000, 900)
        row[[0, 2**16 - 1, 2**16, vocabulary - 1]] = 1, 2, 3, 70_000
    penalized = rng.permutation(ROWS)[:33].astype(np.int32)
    drafts = sorted(zip(rng.integers(0, 33, 60).tolist(), rng.integers(0, vocabulary, 60).tolist(), strict=True))
    drafts += [(32, vocabulary - 1)] * 3
    given = penalty_input(
        counts,
        rows=penalized,
        counts_rows=rng.permutation(50)[:33],
        drafts=drafts,
        repetition=rng.choice([0.9, 1.0, 1.3], 33),
        presence=rng.uniform(-2, 2, 33),
        frequency=rng.uniform(-2, 2, 33),
    )
    held = counts.copy()
    found = ops.to_host(ops.penalize(ops.from_host(logits.copy()), on_device(ops, given)))
    assert_same(found, ORACLE.penalize(logits.copy(), given))
    assert_same(counts, held, "drafts must not stay in the counts")


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_masks_over_a_large_vocabulary(ops: Ops, vocabulary: int) -> None:
    """Mask with words that allow all and none, and single tokens at every boundary, as grammars do."""
    rng = np.random.default_rng(15)
    logits = random_logits(ROWS, vocabulary, 16)
    rows = rng.permutation(ROWS)[:37].astype(np.int32)
    words = -(-vocabulary // 32)
    bits = rng.choice(np.array([0, -1, 2**31 - 1, -(2**31), 0x5A5A5A5A], np.int32), (37, words))
    bits[:5], bits[5:7] = 0, -1
    for row, token in enumerate((0, 2**16 - 1, 2**16, 31, vocabulary - 1)):
        bits[row, token // 32] = np.array(1 << token % 32, np.uint32).astype(np.int32)
    found = ops.to_host(ops.mask_logits(*map(ops.from_host, (logits.copy(), rows, bits))))
    assert_same(found, ORACLE.mask_logits(logits.copy(), rows, bits))


def test_thousands_of_biases_land_where_they_belong(ops: Ops) -> None:
    """Add at cells in random order, including corners and repeated cells."""
    vocabulary, rng = VOCABULARIES[-1], np.random.default_rng(14)
    rows, ids = rng.integers(0, ROWS, 6000).astype(np.int32), rng.integers(0, vocabulary, 6000).astype(np.int32)
    rows[:4], ids[:4] = (0, 0, ROWS - 1, ROWS - 1), (0, vocabulary - 1, 0, vocabulary - 1)
    rows[100:200], ids[100:200] = rows[0:1], ids[1:2]  # the sum of a hundred additions to one cell
    values = rng.choice([-2.0, -0.5, 0.25, 1.0], 6000).astype(np.float32)
    found = ops.add_at(
        ops.from_host(np.zeros((ROWS, vocabulary), np.float32)), *map(ops.from_host, (rows, ids, values))
    )
    right = np.zeros((ROWS, vocabulary), np.float32)
    np.add.at(right, (rows, ids), values)
    assert_same(ops.to_host(found), right)


def test_counts_of_many_slots_are_written_and_kept(ops: Ops) -> None:
    """Count in a large batch, grown as in the runner; the last row and the last id must keep their counts."""
    vocabulary, rng = VOCABULARIES[0], np.random.default_rng(15)
    held = np.zeros((8, vocabulary), np.int32)
    counts = ops.from_host(held.copy())
    while len(held) < 64:
        rows = rng.permutation(len(held))[:5].astype(np.int32)
        values = rng.integers(0, 3, (5, vocabulary)).astype(np.int32)
        counts = ops.write_rows(counts, ops.from_host(rows), ops.from_host(values.copy()))
        held[rows] = values
        places = (
            np.array([0, len(held) - 1], np.int32),
            np.array([vocabulary - 1] * 2, np.int32),
            np.full(2, 2, np.int32),
        )
        counts = ops.add_at(counts, *map(ops.from_host, places))
        np.add.at(held, places[:2], 2)
        more = np.arange(2 * len(held), dtype=np.int32) % len(held)
        counts, held = ops.gather_rows(counts, ops.from_host(more)), held[more]
    assert_same(ops.to_host(counts), held)


@pytest.mark.parametrize("slots", [64, 257, 1023])
@pytest.mark.parametrize("k", [0, 1, 7, 16])
def test_the_matrix_of_many_slots(target: Target, slots: int, k: int) -> None:
    """Use slots in random order, including the first and the last; rows with releases, all rows, none; large tokens."""
    rng = np.random.default_rng(slots + k)
    matrices = Matrices(PostprocessTarget(target.name, target.postprocess, target.ops), slots, k)
    for rows, back in ((slots // 2, slots // 3), (slots, 0), (0, slots), (1, 0), (0, 0), (slots - 1, 1)):
        matrices.check(random_rows(rng, slots, k, rows=rows, revoked=back))


@pytest.mark.parametrize("k", [1, 7, 16])
def test_drafts_of_many_rows_are_verified(ops: Ops, k: int) -> None:
    rng = np.random.default_rng(k)
    sampled = rng.integers(2**17, 2**17 + 2, (131, 1 + k)).astype(np.int32)
    drafts = rng.integers(2**17, 2**17 + 2, (131, k)).astype(np.int32)
    drafts[::4] = sampled[::4, :k]
    counts = rng.integers(0, k + 1, 131).astype(np.int32)
    counts[::4] = k
    accepted = ops.to_host(ops.verify(*map(ops.from_host, (sampled, drafts, counts))))
    assert_same(accepted, ORACLE.verify(sampled, drafts, counts))
    assert accepted[0] == k
