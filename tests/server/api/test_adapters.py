"""LoRA adapters at a server: separate models in every API, loaded and unloaded while it runs, kept by restarts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from functools import partial

import pytest

from fd_core.config import EngineConfig, ServerConfig
from fd_core.engine.clients.launch import open_client
from fd_core.engine.clients.process import ProcessClient
from fd_core.errors import ConfigError
from fd_core.server.app import create_app
from fd_core.testing.models.adapters import merge_adapter, write_adapter
from fd_core.testing.models.checkpoints import write_checkpoint
from fd_core.types import AdapterInfo
from tests.server.fakes import FakeClient, byte_tokenizer, live, samples
from tests.server.stream.test_disconnect import eventually

PATH = "/v1/completions"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PROMPT = [7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 0, 4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    # The tokenizer of these tests has 257 tokens.
    model = write_checkpoint("llama", folder / "model")
    for seed, name in enumerate(("one", "two"), 1):
        merge_adapter(model, write_adapter(model, folder / "adapters" / name, seed=seed), folder / f"{name}-merged")
    (folder / "adapters" / "way-out").symlink_to(folder / "model")
    return folder


async def client(folder, *modules, model="model", where="inproc", **settings):
    config = EngineConfig(
        model="base",
        backend="reference",
        max_num_seqs=4,
        num_kv_blocks=60,
        block_size=8,
        max_model_len=128,
        max_num_batched_tokens=64,
        structured_output=False,
        lora_modules=tuple(f"{name}={folder / 'adapters' / name}" for name in modules),
        **settings,
    )
    return await open_client(config, folder / model, where=where)


def tokens(server, model=None, path=PATH, **fields):
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = server.post(path, body | fields | ({} if model is None else {"model": model}))
    assert answer.status == 200, answer.json
    return answer.json["choices"][0]["token_ids"]


@pytest.fixture(scope="module")
def expected(folder):
    found = {}
    for name in ("one", "two"):
        with live(partial(client, folder, model=f"{name}-merged")) as server:
            found[name] = tokens(server)
    with live(partial(client, folder)) as server:
        found["base"] = tokens(server)
    assert len({*map(tuple, found.values())}) == 3
    return found


@pytest.fixture(scope="module")
def server(folder):
    with live(partial(client, folder, "one", lora_folder=str(folder / "adapters"))) as running:
        yield running


def test_adapter_is_listed_as_a_model_with_a_parent(server):
    cards = server.get("/v1/models").json["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [("base", None), ("one", "base")]
    assert server.get("/v1/models/one").json["parent"] == "base"
    assert str(server.get("/v1/models").json).count("adapters") == 0, "server paths are exposed"


def test_requests_choose_by_model(server, expected):
    for name in ("one", "base", None, "one"):
        assert tokens(server, name) == expected[name or "base"]


def test_every_api_accepts_and_returns_the_adapter_name(server):
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
        "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
        "/v1/responses": {"input": "a", "max_output_tokens": 2},
        "/v1/embeddings": {"input": PROMPT},
    }
    for path, body in bodies.items():
        found = {name: server.post(path, body | {"model": name}) for name in ("base", "one")}
        assert [(each.status, each.json["model"]) for each in found.values()] == [(200, "base"), (200, "one")], path
        if path == "/v1/embeddings":
            vectors = [each.json["data"][0]["embedding"] for each in found.values()]
            assert vectors[0] != vectors[1]


def test_unknown_name_is_404_with_known_names(server):
    answer = server.post(PATH, {"prompt": PROMPT, "model": "three"})
    assert (answer.status, answer.error["code"]) == (404, "model_not_found")
    assert "base, one" in answer.error["message"]


def test_adapters_are_loaded_and_unloaded(server, expected):
    assert server.post(LOAD, {"lora_name": "late", "lora_path": "two"}).status == 200
    assert tokens(server, "late") == expected["two"]
    assert server.post(LOAD, {"lora_name": "late", "lora_path": "two"}).status == 200, "it is served already"
    assert server.post(LOAD, {"lora_name": "late", "lora_path": "one"}).error["param"] == "lora_name"
    assert tokens(server, "late") == expected["two"]
    assert server.post(UNLOAD, {"lora_name": "late"}).status == 200
    assert server.post(PATH, {"prompt": PROMPT, "model": "late"}).status == 404
    assert server.post(UNLOAD, {"lora_name": "late"}).status == 404
    assert server.post(LOAD, {"lora_name": "late", "lora_path": "one"}).status == 200
    assert tokens(server, "late") == expected["one"], "the KV of another adapter of that name was read"
    assert server.post(UNLOAD, {"lora_name": "late"}).status == 200


def test_metrics_count_by_loaded_adapter(server):
    def counted():
        return {name: value for name, value in samples(server).items() if name.startswith("fdcore_adapter_")}

    assert server.post(LOAD, {"lora_name": "counted", "lora_path": "two"}).status == 200
    before = counted()
    assert before["fdcore_adapter_generations_total[counted]"] == 0
    for name in ("counted", "base", "one", "counted"):
        tokens(server, name)
    assert {name: value - before[name] for name, value in counted().items()} == {
        "fdcore_adapter_generations_total[one]": 1,
        "fdcore_adapter_generations_total[counted]": 2,
        "fdcore_adapter_generated_tokens_total[one]": 12,
        "fdcore_adapter_generated_tokens_total[counted]": 24,
    }
    assert server.post(UNLOAD, {"lora_name": "counted"}).status == 200
    assert "counted" not in "".join(counted())


@pytest.mark.parametrize(
    ("name", "path", "param"),
    [
        ("x", "../model", "lora_path"),
        ("x", "way-out", "lora_path"),
        ("x", "/etc", "lora_path"),
        ("x", ".", "lora_path"),
        ("x", "not-there", "lora_path"),
        ("x", "a\0b", "lora_path"),
        ("base", "two", "lora_name"),
        ("one", "two", "lora_name"),
        ("a=b", "two", "lora_name"),
        ("", "two", "lora_name"),
        ("x", None, "lora_path"),
    ],
)
def test_adapter_that_cannot_be_loaded_is_400_naming_the_field(server, name, path, param):
    answer = server.post(LOAD, {"lora_name": name, "lora_path": path})
    assert answer.status == 400
    assert param in (answer.error["param"] or answer.error["message"])


def test_damaged_adapter_is_a_400_and_changes_nothing(server, folder, expected):
    broken = write_adapter(folder / "model", folder / "adapters" / "broken", seed=3)
    path = broken / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    answer = server.post(LOAD, {"lora_name": "broken", "lora_path": "broken"})
    assert answer.status == 400 and "adapter_model.safetensors" in answer.error["message"]
    assert [card["id"] for card in server.get("/v1/models").json["data"]] == ["base", "one"]
    assert tokens(server, "one") == expected["one"]


def test_loading_requires_permission_of_the_operator(folder):
    with live(partial(client, folder, "one")) as server:
        for path, body in ((LOAD, {"lora_name": "x", "lora_path": "two"}), (UNLOAD, {"lora_name": "one"})):
            answer = server.post(path, body)
            assert answer.status == 403 and "--lora-folder" in answer.error["message"]


def test_loading_requires_an_admin_key_if_keys_exist(folder, tmp_path):
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"keys": [{"key": "a", "name": "a"}, {"key": "root", "name": "root", "admin": True}]}))
    keys.chmod(0o600)
    make = partial(client, folder, lora_folder=str(folder / "adapters"))
    with live(make, api_key_file=str(keys)) as server:
        body = {"lora_name": "x", "lora_path": "two"}
        assert [server.post(LOAD, body, x_api_key=key).status for key in ("a", "root")] == [403, 200]
        assert [server.post(UNLOAD, body, x_api_key=key).status for key in ("a", "root")] == [403, 200]


def test_adapter_may_not_have_the_name_of_the_model():
    async def assemble():
        fake = FakeClient(adapters=(AdapterInfo("one", "d", "/a", 1),))
        create_app(ServerConfig(served_model_names=("one",)), fake, byte_tokenizer(), None)

    with pytest.raises(ConfigError, match="the same name as the model"):
        asyncio.run(assemble())


@pytest.mark.slow
def test_killed_engine_restarts_with_its_adapters(folder, expected):
    make = partial(client, folder, "one", lora_folder=str(folder / "adapters"), where="process")
    with live(make) as server:
        assert server.post(LOAD, {"lora_name": "late", "lora_path": "two"}).status == 200
        assert isinstance(server.client, ProcessClient) and server.client.pid is not None
        os.kill(server.client.pid, signal.SIGKILL)
        eventually(lambda: server.client.info.epoch == 2 and server.client.alive)
        assert (tokens(server, "late"), tokens(server, "one")) == (expected["two"], expected["one"])
