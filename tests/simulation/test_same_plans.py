"""Simulated engines make the same plans as computing ones, step by step, if requests arrive at the same steps."""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest
from typing import Any

import pytest

from fd_core.config import EngineConfig
from fd_core.engine.building.builder import load_engine
from fd_core.models.catalog import resolve_model
from tests.simulation.same_plans import computed_plans, messages, simulated_plans

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two plans in flight": {"pipeline_depth": 2},
    "chunks of 24 tokens": {"max_num_batched_tokens": 24},
    "no prefix caching": {"enable_prefix_caching": False},
    "few blocks": {"num_kv_blocks": 13},
    "few blocks, two plans in flight": {"num_kv_blocks": 13, "pipeline_depth": 2, "max_num_batched_tokens": 24},
    "shares of tenants": {"scheduling_policy": "fair"},
    "priorities": {"scheduling_policy": "priority", "num_kv_blocks": 13, "max_num_seqs": 3},
}


def compare(backend: str, count: int, vocab: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the plans of both engines, which were equal."""
    values: dict[str, Any] = {
        "model": "null" if backend == "null" else "smollm2",
        "backend": backend,
        "max_num_seqs": 6,
        "num_kv_blocks": 60,
        "block_size": 16,
        "max_model_len": 200,
        "max_num_batched_tokens": 64,
        "pipeline_depth": 1,
        "save_preempted_kv": False,
        "structured_output": False,
        "scheduling_policy": "fcfs",
    }
    config = EngineConfig(**(values | settings))
    path = None if backend == "null" else resolve_model("smollm2").path
    engine = load_engine(config, path, progress=lambda *_: None)
    due = messages(count, 24, vocab=vocab, longest=60)
    try:
        found = computed_plans(engine, due)
        simulated = simulated_plans(engine, config, due)
    finally:
        engine.close()
    for computed, made in zip_longest(found, simulated):
        assert computed == made
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_plans_equal_those_of_computing_engine(name: str) -> None:
    settings = SETTINGS[name]
    plans = compare("null", 24, 256, settings)
    admitted = Counter(request for plan in plans for request, *_ in plan["admissions"])
    assert len(admitted) > 10
    assert any(plan["revocations"] for plan in plans)
    if settings.get("scheduling_policy") != "fair":  # under which tenants displace each other
        assert (max(admitted.values()) > 1) == ("num_kv_blocks" in settings), "preempted requests are admitted again"
    shared = any(computed for plan in plans for *_, computed in plan["admissions"])
    assert shared == settings.get("enable_prefix_caching", True)


@pytest.mark.soak
@pytest.mark.parametrize("name", SETTINGS)
def test_plans_equal_those_of_smollm2(name: str) -> None:
    assert len(compare("cpu", 40, 49152, SETTINGS[name])) > 100
