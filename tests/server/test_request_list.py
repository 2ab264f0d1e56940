"""GET /v1/requests: requests in flight, as far as a key may abort them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fd_core.types import Phase
from tests.server.fakes import LiveServer, live
from tests.server.stream.test_disconnect import eventually
from tests.server.test_abort import Background, waiting
from tests.server.test_null_engine import null_client, wait_until_idle


def key(name: str) -> str:
    return f"sk-{name}-0123456789"


def listed(server: LiveServer, **headers: str) -> list[dict[str, Any]]:
    answer = server.get("/v1/requests", **headers)
    assert answer.status == 200 and answer.headers["cache-control"] == "no-store"
    assert answer.json["object"] == "list"
    return list(answer.json["data"])


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the engine report for each list."""
    monkeypatch.setattr("fd_core.engine.clients.client._REPORT_INTERVAL", 0.0)


def test_lists_in_a_row_cost_the_engine_one_report(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fd_core.engine.clients.client._REPORT_INTERVAL", 3600.0)
    server.client.reports = 0
    server.client._reported_at = float("-inf")
    for _ in range(5):
        assert listed(server) == []
    assert server.client.reports == 1


def test_each_generation_is_listed_with_its_progress(server: LiveServer) -> None:
    assert listed(server) == []
    server.client.pause_after = 2
    running = Background(server, "one", prompt="hidden", n=2)
    eventually(lambda: [done for _, done in server.client.live.values()] == [2, 2])
    for card in listed(server):
        age = card.pop("seconds")
        assert 0 < age < 60
        assert card == {
            "id": "one",
            "state": "running",
            "wait_reason": None,
            "prompt_tokens": 6,
            "generated_tokens": 2,
        }
    assert len(listed(server)) == 2
    assert b"hidden" not in server.get("/v1/requests").body
    server.post("/v1/abort_requests", {"req_ids": ["one"]})
    assert running.answer.status == 200
    assert listed(server) == []


def test_wait_reason_is_a_phase_of_the_scheduler() -> None:
    with live() as server:
        server.client.held = True
        running = Background(server, "one")
        waiting(server, 1)
        for phase in Phase:
            server.client.activity = ("waiting", phase)
            [card] = listed(server)
            assert card["wait_reason"] == (None if phase is Phase.COMPUTING else phase.name.lower())
        server.call(server.client.die)
        assert running.answer.status >= 500
        assert listed(server) == []


@pytest.mark.parametrize("where", ["inproc", "process"])
def test_waiting_request_of_a_real_engine_has_a_reason_and_can_be_aborted(where: str) -> None:
    with live(partial(null_client, where)) as server:
        assert server.post("/v1/pause", None).status == 200
        running = [Background(server, name) for name in ("one", "two")]
        eventually(lambda: len(listed(server)) == 2)
        assert {(card["state"], card["wait_reason"]) for card in listed(server)} == {("waiting", "scheduler")}
        assert server.post("/v1/abort_requests", {"req_ids": ["one"]}).json["aborted"] == ["one"]
        assert running[0].answer.json["choices"][0]["stop_reason"] == "abort"
        assert [card["id"] for card in listed(server)] == ["two"]
        assert server.post("/v1/resume", None).status == 200
        assert running[1].answer.json["choices"][0]["stop_reason"] != "abort"
        wait_until_idle(server)


def test_silent_engine_does_not_hold_up_the_list(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fd_core.engine.clients.client._REPORT_SECONDS", 0.05)
    listed(server)
    server.client.held, server.client.activity = True, None
    running = Background(server, "one")
    waiting(server, 1)
    for _ in range(2):
        [card] = listed(server)
        assert (card["state"], card["wait_reason"]) == (None, None)
    server.client.held = False
    assert running.answer.status == 200


def test_key_lists_its_own_requests_and_admin_lists_all(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    keys = [f'[[keys]]\nname = "{name}"\nkey = "{key(name)}"\n' for name in ("alice", "bob", "root")]
    path.write_text("".join(keys) + "admin = true\n")
    path.chmod(0o600)
    with live(api_key_file=str(path)) as server:
        server.client.held = True
        sent = [Background(server, name, key=key(name)) for name in ("alice", "bob")]
        waiting(server, 2)
        assert server.get("/v1/requests").status == 401
        for name, seen in (("alice", ["alice"]), ("bob", ["bob"]), ("root", ["alice", "bob"])):
            cards = listed(server, Authorization=f"Bearer {key(name)}")
            assert sorted(card["id"] for card in cards) == seen
        server.client.held = False
        assert all(each.answer.status == 200 for each in sent)
