"""Keys with names and limits at a live server: 429s, headers, accounts, admin keys, protected pages, SIGHUP."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from fd_core.http.access.control import ROUTES
from fd_core.server.state import ServerState
from tests.server.fakes import LiveServer, key_file, live, samples
from tests.server.stream.test_disconnect import eventually
from tests.server.test_abort import waiting
from tests.server.test_owners import begin, ended, upload

PATH = "/v1/completions"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@contextmanager
def guarded(folder: Path, *keys: dict[str, Any], **settings: Any) -> Iterator[LiveServer]:
    with live(api_key_file=key_file(folder, *keys), **settings) as server:
        yield server


def ask(server: LiveServer, key: str, **fields: Any) -> Any:
    return server.post(PATH, {"prompt": "abcde"} | fields, x_api_key=key)


def test_requests_beyond_the_key_limit_are_429_with_retry_after(tmp_path: Path) -> None:
    with guarded(tmp_path, {"name": "alice", "requests_per_minute": 2}, {"name": "bob"}) as server:
        first, second, third = (ask(server, "alice") for _ in range(3))
        assert [first.status, second.status, third.status] == [200, 200, 429]
        assert [each.headers["x-ratelimit-remaining-requests"] for each in (first, second, third)] == ["1", "0", "0"]
        assert third.headers["x-ratelimit-limit-requests"] == "2"
        assert 1 <= int(third.headers["retry-after"]) <= 61
        assert third.headers["x-ratelimit-reset-requests"].endswith("s")
        assert "x-ratelimit-limit-tokens" not in third.headers
        assert (third.error["type"], third.error["code"]) == ("requests", "rate_limit_exceeded")
        assert "alice exceeds its limit of 2 requests a minute" in third.error["message"]
        bob = ask(server, "bob")
        assert bob.status == 200 and not [name for name in bob.headers if name.startswith("x-ratelimit")]
        assert samples(server)["fdcore_key_refusals_total[alice][requests]"] == 1


def test_request_is_charged_its_actual_tokens(tmp_path: Path) -> None:
    with guarded(tmp_path, {"name": "alice", "tokens_per_minute": 100}) as server:
        first = ask(server, "alice", max_tokens=90)
        assert first.json["usage"]["total_tokens"] == 5 + 14
        assert first.headers["x-ratelimit-remaining-tokens"] == "81"
        second = ask(server, "alice", max_tokens=77)
        assert (second.status, second.error["type"]) == (429, "tokens")
        assert second.headers["x-ratelimit-remaining-tokens"] == "81"
        assert ask(server, "alice", max_tokens=76).status == 200


def test_running_request_reserves_its_maximum(tmp_path: Path) -> None:
    with guarded(tmp_path, {"name": "alice", "tokens_per_minute": 100}) as server:
        server.client.held = True
        running = in_background(lambda: ask(server, "alice", max_tokens=80))
        waiting(server, 1)
        assert ask(server, "alice", max_tokens=20).status == 429
        server.client.held = False
        running.join(60)
        assert ask(server, "alice", max_tokens=20).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_refunds_tokens_and_slot(tmp_path: Path, stream: bool) -> None:
    limits = {"tokens_per_minute": 100, "parallel_requests": 1}
    with guarded(tmp_path, {"name": "alice", **limits}) as server:
        server.client.pause_after = 2
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="alice", timeout=0.3, max_retries=0) as client,
            pytest.raises(Exception, match=r"(?i)timed out|timeout|^$") as raised,
        ):
            assert list(client.completions.create(model="fake", prompt="abcde", max_tokens=90, stream=stream))
        assert "Timeout" in type(raised.value).__name__  # streams raise an exception of the HTTP library
        waiting(server, 0)
        server.client.pause_after = None
        eventually(lambda: ask(server, "alice", max_tokens=80).status == 200)


def test_default_max_tokens_fits_the_minute_limit_of_the_key(tmp_path: Path) -> None:
    with guarded(tmp_path, {"name": "alice", "tokens_per_minute": 60}) as server:
        server.client.reply = lambda _: b"x" * 300
        answer = server.post("/v1/chat/completions", CHAT | {"model": "fake"}, x_api_key="alice")
        assert answer.status == 200
        assert (answer.json["usage"]["total_tokens"], answer.json["choices"][0]["finish_reason"]) == (60, "length")


def test_request_that_never_fits_should_not_be_retried(tmp_path: Path) -> None:
    with guarded(tmp_path, {"name": "alice", "tokens_per_minute": 60}) as server:
        answer = ask(server, "alice", max_tokens=56)
        assert (answer.status, answer.headers["x-should-retry"]) == (429, "false")
        assert "retry-after" not in answer.headers and "max_tokens" in answer.error["message"]


def test_parallel_request_limit_covers_streams_and_whole_answers(tmp_path: Path) -> None:
    with guarded(tmp_path, {"name": "alice", "parallel_requests": 2}, {"name": "bob"}) as server:
        server.client.held = True
        running = [in_background(lambda s=stream: ask(server, "alice", stream=s)) for stream in (True, False)]
        waiting(server, 2)
        refused = ask(server, "alice")
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert "2 parallel requests" in refused.error["message"]
        assert server.post("/v1/abort_requests", {"req_ids": ["x"]}, x_api_key="alice").status == 200, "never limited"
        server.client.held = False
        assert ask(server, "bob").status == 200
        for each in running:
            each.join(60)
        assert ask(server, "alice").status == 200


def test_embeddings_and_prompt_only_requests_are_charged(tmp_path: Path) -> None:
    with guarded(tmp_path, {"name": "alice", "tokens_per_minute": 20}) as server:
        body = {"model": "fake", "input": ["abcde", "abcdefg"]}
        first = server.post("/v1/embeddings", body, x_api_key="alice")
        assert (first.status, first.headers["x-ratelimit-remaining-tokens"]) == (200, "8")
        assert server.post("/v1/embeddings", body, x_api_key="alice").status == 429
        assert server.post("/tokenize", {"prompt": "x" * 30}, x_api_key="alice").status == 200


def test_openai_and_anthropic_clients_parse_a_rate_limit_error(tmp_path: Path) -> None:
    with guarded(tmp_path, {"name": "alice", "requests_per_minute": 1}) as server:
        ask(server, "alice")
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="alice", max_retries=0) as client,
            pytest.raises(openai.RateLimitError) as caught,
        ):
            client.completions.create(model="fake", prompt="a")
        assert caught.value.code == "rate_limit_exceeded"
        refused = server.post("/v1/messages", CHAT | {"model": "fake", "max_tokens": 9}, x_api_key="alice")
        assert (refused.status, refused.json["type"], refused.json["error"]["type"]) == (
            429,
            "error",
            "rate_limit_error",
        )


def test_batch_is_charged_to_its_owner_and_waits_for_room(tmp_path: Path) -> None:
    keys = {"name": "alice", "tokens_per_minute": 10_000, "parallel_requests": 1}, {"name": "bob"}
    with guarded(tmp_path, *keys, batch_api=True, batch_store=str(tmp_path / "store")) as server:
        file_id = upload(server, "alice")
        server.client.held = True
        in_background(lambda: ask(server, "alice", max_tokens=9))
        waiting(server, 1)
        time.sleep(1.1)  # a slot may be free again by the second try
        server.client.held = False
        eventually(lambda: begin(server, "alice", file_id).status == 200)
        [batch] = server.get("/v1/batches", x_api_key="alice").json["data"]
        assert ended(server, "alice", batch["id"])["request_counts"]["completed"] == 1
        assert server.get(f"/v1/batches/{batch['id']}", x_api_key="alice").status == 200, "reads are never limited"
        used = 10_000 - int(ask(server, "alice").headers["x-ratelimit-remaining-tokens"])
        assert used == (5 + 9) + (1 + 14) + (5 + 14)


def test_batch_of_a_removed_key_is_not_run(tmp_path: Path) -> None:
    settings = {"batch_api": True, "batch_store": str(tmp_path / "store")}
    with guarded(tmp_path, {"name": "alice"}, **settings) as server:
        server.client.held = True
        file_id = upload(server, "alice")
        batch_id = begin(server, "alice", file_id).json["id"]
        waiting(server, 1)
    with guarded(tmp_path, {"name": "bob"}, **settings) as server:
        eventually(lambda: state_of(server).batches._store.batches[batch_id].ended)  # type: ignore[union-attr]
        assert server.client.specs == []
    with guarded(tmp_path, {"name": "alice", "key": "another"}, **settings) as server:
        batch = server.get(f"/v1/batches/{batch_id}", x_api_key="another").json
        assert batch["request_counts"] == {"total": 1, "completed": 0, "failed": 1}


def test_only_an_admin_key_aborts_requests_of_others(tmp_path: Path) -> None:
    path = "/v1/abort_requests"
    keys = [{"name": "alice"}, {"name": "bob"}, {"name": "root", "admin": True}]
    with guarded(tmp_path, *keys) as server:
        server.client.held = True
        running = [in_background(lambda k=key: ask_as(server, k, "same")) for key in ("alice", "bob")]
        waiting(server, 2)
        own = in_background(lambda: ask_as(server, "alice", "own"))
        waiting(server, 3)
        server.post(path, {"req_ids": ["own"]}, x_api_key="bob")
        assert len(server.client.live) == 3
        server.post(path, {"req_ids": ["own"]}, x_api_key="alice")
        own.join(60)
        assert server.post(path, {"req_ids": ["other"]}, x_api_key="alice").json["not_found"] == ["other"]
        assert server.post(path, {"req_ids": ["same"]}, x_api_key="alice").json["aborted"] == ["same"]
        running[0].join(60)
        assert len(server.client.live) == 1, "another key used the same id"
        assert server.post(path, {"req_ids": ["same"]}, x_api_key="alice").json["not_found"] == ["same"]
        assert server.post(path, {"req_ids": ["same"]}, x_api_key="root").json["aborted"] == ["same"]
        running[1].join(60)
        again = [in_background(lambda k=key: ask_as(server, k, f"{k}-3")) for key in ("alice", "bob")]
        waiting(server, 2)
        for everything in ({"abort_all": True}, {"abort_all": True, "req_ids": None}):
            aborted = server.post(path, everything, x_api_key="alice").json["aborted"]
            assert aborted == (["alice-3"] if "req_ids" not in everything else [])
        assert server.post(path, {"abort_all": True}, x_api_key="root").json["aborted"] == ["bob-3"]
        for each in again:
            each.join(60)


PAGES = [path for path, route in ROUTES.items() if route.right == "page" and path != "/status"]
"""The server's pages; /status is the router's."""


def test_pages_require_a_key_if_configured(tmp_path: Path) -> None:
    with guarded(tmp_path, {"name": "alice"}, protect_pages=True) as server:
        for path in PAGES:
            refused = server.get(path)
            assert (refused.status, refused.headers["www-authenticate"].split()[0]) == (401, "Basic"), path
            assert server.get(path, x_api_key="alice").status == 200
            assert server.get(path, authorization="Basic OmFsaWNl").status == 200, "Basic auth as sent by browsers"
        for path in ("/health", "/ping", "/ready"):
            assert server.get(path).status == 200
        assert server.post(PATH, {"prompt": "a"}, authorization="Basic OmFsaWNl").status == 401


def state_of(server: LiveServer) -> ServerState:
    import gc

    [state] = [each for each in gc.get_objects() if isinstance(each, ServerState) and each.client is server.client]
    return state


def reloaded(server: LiveServer) -> None:
    """Reload keys as SIGHUP does."""
    access = state_of(server).access
    asyncio.run_coroutine_threadsafe(access.reload(), server._loop).result(60)


def test_reloaded_keys_keep_their_usage(tmp_path: Path) -> None:
    with guarded(tmp_path, {"name": "alice", "requests_per_minute": 1}, {"name": "bob"}) as server:
        assert [ask(server, "alice").status for _ in range(2)] == [200, 429]
        key_file(tmp_path, {"name": "alice", "key": "new", "requests_per_minute": 2}, {"name": "carol"})
        assert ask(server, "carol").status == 401
        reloaded(server)
        assert [ask(server, name).status for name in ("alice", "bob", "carol")] == [401, 401, 200]
        assert [ask(server, "new").status for _ in range(2)] == [200, 429]


@pytest.mark.parametrize("text", ["", "{", '{"keys": []}', '{"keys": [{"name": "x"}]}', None])
def test_invalid_key_file_is_logged_and_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str | None
) -> None:
    with guarded(tmp_path, {"name": "alice"}) as server:
        path = tmp_path / "keys.json"
        path.unlink() if text is None else path.write_text(text)
        with caplog.at_level(logging.ERROR):
            reloaded(server)
        assert "API keys were not reloaded" in caplog.text
        assert (ask(server, "alice").status, ask(server, "x").status) == (200, 401)


def ask_as(server: LiveServer, key: str, request_id: str) -> Any:
    return server.post(PATH, {"prompt": "a"}, x_api_key=key, x_request_id=request_id)


def in_background(work: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
