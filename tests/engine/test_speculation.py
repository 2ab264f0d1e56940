"""Speculation changes the number of steps of a text, never the text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fd_core.config import SpeculativeConfig
from fd_core.engine.core import Engine
from tests.engine.helpers import golden, null_engine, random_specs, run
from tests.engine.knowing import OracleDrafter

SPECS = random_specs(16, seed=5)


def speculating(k: int, wrong: float, seed: int = 0, **changes: object) -> Engine:
    engine = null_engine(
        speculative=SpeculativeConfig(method="ngram", num_speculative_tokens=k, cheap_tokens=1000), **changes
    )
    engine.probe().runner.drafter = OracleDrafter(int(changes.get("max_num_seqs", 8)), SPECS, wrong, seed)
    return engine


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
@pytest.mark.in_turn(4)
def test_speculative_texts_are_golden_under_pressure(k: int, depth: int, wrong: float) -> None:
    engine = speculating(k, wrong, num_kv_blocks=30, pipeline_depth=depth)
    assert run(engine, SPECS).tokens == golden(SPECS)
    stats = engine.stats()
    assert stats.scheduler.counters.preemptions > 0
    assert (stats.scheduler.blocks.used, stats.scheduler.blocks.fenced, stats.scheduler.outputs.stale_outputs) == (
        0,
        0,
        0,
    )
    for all_drafts, per_position in (
        (stats.scheduler.drafts.proposed, stats.scheduler.drafts.proposed_per_position),
        (stats.scheduler.drafts.accepted, stats.scheduler.drafts.accepted_per_position),
    ):
        assert len(per_position) == k
        assert sum(per_position) == all_drafts
        assert list(per_position) == sorted(per_position, reverse=True)
    if wrong == 0.0:
        assert stats.scheduler.drafts.accepted > 0.8 * stats.scheduler.drafts.proposed / depth
    if wrong == 1.0:
        assert stats.scheduler.drafts.accepted == 0
    engine.close()


@pytest.mark.parametrize("k", [1, 3, 5])
def test_logprobs_equal_those_without_drafts(k: int) -> None:
    asking = [spec for spec in SPECS if spec.params.logprobs is not None]
    plain = run(null_engine(num_kv_blocks=200), asking)
    drafted = run(speculating(k, 0.3, num_kv_blocks=25), asking)
    assert drafted.scores == plain.scores
    assert all(len(drafted.scores[spec.request_id]) == len(drafted.tokens[spec.request_id]) > 0 for spec in asking)


def test_no_draft_positions_without_speculation() -> None:
    stats = null_engine().stats()
    assert stats.scheduler.drafts.proposed_per_position == stats.scheduler.drafts.accepted_per_position == ()


def test_accepted_drafts_save_steps() -> None:
    alone = SPECS[1:2]
    plain, drafted = null_engine(), speculating(3, 0.0)
    run(plain, alone)
    run(drafted, alone)
    assert drafted.stats().scheduler.counters.steps * 3 < plain.stats().scheduler.counters.steps


@settings(max_examples=25, deadline=None)
@given(
    k=st.integers(1, 5),
    wrong=st.floats(0, 1),
    slots=st.integers(1, 8),
    extra_budget=st.integers(0, 60),
    blocks=st.integers(25, 60),
    depth=st.integers(1, 3),
    seed=st.integers(0, 99),
)
@pytest.mark.law("4")
def test_texts_do_not_depend_on_limits_or_acceptance_rate(
    k: int, wrong: float, slots: int, extra_budget: int, blocks: int, depth: int, seed: int
) -> None:
    engine = speculating(
        k,
        wrong,
        seed,
        max_num_seqs=slots,
        max_num_batched_tokens=1 + k + extra_budget,
        num_kv_blocks=blocks,
        pipeline_depth=depth,
    )
    specs = SPECS[:6]
    assert run(engine, specs).tokens == golden(specs)
    engine.close()
