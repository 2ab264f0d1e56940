"""The server's page and its API description, over HTTP: their scripts run in node against a live server."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.pages.playing import needs_node, play
from tests.server.fakes import live
from tests.server.preprocess.media.images import TEMPLATE, SmallProcessor, data_url
from tests.server.stream.test_disconnect import eventually
from tests.server.test_abort import Background, waiting
from tests.server.test_null_engine import null_client, wait_until_idle

pytestmark = needs_node


def test_requests_of_a_real_engine_are_shown_and_aborted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fd_core.engine.clients.client._REPORT_INTERVAL", 0.0)
    with live(partial(null_client, "process")) as server:
        server.post("/v1/pause", None)
        running = [Background(server, name, prompt="hidden") for name in ("one", "two")]
        eventually(lambda: len(server.get("/v1/requests").json["data"]) == 2)
        shown = play(tmp_path, server.get("/").body, "server_requests", server.url)
        row = ["waiting", "the scheduler's rule", "6", "0"]
        assert sorted(each[:5] for each in shown["before"]) == [["one", *row], ["two", *row]]
        assert shown["same"], "rows stay the same elements, or a click may miss its button"
        assert [each[0] for each in shown["after"]] == ["two"] and shown["count"] == "1"
        assert shown["posted"] == [["/v1/abort_requests", '{"req_ids":["one"]}']]
        assert running[0].answer.json["choices"][0]["stop_reason"] == "abort"
        server.post("/v1/resume", None)
        assert running[1].answer.status == 200
        wait_until_idle(server)


def test_requests_need_a_key_where_there_are_keys(tmp_path: Path) -> None:
    with live(api_keys=("topsecretkey",)) as server:
        server.client.held = True
        running = Background(server, "one", key="topsecretkey")
        waiting(server, 1)
        shown = play(tmp_path, server.get("/").body, "server_keys", server.url)
        server.client.held = False
        assert running.answer.status == 200
    assert shown == {"locked": [False, True, 1], "repeated": 1, "rows": 1, "stored": "topsecretkey", "error": True}


def test_curves_switch_to_the_history(tmp_path: Path) -> None:
    with live() as server:
        shown = play(tmp_path, server.get("/").body, "server_history", server.url)
    assert shown["before"] == shown["again"] == ["−1 min", "−2 min", "−3 min", "−4 min"]
    assert shown["after"] == ["−30 min", "−1 h", "−90 min"]
    assert shown["value"][2:5] == ["2", "–", "250 ms"], "values of the newest sample"
    assert shown["pressed"] == ["true", "false"]


def test_api_description_shows_every_route_of_the_document(tmp_path: Path) -> None:
    with live(api_keys=("topsecretkey",)) as server:
        document = server.get("/openapi.json").json
        shown = play(tmp_path, server.get("/docs").body, "api_docs", server.url)
    assert sorted(shown["found"]) == sorted(
        method + path for path, each in document["paths"].items() for method in each
    )
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert set(fields) <= set(shown["names"]) and {"200", "429"} <= set(shown["names"])
    assert len(shown["deep"]) == 3 and min(shown["deep"]) >= 2, "a schema is shown once it is opened"
    assert shown["kept"] == ["post/v1/abort_requests"]
    assert shown["curl"].startswith("curl -X POST 'http://here/v1/chat/completions' \\\n")
    assert '-H "Authorization: Bearer $API_KEY"' in shown["curl"] and "Say hello." in shown["curl"]
    assert (shown["title"], "API key" in shown["state"]) == ("fd_core API", True)


def test_playground_sends_images(tmp_path: Path) -> None:
    with live(images=SmallProcessor(), template=TEMPLATE) as server:
        shown = play(tmp_path, server.get("/").body, "server_image", server.url)
        url = {"type": "image_url", "image_url": {"url": data_url(b"")}}
        assert shown["offered"] and "at most 16" in shown["limit"]
        assert shown["taken"] == [[False, 0], [True, 2], [True, 2]], "a pasted text stays a text"
        assert shown["messages"][0]["content"] == [url, url, {"type": "text", "text": "What is it?"}]
        assert shown["turns"][0] == "drop.png\ncat.png\nWhat is it?" and "not a complete PNG" in shown["turns"][1]
