"""The engine as a separate process: streams, aborts and load errors; `test_restarts` covers its deaths."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from fd_core.config import EngineConfig
from fd_core.engine.clients.client import EngineClient
from fd_core.engine.clients.launch import open_client
from fd_core.engine.clients.process import ProcessClient
from fd_core.engine.process.engine_process import EngineProcess, prestarted_process
from fd_core.errors import BadRequest, ConfigError, EngineDead, ModelError, PluginError
from fd_core.types import FinishReason
from tests.engine.helpers import golden, random_specs
from tests.process_state import lives

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


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


def in_process_and_thread(test: Callable[[EngineClient], Awaitable[None]]) -> None:
    async def main(where: str) -> None:
        async with opened(where) as client:
            await test(client)

    for where in ("inproc", "process"):
        asyncio.run(main(where))


def test_streams_deliver_golden_texts() -> None:
    async def check(client: EngineClient) -> None:
        texts = await asyncio.gather(*(text(client, index) for index in range(len(SPECS))))
        assert {f"r{index}": tokens for index, tokens in enumerate(texts)} == golden(SPECS)
        assert client.active_requests == 0
        await until(lambda: client.stats.scheduler.blocks.used == 0 and client.stats.scheduler.slots.running == 0)

    in_process_and_thread(check)


def test_abandoned_stream_frees_its_request() -> None:
    async def check(client: EngineClient) -> None:
        stream = client.submit(SPECS[1])
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        await until(lambda: client.active_requests == 0)
        await until(lambda: client.stats.scheduler.blocks.used == 0)

    in_process_and_thread(check)


def test_abort_ends_the_stream() -> None:
    async def check(client: EngineClient) -> None:
        stream = client.submit(SPECS[1])
        assert client.abort(["r1", "r1", "unknown"]) == ["r1"]
        reasons = [delta.finish_reason async for delta in stream]
        assert reasons[-1] in (FinishReason.ABORT, FinishReason.LENGTH)

    in_process_and_thread(check)


def test_duplicate_request_id_is_rejected() -> None:
    async def check(client: EngineClient) -> None:
        stream = client.submit(SPECS[1])
        with pytest.raises(BadRequest, match="already running"):
            client.submit(SPECS[1])
        await stream.aclose()  # type: ignore[attr-defined]

    in_process_and_thread(check)


@pytest.mark.parametrize("where", ["inproc", "process"])
def test_load_errors_keep_their_class(where: str) -> None:
    async def main(**settings: object) -> None:
        values = {"model": "null", "backend": "null", "num_kv_blocks": 4, "max_model_len": 4096}
        await open_client(EngineConfig(**(values | settings)), None, where=where)  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="hold 128 tokens"):
        asyncio.run(main())
    with pytest.raises(PluginError):
        asyncio.run(main(backend="nonesuch"))


@asynccontextmanager
async def begun() -> AsyncIterator[EngineProcess]:
    async with prestarted_process("null") as process:
        assert process is not None
        yield process


def test_prestarted_process_serves_config_sent_later() -> None:
    async def main() -> None:
        async with begun() as process:
            await asyncio.sleep(0.1)
            assert process.process.returncode is None
            client = await open_client(CONFIG, None, prestarted=process)
            try:
                assert isinstance(client, ProcessClient) and client.pid == process.process.pid
                assert await text(client, 0) == golden(SPECS)["r0"]
            finally:
                await client.close()

    asyncio.run(main())


def test_dead_prestarted_process_is_replaced() -> None:
    async def main() -> None:
        async with begun() as process:
            client = await open_client(CONFIG, None, prestarted=process)
            try:
                os.kill(process.process.pid, signal.SIGKILL)
                await until(lambda: client.info.epoch == 2)
                assert await text(client, 0) == golden(SPECS)["r0"]
            finally:
                await client.close()

    asyncio.run(main())


def test_prestarted_process_exit_is_reported_as_engine_death() -> None:
    async def main() -> None:
        async with begun() as process:
            process.process.kill()
            await process.process.wait()
            await open_client(CONFIG, None, prestarted=process)

    with pytest.raises(EngineDead, match="ended with exit code -9"):
        asyncio.run(main())


def test_prestarted_process_ends_when_model_is_missing() -> None:
    pids: list[int] = []

    async def main() -> None:
        async with begun() as process:
            pids.append(process.process.pid)
            raise ModelError("there is no such model")

    with pytest.raises(ModelError):
        asyncio.run(main())
    assert not lives(pids[0])


def test_prestarted_process_ends_with_its_parent() -> None:
    code = (
        "import asyncio, os\n"
        "from fd_core.engine.process.engine_process import EngineProcess\n"
        "async def main():\n"
        "    print((await EngineProcess.begin('null')).process.pid, flush=True)\n"
        "    os._exit(1)\n"
        "asyncio.run(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    ends = time.monotonic() + 60
    while lives(int(done.stdout)):
        assert time.monotonic() < ends
        time.sleep(0.02)


@pytest.mark.parametrize("ranks", [1, 2])
def test_modules_of_working_directory_are_not_imported(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("numpy", "msgspec", "fd_core"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stranger ran')\n")
    monkeypatch.chdir(tmp_path)

    async def main() -> None:
        config = msgspec.structs.replace(CONFIG, tensor_parallel_size=ranks)
        client = await open_client(config, None, where="process")
        try:
            assert await text(client, 0) == golden(SPECS)["r0"]
        finally:
            await client.close()

    asyncio.run(main())


def test_framework_import_error_is_reported() -> None:
    async def main() -> None:
        async with prestarted_process("nonesuch") as process:
            await open_client(CONFIG, None, prestarted=process)

    with pytest.raises(PluginError, match="nonesuch"):
        asyncio.run(main())
