"""Observers receive what each step sampled and cannot disturb the engine."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from fd_core.config import SpeculativeConfig
from fd_core.engine.building import builder
from fd_core.engine.core import Engine
from fd_core.errors import PluginError
from fd_core.runner import observing
from fd_core.runner.observing import SampledStep
from tests.engine.helpers import golden, null_engine, random_specs, run
from tests.engine.knowing import OracleDrafter
from tests.plugin_sites import GOOD, Site

SPECS = random_specs(8, seed=5)
PARTS = """
from fd_core.runner.observing import Observer

class Chip(Observer):
    steps, closed, act = [], False, lambda step: None

    def __init__(self):
        type(self).steps = []

    def observe(self, step):
        self.steps.append(step)
        type(self).act(step)

    def close(self):
        type(self).closed = True
"""

Load = Callable[..., tuple[Engine, type]]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Return a function that loads an engine with an observer from a plugin and returns both."""
    site = Site(tmp_path)
    name = f"fd_sees{abs(hash(tmp_path))}"
    source = GOOD.replace("backends", "observers").format(name="sees", module=name)
    site.install(name.replace("_", "-"), source, parts=PARTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(builder, "installed_plugins", site.discover)

    def loaded(**settings: object) -> tuple[Engine, type]:
        return null_engine(observer="sees", **settings), __import__(f"{name}_parts").Chip

    return loaded


@pytest.mark.parametrize("depth", [1, 2])
def test_observer_sees_all_sampled_and_draft_tokens(load: Load, depth: int) -> None:
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=3, cheap_tokens=1000)
    engine, observer = load(speculative=speculative, num_kv_blocks=30, pipeline_depth=depth)
    engine.probe().runner.drafter = OracleDrafter(8, SPECS, 0.3, 0)
    assert run(engine, SPECS).tokens == golden(SPECS)
    engine.close()
    stats = engine.stats()
    assert stats.scheduler.counters.preemptions > 0
    seen: dict[str, list[int]] = defaultdict(list)
    for step in observer.steps:
        for each in step.requests:
            assert 0 <= each.drafts_accepted <= each.drafts_proposed <= 3
            assert len(each.token_ids) == each.drafts_accepted + 1
            seen[each.request_id] += each.token_ids
    # Tokens in flight at the end of a text are sampled, but not delivered.
    assert all(seen[name][: len(tokens)] == tokens for name, tokens in golden(SPECS).items())
    assert [step.step for step in observer.steps] == list(range(observer.steps[0].step, len(observer.steps)))
    assert {step.epoch for step in observer.steps} == {1}
    assert observer.closed
    assert stats.observer == observing.ObserverStats(steps=len(observer.steps))
    with pytest.raises(AttributeError):
        observer.steps[0].requests = ()


def test_failing_observer_is_counted_and_texts_are_unaffected(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    engine, observer = load()

    def fail(step: SampledStep) -> None:
        raise OSError(f"no room for {step.requests}")

    observer.act = fail
    assert run(engine, SPECS).tokens == golden(SPECS)
    engine.close()
    stats = engine.stats().observer
    assert stats is not None
    assert stats.failures == stats.steps == len(observer.steps) > 10
    assert len([record for record in caplog.records if "the observer failed: OSError" in record.message]) == 1
    assert "no room" not in caplog.text, "what an observer raises may hold tokens"


def test_hung_observer_drops_steps_without_blocking(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing, "MAX_QUEUED", 4)
    monkeypatch.setattr(observing, "_CLOSE_SECONDS", 0.2)
    engine, observer = load()
    free = threading.Event()
    observer.act = lambda step: free.wait(60)
    assert run(engine, SPECS).tokens == golden(SPECS)
    engine.close()
    stats = engine.stats().observer
    free.set()
    assert stats is not None
    assert stats.dropped > 10
    assert stats.steps <= 1


def test_observer_constructor_error_fails_start(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, observer = load()
    engine.close()

    def broken(self: object) -> None:
        raise OSError("no server there")

    monkeypatch.setattr(observer, "__init__", broken)
    with pytest.raises(PluginError, match="creating the observer sees failed: OSError: no server there"):
        load()


def test_observer_receives_no_prompt_tokens() -> None:
    assert observing.SampledStep.__struct_fields__ == ("epoch", "step", "requests")
    assert observing.SampledRequest.__struct_fields__ == (
        *("request_id", "token_ids"),
        *("drafts_proposed", "drafts_accepted"),
    )


def test_unknown_observer_is_rejected() -> None:
    with pytest.raises(PluginError, match="unknown observer 'nosuch'") as refused:
        null_engine(observer="nosuch")
    assert refused.value.exit_code == 4
