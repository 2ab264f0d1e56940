"""Padding is charged, writes only the spare block, and does not change results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fd_core.backends.contract import Model
from fd_core.backends.cpu import ReferenceBackend
from fd_core.config import EngineConfig, Limits
from fd_core.ops.contract import KVShape, StepInput
from fd_core.ops.numpy.ops import NumpyKVCache, NumpyOps
from fd_core.runner.batch import PersistentBatch
from fd_core.runner.inputs.inputs import BudgetExceeded, Rows, gather_inputs, resolve_rows
from fd_core.runner.postprocess.numpy_matrix import NumpyPostprocess
from fd_core.runner.runner import Runner
from fd_core.testing.models.checkpoints import write_checkpoint
from fd_core.types import Admission, BlockGrant, IntArray, SamplingParams, StepPlan

K = 3
BLOCK = 4
LIMITS = Limits(
    max_num_seqs=5,
    max_num_batched_tokens=40,
    max_model_len=24,
    block_size=BLOCK,
    num_kv_blocks=30,
    vocab_size=160,
    max_drafts=K,
)


def ids(*values: int) -> IntArray:
    return np.array(values, np.int32)


def admission(slot: int, length: int) -> Admission:
    tokens = np.random.default_rng(slot).integers(0, 160, length, np.int32)
    return Admission(slot, 1, tokens, length, SamplingParams(temperature=0.0), (), 0)


def plan(step: int, rows: list[tuple[int, int, int, int]], **more: Any) -> StepPlan:
    """Return rows of (slot, start, own tokens, drafts), all of which sample."""
    slots, starts, own, drafts = (ids(*column) for column in zip(*rows, strict=True))
    ones = np.ones(len(rows), np.int32)
    return StepPlan(1, step, slots, ones, starts, own + drafts, drafts, ones.astype(np.bool_), **more)


def batch(*slots: tuple[int, int]) -> PersistentBatch:
    """Return slots of (length, drafts)."""
    result = PersistentBatch(LIMITS)
    for slot, (length, drafts) in enumerate(slots):
        result.admit(admission(slot, length))
        result.guess(ids(slot), np.full((1, K), 9, np.int32), ids(drafts))
    result.tables[:] = np.arange(30, dtype=np.int32).reshape(5, 6)
    return result


def decodes(*drafts: int, length: int = 5) -> tuple[StepPlan, PersistentBatch]:
    rows = [(slot, length - 1, 1, some) for slot, some in enumerate(drafts)]
    return plan(0, rows), batch(*((length, some) for some in drafts))


def test_padded_step_is_charged_at_padded_size() -> None:
    assert resolve_rows(*decodes(0, 0), LIMITS, lambda rows, width: (8, 1)).shape == (8, 1)
    assert resolve_rows(*decodes(3, 1), LIMITS, lambda rows, width: (10, 4)).shape == (10, 4)
    with pytest.raises(BudgetExceeded, match="computes 44 tokens, over the budget 40"):
        resolve_rows(*decodes(3, 1), LIMITS, lambda rows, width: (11, 4))


def test_pack_receives_actual_draft_count() -> None:
    shapes: list[tuple[int, int]] = []
    planned, slots = decodes(3, 1)
    slots.num_drafts[:] = 1
    resolve_rows(planned, slots, LIMITS, lambda rows, width: shapes.append((rows, width)))
    assert shapes == [(2, 2)]


def test_request_shorter_than_a_row_is_not_padded() -> None:
    assert resolve_rows(*decodes(1, 0, length=3), LIMITS, lambda rows, width: (2, 4)).shape is None
    assert resolve_rows(*decodes(1, 0, length=4), LIMITS, lambda rows, width: (2, 4)).shape == (2, 4)


def test_padding_rows_use_the_spare_block() -> None:
    planned, slots = decodes(0, 0)
    rows = resolve_rows(planned, slots, LIMITS, lambda rows, width: (4, 1))
    step = gather_inputs(rows, slots.tokens, slots.tables, BLOCK, spare_block=30)
    assert step.kv_slots.tolist() == [4, 28, 120, 120]
    assert step.block_tables.tolist() == [[0, 1], [6, 7], [30, 30], [30, 30]]
    assert step.query_start.tolist() == [0, 1, 2, 3, 4]
    assert step.context_len.tolist() == [5, 5, 1, 1]
    assert step.positions.tolist() == [4, 4, 0, 0]
    assert step.logits_rows.tolist() == [0, 1]
    with pytest.raises(RuntimeError, match="no spare block"):
        gather_inputs(rows, slots.tokens, slots.tables, BLOCK)


@dataclass
class Work:
    """Step with few tokens per row, and the shape that it is padded to."""

    rows: list[tuple[int, int, int, int]]
    lengths: list[int]
    shape: tuple[int, int]

    def inputs(self, padded: bool) -> tuple[Rows, StepInput]:
        slots = batch(*zip(self.lengths, [row[3] for row in self.rows], strict=True))
        rows = resolve_rows(plan(0, self.rows), slots, LIMITS, lambda *_: self.shape if padded else None)
        return rows, gather_inputs(rows, slots.tokens, slots.tables, BLOCK, spare_block=30)


@st.composite
def works(draw: st.DrawFn) -> Work:
    count = draw(st.integers(1, 5))
    rows, lengths = [], []
    for slot in range(count):
        own = draw(st.integers(1, 1 + K))
        drafts = draw(st.integers(0, 1 + K - own))
        length = draw(st.integers(1 + K, LIMITS.max_model_len - drafts))
        rows.append((slot, length - own, own, drafts))
        lengths.append(length)
    widest = max(own + drafts for _, _, own, drafts in rows)
    width = draw(st.integers(widest, 1 + K))
    return Work(rows, lengths, (draw(st.integers(count, 40 // width)), width))


@given(works())
def test_padding_writes_only_spare_block(work: Work) -> None:
    (plain, expected), (rows, step) = work.inputs(padded=False), work.inputs(padded=True)
    count, (height, width) = len(work.rows), work.shape
    assert len(step.token_ids) == len(step.positions) == len(step.kv_slots) == height * width
    assert step.query_start.tolist() == [width * row for row in range(height + 1)]
    assert (step.max_query, step.uniform) == (width, True)
    # Each request computes its own tokens, in order, at the end of its row.
    own = np.concatenate([begin + np.arange(count) for begin, count in zip(rows.begins, rows.counts, strict=True)])
    for name in ("token_ids", "positions", "kv_slots"):
        np.testing.assert_array_equal(getattr(step, name)[own], getattr(expected, name))
    np.testing.assert_array_equal(own[plain.logits_rows], rows.logits_rows)
    others = np.setdiff1d(np.arange(height * width), own)
    assert (step.kv_slots[others] // BLOCK == 30).all()
    # Every row satisfies the contract: consecutive positions that end with its context.
    ends = step.context_len[:, None] - width + np.arange(width)
    np.testing.assert_array_equal(step.positions.reshape(height, width), ends)
    np.testing.assert_array_equal(step.context_len[:count], expected.context_len)
    np.testing.assert_array_equal(step.block_tables[:count], expected.block_tables)
    assert (step.block_tables[count:] == 30).all()
    assert step.block_tables.shape[1] * BLOCK >= step.context_len.max() == step.max_context


class Padding(NumpyOps):
    """Oracle that pads up to the budget: to a multiple of three rows with one token, or 1 + k."""

    def padded(self, rows: int, width: int) -> tuple[int, int] | None:
        shape = -(-rows // 3) * 3, 1 if width == 1 else 1 + K
        return shape if width <= 1 + K and shape[0] * shape[1] <= LIMITS.max_num_batched_tokens else None

    def allocate_kv(self, shape: KVShape, num_blocks: int) -> NumpyKVCache:
        cache = super().allocate_kv(shape, num_blocks + 1)
        cache.num_blocks = cache.spare_block = num_blocks
        return cache


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Create pairs of runners, the second of which pads."""
    folder = tmp_path_factory.mktemp("llama")
    write_checkpoint("llama", folder)
    packs = [NumpyOps(), Padding()]
    models: list[Model] = [
        ReferenceBackend(EngineConfig(model=str(folder))).load_model(Path(folder), ops, lambda *_: None)
        for ops in packs
    ]
    return list(zip(packs, models, strict=True))


