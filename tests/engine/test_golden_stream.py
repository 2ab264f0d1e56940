"""Batching, chunking, preemption and pipelining never change a text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fd_core.scheduling.running.slots import SlotStats
from tests.engine.helpers import golden, null_engine, random_specs, run

SPECS = random_specs(30, seed=7)


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return golden(SPECS)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.law("4")
def test_preemption_does_not_change_texts(expected: dict[str, list[int]], depth: int, prefix_caching: bool) -> None:
    engine = null_engine(num_kv_blocks=30, pipeline_depth=depth, enable_prefix_caching=prefix_caching)
    texts = run(engine, SPECS)
    assert texts.tokens == expected
    assert engine.stats().scheduler.counters.preemptions > 0, "the pool should run out"
    engine.close()


@settings(max_examples=25, deadline=None)
@given(
    slots=st.integers(1, 9),
    budget=st.integers(1, 80),
    blocks=st.integers(25, 60),
    depth=st.integers(1, 3),
    caching=st.booleans(),
)
def test_scheduling_limits_do_not_change_texts(slots: int, budget: int, blocks: int, depth: int, caching: bool) -> None:
    specs = SPECS[:8]
    engine = null_engine(
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        num_kv_blocks=blocks,
        pipeline_depth=depth,
        enable_prefix_caching=caching,
    )
    texts = run(engine, specs)
    assert texts.tokens == golden(specs)
    engine.close()


@pytest.mark.law("3.6")
def test_gauges_return_to_initial_values() -> None:
    engine = null_engine(num_kv_blocks=30, pipeline_depth=2)
    before = engine.stats().scheduler
    run(engine, SPECS)
    after = engine.stats().scheduler
    assert after.slots == before.slots == SlotStats(running=0, loading=0, draining=0, waiting=0)
    assert (after.blocks.used, after.blocks.fenced) == (before.blocks.used, before.blocks.fenced) == (0, 0)
    assert after.outputs.stale_outputs == 0
    engine.close()


def test_concurrent_requests_compute_shared_prefix_once() -> None:
    prefix = tuple(range(64))
    specs = [
        spec.__class__(request_id=spec.request_id, prompt=(*prefix, index), params=spec.params, eos_token_ids=(256,))
        for index, spec in enumerate(SPECS[:8])
    ]
    engine = null_engine(max_num_batched_tokens=1024, num_kv_blocks=200)
    texts = run(engine, specs)
    assert texts.tokens == golden(specs)
    assert engine.stats().scheduler.counters.prefix_hits == 7 * 64
