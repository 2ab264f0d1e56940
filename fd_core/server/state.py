"""State shared by the handlers of one server: admission, compiled grammars, and metrics.

Metrics are gauges and counters read from the engine on each scrape, and histograms fed by the streams. Everything runs
on the event loop's thread, so nothing is locked.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
import uuid
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Annotated, Final, NamedTuple

import msgspec
from fastapi import Request
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

import fd_core
from fd_core.config import ServerConfig
from fd_core.engine.clients.client import DeltaStream, EngineClient, SingleEngineClient
from fd_core.engine.process.messages import EngineInfo, EngineStats
from fd_core.errors import BadRequest
from fd_core.http.access.control import AccessControl
from fd_core.http.bodies import BodyBudget, BodyStats
from fd_core.http.connections.connections import ConnectionStats
from fd_core.http.draining import Drain
from fd_core.http.errors import ApiError, unavailable, unsupported
from fd_core.http.metrics import Histogram, count_family, metric_families, refusal_family
from fd_core.http.spans import RequestSpans
from fd_core.http.supervision import Supervisor, TaskStats
from fd_core.server.batches.service import BatchService
from fd_core.server.live_page.history import Durations, History
from fd_core.server.preprocess.body import UnknownFieldLog
from fd_core.server.preprocess.media.reader import ImageReader
from fd_core.server.responses.schemas import ResponseAnswer
from fd_core.server.schemas.requests import Message
from fd_core.structured.compiler import vocabulary_table
from fd_core.structured.grammar import RequestedConstraint
from fd_core.structured.workers.messages import ConstraintOutcome
from fd_core.structured.workers.pool import CompilePool
from fd_core.text.parsing.answer import Parsers
from fd_core.text.prompt_reader import PromptReader
from fd_core.text.tokenizer import Tokenizer
from fd_core.types import RequestSpec
from fd_core.types.metrics import counter, gauge

MAX_BYTES: Final = 64 * 2**20
"""Most bytes of all stored answers, as JSON."""
_WAIT_SECONDS: Final = 30.0
"""Timeout for a slot, a process and the work together."""
_WARM_UP_SECONDS: Final = 2.0
"""Delay after the start of the server, because its first requests need all CPUs."""
_PREFIXES: Final = ("chatcmpl-", "cmpl-", "resp_", "msg_")
_TTFT: Final = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_INTER_TOKEN: Final = (0.001, 0.002, 0.004, 0.006, 0.01, 0.015, 0.025, 0.05, 0.1, 0.2, 0.4, 1.0, 2.5, 10.0)
_WAITS: Final = (0.001, 0.005, 0.02, 0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)
_FINISHED: Final = {"disconnect": "abort"}
"""vLLM's name of an outcome, if it differs."""
_END_TO_END: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer, and the conversation up to its end, without the instructions."""

    answer: ResponseAnswer
    messages: tuple[Message, ...]


@dataclass(slots=True)
class _OwnerAnswers:
    """Answers of one owner, the oldest first, with their bytes."""

    kept: OrderedDict[str, tuple[StoredResponse, int]] = field(default_factory=OrderedDict)
    bytes: int = 0


class ResponseStore:
    """At most `capacity` answers and `max_bytes`, each visible to its owner; the largest owner loses its oldest one."""

    def __init__(self, capacity: int, max_bytes: int = MAX_BYTES) -> None:
        self.capacity = capacity
        self._max_bytes = max_bytes
        self._owners: dict[str, _OwnerAnswers] = {}
        self._count = 0
        self._bytes = 0

    def __len__(self) -> int:
        return self._count

    def put(self, owner: str, stored: StoredResponse) -> None:
        """Keep an answer of an owner; one that is larger than the store is not kept."""
        size = len(msgspec.json.encode((stored.answer, stored.messages)))
        if size > self._max_bytes or not self.capacity:
            return
        self.delete(owner, stored.answer.id)  # clients choose request ids, and may use one again
        owned = self._owners.setdefault(owner, _OwnerAnswers())
        owned.kept[stored.answer.id] = stored, size
        owned.bytes += size
        self._bytes += size
        self._count += 1
        while self._count > self.capacity:
            self._forget_oldest(max(self._owners, key=lambda each: len(self._owners[each].kept)))
        while self._bytes > self._max_bytes:
            self._forget_oldest(max(self._owners, key=lambda each: self._owners[each].bytes))

    def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """Return an answer of an owner, None if it is not stored, or was evicted."""
        owned = self._owners.get(owner)
        found = None if owned is None else owned.kept.get(response_id)
        return None if found is None else found[0]

    def delete(self, owner: str, response_id: str) -> bool:
        """Forget an answer of an owner; return True if it was kept."""
        owned = self._owners.get(owner)
        found = None if owned is None else owned.kept.pop(response_id, None)
        if owned is None or found is None:
            return False
        owned.bytes -= found[1]
        self._bytes -= found[1]
        self._count -= 1
        if not owned.kept:
            del self._owners[owner]
        return True

    def _forget_oldest(self, owner: str) -> None:
        self.delete(owner, next(iter(self._owners[owner].kept)))


class GrammarChecker:
    """Compiles grammars in separate processes: an invalid one is a 400 and delays no request. One per server."""

    def __init__(self, tokenizer: Tokenizer, info: EngineInfo) -> None:
        """`info` describes the engine whose requests are checked."""
        self._served = info.structured_output
        self._pool = CompilePool(partial(vocabulary_table, tokenizer, info.vocab_size, info.eos_token_ids))

    def warm_up(self) -> None:
        """Start a process soon, so that the first request with a grammar need not wait for it."""
        if self._served:
            self._pool.warm_up(_WARM_UP_SECONDS)

    async def checked(self, constraint: RequestedConstraint) -> ConstraintOutcome:
        """Return the compiled grammar of a constraint. Raises `ApiError`: 400 for an invalid one, 503 while busy."""
        if not self._served:
            raise unsupported(f"{constraint.field}: structured output is disabled on this server", constraint.field)
        try:
            async with asyncio.timeout(_WAIT_SECONDS):
                outcome = await self._pool.run(constraint)
        except (OSError, EOFError):  # a timeout is an `OSError`
            raise unavailable(
                f"{constraint.field}: all grammar processes are busy; retry later", "grammars_busy", retry_after=5
            ) from None
        if outcome.message:
            raise BadRequest(outcome.message, field=outcome.field, code=outcome.code)
        return outcome

    def close(self) -> None:
        """Kill the processes."""
        self._pool.close()


class ActiveRequests:
    """Engine requests of each HTTP request; several at a time may have the same request id."""

    def __init__(self) -> None:
        self._engine_ids: dict[str, dict[str, str]] = {}
        """Engine ids by request id, each with the owner of its request."""
        self._serial = itertools.count()

    def __len__(self) -> int:
        return len(self._engine_ids)

    def enter(self, request_id: str, count: int, owner: str = "") -> list[str]:
        """Reserve `count` engine ids for a request of an owner's."""
        serial = next(self._serial)
        ids = [f"{request_id}.{serial:x}.{index}" for index in range(count)]
        self._engine_ids.setdefault(request_id, {}).update(dict.fromkeys(ids, owner))
        return ids

    def leave(self, request_id: str, engine_ids: list[str]) -> None:
        """Forget engine ids of a request that has ended."""
        left = self._engine_ids[request_id]
        for engine_id in engine_ids:
            del left[engine_id]
        if not left:
            del self._engine_ids[request_id]

    def engine_ids(self, given: str, reaches: Callable[[str], bool]) -> list[str]:
        """Return the engine ids of a request id or the `id` of an answer; empty if none is active.

        Only requests whose owner the caller `reaches` are considered: ids of other owners change nothing. A request id
        may look like the `id` of another answer; both are meant then, even on different workers.
        """
        names = (given, *(given.removeprefix(prefix) for prefix in _PREFIXES if given.startswith(prefix)))
        return [each for name in names for each, owner in self._engine_ids.get(name, {}).items() if reaches(owner)]

    def all_ids(self, reaches: Callable[[str], bool]) -> list[str]:
        """Return the engine ids of every request whose owner the caller `reaches`."""
        return [each for ids in self._engine_ids.values() for each, owner in ids.items() if reaches(owner)]

    @staticmethod
    def request_id(engine_id: str) -> str:
        """Return the request id that an engine id was made from."""
        return engine_id.rsplit(".", 2)[0]


