"""Engine with a draft model: the same texts in fewer steps, with its memory budgeted before allocation."""

from __future__ import annotations

import pytest

from fd_core.config import SpeculativeConfig
from fd_core.engine.core import Engine
from fd_core.errors import ConfigError
from tests.engine.helpers import golden, null_engine, random_specs, run
from tests.engine.stepping import greedy

SPECS = random_specs(16, seed=5)


def drafting(k: int, **changes: object) -> Engine:
    speculative = SpeculativeConfig(method="draft_model", model="null", num_speculative_tokens=k, cheap_tokens=1000)
    return null_engine(speculative=speculative, **changes)


@pytest.mark.parametrize("budget", [24, 64])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("k", [1, 3, 5])
def test_texts_are_golden_under_memory_pressure(k: int, depth: int, budget: int) -> None:
    engine = drafting(k, num_kv_blocks=30, pipeline_depth=depth, max_num_batched_tokens=budget)
    assert run(engine, SPECS).tokens == golden(SPECS)
    stats = engine.stats()
    assert stats.scheduler.counters.preemptions > 0
    assert stats.scheduler.drafts.proposed > stats.scheduler.drafts.accepted > 0, (
        "random requests reject, greedy ones accept"
    )
    engine.close()


@pytest.mark.parametrize("k", [1, 3, 5])
def test_model_drafting_for_itself_has_full_acceptance(k: int) -> None:
    specs = [greedy(f"r{index}", range(index, 40 * index + 1), 60) for index in range(8)]
    engine, plain = drafting(k), null_engine()
    texts, expected = run(engine, specs), run(plain, specs)
    assert texts.tokens == expected.tokens
    stats = engine.stats()
    assert stats.scheduler.drafts.proposed == stats.scheduler.drafts.accepted > 0
    assert stats.scheduler.counters.steps < plain.stats().scheduler.counters.steps


def test_draft_cache_is_taken_from_kv_memory() -> None:
    memory = 16 * 1024
    plain = null_engine(num_kv_blocks=None, kv_cache_memory=memory)
    engine = drafting(3, num_kv_blocks=None, kv_cache_memory=memory)
    assert engine.info.num_kv_blocks * 2 == plain.info.num_kv_blocks
    assert engine.info.kv_cache_bytes == plain.info.kv_cache_bytes == memory


def test_block_count_that_cannot_hold_both_caches_is_rejected() -> None:
    blocks = 64 * 2**20 // 128
    null_engine(num_kv_blocks=blocks)
    with pytest.raises(ConfigError, match="are free"):
        drafting(3, num_kv_blocks=blocks)


def test_zero_draft_tokens_loads_no_draft_model() -> None:
    engine = drafting(0)
    assert engine.probe().runner.drafter is None
    assert engine.info.kv_cache_bytes == null_engine().info.kv_cache_bytes


def test_method_without_required_draft_model_is_rejected() -> None:
    with pytest.raises(ConfigError, match="needs a draft model"):
        null_engine(speculative=SpeculativeConfig(method="draft_model"))
