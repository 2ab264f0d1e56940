"""Sampling: exact, token by token: filters, ties, seeds, penalties, log-probabilities, verification of drafts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fd_core.ops.contract import Ops, SampleInput
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.ops.philox import uniform
from fd_core.testing.models.arrays import Floats, assert_same, assert_within, on_device, penalty_input, sample_input
from fd_core.types import IntArray

# A pack has no state between examples, so they may share one.
SHARED = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}

# Few distinct values, so that ties are common.
LOGITS = st.lists(st.sampled_from([-2.5, -0.0, 0.0, 0.5, 0.75, 3.0, 11.0]), min_size=9, max_size=9)


@st.composite
def situations(draw: Any) -> tuple[Floats, SampleInput]:
    """Draw logits [R, 9] and parameters of up to four rows."""
    rows = draw(st.integers(1, 4))
    each = {"min_size": rows, "max_size": rows}
    logits = np.array(draw(st.lists(LOGITS, **each)), np.float32)
    parameters = sample_input(
        rows,
        temperature=draw(st.lists(st.sampled_from([0.0, 0.01, 0.7, 1.0, 3.0]), **each)),
        top_k=draw(st.lists(st.sampled_from([0, 1, 3, 9, 50]), **each)),
        top_p=draw(st.lists(st.sampled_from([0.0, 0.05, 0.5, 0.9, 1.0]), **each)),
        min_p=draw(st.lists(st.sampled_from([0.0, 0.1, 0.8, 1.0]), **each)),
        seeds=draw(st.lists(st.integers(0, 2**64 - 1), **each)),
        positions=draw(st.lists(st.integers(0, 2**31 - 1), **each)),
    )
    return logits, parameters


def sample(ops: Ops, logits: Floats, parameters: SampleInput) -> IntArray:
    return choose(ops, logits, parameters)[0]


def choose(ops: Ops, logits: Floats, parameters: SampleInput) -> tuple[IntArray, Floats]:
    tokens, peaks = ops.sample(ops.from_host(logits.copy()), on_device(ops, parameters))
    found: IntArray = ops.to_host(tokens)
    assert found.dtype == np.int32
    return found, ops.to_host(peaks)


def by_definition(logits: Floats, parameters: SampleInput, row: int) -> int:
    """Reference implementation of the contract, one row and one token at a time."""
    values = [float(value) for value in logits[row]]
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    temperature = float(parameters.temperature[row])
    if temperature == 0:
        return order[0]
    weights = [round(2**32 * math.exp((value - max(values)) / temperature)) for value in values]
    kept = order[: int(parameters.top_k[row]) or len(order)]
    mass = float(parameters.top_p[row]) * sum(weights[token] for token in kept)
    kept = [
        token for rank, token in enumerate(kept) if rank == 0 or sum(weights[earlier] for earlier in kept[:rank]) < mass
    ]
    kept = [token for token in kept if weights[token] >= float(parameters.min_p[row]) * 2**32]
    threshold = float(uniform(parameters.seeds, parameters.positions)[row]) * sum(weights[token] for token in kept)
    total = 0
    for token in sorted(kept):
        total += weights[token]
        if total > threshold:
            return token
    raise AssertionError("the last cumulative weight exceeds the threshold")


@settings(max_examples=40, **SHARED)
@given(situations())
def test_chooses_the_token_that_the_contract_defines(ops: Ops, situation: tuple[Floats, SampleInput]) -> None:
    logits, parameters = situation
    expected = [by_definition(logits, parameters, row) for row in range(len(logits))]
    assert sample(ops, logits, parameters).tolist() == expected


def test_greedy_takes_the_lowest_id_on_a_tie(ops: Ops) -> None:
    logits = np.full((2, 70), -1.0, np.float32)
    logits[0, [40, 69]] = 5.0
    assert sample(ops, logits, sample_input(2, temperature=0.0)).tolist() == [40, 0]


def test_greedy_rows_stay_greedy_next_to_random_ones(ops: Ops) -> None:
    logits = np.tile(np.arange(50).astype(np.float32), (40, 1)) * np.float32(0.02)
    temperature = np.arange(40) % 2
    tokens = sample(ops, logits, sample_input(40, temperature=temperature, positions=np.arange(40)))
    assert set(tokens[::2].tolist()) == {49}
    assert len(set(tokens[1::2].tolist())) > 10


def test_top_k_cuts_before_top_p(ops: Ops) -> None:
    """Of four tokens of equal weight, top_k keeps two; half of the rest is one of them."""
    logits = np.zeros((60, 4), np.float32)
    tokens = sample(ops, logits, sample_input(60, top_k=2, top_p=0.5, positions=np.arange(60)))
    assert set(tokens.tolist()) == {0}


def test_top_k_keeps_the_lower_id_on_a_tie(ops: Ops) -> None:
    logits = np.array([[0, 1, 1, 1]] * 60, np.float32)
    tokens = sample(ops, logits, sample_input(60, top_k=2, positions=np.arange(60)))
    assert set(tokens.tolist()) == {1, 2}


def test_min_p_leaves_out_what_is_much_less_likely(ops: Ops) -> None:
    logits = np.log(np.array([[1.0, 0.6, 0.4]] * 60, np.float32))
    tokens = sample(ops, logits, sample_input(60, min_p=0.5, positions=np.arange(60)))
    assert set(tokens.tolist()) == {0, 1}


def test_seed_and_position_decide(ops: Ops) -> None:
    logits = np.zeros((200, 1000), np.float32)
    seeds, positions = np.repeat(np.arange(20), 10), np.tile(np.arange(10), 20)
    tokens = sample(ops, logits, sample_input(200, seeds=seeds, positions=positions))
    expected = (uniform(seeds.astype(np.uint64), positions.astype(np.int32)).astype(np.float64) * 1000).astype(int)
    assert np.abs(tokens - expected).max() <= 1
    assert len(set(tokens.tolist())) > 150


def test_a_boundary_belongs_to_the_next_token(ops: Ops) -> None:
    half, zero = 9_297_664, 14_883_995  # positions where seed 0 draws exactly 1/2 and exactly 0
    parameters = sample_input(2, positions=[half, zero])
    assert uniform(parameters.seeds, parameters.positions).tolist() == [0.5, 0.0]
    logits = np.array([[1, 1, -np.inf], [-np.inf, 1, 1]], np.float32)
    assert sample(ops, logits, parameters).tolist() == [1, 1]


def test_a_large_vocabulary_with_every_filter(ops: Ops) -> None:
    rng = np.random.default_rng(0)
    rows = 48
    logits = (rng.standard_normal((rows, 5003)) * rng.choice([0.1, 1.0, 4.0], (rows, 1))).astype(np.float32)
    parameters = sample_input(
        rows,
        temperature=rng.choice([0.0, 0.3, 1.0, 2.5], rows),
        top_k=rng.choice([0, 1, 40, 4000], rows),
        top_p=rng.choice([0.1, 0.9, 0.999, 1.0], rows),
        min_p=rng.choice([0.0, 0.01, 0.3], rows),
        seeds=rng.integers(0, 2**63, rows),
        positions=rng.integers(0, 4000, rows),
    )
    assert_same(sample(ops, logits, parameters), sample(NumpyOps(), logits, parameters))


def test_a_row_does_not_depend_on_its_neighbours(ops: Ops) -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(8, 300)).astype(np.float32)
    columns: dict[str, Any] = {
        "temperature": rng.uniform(0, 1, 8).round(),
        "seeds": rng.integers(0, 99, 8),
        "positions": np.arange(8),
    }
    together = sample(ops, logits, sample_input(8, **columns))
    alone = [
        sample(ops, logits[row : row + 1], sample_input(1, **{name: values[row] for name, values in columns.items()}))
        for row in range(8)
    ]
    assert_same(together, np.concatenate(alone))


def test_token_frequencies_match_their_probabilities(ops: Ops) -> None:
    probabilities = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
    draws = 20_000
    logits = np.tile(np.log(probabilities).astype(np.float32), (draws, 1))
    tokens = sample(ops, logits, sample_input(draws, seeds=4, positions=np.arange(draws)))
    counts = np.bincount(tokens, minlength=5)
    # Chi-squared with 4 degrees of freedom exceeds 18.5 with probability 0.001; the draw is deterministic.
    assert ((counts - draws * probabilities) ** 2 / (draws * probabilities)).sum() < 18.5


def test_forbidden_tokens_are_never_drawn(ops: Ops) -> None:
    rows = np.repeat(np.arange(200, dtype=np.int32), 2)
    ids = np.tile(np.array([0, 3], np.int32), 200)
    places = map(ops.from_host, (rows, ids, np.full(400, -np.inf, np.float32)))
    logits = ops.add_at(ops.from_host(np.zeros((200, 4), np.float32)), *places)
    chosen, _ = ops.sample(logits, on_device(ops, sample_input(200, positions=np.arange(200))))
    tokens = ops.to_host(chosen)
    assert set(tokens.tolist()) == {1, 2}


def test_adds_to_single_logits_and_sums_repeated_places(ops: Ops) -> None:
    places = np.array([0, 1, 1], np.int32), np.array([2, 0, 0], np.int32), np.array([1.5, -1, -2], np.float32)
    result = ops.add_at(ops.from_host(np.zeros((2, 3), np.float32)), *map(ops.from_host, places))
    assert ops.to_host(result).tolist() == [[0, 0, 1.5], [-3, 0, 0]]


def test_repetition_penalty_lowers_logits_of_either_sign(ops: Ops) -> None:
    logits = np.array([[3, -3, 5], [0, 8, 2]], np.float32)
    seen = np.array([[1, 2, 0], [0, 3, 0]], np.int32)
    result = ops.penalize(ops.from_host(logits), on_device(ops, penalty_input(seen, repetition=[2, 4])))
    assert ops.to_host(result).tolist() == [[1.5, -6, 5], [0, 2, 2]]


@pytest.mark.parametrize("seed", range(6))
def test_penalties_are_those_of_the_definition(ops: Ops, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, running_batch, vocabulary = 6, 4, 11
    logits = rng.choice([-2.5, -0.0, 0.1, 7.3], (rows, vocabulary)).astype(np.float32)
    counts = rng.integers(0, 9, (running_batch, vocabulary), dtype=np.int32)
    chosen = rng.permutation(rows)[:seed].astype(np.int32)  # empty in the first case
    drafts = sorted((int(row), int(token)) for row in range(seed) for token in rng.integers(0, 4, row))
    given = penalty_input(
        counts,
        rows=chosen,
        counts_rows=rng.integers(0, running_batch, seed),
        drafts=drafts,
        repetition=rng.choice([0.7, 1.0, 1.3], seed),
        presence=rng.choice([-0.3, 0.0, 1.7], seed),
        frequency=rng.choice([-0.1, 0.0, 0.3], seed),
    )
    expected = logits.copy()
    for index, row in enumerate(chosen.tolist()):
        for token in range(vocabulary):
            count = int(counts[given.counts_rows[index], token]) + 2 * drafts.count((index, token))
            logit = logits[row, token]
            if count:
                penalty = given.repetition[index]
                logit = logit / penalty if logit > 0 else logit * penalty
            if count > 1:
                added = float(given.presence[index]) + float(given.frequency[index]) * (count // 2)
                logit = logit - np.float32(added)
            expected[row, token] = logit
    result = ops.penalize(ops.from_host(logits.copy()), on_device(ops, given))
    assert_same(ops.to_host(result), expected)


def test_penalties_of_a_real_vocabulary_are_the_oracles(ops: Ops) -> None:
    rng = np.random.default_rng(0)
    rows, vocabulary = 20, 50_021
    logits = (rng.standard_normal((rows, vocabulary)) * 4).astype(np.float32)
    counts = rng.integers(-12, 900, (rows, vocabulary), dtype=np.int32).clip(0)
    counts[:, 200:40_000] = 0
    drafts = sorted(zip(rng.integers(0, rows, 50).tolist(), rng.integers(0, vocabulary, 50).tolist(), strict=True))
    given = penalty_input(
        counts,
        counts_rows=rng.permutation(rows),
        drafts=drafts,
        repetition=rng.choice([0.9, 1.0, 1.2], rows),
        presence=rng.uniform(-2, 2, rows),
        frequency=rng.uniform(-2, 2, rows),
    )
    result = ops.penalize(ops.from_host(logits.copy()), on_device(ops, given))
    assert_same(ops.to_host(result), NumpyOps().penalize(logits.copy(), given))


@pytest.mark.parametrize("vocabulary", [9, 32, 33, 64, 1003])
def test_masked_tokens_become_impossible_and_no_others(ops: Ops, vocabulary: int) -> None:
    """Mask rows in random order, one of them not finite; words with the sign bit; bits beyond the vocabulary set and
    unset."""
    rng = np.random.default_rng(vocabulary)
    logits = (rng.standard_normal((5, vocabulary)) * 4).astype(np.float32)
    logits[4, ::3] = np.nan
    rows = np.array([4, 0, 2], np.int32)
    bits = rng.integers(-(2**31), 2**31, (3, -(-vocabulary // 32)), dtype=np.int32)
    bits[1] = 1 << 8  # one token per word, not the first
    expected = logits.copy()
    for index, row in enumerate(rows.tolist()):
        for token in range(vocabulary):
            if not int(bits[index, token // 32]) >> token % 32 & 1:
                expected[row, token] = -np.inf
    result = ops.mask_logits(*map(ops.from_host, (logits.copy(), rows, bits)))
    assert_same(ops.to_host(result), expected)


def test_a_mask_of_no_rows_changes_nothing(ops: Ops) -> None:
    nothing = np.empty(0, np.int32), np.empty((0, 2), np.int32)
    result = ops.mask_logits(ops.from_host(np.ones((2, 40), np.float32)), *map(ops.from_host, nothing))
    assert (ops.to_host(result) == 1).all()


def test_the_mask_of_a_single_token_leaves_that_token(ops: Ops) -> None:
    """Sample every token of a vocabulary that ends inside a word, greedily and at random."""
    vocabulary = 77
    tokens = np.arange(vocabulary)
    bits = np.zeros((vocabulary, 3), np.uint32)
    bits[tokens, tokens // 32] = np.uint32(1) << (tokens % 32).astype(np.uint32)
    logits = np.random.default_rng(3).standard_normal((vocabulary, vocabulary)).astype(np.float32)
    rows = np.arange(vocabulary, dtype=np.int32)
    masked = ops.mask_logits(*map(ops.from_host, (logits, rows, bits.view(np.int32))))
    parameters = sample_input(vocabulary, temperature=np.arange(vocabulary) % 2, positions=tokens)
    chosen, _ = ops.sample(masked, on_device(ops, parameters))
    assert_same(ops.to_host(chosen), tokens)


def test_counts_of_tokens_are_written_and_added_to(ops: Ops) -> None:
    counts = ops.from_host(np.zeros((3, 4), np.int32))
    rows = np.array([2, 0], np.int32), np.array([[1, 0, 3, 0], [5, 0, 0, 0]], np.int32)
    counts = ops.write_rows(counts, *map(ops.from_host, rows))
    places = np.array([2, 2, 1], np.int32), np.array([0, 0, 3], np.int32), np.array([2, 2, 2], np.int32)
    counts = ops.add_at(counts, *map(ops.from_host, places))
    assert ops.to_host(counts).tolist() == [[5, 0, 0, 0], [0, 0, 0, 2], [5, 0, 3, 0]]


@settings(max_examples=20, **SHARED)
@given(st.lists(LOGITS, min_size=1, max_size=3), st.integers(0, 9))
def test_logprobs_are_sorted_and_ties_go_to_the_lower_id(ops: Ops, rows: list[list[float]], top_n: int) -> None:
    logits = np.array(rows, np.float32)
    tokens = np.arange(len(rows), dtype=np.int32)
    found = ops.logprobs(ops.from_host(logits.copy()), ops.from_host(tokens), top_n)
    chosen, top_ids, top = map(ops.to_host, found)
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    assert_within(chosen, exact[tokens, tokens], atol=1e-5)
    expected = [sorted(range(9), key=lambda token: (-row[token], token))[:top_n] for row in logits.tolist()]
    assert_same(top_ids, expected)
    assert top_ids.dtype == np.int32
    assert_within(top, np.take_along_axis(exact, np.array(expected, np.int64).reshape(top.shape), 1), atol=1e-5)


@settings(max_examples=20, **SHARED)
@given(st.lists(LOGITS, min_size=1, max_size=3), st.integers(0, 8))
def test_ranks_count_from_one_and_ties_go_to_the_lower_id(ops: Ops, rows: list[list[float]], token: int) -> None:
    logits = np.array(rows, np.float32)
    tokens = (np.arange(len(rows), dtype=np.int32) + np.int32(token)) % 9
    found = ops.to_host(ops.ranks(ops.from_host(logits.copy()), ops.from_host(tokens)))
    orders = [sorted(range(9), key=lambda token: (-row[token], token)) for row in logits.tolist()]
    assert found.tolist() == [order.index(token) + 1 for order, token in zip(orders, tokens.tolist(), strict=True)]
    assert found.dtype == np.int32


@settings(max_examples=40, **SHARED)
@given(st.data(), st.integers(1, 5), st.integers(1, 5))
def test_verify_counts_the_right_drafts_before_the_first_wrong_one(ops: Ops, data: Any, rows: int, k: int) -> None:
    # Few tokens make matching drafts likely; token 0 is a token.
    row = st.lists(st.integers(0, 2), min_size=2 * k + 1, max_size=2 * k + 1)
    table = np.array(data.draw(st.lists(row, min_size=rows, max_size=rows)), np.int32)
    sampled, drafts = np.ascontiguousarray(table[:, : k + 1]), np.ascontiguousarray(table[:, k + 1 :])
    counts = np.array(data.draw(st.lists(st.integers(0, k), min_size=rows, max_size=rows)), np.int32)
    accepted = ops.to_host(ops.verify(*map(ops.from_host, (sampled, drafts, counts))))
    for index in range(rows):
        right = 0
        while right < counts[index] and drafts[index, right] == sampled[index, right]:
            right += 1
        assert accepted[index] == right


def test_verify_of_no_drafts_keeps_none(ops: Ops) -> None:
    sampled, drafts = np.zeros((3, 4), np.int32), np.zeros((3, 3), np.int32)
    accepted = ops.verify(*map(ops.from_host, (sampled, drafts, np.zeros(3, np.int32))))
    assert ops.to_host(accepted).tolist() == [0, 0, 0]


def test_a_chosen_token_is_a_number_of_the_vocabulary(ops: Ops) -> None:
    """Fail even if one logit is by far the largest, or all are equal."""
    logits = np.array([[0, 0, 1e30], [-1e30, 0, 0], [5, 5, 5]], np.float32)
    for temperature in (0.0, 1.0):
        tokens = sample(ops, logits, sample_input(3, temperature=temperature, positions=[1, 2, 3]))
        assert tokens.min() >= 0
        assert tokens.max() < 3
        assert tokens[0] == 2


@pytest.mark.parametrize("strange", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("columns", [{"temperature": 0.0}, {}, {"top_k": 7, "top_p": 0.9, "min_p": 0.1}])
def test_non_finite_row_is_reported_without_affecting_others(
    ops: Ops, strange: float, columns: dict[str, float]
) -> None:
    """Fail a row with all logits -inf, or one other nonfinite logit; the peaks of other rows are exact."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((9, 2001)).astype(np.float32)
    logits[3:6, 5] = -np.inf
    parameters = sample_input(9, positions=np.arange(9), **columns)
    healthy = [0, 1, 3, 4, 5, 7, 8]
    expected = sample(ops, logits, parameters)
    logits[2, slice(None) if strange == -np.inf else 1999] = logits[6, slice(None) if strange == -np.inf else 0] = (
        strange
    )
    tokens, peaks = choose(ops, logits, parameters)
    assert np.flatnonzero(np.isfinite(peaks)).tolist() == healthy
    assert_same(peaks[healthy], logits[healthy].max(axis=1))
    assert_same(tokens[healthy], expected[healthy])
    assert tokens.min() >= 0
    assert tokens.max() < 2001


@pytest.mark.parametrize("temperature", [0.25, 4.0])
def test_temperature_divides_logits(ops: Ops, temperature: float) -> None:
    logits = np.tile(np.array([0.0, 1.0], np.float32), (2000, 1))
    tokens = sample(ops, logits, sample_input(2000, temperature=temperature, positions=np.arange(2000)))
    expected = 1 / (1 + math.exp(-1 / temperature))
    assert abs(tokens.mean() - expected) < 0.04
