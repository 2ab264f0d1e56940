"""Steps of production sizes through the runner and the engine, compared with the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from fd_core.signals import Outcome
from fd_core.testing.kit.judging import Judge
from fd_core.testing.kit.target import Target
from fd_core.testing.models.checkpoints import LONG_CASE, WIDE_CASE
from fd_core.testing.models.stepper import ManualDriver
from fd_core.testing.models.texts import greedy, run
from fd_core.types import RequestSpec, SamplingParams

SLOTS = 67
MANY: dict[str, Any] = {
    "max_num_seqs": SLOTS,
    "num_kv_blocks": 67 * 4,
    "block_size": 16,
    "max_model_len": 64,
    "max_num_batched_tokens": 1100,
}
LONG: dict[str, Any] = {
    "max_num_seqs": 4,
    "num_kv_blocks": 5000 * 3 // 32 + 8,
    "block_size": 32,
    "max_model_len": 5000,
    "max_num_batched_tokens": 601,
    "watchdog_seconds": 60.0,
}
WIDE: dict[str, Any] = {
    "max_num_seqs": 41,
    "num_kv_blocks": 41 * 4,
    "block_size": 16,
    "max_model_len": 64,
    "max_num_batched_tokens": 1024,
    "watchdog_seconds": 60.0,
}


class Batch:
    """A batch with one request per slot, stepped manually; every prompt token may be a separate step."""

    def __init__(self, hand: ManualDriver, judge: Judge) -> None:
        self.hand, self.judge = hand, judge
        self.specs = [judge.specs[f"r{slot}"] for slot in range(SLOTS)]
        self.computed = [0] * SLOTS
        self.delivered: dict[str, list[int]] = {}
        for slot, spec in enumerate(self.specs):
            hand.admit(slot, spec.prompt)

    def decode(self, slots: list[int]) -> None:
        self.step([(slot, 1, True) for slot in slots])

    def prefill(self, slots: list[int]) -> None:
        self.step([(slot, len(self.specs[slot].prompt) - self.computed[slot], True) for slot in slots])

    def chunks(self, unfinished: Sequence[int], finished: Sequence[int] = ()) -> None:
        """Compute one prompt token of some slots without sampling, and one sampling token of others."""
        self.step([*((slot, 1, False) for slot in unfinished), *((slot, 1, True) for slot in finished)])
        for slot in unfinished:
            assert self.computed[slot] < len(self.specs[slot].prompt)

    def step(self, rows: list[tuple[int, int, bool]]) -> None:
        output, outcomes = self.hand.step(*rows)
        assert not output.errors
        sampling = {slot for slot, _, samples in rows if samples}
        for slot in range(SLOTS):
            assert outcomes.kinds[slot] == (Outcome.TOKENS if slot in sampling else Outcome.EMPTY), slot
        for slot, count, samples in rows:
            self.computed[slot] += count
            if samples:
                text = self.delivered.setdefault(f"r{slot}", [])
                text.append(int(outcomes.tokens[slot, 0]))

    def check(self) -> None:
        self.judge.check(self.delivered)


@pytest.fixture
def batch(target: Target) -> Iterator[Batch]:
    specs = [
        greedy(f"r{index}", [(17 * index + 5 * place * place + 3) % 250 for place in range(3 + index % 29)], 24)
        for index in range(SLOTS)
    ]
    judge = Judge.of(target, "batch", LONG_CASE, specs, **MANY)
    with target.engine(case=LONG_CASE, **MANY) as engine:
        hand = ManualDriver(engine)
        yield Batch(hand, judge)
        hand.close()


def shuffled(count: int, seed: int, of: int = SLOTS) -> list[int]:
    found: list[int] = np.random.default_rng(seed).permutation(of)[:count].tolist()
    return found


def test_decode_batches_shrink_and_grow(batch: Batch) -> None:
    batch.prefill(shuffled(SLOTS, 0))
    for step, rows in enumerate([67, 1, 66, 64, 3, 65, 41, 40, 2, 63, 33, 5, 67, 31, 1]):
        batch.decode(shuffled(rows, step))
        batch.check()


def test_the_last_slot_and_the_first_alone_after_a_large_batch(batch: Batch) -> None:
    batch.prefill(list(range(SLOTS)))
    for slots in ([66], list(range(SLOTS)), [0], [66, 0], shuffled(67, 1), [65]):
        batch.decode(slots)
    batch.check()


def test_unfinished_chunks_between_decodes_leave_no_state(batch: Batch) -> None:
    """Run single-token steps with few sampling rows, in batches that shrink and grow."""
    late = [slot for slot in range(SLOTS) if len(batch.specs[slot].prompt) >= 20][:12]
    early = [slot for slot in range(SLOTS) if slot not in late]
    batch.prefill(early)
    batch.decode(early)  # all rows of a large batch have logits
    batch.chunks(late, [early[-1]])
    batch.chunks(late[:7], [early[0]])
    batch.chunks(late[:3], [early[7]])
    batch.chunks(late[1:2], [early[20]])
    batch.chunks(late)  # no row samples
    batch.decode([early[3]])
    batch.chunks(late[5:6], early[:39])
    batch.chunks(late[:1], early[40:42])
    batch.prefill(late)
    batch.decode(shuffled(SLOTS, 3))
    batch.check()


def test_wide_step_with_decodes(batch: Batch) -> None:
    """Run one step of more than 600 tokens: prompts, partial chunks and decodes, in random order of slots."""
    first = shuffled(9, 5)
    batch.prefill(first)
    rest = [slot for slot in shuffled(SLOTS, 6) if slot not in first]
    total = sum(len(batch.specs[slot].prompt) for slot in rest)
    assert total >= 600
    rows = [(slot, len(batch.specs[slot].prompt), True) for slot in rest]
    rows[3:3] = [(slot, 1, True) for slot in first[:5]]
    rows += [(slot, 1, True) for slot in first[5:]]
    batch.step(rows)
    batch.decode(shuffled(SLOTS, 7))
    batch.check()


def test_contexts_beyond_any_split_up_to_the_last_position(target: Target) -> None:
    """Run prompts of 2,000 tokens and more in chunks of 601, then decodes, one up to the model's last position."""
    rng = np.random.default_rng(8)
    lengths = {"a": (2048, 4), "b": (2047, 6), "c": (4096 - 3, 7), "d": (5000 - 9, 9)}
    specs = [greedy(name, rng.integers(0, 250, count).tolist(), most) for name, (count, most) in lengths.items()]
    judge = Judge.of(target, "contexts", LONG_CASE, specs, **LONG)
    with target.engine(case=LONG_CASE, **LONG) as engine:
        texts = run(engine, specs).tokens
    judge.check(texts)
    assert {name: len(text) for name, text in texts.items()} == {name: most for name, (_, most) in lengths.items()}


