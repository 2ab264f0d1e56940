"""Spans of requests, through server, router and pair. Tests of the SDK are skipped if the extra is missing."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fd_core.config import EngineConfig
from fd_core.disagg.keys import ticket_key
from fd_core.disagg.ticket import OUTCOME_HEADER
from fd_core.engine.clients.client import EngineClient
from fd_core.engine.clients.launch import open_client
from fd_core.errors import ConfigError
from fd_core.http.spans import RequestSpans, open_spans
from fd_core.types import PHASE_NAMES
from tests.router.gateway.fakes import FakeWorker, in_loop, routed
from tests.server.fakes import FakeClient, live
from tests.server.processes import free_port

SDK = pytest.mark.skipif(importlib.util.find_spec("opentelemetry.sdk") is None, reason="fd-core[otel] is not installed")
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
SECRET = "a prompt that must stay private"


class Memory:
    """Exporter that keeps spans in memory."""

    def __init__(self) -> None:
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self._exporter = InMemorySpanExporter()
        self.spans = RequestSpans(self._exporter, "tests")

    def ended(self, count: int) -> dict[str, Any]:
        """Return ended spans by name, once there are `count`."""
        deadline = time.monotonic() + 60
        while len(self._all()) < count and time.monotonic() < deadline:
            time.sleep(0.02)
        found = self._all()
        assert len(found) == count, [each.name for each in found]
        assert SECRET not in str([each.to_json() for each in found])
        return {each.name: each for each in found}

    def _all(self) -> tuple[Any, ...]:
        self.spans.provider.force_flush()
        return self._exporter.get_finished_spans()


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory()
    yield made
    made.spans.close()


def header(span: Any) -> str:
    """The traceparent that names a span."""
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-01"


@SDK
@pytest.mark.parametrize("stream", [False, True])
def test_chat_span_is_a_child_of_the_clients_span(memory: Memory, stream: bool) -> None:
    with live(spans=memory.spans) as server:
        body = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 5, "stream": stream}
        assert server.post("/v1/chat/completions", body, traceparent=PARENT, tracestate="a=b").status == 200
        span = memory.ended(1)["chat fake"]
    assert f"{span.context.trace_id:032x}" == TRACE and f"{span.parent.span_id:016x}" == "00f067aa0ba902b7"
    attributes = dict(span.attributes)
    assert attributes.pop("gen_ai.latency.time_in_queue", 0) >= 0
    assert 0 < attributes.pop("gen_ai.latency.time_to_first_token") < 10
    assert attributes.pop("gen_ai.request.id") and attributes.pop("gen_ai.usage.input_tokens") > len(SECRET)
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "fake",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.choice.count": 1,
        "gen_ai.response.model": "fake",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.output_tokens": 5,
    }
    assert span.status.status_code.name == "UNSET" and span.kind.name == "SERVER"


@SDK
def test_span_has_durations_by_phase(memory: Memory) -> None:
    with live(spans=memory.spans) as server:
        server.client.phases = (0.5, 0.25, *[0.0] * (len(PHASE_NAMES) - 2))
        assert server.post("/v1/completions", {"prompt": SECRET, "max_tokens": 5}).status == 200
        span = memory.ended(1)["text_completion fake"]
    durations = {name: value for name, value in span.attributes.items() if name.startswith("fdcore.phase.")}
    assert durations == {"fdcore.phase.computing": 0.5, "fdcore.phase.slot": 0.25}


@SDK
def test_failure_is_recorded_in_its_span(memory: Memory) -> None:
    with live(spans=memory.spans) as server:
        server.client.fail_after = 2
        server.post("/v1/completions", {"prompt": SECRET, "max_tokens": 5})
        span = memory.ended(1)["text_completion fake"]
    assert span.attributes["error.type"] == "error" and span.status.status_code.name == "ERROR"


@SDK
@in_loop
async def test_each_router_attempt_is_a_span_passed_to_its_worker(memory: Memory) -> None:
    async with FakeWorker("a") as a, FakeWorker("b") as b, routed(a, b, spans=memory.spans) as live:
        first = min((a, b), key=lambda worker: worker.url)
        first.script.append("500")
        body = {"model": "m", "messages": [{"role": "user", "content": SECRET}], "stream": True}
        assert (await live.post(body=body, traceparent=PARENT))[0] == 200
        sent = [worker.seen[-1][1]["traceparent"] for worker in sorted((a, b), key=lambda worker: worker is not first)]
    memory.ended(3)
    root, *attempts = sorted(memory._all(), key=lambda span: span.start_time)
    assert (root.name, [each.name for each in attempts]) == ("POST /v1/chat/completions", ["chat m", "chat m"])
    assert f"{root.context.trace_id:032x}" == TRACE and root.attributes["http.response.status_code"] == 200
    assert sent == [header(each) for each in attempts]
    assert {each.parent.span_id for each in attempts} == {root.context.span_id}
    assert [each.attributes.get("error.type") for each in attempts] == ["worker_failed", None]
    assert [each.attributes["fdcore.attempt"] for each in attempts] == [1, 2]


async def null_worker(role: str, secret: str) -> EngineClient:
    config = EngineConfig(
        model="null",
        backend="null",
        max_num_seqs=4,
        num_kv_blocks=40,
        block_size=16,
        max_model_len=400,
        max_num_batched_tokens=64,
        role=role,
        transfer_secret_file=secret,
    )
    return await open_client(config, None, where="inproc")


@SDK
@in_loop
async def test_trace_spans_router_decode_and_prefill_worker(memory: Memory, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of this test alone")
    secret.chmod(0o600)
    key = ticket_key(str(secret))
    prefill, decode = (partial(null_worker, role, str(secret)) for role in ("prefill", "decode"))
    with live(prefill, spans=memory.spans) as p, live(decode, spans=memory.spans, ticket_key=key) as d:
        workers = FakeWorker("p", role="prefill"), FakeWorker("d", role="decode")
        for worker, at in zip(workers, (p, d), strict=True):
            worker.url = at.url
        async with routed(*workers, spans=memory.spans, ticket_key=key) as gateway:
            body = {"model": "null", "prompt": SECRET * 4, "max_tokens": 5, "ignore_eos": True}
            status, headers, _ = await gateway.post("/v1/completions", body)
            assert (status, headers[OUTCOME_HEADER]) == (200, "transferred")
        memory.ended(4)
    spans = memory._all()
    by_kind = {(each.name, each.kind.name): each for each in spans}
    root, attempt, answer, prefilled = (
        by_kind[name, kind]
        for name, kind in (
            ("POST /v1/completions", "SERVER"),
            ("text_completion null", "CLIENT"),
            ("text_completion null", "SERVER"),
            ("prefill null", "SERVER"),
        )
    )
    assert len({each.context.trace_id for each in spans}) == 1 and root.parent is None
    parents = [each.parent.span_id for each in (attempt, answer, prefilled)]
    assert parents == [each.context.span_id for each in (root, attempt, answer)]
    assert prefilled.attributes["fdcore.lease.end"] == "confirmed"
    assert prefilled.attributes["gen_ai.usage.input_tokens"] == 4 * len(SECRET) - 1
    assert answer.start_time <= prefilled.start_time <= prefilled.end_time <= answer.end_time


@SDK
@pytest.mark.timing
def test_dead_collector_is_logged_once_and_blocks_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "0.3")
    port = free_port()
    with caplog.at_level(logging.DEBUG):
        spans = open_spans(f"http://127.0.0.1:{port}/v1/traces", "tests")
        began = time.monotonic()
        for _ in range(5000):
            spans.begin("chat", "server", {}, {}).end()
        assert time.monotonic() - began < 5, "creating a span blocks on the collector"
        spans.provider.force_flush()
        spans.begin("chat", "server", {}, {}).end()
        spans.provider.force_flush()
        began = time.monotonic()
        spans.close()
        assert time.monotonic() - began < 5
    logged = [record for record in caplog.records if record.name.startswith(("fd_core", "opentelemetry"))]
    assert [record.name for record in logged] == ["fd_core.http.spans"]
    assert "spans cannot be exported" in logged[0].message


def test_trace_headers_pass_a_router_without_spans() -> None:
    @in_loop
    async def scenario() -> None:
        async with FakeWorker() as worker, routed(worker) as live:
            await live.post(traceparent=PARENT, tracestate="a=b")
            seen = worker.seen[-1][1]
            assert (seen["traceparent"], seen["tracestate"]) == (PARENT, "a=b")

    scenario()


def test_without_an_endpoint_nothing_is_imported() -> None:
    code = (
        "import sys, fd_core.server.serve, fd_core.router.gateway.serving;"
        "import fd_core.cli.serving.serve, fd_core.cli.serving.route;"
        "print(*(name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.strip() == ""


@pytest.mark.parametrize(
    "command", [["serve", "null", "--backend", "null"], ["route", "--worker", "http://127.0.0.1:9"]]
)
def test_endpoint_without_the_extra_is_rejected(command: list[str]) -> None:
    code = (
        "import sys; sys.modules['opentelemetry.exporter.otlp.proto.http.trace_exporter'] = None;"
        "from fd_core.cli.main import main; sys.exit(main())"
    )
    words = [*command, "--port", "0", "--otlp-traces-endpoint", "http://127.0.0.1:4318/v1/traces"]
    answer = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert answer.returncode == 2, answer.stderr
    assert "--otlp-traces-endpoint" in answer.stderr and "fd-core[otel]" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_unsupported_address_is_rejected() -> None:
    with pytest.raises(ConfigError, match="gRPC is not supported") as caught:
        open_spans("localhost:4317", "tests")
    assert caught.value.exit_code == 2


def test_engine_of_an_untraced_server_gets_no_trace() -> None:
    with live(FakeClient) as server:
        server.post("/v1/completions", {"prompt": "a"}, traceparent=PARENT)
        assert server.client.specs[-1].traceparent == ""
