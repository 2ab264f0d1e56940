"""Health, status and metrics of a server over several engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fd_core.engine.clients.data_parallel import DataParallelClient
from tests.server.fakes import FakeClient, LiveServer, live, samples


@pytest.fixture
def engines() -> list[FakeClient]:
    return []


@pytest.fixture
def server(engines: list[FakeClient]) -> Iterator[LiveServer]:
    def make() -> Any:
        engines.extend((FakeClient(), FakeClient()))
        return DataParallelClient(engines)

    with live(make, metrics_names="vllm") as serving:
        yield serving


def test_missing_engine_is_reported_while_others_serve(server: LiveServer, engines: list[FakeClient]) -> None:
    assert [server.get(path).json for path in ("/ready", "/health")] == [{"status": "ok", "reason": None}] * 2
    server.call(lambda: engines[1]._engine_lost("it died"))
    expected = {"status": "ok", "reason": "engine 1 of 2 is not running"}
    assert [(server.get(path).status, server.get(path).json) for path in ("/ready", "/health")] == [(200, expected)] * 2
    assert server.get("/status.json").json["missing"] == expected["reason"]
    assert server.post("/v1/completions", {"prompt": "p", "max_tokens": 3}).status == 200


def test_permanently_lost_engine_fails_the_health_check(server: LiveServer, engines: list[FakeClient]) -> None:
    server.call(engines[0].die)
    assert (server.get("/ready").status, server.get("/health").status) == (200, 503)
    server.call(engines[1].die)
    answers = [server.get("/ready"), server.get("/health"), server.post("/v1/completions", {"prompt": "p"})]
    assert [answer.status for answer in answers] == [503] * 3
    assert answers[0].json == {"status": "not ready", "reason": "engine 0 and engine 1 of 2 are not running"}


def test_metrics_name_the_engine(server: LiveServer, engines: list[FakeClient]) -> None:
    for index in range(4):
        server.post("/v1/completions", {"prompt": f"{index}", "max_tokens": 3})
    server.call(engines[1].die)
    found = samples(server)
    assert (found["fdcore_engine_up[0]"], found["fdcore_engine_up[1]"]) == (1, 0)
    assert found["fdcore_preemptions_total[0]"] == found["vllm:num_preemptions_total[0][fake]"] == 3
    assert found["fdcore_generations_total[length]"] == found["vllm:request_success_total[length][fake]"] == 4
    assert found["vllm:cache_config_info[16][none][1][40]"] == 1
