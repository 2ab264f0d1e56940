"""Metrics for Prometheus: gauges and counters read from the engine when asked, histograms fed by the streams.

Everything here runs on the event loop's thread, so nothing is locked.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Final

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

import fd_core
from fd_core.engine.clients.client import DeltaStream, EngineClient, SingleEngineClient
from fd_core.http.bodies import BodyStats
from fd_core.http.connections.connections import ConnectionStats
from fd_core.http.metrics import Histogram, metric_families, refusal_family
from fd_core.http.supervision import TaskStats
from fd_core.types import RequestSpec
from fd_core.types.metrics import counter, gauge

_TTFT: Final = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_INTER_TOKEN: Final = (0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.025, 0.05, 0.1, 0.2, 0.4, 1.0, 2.5, 10.0)
_WAITS: Final = (0.001, 0.005, 0.02, 0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)
_FINISHED: Final = {"disconnect": "abort"}
"""vLLM's word for an outcome, where it is another one."""
_END_TO_END: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)


@dataclass(slots=True)
class TokenTimes:
    """When the tokens of one generation came, in seconds of `time.perf_counter`."""

    arrived: float
    first: float = 0.0
    last: float = 0.0


class EngineStarts(msgspec.Struct, frozen=True):
    """Deaths and restarts of one engine, as its client knows them."""

    up: Annotated[int, gauge("engine_up", "1 while the engine answers, 0 otherwise.")]
    epoch: Annotated[int, gauge("engine_epoch", "Number of starts of the engine.")]
    requeued: Annotated[int, counter("requests_requeued", "Requests given to a restarted engine.")]
    start_failures: Annotated[
        int, counter("engine_start_failures", "Starts of an engine that failed after one had died.")
    ]
    rank_failures: Annotated[
        dict[str, int], counter("rank_failures", "Failures of the engine by one of its ranks.", label="rank")
    ]


