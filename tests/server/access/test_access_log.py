"""Lines of the access log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from fd_core.config.logs import one_word
from tests.server.fakes import LiveServer, key_file, live
from tests.server.stream.test_disconnect import eventually
from tests.server.test_owners import begin, ended, upload

PATH = "/v1/completions"


@pytest.fixture
def server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[LiveServer]:
    caplog.set_level(logging.INFO, "fd_core.access")
    file = key_file(tmp_path, {"name": "alice"}, {"name": "bob"})
    settings = {"batch_api": True, "batch_store": str(tmp_path / "store"), "api_keys": ("plain",)}
    with live(api_key_file=file, access_log=True, **settings) as running:
        yield running


def lines(caplog: pytest.LogCaptureFixture, count: int) -> list[dict[str, Any]]:
    def found() -> list[dict[str, Any]]:
        return [each.fields for each in caplog.records if each.name == "fd_core.access"]  # type: ignore[attr-defined]

    eventually(lambda: len(found()) >= count)  # a line is written after the client has its answer
    return found()


def test_line_has_key_route_status_and_tokens(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    for stream in (False, True):
        server.post(
            PATH + "?token=sk-hidden",
            {"prompt": "secret words", "stream": stream},
            authorization="Bearer alice",
            x_request_id="trace-7",
        )
    found, text = lines(caplog, 2), caplog.records[0].getMessage()
    for line in found:
        assert line.pop("seconds") > 0
        assert line == {
            "client": "127.0.0.1",
            "method": "POST",
            "path": PATH,
            "status": 200,
            "tokens_in": 12,
            "tokens_out": 14,
            "request_id": "trace-7",
            "key": "alice",
        }
    assert text.startswith(f"127.0.0.1 POST {PATH} 200 ") and text.endswith(" s in=12 out=14 id=trace-7 key=alice")
    for secret in ("hidden", "secret", "Hello", "Bearer"):
        assert secret not in caplog.text


@pytest.mark.parametrize(
    ("method", "path", "key", "status", "name"),
    [
        ("GET", "/health", None, 200, "-"),
        ("HEAD", "/health", None, 200, "-"),
        ("GET", "/v1/models", "plain", 200, "unnamed"),
        ("GET", "/v1/models", "sk-wrong", 401, "-"),
        ("OPTIONS", "/v1/models", None, 204, "-"),
        ("DELETE", "/nothing", "bob", 404, "bob"),
    ],
)
def test_every_request_has_a_line(
    server: LiveServer,
    caplog: pytest.LogCaptureFixture,
    method: str,
    path: str,
    key: str | None,
    status: int,
    name: str,
) -> None:
    server.request(method, path, None, **({} if key is None else {"x_api_key": key}))
    (line,) = lines(caplog, 1)
    assert (line["method"], line["path"], line["status"], line["key"]) == (method, path, status, name)
    assert "sk-wrong" not in caplog.text


def test_client_disconnect_is_logged_with_its_tokens(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    server.client.pause_after = 3
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="bob", max_retries=0) as client:
        stream = client.completions.create(model="fake", prompt="abcde", stream=True)
        next(stream)
        stream.close()
    (line,) = lines(caplog, 1)
    assert (line["status"], line["tokens_in"], line["tokens_out"], line["key"]) == (499, 5, 3, "bob")


def test_address_is_that_of_the_connection_not_of_headers(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    server.get("/health", x_forwarded_for="6.6.6.6", forwarded="for=6.6.6.6")
    assert lines(caplog, 1)[0]["client"] == "127.0.0.1"


def test_requests_of_a_batch_have_their_own_lines(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    batch = ended(server, "alice", begin(server, "alice", upload(server, "alice")).json["id"])
    (line,) = [each for each in lines(caplog, 3) if each["client"] == "batch"]
    assert (line["path"], line["key"], line["tokens_out"]) == (PATH, "alice", 14)
    assert line["request_id"].startswith(batch["id"])


@pytest.mark.parametrize(
    ("path", "seen"),
    [
        ("/v1/models", "/v1/models"),
        ("/a b", "/a\\x20b"),
        ('/"\x1b[2J\r\nINFO forged', '/"\\x1b[2J\\x0d\\x0aINFO\\x20forged'),
        ("/\u202e\U0001f600\x85", "/\\u202e\\U0001f600\\x85"),
        ("/back\\x0a", "/back\\x5cx0a"),
        ("/" + "x" * 300, "/" + "x" * 255 + "..."),
    ],
)
def test_path_is_escaped_to_one_word(path: str, seen: str) -> None:
    assert one_word(path, 256) == seen
