"""Control endpoints at a server, see control.md: requests wait while it is paused, and weights change between steps."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from fd_core.config import EngineConfig
from fd_core.engine.clients.client import EngineClient
from fd_core.engine.clients.launch import open_client
from fd_core.testing.models.adapters import merge_adapter, write_adapter
from fd_core.testing.models.checkpoints import write_checkpoint
from tests.server.fakes import LiveServer, live
from tests.server.stream.test_disconnect import eventually

BODY = {"prompt": "Hello", "max_tokens": 200, "temperature": 0.8, "seed": 7, "ignore_eos": True}


async def client(where: str, **settings) -> EngineClient:
    config = EngineConfig(model="null", backend="null", max_model_len=400, structured_output=False, **settings)
    return await open_client(config, None, where=where)


@pytest.fixture(scope="module", params=["inproc", "process"])
def server(request):
    with live(partial(client, request.param)) as running:
        yield running


def complete(server: LiveServer, found: list[str], **fields) -> threading.Thread:
    def ask() -> None:
        answer = server.post("/v1/completions", BODY | fields)
        assert answer.status == 200, answer.json
        found.append(answer.json["choices"][0]["text"])

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def running(server: LiveServer) -> int:
    return int(server.get("/load").json["server_load"])


def test_requests_wait_until_resume_with_the_same_text(server: LiveServer) -> None:
    expected: list[str] = []
    complete(server, expected).join()
    found: list[str] = []
    first = complete(server, found)
    assert server.post("/v1/pause", {}).json["is_paused"] is True
    second = complete(server, found)
    eventually(lambda: running(server) >= 1)
    assert server.get("/v1/control").json == server.get("/is_paused").json
    assert server.get("/ready").status == 200
    assert server.post("/v1/resume", {}).json["is_paused"] is False
    first.join()
    second.join()
    assert found == expected * 2


def test_paused_engine_is_not_taken_for_a_dead_one() -> None:
    """A restarted engine is paused as the one before, and its watchdog does not count the time."""
    with live(partial(client, "process", watchdog_seconds=0.4)) as other:
        found: list[str] = []
        other.post("/v1/pause", {})
        waiting = complete(other, found)
        eventually(lambda: running(other) == 1)
        engine = other.client
        os.kill(engine.pid, signal.SIGKILL)
        eventually(lambda: engine.alive and engine.info.epoch == 2 and engine.info.paused)
        waiting.join(timeout=1.0)
        assert waiting.is_alive() and engine.info.epoch == 2 and not found
        other.post("/v1/resume", {})
        waiting.join()
        complete(other, found).join()
        assert found[0] == found[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    model = write_checkpoint("llama", folder / "model")
    merge_adapter(model, write_adapter(model, folder / "adapter", seed=1), folder / "weights" / "trained")
    (folder / "weights" / "out").symlink_to(model)
    return folder


async def loaded(folder, where="inproc", model="model", **settings) -> EngineClient:
    config = EngineConfig(
        model="base",
        backend="reference",
        max_num_seqs=4,
        num_kv_blocks=60,
        block_size=8,
        max_model_len=128,
        structured_output=False,
        **settings,
    )
    return await open_client(config, folder / model, where=where)


PROMPT = [7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 0, 4]
UPDATE = "/v1/update_weights"


def choice(server: LiveServer) -> dict[str, Any]:
    answer = server.post(
        "/v1/completions",
        {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True},
    )
    assert answer.status == 200, answer.json
    assert answer.headers["x-weight-version"] == answer.json["choices"][0]["weight_version"]
    return answer.json["choices"][0]


RANKS = [
    {},
    pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow),
    pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.soak),
]


@pytest.mark.parametrize("settings", RANKS, ids=str)
def test_answers_carry_the_version_of_updated_weights_also_after_a_restart(folder, settings: dict[str, Any]) -> None:
    settings = settings | {"weights_folder": str(folder / "weights")}
    with live(partial(loaded, folder, model="weights/trained")) as server:
        expected = choice(server)["token_ids"]
    with live(partial(loaded, folder, "process", **settings)) as server:
        before = choice(server)
        assert before["weight_version"] == "0" and before["token_ids"] != expected
        answer = server.post(UPDATE, {"model_path": "trained"})
        assert (answer.status, answer.json["weight_version"]) == (200, "1")
        assert (choice(server)["weight_version"], choice(server)["token_ids"]) == ("1", expected)
        answer = server.post("/update_weights_from_disk", {"model_path": "trained", "weight_version": "step-2"})
        assert (answer.json["success"], answer.json["weight_version"]) == (True, "step-2")
        stream = {"prompt": PROMPT, "max_tokens": 2, "ignore_eos": True, "stream": True}
        assert server.post("/v1/completions", stream).events[-2]["choices"][0]["weight_version"] == "step-2"
        engine = server.client
        os.kill(engine.pid, signal.SIGKILL)
        eventually(lambda: engine.alive and engine.info.epoch == 2)
        found = choice(server)
        assert (found["weight_version"], found["token_ids"]) == ("step-2", expected)


@pytest.mark.parametrize("settings", [{}, pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.soak)], ids=str)
def test_requests_wait_for_the_end_of_a_sleep_also_after_a_restart(folder, settings: dict[str, Any]) -> None:
    with live(partial(loaded, folder, "process", **settings)) as server:
        expected = choice(server)["token_ids"]
        answer = server.post("/v1/sleep?level=2", {})
        assert (answer.status, answer.json["is_sleeping"], answer.json["sleep_level"]) == (200, True, 2)
        engine = server.client
        os.kill(engine.pid, signal.SIGKILL)
        eventually(lambda: engine.alive and engine.info.epoch == 2 and engine.info.sleep_level == 2)
        found: list[str] = []
        waiting = complete(server, found, max_tokens=3)
        eventually(lambda: running(server) == 1)
        assert server.get("/is_sleeping").json["is_sleeping"] is True and not found
        for _ in range(2):
            assert server.post("/v1/wake_up", {}).json["is_sleeping"] is False
        waiting.join()
        assert found and choice(server)["token_ids"] == expected
        assert server.post("/v1/sleep?level=3", {}).error["param"] == "level"


def test_simultaneous_updates_are_applied_one_after_the_other(folder) -> None:
    with live(partial(loaded, folder, weights_folder=str(folder / "weights"))) as server:
        before, versions = choice(server), {"a", "b", "c"}

        def update(version: str) -> None:
            answer = server.post(UPDATE, {"model_path": "trained", "weight_version": version})
            assert answer.status == 200 and answer.json["weight_version"] in versions

        with ThreadPoolExecutor() as pool:
            list(pool.map(update, versions))
        after = choice(server)
        assert after["weight_version"] in versions and after["token_ids"] != before["token_ids"]


def test_damaged_weights_are_refused_while_requests_run(folder, tmp_path) -> None:
    (tmp_path / "damaged").mkdir()
    with live(partial(loaded, folder, "process", weights_folder=str(tmp_path))) as server:
        expected = choice(server)
        for added in (None, "config.json", "model.safetensors"):
            if added is not None:
                (tmp_path / "damaged" / added).write_bytes((folder / "model" / added).read_bytes()[:20_000])
            found: list[str] = []
            streaming = complete(server, found, prompt=PROMPT, max_tokens=100)
            answer = server.post(UPDATE, {"model_path": "damaged"})
            assert (answer.status, answer.error["param"]) == (400, "model"), added
            streaming.join()
            assert found and choice(server) == expected and server.client.info.epoch == 1, added


@pytest.mark.parametrize("key", [None, "sk-wrong", "sk-user"])
def test_only_an_admin_key_changes_a_server(tmp_path, key: str | None) -> None:
    (tmp_path / "keys.toml").write_text(
        '[[keys]]\nname = "user"\nkey = "sk-user"\n[[keys]]\nname = "root"\nkey = "sk-root"\nadmin = true\n'
    )
    (tmp_path / "keys.toml").chmod(0o600)
    with live(partial(client, "inproc"), api_key_file=str(tmp_path / "keys.toml")) as server:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        for name in ("pause", "resume", "sleep", "wake_up", "reset_prefix_cache", "update_weights"):
            answer = server.post(f"/v1/{name}", {"model_path": "trained"}, **headers)
            assert answer.status == (403 if key == "sk-user" else 401)
        state = server.get("/v1/control", Authorization="Bearer sk-root").json
        assert (state["is_paused"], state["is_sleeping"]) == (False, False)


def test_client_that_leaves_during_a_pause_leaves_nothing_behind(server: LiveServer) -> None:
    server.post("/v1/pause", {})
    with closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(BODY), {"Content-Type": "application/json"})
        eventually(lambda: running(server) == 1)
    eventually(lambda: running(server) == 0 and server.client.active_requests == 0)
    server.post("/v1/resume", {})


@pytest.mark.parametrize("order", ["pause", "sleep?level=2"])
def test_shutdown_of_a_stopped_server_ends_waiting_requests_at_once(order: str) -> None:
    with live(partial(client, "process"), drain_seconds=600.0) as server:
        server.post(f"/v1/{order}", {})
        found: list[str] = []
        waiting = complete(server, found)
        eventually(lambda: running(server) == 1)
        server.stop()
        waiting.join(timeout=30)
        assert found == [""]


def test_weights_outside_the_folder_are_refused(folder) -> None:
    with live(partial(loaded, folder, weights_folder=str(folder / "weights"))) as server:
        for path in ("../model", "out", "/etc", "none", "."):
            answer = server.post(UPDATE, {"model_path": path})
            assert (answer.status, answer.error["param"]) == (400, "model_path"), path


def test_updates_are_disabled_without_a_folder(server: LiveServer) -> None:
    answer = server.post(UPDATE, {"model_path": "trained"})
    assert answer.status == 403 and "--weights-folder" in answer.error["message"]


def test_prefixes_are_forgotten(server: LiveServer) -> None:
    complete(server, []).join()
    assert server.post("/v1/reset_prefix_cache", {}).json["success"] is True
