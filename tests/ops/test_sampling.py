import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fd_core.ops.philox import uniform
from tests.ops.packs import PACKS, on_device, sample_input

# Few distinct values, so that ties are common.
LOGITS = st.lists(st.sampled_from([-2.5, -0.0, 0.0, 0.5, 0.75, 3.0, 11.0]), min_size=9, max_size=9)


@st.composite
def situations(draw):
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


def sample(pack, logits, parameters):
    ops = PACKS[pack]()
    tokens = ops.to_host(ops.sample(ops.from_host(logits.copy()), on_device(ops, parameters)))
    assert tokens.dtype == np.int32
    return tokens


def by_definition(logits, parameters, row):
    """The contract's words, one row and one token at a time."""
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


@pytest.mark.parametrize("pack", PACKS)
@settings(deadline=None, max_examples=150)
@given(situations())
def test_chooses_the_token_that_the_contract_defines(pack, situation):
    logits, parameters = situation
    expected = [by_definition(logits, parameters, row) for row in range(len(logits))]
    assert sample(pack, logits, parameters).tolist() == expected


@pytest.mark.parametrize("pack", PACKS)
def test_a_boundary_belongs_to_the_next_token(pack):
    half, zero = 9_297_664, 14_883_995  # positions where seed 0 draws exactly 1/2 and exactly 0
    parameters = sample_input(2, positions=[half, zero])
    assert uniform(parameters.seeds, parameters.positions).tolist() == [0.5, 0.0]
    logits = np.array([[1, 1, -np.inf], [-np.inf, 1, 1]], np.float32)
    assert sample(pack, logits, parameters).tolist() == [1, 1]


@pytest.mark.parametrize("pack", PACKS)
def test_packs_choose_the_same_tokens_of_a_large_vocabulary(pack):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(64, 20_000)).astype(np.float32) * 3
    parameters = sample_input(
        64,
        temperature=rng.uniform(0.2, 2, 64),
        top_p=rng.choice([0.5, 0.95, 1.0], 64),
        top_k=rng.choice([0, 20], 64),
        seeds=rng.integers(0, 2**63, 64),
        positions=rng.integers(0, 10_000, 64),
    )
    assert sample(pack, logits, parameters).tolist() == sample("numpy", logits, parameters).tolist()


@pytest.mark.parametrize("pack", PACKS)
def test_a_row_does_not_depend_on_its_neighbours(pack):
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(8, 300)).astype(np.float32)
    columns = {"temperature": rng.uniform(0, 1, 8).round(), "seeds": rng.integers(0, 99, 8), "positions": np.arange(8)}
    together = sample(pack, logits, sample_input(8, **columns))
    alone = [
        sample(pack, logits[row : row + 1], sample_input(1, **{name: values[row] for name, values in columns.items()}))
        for row in range(8)
    ]
    assert together.tolist() == np.concatenate(alone).tolist()


@pytest.mark.parametrize("pack", PACKS)
def test_tokens_come_as_often_as_their_probability(pack):
    probabilities = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
    draws = 20_000
    logits = np.tile(np.log(probabilities).astype(np.float32), (draws, 1))
    tokens = sample(pack, logits, sample_input(draws, seeds=4, positions=np.arange(draws)))
    counts = np.bincount(tokens, minlength=5)
    # Chi-squared with 4 degrees of freedom exceeds 18.5 with probability 0.001; the draw is deterministic.
    assert ((counts - draws * probabilities) ** 2 / (draws * probabilities)).sum() < 18.5


@pytest.mark.parametrize("pack", PACKS)
def test_forbidden_tokens_are_never_drawn(pack):
    ops = PACKS[pack]()
    logits = ops.from_host(np.zeros((200, 4), np.float32))
    rows = np.repeat(np.arange(200, dtype=np.int32), 2)
    ids = np.tile(np.array([0, 3], np.int32), 200)
    logits = ops.add_at(logits, *map(ops.from_host, (rows, ids, np.full(400, -np.inf, np.float32))))
    tokens = ops.to_host(ops.sample(logits, on_device(ops, sample_input(200, positions=np.arange(200)))))
    assert set(tokens.tolist()) == {1, 2}


@pytest.mark.parametrize("pack", PACKS)
def test_adds_to_single_logits_and_sums_repeated_places(pack):
    ops = PACKS[pack]()
    places = np.array([0, 1, 1], np.int32), np.array([2, 0, 0], np.int32), np.array([1.5, -1, -2], np.float32)
    result = ops.add_at(ops.from_host(np.zeros((2, 3), np.float32)), *map(ops.from_host, places))
    assert ops.to_host(result).tolist() == [[0, 0, 1.5], [-3, 0, 0]]


@pytest.mark.parametrize("pack", PACKS)
def test_a_repetition_penalty_makes_logits_smaller_whatever_their_sign(pack):
    ops = PACKS[pack]()
    logits = np.array([[3, -3, 5], [0, 8, 2]], np.float32)
    places = np.array([0, 0, 1], np.int32), np.array([0, 1, 1], np.int32), np.array([2, 2, 4], np.float32)
    result = ops.repetition_at(ops.from_host(logits), *map(ops.from_host, places))
    assert ops.to_host(result).tolist() == [[1.5, -6, 5], [0, 2, 2]]


@pytest.mark.parametrize("pack", PACKS)
@given(st.lists(LOGITS, min_size=1, max_size=3), st.integers(0, 9))
@settings(deadline=None, max_examples=50)
def test_logprobs_are_sorted_and_ties_go_to_the_lower_id(pack, rows, top_n):
    ops = PACKS[pack]()
    logits = np.array(rows, np.float32)
    tokens = np.arange(len(rows), dtype=np.int32)
    found = ops.logprobs(ops.from_host(logits.copy()), ops.from_host(tokens), top_n)
    chosen, top_ids, top = map(ops.to_host, found)
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(chosen, exact[tokens, tokens], atol=1e-5)
    expected = [sorted(range(9), key=lambda token: (-row[token], token))[:top_n] for row in logits.tolist()]
    assert top_ids.tolist() == expected
    assert top_ids.dtype == np.int32
    np.testing.assert_allclose(
        top, np.take_along_axis(exact, np.array(expected, np.int64).reshape(top.shape), 1), atol=1e-5
    )
