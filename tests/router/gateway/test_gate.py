"""Keys, limits, paths, models, pages."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.router.gateway.fakes import ABORT, CHAT, COMPLETIONS, FakeWorker, eventually, in_loop, routed, turn


@in_loop
async def test_client_keys_are_not_forwarded() -> None:
    async with FakeWorker(usual="json") as worker:
        async with routed(worker, api_keys=("client-key",), worker_api_keys=("worker-key",)) as live:
            status, headers, body = await live.post()
            assert status == 401 and headers["WWW-Authenticate"] == "Bearer"
            assert json.loads(body)["error"]["code"] == "invalid_api_key"
            assert (await live.post(Authorization="Bearer client-key"))[0] == 200
            assert (await live.get("/v1/models"))[0] == 401
            for path in ("/", "/status", "/status.json", "/health", "/ready", "/metrics", "/version"):
                assert (await live.get(path))[0] == 200, path
        assert len(worker.seen) == 1 and worker.seen[0][1]["Authorization"] == "Bearer worker-key"
        async with routed(worker, api_keys=("client-key",)) as live:
            assert (await live.post(Authorization="Bearer client-key"))[0] == 200
        assert "Authorization" not in worker.seen[1][1]


@in_loop
async def test_x_api_key_header_is_accepted_and_not_forwarded() -> None:
    async with FakeWorker(usual="json") as worker, routed(worker, api_keys=("client-key",)) as live:
        assert (await live.post(X_Api_Key="wrong"))[0] == 401
        assert (await live.post(X_Api_Key="client-key"))[0] == 200
    assert "X-Api-Key" not in worker.seen[0][1]


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        *(("/", "GET, HEAD, OPTIONS"), ("/v1/models", "GET, HEAD, OPTIONS"), (CHAT, "OPTIONS, POST"), ("/other", None)),
        *(("/tokenizer_info", "GET, HEAD, OPTIONS"), ("/v1/responses/r", "DELETE, GET, HEAD, OPTIONS")),
    ],
)
@in_loop
async def test_options_names_the_methods_of_a_path(path: str, allowed: str | None) -> None:
    async with (
        FakeWorker() as worker,
        routed(worker, api_keys=("k",)) as live,
        live.client.options(live.url + path) as answer,
    ):
        assert (answer.status, answer.headers.get("Allow")) == (404 if allowed is None else 204, allowed)


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches/batch_1/cancel", "/v1/batches"])
@in_loop
async def test_files_api_is_rejected_with_a_hint(path: str) -> None:
    async with FakeWorker(usual="json") as worker, routed(worker) as live:
        status, _, body = await live.post(path, {})
        assert status == 404 and "worker" in json.loads(body)["error"]["message"]
        assert worker.seen == []


@in_loop
async def test_path_without_v1_gets_a_hint() -> None:
    async with FakeWorker() as worker, routed(worker) as live:
        status, _, body = await live.post("/chat/completions", {})
        assert status == 404 and "'/chat/completions'; paths of OpenAI's API start with /v1" in body.decode()


@pytest.mark.parametrize("announced", [True, False])
@in_loop
async def test_body_limit_applies_before_buffering(announced: bool) -> None:
    async def pieces():
        for _ in range(100):
            yield b"x" * 100

    async with FakeWorker() as worker, routed(worker, max_body_bytes=1000) as live:
        data = b"x" * 10_000 if announced else pieces()
        async with live.client.post(live.url + CHAT, data=data) as answer:
            assert answer.status == 413
            assert json.loads(await answer.read())["error"]["code"] == "body_too_large"
        assert worker.seen == []


@in_loop
async def test_expect_100_continue_is_supported() -> None:
    async with FakeWorker(usual="json") as worker, routed(worker) as live:
        async with live.client.post(live.url + COMPLETIONS, data=b'{"prompt": "x"}', expect100=True) as answer:
            assert answer.status == 200
        assert "Expect" not in worker.seen[0][1]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/other", 404),
        ("GET", CHAT, 405),
        ("POST", "/v1/models", 405),
        ("POST", "/metrics", 405),
        ("GET", "/v1/abort_requests", 405),
        ("POST", "/v1/%2e%2e/admin", 404),
        ("GET", "/register", 404),
        ("POST", "/v1/embeddings", 200),
        ("POST", "/tokenize", 200),
        *(("POST", path, 200) for path in ("/score", "/rerank", "/v2/rerank")),
        *(("GET", path, 200) for path in ("/tokenizer_info", "/get_model_info")),
        ("POST", "/tokenizer_info", 405),
    ],
)
@in_loop
async def test_paths(method: str, path: str, status: int) -> None:
    import yarl

    async with FakeWorker(usual="json") as worker, routed(worker) as live:
        url = yarl.URL(live.url + path, encoded=True)
        async with live.client.request(method, url, data=b'{"input": "x"}') as answer:
            assert answer.status == status
            assert len(answer.headers["X-Request-Id"]) == 32
            assert "error" in json.loads(await answer.read()) or status == 200
        assert len(worker.seen) == (status == 200)


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
@in_loop
async def test_requests_are_routed_by_model(path: str) -> None:
    async with (
        FakeWorker("a", "json", models=("m",)) as a,
        FakeWorker("b", "json", models=("n",)) as b,
        routed(a, b, worker_api_keys=("worker-key",)) as live,
    ):
        await eventually(lambda: all(live.router.registry.member(each).models for each in live.router.workers()))
        for _ in range(3):
            assert json.loads((await live.post(path, {"prompt": "x", "model": "n"}))[2])["worker"] == "b"
        assert not a.seen and len(b.seen) == 3
        a.usual = b.usual = "404"
        status, _, body = await live.post(path, {"prompt": "x", "model": "unknown"})
        assert (status, json.loads(body)["error"]["code"]) == (404, "model_not_found")


@in_loop
async def test_abort_reaches_requests_on_any_worker() -> None:
    ids = {"req_ids": ["one", "two", "three"]}
    async with (
        FakeWorker("a") as a,
        FakeWorker("b") as b,
        FakeWorker("p", role="prefill") as p,
        routed(a, b, p, worker_api_keys=("worker-key",)) as live,
    ):
        a.runs, b.runs = {"one", "other"}, {"three"}
        status, headers, body = await live.post(ABORT, ids, X_Request_Id="mine")
        assert (status, json.loads(body)) == (200, {"aborted": ["one", "three"], "not_found": ["two"]})
        assert headers["X-Request-Id"] == "mine" and a.seen[0][1]["Authorization"] == "Bearer worker-key"
        assert (a.runs, b.runs, p.seen) == ({"other"}, set(), [])
        status, _, body = await live.post(ABORT, {"abort_all": True})
        assert (status, json.loads(body)) == (200, {"aborted": ["other"], "not_found": []})
        assert live.router.snapshot().tally.selected == 0, "aborts are not counted as requests"


@in_loop
async def test_abort_that_no_worker_accepts_is_rejected() -> None:
    async with FakeWorker("a") as a, FakeWorker("b") as b, routed(a, b) as live:
        status, _, body = await live.post(ABORT, b"{}")
        assert status == 400 and json.loads(body)["error"]["message"]
        a.script.append("die")
        b.runs = {"one"}
        status, _, body = await live.post(ABORT, {"req_ids": ["one"]})
        assert (status, json.loads(body)["aborted"]) == (200, ["one"])
        a.script.append("die")
        b.script.append("500")
        assert (await live.post(ABORT, {"req_ids": ["one"]}))[0] == 503


@in_loop
async def test_models_are_those_of_all_workers() -> None:
    async with (
        FakeWorker("a", models=("m", "x")) as a,
        FakeWorker("b", models=("m", "y")) as b,
        routed(a, b) as live,
    ):
        status, body = await live.get("/v1/models")
        assert status == 200 and {each["id"] for each in json.loads(body)["data"]} == {"m", "x", "y"}
        assert json.loads((await live.get("/v1/models/y"))[1])["id"] == "y"
        assert (await live.get("/v1/models/z"))[0] == 404


@in_loop
async def test_metrics_and_page_show_load_hits_and_failures() -> None:
    prompt = {"prompt": "the same long beginning of every prompt, " * 20}
    async with FakeWorker() as worker, routed(worker, router={"policy": "cache_aware"}) as live:
        for _ in range(3):
            await live.post(COMPLETIONS, prompt)
        worker.script.append("after:2")
        await live.post(COMPLETIONS, prompt)
        _, text = await live.get("/metrics")
        found = {
            sample.name + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text.decode())
            for sample in family.samples
        }
        label = f"[mixed][{worker.url}]"
        assert found["fdcore_router_worker_served_total" + label] == 3
        assert found["fdcore_router_worker_failed_total" + label] == 1
        assert found["fdcore_router_worker_healthy" + label] == 1
        assert found["fdcore_router_worker_requests" + label] == 0
        assert found["fdcore_router_hit_blocks_total"] > 0
        assert found["fdcore_router_streams_broken_total"] == 1
        assert found[f"fdcore_router_answers_total[{COMPLETIONS}][200]"] == 4
        assert found["fdcore_router_first_byte_seconds_count"] == 4
        status = await live.status()
        assert status["workers"][0]["tally"]["hit_blocks"] > 0 and status["policies"]["mixed"] == "cache_aware"
        page = (await live.get("/"))[1].decode()
        assert "/status.json" in page and "http://" not in page and "https://" not in page


@in_loop
async def test_prompts_and_keys_are_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with FakeWorker() as worker, routed(worker, worker_api_keys=("topsecretkey",)) as live:
            for word in ("stream", "die", "after:1", "500"):
                worker.script.append(word)
                await live.post(CHAT, {"messages": [turn("a secret prompt")]}, Authorization="Bearer topsecretkey")
            await live.post("/v1/completions", b"not json, secret")
            reader, writer = await asyncio.open_connection(*live.url.removeprefix("http://").split(":"))
            writer.write(b"POST / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer topsecretkey\0\r\n\r\n")
            assert b" 400 " in await reader.readline()
            writer.close()
            await asyncio.sleep(0.1)
    assert "secret prompt" not in caplog.text and "topsecret" not in caplog.text and "json" not in caplog.text
    assert "Traceback" not in caplog.text
