"""Metrics of KV outside the device: host tier, store, and what loading and computing were measured to cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from fd_core.engine.messages import BREAKER_STATES, STORE_TROUBLES, EngineStats, TierStats

__all__ = ["kv_metrics"]

_Read = Callable[[TierStats], int]

_GAUGES: Final[Sequence[tuple[str, str, _Read]]] = (
    ("kv_host_blocks", "KV blocks in the host tier", lambda kv: kv.host_blocks),
    ("kv_host_bytes", "Bytes of them", lambda kv: kv.host_bytes),
    ("kv_host_limit_bytes", "Bytes that the host tier may hold", lambda kv: kv.host_limit_bytes),
    ("kv_operations_open", "Lookups, loads and saves in progress", lambda kv: kv.open_operations),
)
_COUNTERS: Final[Sequence[tuple[str, str, _Read]]] = (
    ("kv_lookups", "Prefixes looked for outside the device", lambda kv: kv.lookups),
    ("kv_lookups_expired", "Lookups that ran out of time", lambda kv: kv.lookups_expired),
    ("kv_loads_expired", "Loads that ran out of time", lambda kv: kv.load_expired),
    ("kv_saves_expired", "Saves that ran out of time", lambda kv: kv.saves_expired),
    ("kv_copy_errors", "Copies from or to the device that failed", lambda kv: kv.copy_errors),
)
_STORE_GAUGES: Final[Sequence[tuple[str, str, _Read]]] = (
    ("kv_store_pending_bytes", "Bytes of KV that wait to be written to the store", lambda kv: kv.pending_write_bytes),
)
_STORE_COUNTERS: Final[Sequence[tuple[str, str, _Read]]] = (
    ("kv_store_written_blocks", "KV blocks written to the store", lambda kv: kv.written_blocks),
    ("kv_store_dropped_blocks", "KV blocks that should have been written but were not", lambda kv: kv.dropped_blocks),
)
_PACE: Final[Sequence[tuple[str, str, Callable[[EngineStats], float | None]]]] = (
    ("kv_pace_prefill_token_seconds", "To compute one token of a prompt", lambda s: s.pace.prefill_token),
    ("kv_pace_host_block_seconds", "To load one KV block from the host tier", lambda s: s.pace.host_block),
    ("kv_pace_store_block_seconds", "To bring one KV block from the store", lambda s: s.pace.store_block),
)
"""Without a sample while nothing was measured."""


def kv_metrics(stats: EngineStats, block_size: int) -> Iterator[Metric]:
    """Yield what `stats.kv` says; nothing if no KV is kept outside the device."""
    kv = stats.kv
    if kv is None:
        return
    stored = kv.store is not None
    for name, text, gauge in (*_GAUGES, *(_STORE_GAUGES if stored else ())):
        yield GaugeMetricFamily(f"fdcore_{name}", text, gauge(kv))
    for name, text, counter in (*_COUNTERS, *(_STORE_COUNTERS if stored else ())):
        yield CounterMetricFamily(f"fdcore_{name}", text, counter(kv))
    for name, text, pace in _PACE:
        yield GaugeMetricFamily(f"fdcore_{name}", text, pace(stats))
    found = {"host": kv.host_hit_blocks, "store": kv.store_hit_blocks}
    yield _by("kv_found_blocks", "KV blocks that lookups found", "tier", found)
    loaded = {"host": kv.loaded_blocks_host * block_size, "store": kv.loaded_blocks_store * block_size}
    yield _by("kv_loaded_tokens", "Tokens whose KV was copied to the device", "tier", loaded)
    if not stored:
        return
    failures = dict.fromkeys(STORE_TROUBLES, 0) | kv.store_errors
    yield _by("kv_store_failures", "Calls of the KV store that failed", "trouble", failures)
    yield _by("kv_store_damaged", "Stored values that were refused", "reason", kv.damaged)
    breaker = GaugeMetricFamily(
        "fdcore_kv_store_breaker", "1 at the state of the breaker that guards the KV store", labels=["way", "state"]
    )
    for way, current in (("read", kv.breaker), ("write", kv.write_breaker)):
        for state in BREAKER_STATES:
            breaker.add_metric([way, state], float(state == current))
    yield breaker


def _by(name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"fdcore_{name}", text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family
