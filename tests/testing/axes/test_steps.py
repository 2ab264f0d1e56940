"""Engines of cases: short memory preempts requests, and an encoder needs no KV."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from fd_core.plugins import installed_plugins
from fd_core.testing.axes.covering import parse_case
from fd_core.testing.axes.parts import cases_of
from fd_core.testing.axes.steps import STEPS, check_steps, supported_by
from fd_core.testing.kit.target import parse_target
from fd_core.testing.models.scenario import Scenario


def test_requests_are_preempted_where_memory_is_short(tmp_path, monkeypatch):
    """Most engines of cases without ample memory preempt, and save KV that is to be restored."""
    installed_plugins.cache_clear()
    target, seen, right = parse_target("null", tmp_path), [], Scenario.loaded

    @contextmanager
    def watched(self):
        with right(self) as engine:
            yield engine
            stats = engine.stats().scheduler
            seen.append((stats.counters.preemptions, stats.offload.saved_tokens))

    monkeypatch.setattr(Scenario, "loaded", watched)
    cases = [case for case in cases_of(STEPS)[0] if case.values["memory"] != "ample"]
    for case in cases:
        STEPS.check(target, case.with_only(supported_by(target)).values)
    preempting = [preempted > 0 for preempted, _ in seen]
    assert sum(preempting) >= 0.75 * len(preempting) and len(preempting) > 10, preempting
    assert any(saved for _, saved in seen)


@pytest.mark.parametrize("seed", [1, 2])
def test_other_seeds_have_cases_of_short_memory(seed):
    assert sum(case.values["memory"] != "ample" for case in cases_of(STEPS, seed)[0]) > 10


@pytest.mark.parametrize("setting", ["kv_cache_dtype=int8", "pipeline_parallel_size=2"])
def test_settings_of_kv_and_stages_are_not_those_of_an_encoder(tmp_path, setting):
    check_steps(parse_target(f"reference:{setting}", tmp_path), parse_case("model=gemma3-encoder", STEPS.axes))
