"""Workers of a pair: accepting tickets, generating, and reporting to the router."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from fd_core.disagg.stats import ReceiverStats, SenderStats
from fd_core.disagg.ticket import sign_ticket
from fd_core.engine.process.messages import EngineStats, LeaseStats
from fd_core.http.metrics import metric_families
from fd_core.scheduling.contract import SchedulerStats
from fd_core.scheduling.operations.kv_transferring import TransferCounters
from tests.server.fakes import FakeClient, LiveServer, live

KEY = b"0123456789abcdef0123456789abcdef"
PEER = "127.0.0.1:7001"
BODIES = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}
OTHERS = {
    "/v1/responses": {"model": "fake", "input": "a"},
    "/v1/messages": {"model": "fake", "max_tokens": 5, **BODIES["/v1/chat/completions"]},
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
}


@pytest.fixture(scope="module")
def decode() -> Iterator[LiveServer]:
    with live(partial(FakeClient, role="decode"), ticket_key=KEY) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_ticket_names_the_prefill_worker_and_answer_its_outcome(decode: LiveServer, path: str, stream: bool) -> None:
    decode.call(decode.client.specs.clear)
    decode.client.prefill = "transferred"
    ticket = sign_ticket(KEY, "one", PEER)
    answer = decode.post(path, BODIES[path] | {"stream": stream}, X_Request_Id="one", X_FD_Prefill=ticket)
    assert answer.status == 200
    assert answer.headers["x-fd-prefill-outcome"] == "transferred"
    assert [spec.prefill_at for spec in decode.client.specs] == [PEER]


def test_without_a_ticket_the_prompt_is_computed_here(decode: LiveServer) -> None:
    decode.call(decode.client.specs.clear)
    decode.client.prefill = None
    answer = decode.post("/v1/completions", BODIES["/v1/completions"])
    assert answer.status == 200
    assert "x-fd-prefill-outcome" not in answer.headers
    assert [spec.prefill_at for spec in decode.client.specs] == [""]


@pytest.mark.parametrize(
    "ticket",
    [
        sign_ticket(KEY, "another", PEER),
        sign_ticket(b"another key", "one", PEER),
        sign_ticket(KEY, "one", PEER).replace("7001", "7002"),
        "",
        PEER,
    ],
    ids=["other request", "other key", "other peer", "empty", "not signed"],
)
def test_ticket_not_signed_for_this_request_is_rejected(decode: LiveServer, ticket: str) -> None:
    decode.call(decode.client.specs.clear)
    answer = decode.post("/v1/completions", BODIES["/v1/completions"], X_Request_Id="one", X_FD_Prefill=ticket)
    assert (answer.status, answer.error["code"]) == (403, "bad_ticket")
    assert "--transfer-secret-file" in answer.error["message"]
    assert not decode.client.specs


def test_worker_of_another_role_rejects_tickets(server: LiveServer) -> None:
    ticket = sign_ticket(KEY, "one", PEER)
    answer = server.post("/v1/completions", BODIES["/v1/completions"], X_Request_Id="one", X_FD_Prefill=ticket)
    assert (answer.status, answer.error["code"]) == (400, "not_a_decode_worker")
    assert "--role decode" in answer.error["message"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/score", "/v1/rerank"])
def test_decode_worker_computes_embeddings_itself(decode: LiveServer, path: str) -> None:
    decode.call(decode.client.specs.clear)
    ticket = sign_ticket(KEY, "one", PEER)
    assert decode.post(path, OTHERS[path], X_Request_Id="one", X_FD_Prefill=ticket).status == 200
    assert {spec.prefill_at for spec in decode.client.specs} == {""}


@pytest.mark.parametrize("path", BODIES | OTHERS)
def test_prefill_worker_rejects_requests_and_reports_its_port(path: str) -> None:
    with live(partial(FakeClient, role="prefill", kv_port=7001)) as server:
        answer = server.post(path, (BODIES | OTHERS)[path])
        assert answer.status == 400
        assert "decode worker" in answer.json["error"]["message"]
        assert path == "/v1/messages" or answer.error["code"] == "prefill_worker"
        health = server.get("/health")
        assert (health.headers["x-fd-role"], health.headers["x-fd-kv-port"]) == ("prefill", "7001")
        assert server.get("/ready").status == 200


def lines(stats: LeaseStats | None, transfers: TransferCounters | None = None) -> list[str]:
    class Leases(Collector):
        def collect(self):
            return metric_families(
                "fdcore_", [({}, EngineStats(leases=stats, scheduler=SchedulerStats(transfers=transfers)))]
            )

    registry = CollectorRegistry()
    registry.register(Leases())
    return generate_latest(registry).decode().splitlines()


def test_metrics_of_either_side() -> None:
    assert not [line for line in lines(None) if line.startswith(("fdcore_kv_lease", "fdcore_prefills"))]
    shown = lines(
        LeaseStats(open=2, receiver=ReceiverStats(bytes=9)),
        TransferCounters(outcomes={"lost": 3}, fetched_tokens=7),
    )
    assert "fdcore_kv_leases_open 2.0" in shown
    assert 'fdcore_prefills_elsewhere_total{outcome="lost"} 3.0' in shown
    assert 'fdcore_prefills_elsewhere_total{outcome="transferred"} 0.0' in shown
    assert "fdcore_kv_fetched_tokens_total 7.0" in shown
    shown = lines(
        LeaseStats(sender=SenderStats(ended={"confirmed": 5}, refused={"busy": 1})),
        TransferCounters(sent_blocks=4),
    )
    assert 'fdcore_kv_leases_ended_total{how="confirmed"} 5.0' in shown
    assert 'fdcore_kv_leases_refused_total{reason="busy"} 1.0' in shown
    assert "fdcore_kv_sent_blocks_total 4.0" in shown


def test_scored_prompt_is_computed_here_for_all_choices(decode: LiveServer) -> None:
    decode.call(decode.client.specs.clear)
    ticket = sign_ticket(KEY, "one", PEER)
    body = {"prompt": "ab", "n": 3, "prompt_logprobs": 0, "max_tokens": 1}
    assert decode.post("/v1/completions", body, X_Request_Id="one", X_FD_Prefill=ticket).status == 200
    assert [spec.prefill_at for spec in decode.client.specs] == [""] * 3
