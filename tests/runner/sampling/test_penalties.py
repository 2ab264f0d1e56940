"""Token counts follow delivered tokens, and penalties equal a recount of the whole text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fd_core.ops.numpy.ops import NumpyOps
from fd_core.runner.sampling.sampler import Penalties
from fd_core.types import Admission, SamplingParams

VOCABULARY, SLOTS, WIDTH, LONGEST = 7, 12, 3, 60


def recounted(logits: np.ndarray, params: SamplingParams, prompt: list[int], generated: list[int]) -> np.ndarray:
    """Penalize one row by the definition."""
    result = logits.copy()
    for token in {*prompt, *generated}:
        penalty = np.float32(params.repetition_penalty)
        result[token] = result[token] / penalty if result[token] > 0 else result[token] * penalty
    for token in set(generated):
        times = generated.count(token)
        added = float(np.float32(params.presence_penalty)) + float(np.float32(params.frequency_penalty)) * times
        result[token] -= np.float32(added)
    return result


def parameters(rng: np.random.Generator) -> SamplingParams:
    return SamplingParams(
        repetition_penalty=float(rng.choice([1.0, 1.3, 0.8])),
        presence_penalty=float(rng.choice([0.0, 0.4])),
        frequency_penalty=float(rng.choice([0.0, 0.1])),
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000))
def test_penalties_equal_a_recount(seed: int) -> None:
    """Slots change requests, so rows of counts are allocated, freed and reused; drafts are accepted or rejected."""
    rng = np.random.default_rng(seed)
    penalties = Penalties(NumpyOps(), SLOTS, VOCABULARY)
    tokens = np.zeros((SLOTS, LONGEST), np.int32)
    texts: dict[int, tuple[SamplingParams, list[int], list[int]]] = {}
    for _ in range(12):
        slot = int(rng.integers(0, SLOTS))
        text = rng.integers(0, VOCABULARY, rng.integers(1, 9), dtype=np.int32)
        prompt_len = int(rng.integers(1, len(text) + 1))
        params = parameters(rng)
        penalties.admit(Admission(slot, 1, text, prompt_len, params, (), 0))
        texts[slot] = params, text[:prompt_len].tolist(), text[prompt_len:].tolist()

        slots = rng.permutation(sorted(texts)).astype(np.int32)[: rng.integers(1, len(texts) + 1)]
        counts = rng.integers(0, WIDTH, len(slots))
        rows = np.repeat(np.arange(len(slots)), counts + 1)
        columns = np.concatenate([np.arange(count + 1) for count in counts]).astype(np.int32)
        drafts = rng.integers(0, VOCABULARY, (len(slots), WIDTH), dtype=np.int32)
        for index, slot in enumerate(slots.tolist()):
            _, prompt, generated = texts[slot]
            known = prompt + generated
            tokens[slot, : len(known)] = known
            tokens[slot, len(known) : len(known) + counts[index]] = drafts[index, : counts[index]]
        lengths = np.array([len(texts[slot][1]) + len(texts[slot][2]) for slot in slots.tolist()], np.int32)
        logits = rng.choice([-2.0, 0.0, 3.5], (len(rows), VOCABULARY)).astype(np.float32)
        gathered = penalties.gather(slots[rows], lengths[rows] + columns, columns, tokens)
        found = logits if gathered is None else penalties.apply(logits.copy(), gathered)
        for row, (index, column) in enumerate(zip(rows.tolist(), columns.tolist(), strict=True)):
            params, prompt, generated = texts[int(slots[index])]
            expected = recounted(logits[row], params, prompt, generated + drafts[index, :column].tolist())
            np.testing.assert_array_equal(found[row], expected)

        accepted = np.array([rng.integers(0, count + 1) for count in counts], np.int32)
        sampled = rng.integers(0, VOCABULARY, (len(slots), WIDTH), dtype=np.int32)
        penalties.extend(slots, sampled, accepted)
        for index, slot in enumerate(slots.tolist()):
            texts[slot][2].extend(sampled[index, : accepted[index] + 1].tolist())
        texts = {slot: text for slot, text in texts.items() if len(text[1]) + len(text[2]) < LONGEST - 2 * WIDTH}


def test_device_tokens_count_like_delivered_ones() -> None:
    """In slots without penalties they do not count."""
    known, other = (Penalties(NumpyOps(), 3, VOCABULARY) for _ in range(2))
    for penalties in (known, other):
        for slot, penalty in enumerate((0.5, 0.0, 0.7)):
            params = SamplingParams(frequency_penalty=penalty)
            penalties.admit(Admission(slot, 1, np.array([1, 2], np.int32), 1, params, (), 0))
    slots, tokens = np.array([2, 1, 0], np.int32), np.array([4, 5, 4], np.int32)
    known.extend(slots, tokens[:, None], np.zeros(3, np.int32))
    other.count(other.counting(slots), tokens)
    assert other.counting(slots[1:2]) is None
    zero, logits = np.zeros(3, np.int32), np.zeros((3, VOCABULARY), np.float32)
    found = [
        each.apply(logits.copy(), each.gather(slots, zero + 3, zero, np.zeros((3, 9), np.int32)))
        for each in (known, other)
    ]
    np.testing.assert_array_equal(found[0], found[1])
    assert found[1][:, 4].tolist() == [np.float32(-0.7), 0.0, -0.5]


@pytest.mark.parametrize("penalized", [0, 3])
def test_only_penalized_requests_allocate_counts(penalized: int) -> None:
    class Counting(NumpyOps):
        largest = 0

        def write_rows(self, x, rows, values):  # type: ignore[no-untyped-def]
            self.largest = max(self.largest, len(x))
            return super().write_rows(x, rows, values)

    ops = Counting()
    penalties = Penalties(ops, 256, VOCABULARY)
    for slot in range(256):
        params = SamplingParams(presence_penalty=1.0 if slot < penalized else 0.0)
        penalties.admit(Admission(slot, 1, np.array([1], np.int32), 1, params, (), 0))
    assert ops.largest == (8 if penalized else 0)
