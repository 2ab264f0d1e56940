"""Abort is idempotent and prompt in every state, and frees everything exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fd_core.types import FinishReason
from tests.engine.helpers import Texts, golden, null_engine, random_specs

pytestmark = pytest.mark.slow

SPECS = random_specs(12, seed=3)


def test_aborted_waiting_request_leaves_without_prefill() -> None:
    engine = null_engine(max_num_seqs=1)
    for spec in SPECS[:2]:
        engine.submit(spec)
    engine.step()
    deltas = engine.abort(["r1"])
    assert [(delta.request_id, delta.finish_reason) for delta in deltas] == [("r1", FinishReason.ABORT)]
    assert engine.abort(["r1"]) == []


def test_aborted_running_request_ends_on_acknowledgement() -> None:
    engine = null_engine()
    engine.submit(SPECS[1])
    engine.step()
    assert engine.abort(["r1"]) == []
    assert engine.stats().scheduler.slots.running == 1
    deltas = engine.step()
    assert [delta.finish_reason for delta in deltas] == [FinishReason.ABORT]
    assert not engine.has_work
    assert engine.stats().scheduler.blocks.used == 0


def test_abort_of_unknown_id_is_ignored() -> None:
    assert null_engine().abort(["unknown"]) == []


@pytest.mark.parametrize("examples", [12, pytest.param(40, marks=pytest.mark.soak)])
def test_random_aborts_leave_other_texts_unchanged(examples: int) -> None:
    abort = st.tuples(st.integers(0, 40), st.integers(0, 11))
    aborted = given(depth=st.integers(1, 3), aborts=st.lists(abort, max_size=12))(check_survivors)
    settings(max_examples=examples, deadline=None)(aborted)()


def check_survivors(depth: int, aborts: list[tuple[int, int]]) -> None:
    engine = null_engine(num_kv_blocks=25, max_num_batched_tokens=48, pipeline_depth=depth, max_num_seqs=6)
    texts = Texts()
    for spec in SPECS:
        texts.take(engine.submit(spec))
    step = 0
    while engine.has_work:
        for when, victim in aborts:
            if when == step:
                texts.take(engine.abort([f"r{victim}"]))
                texts.take(engine.abort([f"r{victim}"]))
        texts.take(engine.step())
        engine.check_integrity()
        step += 1
        assert step < 10_000
    engine.close()
    expected = golden(SPECS)
    assert set(texts.ends) == set(expected)
    for request_id, reason in texts.ends.items():
        delivered, whole = texts.tokens[request_id], expected[request_id]
        if reason is FinishReason.ABORT:
            assert delivered == whole[: len(delivered)]
        else:
            assert delivered == whole
    stats = engine.stats()
    assert (
        stats.scheduler.slots.running,
        stats.scheduler.slots.waiting,
        stats.scheduler.blocks.used,
        stats.scheduler.blocks.fenced,
    ) == (0, 0, 0, 0)


@pytest.mark.parametrize("depth", [1, 2])
def test_abort_of_all_requests_frees_everything(depth: int) -> None:
    engine = null_engine(pipeline_depth=depth)
    texts = Texts()
    for spec in SPECS:
        engine.submit(spec)
    texts.take(engine.step())
    texts.take(engine.abort_all())
    while engine.has_work:
        texts.take(engine.step())
    engine.check_integrity()
    assert set(texts.ends.values()) <= {FinishReason.ABORT, FinishReason.STOP, FinishReason.LENGTH}
    assert len(texts.ends) == len(SPECS)
    engine.close()
