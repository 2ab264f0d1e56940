"""History of the server's figures: rates of one interval, gaps without an engine, bounded memory."""

from __future__ import annotations

from typing import Any

from fd_core.engine.process.messages import EngineStats
from fd_core.kv.blocks import BlockStats
from fd_core.scheduling.contract import SchedulerStats
from fd_core.scheduling.running.output_processor import OutputCounters
from fd_core.scheduling.running.running_batch import SchedulerCounters
from fd_core.scheduling.running.slots import SlotStats
from fd_core.server.live_page.history import CAPACITY, SECONDS, Durations, History, quantile_of


def figures(generated: int = 0, first: tuple[int, ...] = (0, 0, 0), **slots: int) -> tuple[EngineStats, Durations]:
    scheduler = SchedulerStats(
        slots=SlotStats(**slots),
        blocks=BlockStats(used=3, fenced=1, total=16),
        outputs=OutputCounters(generated_tokens=generated),
        counters=SchedulerCounters(prompt_tokens=2 * generated, preemptions=0),
    )
    bounds = (0.1, 0.2)
    histograms = {
        "time_to_first_token": {"bounds": bounds, "counts": first},
        "inter_token": {"bounds": bounds, "counts": (0, 0, 0)},
    }
    return EngineStats(scheduler=scheduler), histograms


def rows(history: History) -> list[dict[str, Any]]:
    shown = history.shown(1000.0)
    return [
        dict(zip(shown["columns"], (getattr(row, name) for name in shown["columns"]), strict=True))
        for row in shown["rows"]
    ]


def test_sample_holds_gauges_and_rates_of_its_interval() -> None:
    history = History()
    history.record(100.0, figures(1000, (5, 0, 0), running=1))
    history.record(110.0, figures(1050, (5, 4, 0), running=2, loading=1, draining=1, waiting=7))
    first, second = rows(history)
    assert (first["generated"], first["ttft50"], first["running"]) == (None, None, 1), "no interval yet"
    assert (second["running"], second["waiting"], second["kv"]) == (4, 7, 0.25)
    assert (second["generated"], second["prompt"], second["preempted"]) == (5.0, 10.0, 0.0)
    assert (second["ttft50"], second["ttft95"]) == (0.15, 0.195)
    assert second["tpot50"] is None, "nothing was measured"


def test_counters_of_a_restarted_engine_are_no_rate() -> None:
    history = History()
    history.record(100.0, figures(1000))
    history.record(115.0, None)
    history.record(130.0, figures(10))
    history.record(145.0, figures(40))
    assert [row["generated"] for row in rows(history)] == [None, None, None, 2.0]
    assert rows(history)[1]["running"] is None
    history.record(160.0, figures(10))
    assert rows(history)[-1]["generated"] is None


def test_history_is_bounded() -> None:
    history = History()
    for index in range(CAPACITY + 10):
        history.record(index * SECONDS, figures(index))
    kept = rows(history)
    assert len(kept) == CAPACITY and kept[0]["at"] == 10 * SECONDS


def test_quantile_is_linear_within_its_bucket() -> None:
    assert quantile_of((1.0, 2.0), (0, 0, 0), 0.5) is None
    assert quantile_of((1.0, 2.0), (4, 0, 0), 0.5) == 0.5
    assert quantile_of((1.0, 2.0), (2, 2, 0), 0.75) == 1.5
    assert quantile_of((1.0, 2.0), (0, 0, 9), 0.95) == 2.0
