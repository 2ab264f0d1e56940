"""API keys."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.fakes import LiveServer, live

KEYS = ("first-key", "zweiter-schlüssel")


@pytest.fixture(scope="module")
def guarded() -> Iterator[LiveServer]:
    with live(api_keys=KEYS) as server:
        yield server


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/abort_requests", "/nothing"]
)
@pytest.mark.parametrize(
    "header", [None, "Bearer", "Bearer ", "Bearer wrong", "Basic first-key", "first-key", "Bearer first-key2"]
)
def test_without_an_accepted_key_nothing_is_served(guarded: LiveServer, path: str, header: str | None) -> None:
    answer = guarded.post(path, {}, **({"authorization": header} if header is not None else {}))
    assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"


def test_missing_and_wrong_key_have_different_messages(guarded: LiveServer) -> None:
    assert "missing API key" in guarded.get("/v1/models").error["message"]
    for headers in ({"authorization": "Bearer wrong"}, {"x_api_key": "wrong"}):
        message = guarded.get("/v1/models", **headers).error["message"]
        assert "invalid API key" in message and "x-api-key: KEY" in message and "wrong" not in message


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_accepted(guarded: LiveServer, key: str) -> None:
    header = f"Bearer {key}".encode().decode("latin-1")
    assert guarded.get("/v1/models", authorization=header).status == 200
    assert guarded.post("/v1/completions", {"prompt": "a"}, authorization=header).status == 200
    bare = header.removeprefix("Bearer ")
    assert guarded.get("/v1/models", x_api_key=bare).status == 200
    assert guarded.get("/v1/models", x_api_key=bare, authorization="Bearer wrong").status == 200


@pytest.mark.parametrize("key", ["", "wrong", "Bearer first-key", "first-key2"])
def test_wrong_x_api_key_is_rejected(guarded: LiveServer, key: str) -> None:
    assert guarded.get("/v1/models", x_api_key=key).status == 401


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready", "/load", "/version", "/metrics", "/", "/openapi.json"])
def test_probes_need_no_key(guarded: LiveServer, path: str) -> None:
    assert guarded.get(path).status == 200
