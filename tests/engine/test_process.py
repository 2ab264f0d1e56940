"""The engine as a process of its own: streams, aborts and errors of loading; `test_restarts` has its deaths."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from fd_core.config import EngineConfig
from fd_core.engine.client import EngineClient
from fd_core.engine.launch import open_client
from fd_core.errors import BadRequest, ConfigError, PluginError
from fd_core.types import FinishReason
from tests.engine.helpers import golden, random_specs

SPECS = random_specs(12, seed=11)
CONFIG = EngineConfig(
    model="null",
    backend="null",
    max_num_seqs=8,
    num_kv_blocks=40,
    block_size=16,
    max_model_len=400,
    max_num_batched_tokens=64,
)


@asynccontextmanager
async def opened(where: str) -> AsyncIterator[EngineClient]:
    client = await open_client(CONFIG, None, where=where)
    try:
        yield client
    finally:
        await client.close()


async def text(client: EngineClient, index: int) -> list[int]:
    return [token async for delta in client.submit(SPECS[index]) for token in delta.token_ids]


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


def in_each_place(test: Callable[[EngineClient], Awaitable[None]]) -> None:
    async def main(where: str) -> None:
        async with opened(where) as client:
            await test(client)

    for where in ("inproc", "process"):
        asyncio.run(main(where))


def test_streams_carry_the_golden_texts() -> None:
    async def check(client: EngineClient) -> None:
        texts = await asyncio.gather(*(text(client, index) for index in range(len(SPECS))))
        assert {f"r{index}": tokens for index, tokens in enumerate(texts)} == golden(SPECS)
        assert client.active_requests == 0
        await until(lambda: client.stats.scheduler.blocks.used == 0 and client.stats.scheduler.slots.running == 0)

    in_each_place(check)


def test_a_reader_who_leaves_frees_the_request() -> None:
    async def check(client: EngineClient) -> None:
        stream = client.submit(SPECS[1])
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        await until(lambda: client.active_requests == 0, 1.0)
        await until(lambda: client.stats.scheduler.blocks.used == 0, 1.0)

    in_each_place(check)


def test_abort_ends_the_stream() -> None:
    async def check(client: EngineClient) -> None:
        stream = client.submit(SPECS[1])
        assert client.abort(["r1", "r1", "unknown"]) == ["r1"]
        reasons = [delta.finish_reason async for delta in stream]
        assert reasons[-1] in (FinishReason.ABORT, FinishReason.LENGTH)

    in_each_place(check)


def test_an_id_in_use_is_refused() -> None:
    async def check(client: EngineClient) -> None:
        stream = client.submit(SPECS[1])
        with pytest.raises(BadRequest, match="already running"):
            client.submit(SPECS[1])
        await stream.aclose()  # type: ignore[attr-defined]

    in_each_place(check)


@pytest.mark.parametrize("where", ["inproc", "process"])
def test_errors_of_loading_reach_the_caller_with_their_class(where: str) -> None:
    async def main(**settings: object) -> None:
        values = {"model": "null", "backend": "null", "num_kv_blocks": 4, "max_model_len": 4096}
        await open_client(EngineConfig(**(values | settings)), None, where=where)  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="hold 128 tokens"):
        asyncio.run(main())
    with pytest.raises(PluginError):
        asyncio.run(main(backend="nonesuch"))
