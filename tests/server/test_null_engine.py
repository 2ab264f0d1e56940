"""The server over a real engine with a scripted backend: nothing leaks, and texts are independent of the batch."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import openai
import pytest

from fd_core.config import EngineConfig
from fd_core.engine.clients.client import EngineClient
from fd_core.engine.clients.launch import open_client
from fd_core.engine.clients.process import ProcessClient
from tests.engine.faults import Faults
from tests.server.fakes import LiveServer, live, samples
from tests.server.stream.test_disconnect import eventually, leave

PATH = "/v1/completions"
IDLE = (
    "fdcore_requests_running",
    "fdcore_requests_waiting",
    "fdcore_slots_draining",
    "fdcore_kv_blocks_used",
    "fdcore_kv_blocks_fenced",
    "fdcore_active_requests",
)


async def null_client(where: str = "inproc", backend: str = "null") -> EngineClient:
    config = EngineConfig(
        model="null",
        backend=backend,
        max_num_seqs=8,
        num_kv_blocks=40,
        block_size=16,
        max_model_len=400,
        max_num_batched_tokens=64,
    )
    return await open_client(config, None, where=where)


@pytest.fixture(scope="module")
def null() -> Iterator[LiveServer]:
    with live(null_client) as server:
        yield server


def gauges(server: LiveServer) -> dict[str, float]:
    found = samples(server)
    return {name: found[name] for name in IDLE}


def wait_until_idle(server: LiveServer) -> None:
    eventually(lambda: all(value == 0 for value in gauges(server).values()))


def body(number: int, **fields: object) -> dict[str, object]:
    return {
        "prompt": f"prompt {number} " * (1 + number % 5),
        "max_tokens": 40,
        "seed": number,
        "temperature": float(number % 2),
        "logit_bias": {str(each): -100 for each in range(128, 257)},
        **fields,
    }


def test_joined_stream_equals_the_whole_answer(null: LiveServer) -> None:
    whole = null.post(PATH, body(1, logprobs=2)).json
    events = null.post(PATH, body(1, stream=True, stream_options={"include_usage": True})).events
    assert "".join(event["choices"][0]["text"] for event in events[:-2]) == whole["choices"][0]["text"]
    assert len(whole["choices"][0]["logprobs"]["tokens"]) == whole["usage"]["completion_tokens"] == 40
    assert events[-2]["usage"]["completion_tokens"] == 40


def test_prefix_cache_hits_show_in_usage(null: LiveServer) -> None:
    request = {**body(0), "prompt": "x" * 100, "cache_salt": "s"}
    cached = [
        null.post(PATH, each).json["usage"]["prompt_tokens_details"]["cached_tokens"]
        for each in (request, request, {**request, "cache_salt": "other"})
    ]
    assert cached == [0, 96, 0]


def test_texts_do_not_depend_on_the_batch(null: LiveServer) -> None:
    """24 requests in a small pool: preempted, chunked or batched, each text equals the one generated alone."""
    alone = [null.post(PATH, body(number)).json["choices"][0]["text"] for number in range(24)]
    with ThreadPoolExecutor(24) as pool:
        together = list(pool.map(lambda number: null.post(PATH, body(number)).json["choices"][0]["text"], range(24)))
    assert together == alone
    wait_until_idle(null)


def test_disconnects_restore_every_gauge(null: LiveServer) -> None:
    chance = random.Random(3)

    async def one(number: int) -> None:
        stream = chance.random() < 0.7
        request = body(number, stream=stream, max_tokens=300)
        if chance.random() < 0.6:
            await leave(null.port, request, chance.choice([0, 200, 900]) if stream else 0)
        else:
            request["max_tokens"] = 20
            await asyncio.to_thread(null.post, PATH, request)

    async def all_of_them() -> None:
        await asyncio.gather(*(one(number) for number in range(64)))

    asyncio.run(all_of_them())
    wait_until_idle(null)


@pytest.mark.timing
def test_disconnect_frees_its_blocks_within_a_second(null: LiveServer) -> None:
    request = {**body(2), "prompt": "y" * 90, "max_tokens": 300, "ignore_eos": True, "stream": True}
    asyncio.run(leave(null.port, request, 400))
    start = time.monotonic()
    wait_until_idle(null)
    assert time.monotonic() - start < 3  # and other work of the machine


def test_abort_by_id_reaches_the_engine(faults: Faults) -> None:
    faults.arm("hold", position=100)
    with live(partial(null_client, backend="faulty")) as server, ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.post, PATH, body(2, max_tokens=360, n=8, ignore_eos=True), X_Request_Id="q")
        eventually(lambda: faults.count == 1)
        assert server.post("/v1/abort_requests", {"req_ids": ["q"]}).json["aborted"] == ["q"]
        faults.release()
        assert {choice["stop_reason"] for choice in running.result().json["choices"]} == {"abort"}
        wait_until_idle(server)


def test_stream_survives_the_death_of_its_engine(
    null: LiveServer, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client sees one text and one usage; during the restart the server is not ready and rejects new requests."""
    may_restart = threading.Event()
    start_another = ProcessClient._restart_once

    async def held(client: ProcessClient) -> None:
        await asyncio.to_thread(may_restart.wait, 60)
        await start_another(client)

    monkeypatch.setattr(ProcessClient, "_restart_once", held)
    length = 360
    request = {"model": "null", "prompt": "prompt", "max_tokens": length, "seed": 3, "logprobs": 1, "n": 2}
    request["logit_bias"] = {str(each): -100 for each in range(128, 257)}
    with openai.OpenAI(base_url=f"{null.url}/v1", api_key="k") as api:
        whole = api.completions.create(**request)
    faults.arm("kill", position=200)
    with (
        live(partial(null_client, "process", "faulty")) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="k") as api,
    ):
        stream = api.completions.create(**request, stream=True, stream_options={"include_usage": True})
        pieces = [next(stream)]
        eventually(lambda: not server.call(lambda: server.client.alive))
        refused = [server.get("/ready"), server.post(PATH, body(1))]
        may_restart.set()
        pieces += stream
        texts, scores = ["", ""], [[], []]
        for choice in (choice for piece in pieces for choice in piece.choices):
            texts[choice.index] += choice.text
            scores[choice.index] += choice.logprobs.token_logprobs if choice.logprobs else []
        assert texts == [choice.text for choice in whole.choices]
        assert scores == [choice.logprobs.token_logprobs for choice in whole.choices]
        assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens == 2 * length
        assert pieces[-1].usage.prompt_tokens == whole.usage.prompt_tokens
        assert [answer.status for answer in refused] == [503, 503]
        assert (refused[1].error["code"], refused[1].headers["retry-after"]) == ("engine_dead", "5")
        found = samples(server)
        assert found["fdcore_engine_epoch"] == 2
        assert found["fdcore_requests_requeued_total"] == 2
        wait_until_idle(server)


def test_generation_time_is_queue_plus_prefill_plus_decode(null: LiveServer) -> None:
    wait_until_idle(null)
    before = samples(null)
    null.post(PATH, {"prompt": "a" * 100, "max_tokens": 20, "n": 10, "ignore_eos": True})
    after = samples(null)

    def grown(name: str) -> float:
        return after[f"fdcore_{name}"] - before[f"fdcore_{name}"]

    for name in ("queue_seconds", "prefill_seconds", "decode_seconds", "time_per_token_seconds", "end_to_end_seconds"):
        assert grown(f"{name}_count") == 10
    parts = sum(grown(f"{name}_seconds_sum") for name in ("queue", "prefill", "decode"))
    assert 0 < parts <= grown("end_to_end_seconds_sum")
    assert (grown("prompt_length_tokens_sum"), grown("text_length_tokens_sum")) == (1000, 200)