def begin(runners: list[Any], lengths: list[int]) -> list[Runner]:
    """Prefill slots of these lengths with two runners."""
    admissions = tuple(admission(slot, length) for slot, length in enumerate(lengths))
    grants = tuple(BlockGrant(slot, 0, np.arange(6, dtype=np.int32) + 6 * slot) for slot in range(len(lengths)))
    rows = [(slot, 0, length, 0) for slot, length in enumerate(lengths)]
    pair = [Runner(*each, LIMITS, NumpyPostprocess) for each in runners]
    for runner in pair:
        runner.execute(plan(0, rows, admissions=admissions, grants=grants))
    return pair


@given(st.data())
def test_padding_does_not_change_texts_with_drafts(runners: list[Any], data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=5))
    pair = begin(runners, lengths)
    for step in range(1, 4):
        known = pair[0].batch.length.copy()
        rows = []
        for slot in data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1).map(sorted)):
            drafts = data.draw(st.integers(0, K))
            guess = data.draw(st.lists(st.integers(0, 159), min_size=K, max_size=K))
            for runner in pair:
                runner.batch.guess(ids(slot), np.array([guess], np.int32), ids(drafts))
            rows.append((slot, int(known[slot]) - 1, 1, drafts))
        outputs = [runner.execute(plan(step, rows)) for runner in pair]
        np.testing.assert_array_equal(outputs[0].tokens, outputs[1].tokens)
    blocks = np.arange(30, dtype=np.int32)
    np.testing.assert_allclose(*(runner.cache.export_blocks(blocks) for runner in pair), atol=1e-5)


def test_nan_does_not_spread_through_padding(runners: list[Any]) -> None:
    """The keys of one request are NaN and its row is padded: no other request is affected, now or later."""
    pair = begin(runners, [7, 7, 7])
    for runner in pair:
        runner.cache.import_blocks(ids(0, 1), np.full_like(runner.cache.export_blocks(ids(0, 1)), np.nan))
    for step in range(1, 3):
        for runner in pair:
            runner.batch.guess(ids(1), np.full((1, K), 3, np.int32), ids(K))
        start = 6 + step
        rows = [(slot, start, 1, K if slot == 1 else 0) for slot in range(3)]
        outputs = [runner.execute(plan(step, rows)) for runner in pair]
        np.testing.assert_array_equal(outputs[0].tokens[1:], outputs[1].tokens[1:])
        assert [[slot for slot, _ in output.errors] for output in outputs] == [[0], [0]]