def test_a_vocabulary_beyond_2_17_with_everything_at_once(target: Target, require: Callable[..., None]) -> None:
    """Run 41 requests with log-probabilities, filters, penalties and biases over 140,003 tokens, most beyond 2^16."""
    require("checkpoints")
    specs = wide_specs(target.exact)
    judge = Judge.of(target, "wide", WIDE_CASE, specs, **WIDE)
    with target.engine(case=WIDE_CASE, **WIDE) as engine:
        texts = run(engine, specs)
    judge.check(texts.tokens)
    assert max(token for text in texts.tokens.values() for token in text) > 2**17
    for name, spec in judge.specs.items():
        if spec.params.logprobs is None:
            continue
        for at, score in enumerate(texts.scores[name]):
            if texts.tokens[name][: at + 1] != judge.texts[name][: at + 1]:
                break
            judge.check_scores(name, at, score.logprob, top_ids=score.top_ids, top=score.top)


def wide_specs(exact: bool) -> list[RequestSpec]:
    """Return requests over the large vocabulary; only greedy ones unless `exact`."""
    rng = np.random.default_rng(9)
    specs = []
    for index in range(41):
        params: dict[str, Any] = {"temperature": 0.0, "max_tokens": 3, "ignore_eos": True}
        params["logprobs"] = [None, 0, 1, 20][index % 4]
        if exact and index % 5:
            params |= {
                "temperature": [0.7, 1.0, 2.0][index % 3],
                "top_k": [0, 1, 50, 17_000, 140_003][index % 5],
                "top_p": [1.0, 0.9, 0.999][index % 3],
                "min_p": [0.0, 0.0, 1e-4][index % 3],
                "seed": int(rng.integers(0, 2**63)),
            }
        if index % 3 == 0:
            params |= {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.1}
        if index % 4 == 1:
            high = rng.integers(2**17, 140_003, 30).tolist()
            params["logit_bias"] = dict.fromkeys([*high, 140002, 0], 9.0) | {7: -100.0}
        prompt = tuple(rng.integers(2**16, 140_003, 1 + index % 23).tolist())
        specs.append(RequestSpec(request_id=f"r{index}", prompt=prompt, params=SamplingParams(**params)))
    return specs
