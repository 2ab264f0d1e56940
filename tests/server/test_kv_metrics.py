"""Metrics of KV outside the device: absent if there is none, complete if there is."""

from __future__ import annotations

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from fd_core.engine.process.messages import EngineStats
from fd_core.http.metrics import metric_families
from fd_core.kv.tiers.stats import TierStats
from fd_core.scheduling.contract import SchedulerStats
from fd_core.scheduling.operations.kv_offloading import OffloadCounters, Pace

KV = TierStats(
    host_blocks=3,
    host_bytes=300,
    host_limit_bytes=1000,
    pending_write_bytes=77,
    loaded_blocks_host=2,
    loaded_blocks_store=5,
    block_size=16,
    host_hit_blocks=4,
    store_hit_blocks=6,
    written_blocks=8,
    dropped_blocks=1,
    damaged={"digest": 2},
    store_errors={"timeout": 3},
    breaker="open",
    store="disk:kv",
)


def metrics(stats: EngineStats) -> dict[str, float]:
    class Engine(Collector):
        def collect(self):
            return metric_families("fdcore_", [({}, stats)])

    registry = CollectorRegistry()
    registry.register(Engine())
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        sample.name + "".join(f"[{value}]" for _, value in sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def test_without_offloaded_kv_its_metrics_are_absent() -> None:
    seen = metrics(EngineStats())
    assert not [name for name in seen if name.startswith(("fdcore_kv_host", "fdcore_kv_store", "fdcore_kv_pace"))]
    assert "fdcore_kv_lookups_total" not in seen and seen["fdcore_kv_loads_total"] == 0


def test_statistics_of_the_tiers_are_exported() -> None:
    seen = metrics(EngineStats(kv=KV, scheduler=SchedulerStats(pace=Pace(prefill_token=0.002, store_block=0.5))))
    assert seen["fdcore_kv_host_bytes"] == 300
    assert seen["fdcore_kv_host_limit_bytes"] == 1000
    assert seen["fdcore_kv_store_pending_bytes"] == 77
    assert (seen["fdcore_kv_loaded_tokens_total[host]"], seen["fdcore_kv_loaded_tokens_total[store]"]) == (32, 80)
    assert (seen["fdcore_kv_found_blocks_total[host]"], seen["fdcore_kv_found_blocks_total[store]"]) == (4, 6)
    assert (seen["fdcore_kv_store_written_blocks_total"], seen["fdcore_kv_store_dropped_blocks_total"]) == (8, 1)
    assert seen["fdcore_kv_store_damaged_total[digest]"] == 2
    assert seen["fdcore_kv_store_failures_total[timeout][timeout]"] == 3
    assert seen["fdcore_kv_store_failures_total[full][full]"] == 0, "a later failure must appear as an increase"
    states = {name: value for name, value in seen.items() if name.startswith("fdcore_kv_store_breaker")}
    assert len(states) == 6
    assert {name for name, value in states.items() if value} == {
        "fdcore_kv_store_breaker[open][read]",
        "fdcore_kv_store_breaker[closed][write]",
    }
    assert (seen["fdcore_kv_pace_prefill_token_seconds"], seen["fdcore_kv_pace_store_block_seconds"]) == (0.002, 0.5)
    assert "fdcore_kv_pace_host_block_seconds" not in seen, "nothing was measured"


def test_without_a_store_its_metrics_are_absent() -> None:
    seen = metrics(EngineStats(kv=msgspec.structs.replace(KV, store=None)))
    assert "fdcore_kv_host_bytes" in seen
    assert not [name for name in seen if name.startswith("fdcore_kv_store")]


def test_statistics_round_trip_through_msgpack() -> None:
    stats = EngineStats(kv=KV, scheduler=SchedulerStats(pace=Pace(host_block=0.25), offload=OffloadCounters(loads=2)))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=EngineStats) == stats