class ServedName(NamedTuple):
    """A name of the model, and the identity of the weights that serve it."""

    name: str
    adapter: str
    """Digest of the LoRA adapter of that name; empty for the model itself."""
    fingerprint: str
    """OpenAI's `system_fingerprint`: equal where equal requests with a seed get equal texts."""


@dataclass
class ServerState:
    """The state of one HTTP server, including its engine or engines."""

    config: ServerConfig
    client: EngineClient
    tokenizer: Tokenizer
    prompt_reader: PromptReader
    metrics: ServerMetrics
    grammars: GrammarChecker
    bodies: BodyBudget
    parsers: Parsers = field(default_factory=Parsers)
    responses: ResponseStore = field(default_factory=lambda: ResponseStore(0))
    active: ActiveRequests = field(default_factory=ActiveRequests)
    created: int = field(default_factory=lambda: int(time.time()))
    instance: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Names this process, so that a router notices another one at the same address."""
    ticket_key: bytes | None = None
    """Verifies the tickets with which a router assigns prompts to prefill workers; None except on a decode worker."""
    batches: BatchService | None = None
    """Stores files and runs batches; None if disabled."""
    supervisor: Supervisor = field(default_factory=Supervisor)
    drain: Drain = field(default_factory=Drain)
    history: History = field(default_factory=History)
    access: AccessControl = field(default_factory=AccessControl)
    spans: RequestSpans | None = None
    unknown_fields: UnknownFieldLog = field(default_factory=UnknownFieldLog)
    images: ImageReader | None = None
    """Reads images; None for a model that takes none."""
    _names: dict[str, ServedName] = field(init=False, default_factory=dict)
    """Model or adapter served under each name, the main one first."""
    _named_for: EngineInfo | None = field(init=False, default=None)

    @property
    def context(self) -> int:
        """Most tokens of prompt and text together."""
        return self.client.info.max_model_len

    @property
    def max_n(self) -> int:
        """Most texts per request."""
        return self.config.max_n

    @property
    def trusts_templates(self) -> bool:
        """True if requests may supply a chat template."""
        return self.config.trust_request_chat_template

    @property
    def incarnation(self) -> str:
        """Identifies this process and its engine's start: a server with another identity has an empty cache."""
        return f"{self.instance}.{self.client.info.epoch}"

    @property
    def names(self) -> Mapping[str, ServedName]:
        """Names under which the model answers, the main one first, and those of its adapters."""
        info = self.client.info
        if info is not self._named_for:
            own = self.config.served_model_names or (info.model,)
            forms = sorted({use.computed for use in info.weights})
            computing = (fd_core.__version__, info.model, info.num_parameters, info.backend, info.device, info.dtype)
            digests = [adapter.digest for adapter in info.adapters]
            text = repr(((*computing, forms), digests))
            mark = f"fp_{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"
            self._names = {name: ServedName(name, "", mark) for name in own}
            for adapter in info.adapters:
                self._names.setdefault(adapter.name, ServedName(adapter.name, adapter.digest, mark))
            self._named_for = info
        return self._names

    def served(self, asked: str | None) -> ServedName:
        """Return the model or adapter of a name, or the main one; `ApiError` (404) for a model that is not served."""
        names = self.names
        if not asked:
            return next(iter(names.values()))
        found = names.get(asked)
        if found is None:
            message = f"the model {asked[:128]!r} does not exist; available: {', '.join(names)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return found

    @property
    def degraded(self) -> str:
        """Missing engines and failing background tasks while requests are served; empty if there are none."""
        return "; ".join(filter(None, (self.client.missing, self.supervisor.failing)))

    def not_ready(self) -> str | None:
        """Return the reason why requests are rejected, or None if they are accepted."""
        if self.drain.leaving:
            return "the server is shutting down"
        return None if self.client.alive else self.client.missing

    def figures(self) -> tuple[EngineStats, Durations] | None:
        """Return what a sample of the history is made from, None without an engine."""
        return (self.client.stats, self.metrics.durations()) if self.client.alive else None

    def admit(self, count: int) -> None:
        """Raise `ApiError` (503) if the queue has no room for `count` more generations, 400 if it never can."""
        if self.client.info.role == "prefill":
            message = "this prefill worker only computes prompts; send requests to a decode worker or to the router"
            raise ApiError(400, message, code="prefill_worker")
        if not self.client.alive:
            raise unavailable(self.client.missing, "engine_dead", retry_after=5)
        queue = self.config.max_queued_requests
        if self.client.active_requests + count > self.client.info.max_num_seqs + queue:
            raise unavailable(
                f"the waiting queue is full ({queue} requests), no room for {count} more", "queue_full", retry_after=1
            )


