"""Metrics of KV that travels between prefill and decode workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from fd_core.engine.messages import LeaseStats
from fd_core.kv.effects import Outcome

__all__ = ["lease_metrics"]

_OUTCOMES: Final[tuple[str, ...]] = get_args(Outcome)


def lease_metrics(stats: LeaseStats | None) -> Iterator[Metric]:
    """Yield what `stats` says; nothing for a worker that computes prompts and texts."""
    if stats is None:
        return
    yield GaugeMetricFamily("fdcore_kv_leases_open", "Leases of KV that are not over", stats.open)
    received, sent = stats.receiver, stats.sender
    if received is not None:
        yield _by(
            "prefills_elsewhere",
            "Prompts that a prefill worker was to compute",
            "outcome",
            dict.fromkeys(_OUTCOMES, 0) | stats.outcomes,
        )
        yield _counter("kv_fetched_tokens", "Tokens whose KV came from a prefill worker", stats.fetched_tokens)
        yield _counter("kv_fetched_bytes", "Bytes of KV that came from prefill workers", received.bytes)
        yield _counter("kv_fetch_seconds", "Time from lease to last copy, of all transfers together", received.seconds)
        yield _counter("kv_transfer_dropped_frames", "Frames that nobody with the secret sent", received.dropped_frames)
    if sent is not None:
        yield _by("kv_leases_ended", "Leases of decode workers, by what became of them", "how", sent.ended)
        yield _by("kv_leases_refused", "Leases of decode workers that were not begun", "reason", sent.refused)
        yield _counter("kv_sent_blocks", "KV blocks computed for decode workers", stats.sent_blocks)
        yield _counter("kv_sent_bytes", "Bytes of KV sent to decode workers", sent.bytes)
        yield _counter("kv_transfer_dropped_frames", "Frames that nobody with the secret sent", sent.dropped_frames)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"fdcore_{name}", text, value)


def _by(name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"fdcore_{name}", text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family
