"""Control endpoints at a server, see control.md: requests wait while it is paused, and weights change between steps."""

from __future__ import annotations

import os
import signal
import threading
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


def test_paused_engine_is_not_taken_for_a_dead_one(server: LiveServer) -> None:
    """A restarted engine is paused as the one before, and its watchdog does not count the time."""
    with live(partial(client, "process", watchdog_seconds=0.4)) as other:
        found: list[str] = []
        other.post("/v1/pause", {})
        waiting = complete(other, found)
        eventually(lambda: running(other) == 1)
        engine = other.client
        os.kill(engine.pid, signal.SIGKILL)
        eventually(lambda: engine.alive and engine.info.epoch == 2 and engine.info.paused, seconds=30)
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


def test_answers_carry_the_version_of_updated_weights_also_after_a_restart(folder) -> None:
    with live(partial(loaded, folder, model="weights/trained")) as server:
        expected = choice(server)["token_ids"]
    with live(partial(loaded, folder, "process", weights_folder=str(folder / "weights"))) as server:
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
        eventually(lambda: engine.alive and engine.info.epoch == 2, seconds=30)
        found = choice(server)
        assert (found["weight_version"], found["token_ids"]) == ("step-2", expected)


def test_requests_wait_for_the_end_of_a_sleep_also_after_a_restart(folder) -> None:
    with live(partial(loaded, folder, "process", weights_folder=str(folder / "weights"))) as server:
        expected = choice(server)["token_ids"]
        answer = server.post("/v1/sleep?level=2", {})
        assert (answer.status, answer.json["is_sleeping"], answer.json["sleep_level"]) == (200, True, 2)
        engine = server.client
        os.kill(engine.pid, signal.SIGKILL)
        eventually(lambda: engine.alive and engine.info.epoch == 2 and engine.info.sleep_level == 2, seconds=30)
        found: list[str] = []
        waiting = complete(server, found, max_tokens=3)
        eventually(lambda: running(server) == 1)
        assert server.get("/is_sleeping").json["is_sleeping"] is True and not found
        assert server.post("/v1/wake_up", {}).json["is_sleeping"] is False
        waiting.join()
        assert found and choice(server)["token_ids"] == expected
        assert server.post("/v1/sleep?level=3", {}).error["param"] == "level"


@pytest.mark.parametrize("path", ["../model", "out", "/etc", "none", "."])
def test_weights_outside_the_folder_are_refused(folder, path: str) -> None:
    with live(partial(loaded, folder, weights_folder=str(folder / "weights"))) as server:
        answer = server.post(UPDATE, {"model_path": path})
        assert (answer.status, answer.error["param"]) == (400, "model_path")


def test_updates_are_disabled_without_a_folder(server: LiveServer) -> None:
    answer = server.post(UPDATE, {"model_path": "trained"})
    assert answer.status == 403 and "--weights-folder" in answer.error["message"]


def test_prefixes_are_forgotten(server: LiveServer) -> None:
    complete(server, []).join()
    assert server.post("/v1/reset_prefix_cache", {}).json["success"] is True