def state_of(request: Request) -> ServerState:
    """Return the state that the application was assembled with."""
    state: ServerState = request.app.state.fd
    return state


@dataclass(slots=True)
class TokenTimes:
    """Times at which one generation's request, first and last tokens arrived, in seconds of `time.perf_counter`."""

    arrived: float
    first: float = 0.0
    last: float = 0.0


class EngineStarts(msgspec.Struct, frozen=True):
    """Deaths and restarts of one engine, as counted by its client."""

    up: Annotated[int, gauge("engine_up", "1 while the engine answers, 0 otherwise.")]
    epoch: Annotated[int, gauge("engine_epoch", "Number of starts of the engine.")]
    requeued: Annotated[int, counter("requests_requeued", "Requests resubmitted to a restarted engine.")]
    start_failures: Annotated[int, counter("engine_start_failures", "Failed attempts to restart an engine that died.")]
    rank_failures: Annotated[
        dict[str, int], counter("rank_failures", "Failures of the engine by one of its ranks.", label="rank")
    ]


class ServerMetrics(Collector):
    """All metrics of one server, in a separate registry."""

    def __init__(
        self,
        client: EngineClient,
        vllm_model: str | None = None,
        *,
        refusals: Mapping[tuple[str, str], int] = MappingProxyType({}),
        counters: Iterable[object] | None = None,
    ) -> None:
        """`vllm_model` labels vLLM's names, None omits them; `counters` are statistics of the listeners."""
        self._client = client
        self._vllm_model = vllm_model
        self.ttft = Histogram(
            "fdcore_time_to_first_token_seconds",
            "Time from the arrival of a request, before its body is read, to its first token, in seconds.",
            _TTFT,
            vllm=("time_to_first_token_seconds",),
        )
        self.inter_token = Histogram(
            "fdcore_inter_token_seconds",
            "Time between two tokens of one generation, in seconds.",
            _INTER_TOKEN,
            vllm=("inter_token_latency_seconds", "time_per_output_token_seconds"),
        )
        self.time_per_token = Histogram(
            "fdcore_time_per_token_seconds",
            "Mean time between the tokens of a generation, in seconds; one value for each generation.",
            _INTER_TOKEN,
            vllm=("request_time_per_output_token_seconds",),
        )
        self.queue = Histogram(
            "fdcore_queue_seconds",
            "Time from the submission of a generation until it enters a slot for the first time, in seconds.",
            _WAITS,
            vllm=("request_queue_time_seconds",),
        )
        self.prefill = Histogram(
            "fdcore_prefill_seconds",
            "Time from entering a slot for the first time to the first token, in seconds.",
            _WAITS,
            vllm=("request_prefill_time_seconds",),
        )
        self.decode = Histogram(
            "fdcore_decode_seconds",
            "Time from the first token of a generation to its last, in seconds.",
            _WAITS,
            vllm=("request_decode_time_seconds",),
        )
        lengths = _one_two_five(client.info.max_model_len)
        self.prompt_length = Histogram(
            "fdcore_prompt_length_tokens",
            "Length of the prompts of generations that ended, in tokens.",
            lengths,
            vllm=("request_prompt_tokens",),
        )
        self.text_length = Histogram(
            "fdcore_text_length_tokens",
            "Length of the texts of generations that ended, in tokens.",
            lengths,
            vllm=("request_generation_tokens", "request_max_num_generation_tokens"),
        )
        self.max_tokens = Histogram(
            "fdcore_max_tokens",
            "Most tokens that generations may have, in tokens.",
            lengths,
            vllm=("request_params_max_tokens",),
        )
        self.end_to_end = Histogram(
            "fdcore_end_to_end_seconds",
            "Time from the arrival of a request at the server to its last token, in seconds.",
            _END_TO_END,
            vllm=("e2e_request_latency_seconds",),
        )
        self._histograms = (
            self.ttft,
            self.inter_token,
            self.end_to_end,
            self.time_per_token,
            self.queue,
            self.prefill,
            self.decode,
            self.prompt_length,
            self.text_length,
            self.max_tokens,
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

    def observe_tokens(self, times: TokenTimes, count: int, *, first: bool) -> None:
        """Observe the time until a generation's `first` tokens, or since the previous ones."""
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
        """Count a generation that ended; `deltas` has the times of its submission and of its first slot, if any."""
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
        """Return the histograms by metric: upper bounds in seconds, and counts with one more at the end."""
        measured = {"time_to_first_token": self.ttft, "inter_token": self.inter_token, "end_to_end": self.end_to_end}
        return {name: {"bounds": each.bounds, "counts": (*each.counts,)} for name, each in measured.items()}

    def describe(self) -> Iterable[Metric]:
        """Return nothing: names are known without querying an engine."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every metric with its current value."""
        yield from self._engine()
        yield from (histogram.family() for histogram in self._histograms)
        yield count_family("fdcore_generations", "Generations ended, by outcome.", ["outcome"], counts=self.outcomes)
        yield self._by_adapter("generations", "Generations ended, by LoRA adapter.", self.adapter_generations)
        yield self._by_adapter(
            "generated_tokens", "Tokens generated, by LoRA adapter, counted when generations end.", self.adapter_tokens
        )
        answers, text = dict(sorted(self.answers.items())), "HTTP responses begun, by path and status."
        yield count_family("fdcore_http_answers", text, ["path", "status"], counts=answers)
        yield refusal_family("fdcore_", self._refusals)
        for stats in self._counters:
            yield from metric_families("fdcore_", [({}, stats)])
        if self._vllm_model is not None:
            yield from self._as_vllm({"model_name": self._vllm_model})

    def _by_adapter(self, name: str, text: str, counts: Mapping[str, int]) -> Metric:
        """Return counts of the adapters that are loaded: otherwise labels of unloaded adapters would accumulate."""
        loaded = {adapter.name: counts.get(adapter.name, 0) for adapter in self._client.info.adapters}
        return count_family(f"fdcore_adapter_{name}", text, ["adapter"], counts=loaded)

    def _as_vllm(self, model: Mapping[str, str]) -> Iterator[Metric]:
        """Yield vLLM's metrics under its names; with several engines, the server's own counts have no engine label."""
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