class ServerMetrics(Collector):
    """All metrics of one server, in a registry of its own."""

    def __init__(
        self,
        client: EngineClient,
        vllm_model: str | None = None,
        *,
        refusals: Mapping[tuple[str, str], int] = MappingProxyType({}),
        counters: Iterable[object] | None = None,
    ) -> None:
        """`vllm_model` labels vLLM's names, None leaves them out; `counters` are statistics of what listens."""
        self._client = client
        self._vllm_model = vllm_model
        self.ttft = Histogram(
            "fdcore_time_to_first_token_seconds",
            "Time from the arrival of a request, before its body is read, to its first token, in seconds.",
            _TTFT,
            ("time_to_first_token_seconds",),
        )
        self.inter_token = Histogram(
            "fdcore_inter_token_seconds",
            "Time between two tokens of one generation, in seconds.",
            _INTER_TOKEN,
            ("inter_token_latency_seconds", "time_per_output_token_seconds"),
        )
        self.time_per_token = Histogram(
            "fdcore_time_per_token_seconds",
            "Mean time between the tokens of a generation, in seconds; one value for each generation.",
            _INTER_TOKEN,
            ("request_time_per_output_token_seconds",),
        )
        self.queue = Histogram(
            "fdcore_queue_seconds",
            "Time from the submission of a generation until it enters a slot for the first time, in seconds.",
            _WAITS,
            ("request_queue_time_seconds",),
        )
        self.prefill = Histogram(
            "fdcore_prefill_seconds",
            "Time from entering a slot for the first time to the first token, in seconds.",
            _WAITS,
            ("request_prefill_time_seconds",),
        )
        self.decode = Histogram(
            "fdcore_decode_seconds",
            "Time from the first token of a generation to its last, in seconds.",
            _WAITS,
            ("request_decode_time_seconds",),
        )
        lengths = _one_two_five(client.info.max_model_len)
        self.prompt_length = Histogram(
            "fdcore_prompt_length_tokens",
            "Length of the prompts of generations that ended, in tokens.",
            lengths,
            ("request_prompt_tokens",),
        )
        self.text_length = Histogram(
            "fdcore_text_length_tokens",
            "Length of the texts of generations that ended, in tokens.",
            lengths,
            ("request_generation_tokens", "request_max_num_generation_tokens"),
        )
        self.max_tokens = Histogram(
            "fdcore_max_tokens",
            "Most tokens that generations may have, in tokens.",
            lengths,
            ("request_params_max_tokens",),
        )
        self.end_to_end = Histogram(
            "fdcore_end_to_end_seconds",
            "Time from the arrival of a request at the server to its last token, in seconds.",
            _END_TO_END,
            ("e2e_request_latency_seconds",),
        )
        self._histograms = (
            *(self.ttft, self.inter_token, self.end_to_end, self.time_per_token, self.queue, self.prefill, self.decode),
            *(self.prompt_length, self.text_length, self.max_tokens),
        )
        self.outcomes: Counter[str] = Counter(dict.fromkeys(("stop", "length", "abort", "error", "disconnect"), 0))
        self.adapter_generations: Counter[str] = Counter()
        """Generations ended, by the adapter's name."""
        self.adapter_tokens: Counter[str] = Counter()
        self.answers: Counter[tuple[str, int]] = Counter()
        self._refusals = refusals
        self._counters = (ConnectionStats(), BodyStats(), TaskStats()) if counters is None else tuple(counters)
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def tokens_came(self, times: TokenTimes, count: int, *, first: bool) -> None:
        """Count the time until a generation's `first` tokens came, or since those before."""
        moment = time.perf_counter()
        if first:
            histogram, seconds, count = self.ttft, moment - times.arrived, 1
            times.first = moment
        else:
            histogram, seconds = self.inter_token, (moment - times.last) / count
        times.last = moment
        histogram.counts[bisect_left(histogram.bounds, seconds)] += count
        histogram.total += seconds * count

    def ended(
        self,
        outcome: str,
        *,
        adapter: str | None,
        spec: RequestSpec,
        tokens: int,
        deltas: DeltaStream,
        times: TokenTimes,
    ) -> None:
        """Count a generation that ended with `tokens` written, under the name of its LoRA adapter if it had one.

        `deltas` know when the engine was given it, and when it got a slot, if it did.
        """
        submitted, admitted = deltas.submitted, deltas.admitted
        self.outcomes[outcome] += 1
        if adapter is not None:
            self.adapter_generations[adapter] += 1
            self.adapter_tokens[adapter] += tokens
        decoding = times.last - times.first
        values: list[tuple[Histogram, float]] = [
            (self.end_to_end, time.perf_counter() - times.arrived),
            (self.prompt_length, len(spec.prompt)),
            (self.max_tokens, spec.params.max_tokens),
        ]
        if admitted is not None:
            values.append((self.queue, admitted - submitted))
        if tokens:
            values += (self.text_length, tokens), (self.decode, decoding)
            if admitted is not None:
                values.append((self.prefill, max(0.0, times.first - admitted)))
        if tokens > 1:
            values.append((self.time_per_token, decoding / (tokens - 1)))
        for histogram, value in values:
            histogram.counts[bisect_left(histogram.bounds, value)] += 1
            histogram.total += value

    def durations(self) -> dict[str, dict[str, Sequence[float]]]:
        """Return the histograms by what they measure: upper bounds in seconds, and counts with one more at the end."""
        measured = {"time_to_first_token": self.ttft, "inter_token": self.inter_token, "end_to_end": self.end_to_end}
        return {name: {"bounds": each.bounds, "counts": each.counts} for name, each in measured.items()}

    def describe(self) -> Iterable[Metric]:
        """Return nothing: names are known without asking an engine."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every metric as it is at this moment."""
        yield from self._engine()
        yield from (histogram.family() for histogram in self._histograms)
        generations = CounterMetricFamily("fdcore_generations", "Generations ended, by outcome.", labels=["outcome"])
        for outcome, count in self.outcomes.items():
            generations.add_metric([outcome], count)
        yield generations
        yield self._by_adapter("generations", "Generations ended, by LoRA adapter.", self.adapter_generations)
        yield self._by_adapter(
            "generated_tokens", "Tokens generated, by LoRA adapter, counted when generations end.", self.adapter_tokens
        )
        answers = CounterMetricFamily(
            "fdcore_http_answers", "HTTP responses begun, by path and status.", labels=["path", "status"]
        )
        for (path, status), count in sorted(self.answers.items()):
            answers.add_metric([path, str(status)], count)
        yield answers
        yield refusal_family("fdcore_", self._refusals)
        for stats in self._counters:
            yield from metric_families("fdcore_", [({}, stats)])
        if self._vllm_model is not None:
            yield from self._as_vllm({"model_name": self._vllm_model})

    def _by_adapter(self, name: str, text: str, counts: Mapping[str, int]) -> Metric:
        """Return counts of the adapters that are loaded: names of others would add up for ever."""
        family = CounterMetricFamily(f"fdcore_adapter_{name}", text, labels=["adapter"])
        for adapter in self._client.info.adapters:
            family.add_metric([adapter.name], counts.get(adapter.name, 0))
        return family

    def _as_vllm(self, model: Mapping[str, str]) -> Iterator[Metric]:
        """Yield what vLLM has a name for under that name; of several engines, what the server counts has no engine."""
        engines = [({**model, "engine": str(index)}, each) for index, each in enumerate(self._client.engines)]
        yield from metric_families("vllm:", [(labels, each.stats) for labels, each in engines], lambda spec: spec.vllm)
        labels = engines[0][0] if len(engines) == 1 else model
        for histogram in self._histograms:
            yield from (histogram.family(f"vllm:{name}", labels) for name in histogram.vllm)
        counts: Counter[str] = Counter()
        for outcome, count in self.outcomes.items():
            counts[_FINISHED.get(outcome, outcome)] += count
        success = CounterMetricFamily(
            "vllm:request_success", "Generations ended, by reason.", labels=(*labels, "finished_reason")
        )
        for reason, count in counts.items():
            success.add_metric((*labels.values(), reason), count)
        yield success
        facts = ("block_size", "num_gpu_blocks", "cache_dtype", "engine")
        cache = GaugeMetricFamily("vllm:cache_config_info", "Layout of the KV cache.", labels=facts)
        for index, each in enumerate(self._client.engines):
            info = each.info
            cache.add_metric((str(info.block_size), str(info.num_kv_blocks), info.kv_dtype, str(index)), 1.0)
        yield cache

    def _engine(self) -> Iterator[Metric]:
        client, alone = self._client, len(self._client.engines) == 1
        engines = [({} if alone else {"engine": str(index)}, each) for index, each in enumerate(client.engines)]
        yield from metric_families("fdcore_", [(labels, each.stats) for labels, each in engines])
        yield from metric_families("fdcore_", [(labels, _starts(each)) for labels, each in engines])
        text = "Generations of this server that have not ended."
        yield GaugeMetricFamily("fdcore_active_requests", text, client.active_requests)
        info = InfoMetricFamily("fdcore", "Model, backend and version of this server.")
        facts = {key: str(getattr(client.info, key)) for key in ("model", "architecture", "backend", "device", "dtype")}
        info.add_metric([], {"version": fd_core.__version__, **facts})
        yield info


def _one_two_five(largest: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50 and so on, up to `largest`."""
    steps = (float(step * 10**power) for power in range(len(str(largest))) for step in (1, 2, 5))
    return tuple(step for step in steps if step <= largest)


def _starts(engine: SingleEngineClient) -> EngineStarts:
    return EngineStarts(
        int(engine.alive), engine.info.epoch, engine.requests_requeued, engine.start_failures, engine.rank_failures
    )
