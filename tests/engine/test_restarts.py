"""An engine that dies or stalls is replaced and its requests resume: same text, no token lost or duplicated."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import resource
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fd_core.config import EngineConfig, SpeculativeConfig
from fd_core.engine.clients import client as clients
from fd_core.engine.clients import process
from fd_core.engine.clients.client import EngineClient
from fd_core.engine.clients.inproc import InprocClient
from fd_core.engine.clients.launch import open_client
from fd_core.engine.clients.process import ProcessClient
from fd_core.errors import EngineDead
from fd_core.types import Delta, FinishReason, RequestSpec, TokenLogprobs
from tests.engine.clients.test_process import until
from tests.engine.faults import Faults
from tests.engine.helpers import Texts, golden, null_engine, random_specs, run
from tests.engine.stepping import greedy
from tests.server.processes import free_port
from tests.server.processes import process as started_process

pytestmark = pytest.mark.slow

SPECS = random_specs(10, seed=29, max_prompt=30, max_tokens=110)
"""More requests than slots, with texts that pass the fault positions; some want logprobs or penalties."""
LONG = greedy("long", range(20), 370)
POISON = 255
STALL = 2.0
"""Watchdog of tests whose engine stalls, in seconds: longer than a busy machine lets a process wait."""
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3)


@pytest.fixture(scope="module")
def undisturbed() -> Texts:
    return run(null_engine(num_kv_blocks=200), SPECS)


@asynccontextmanager
async def opened(where: str = "process", path: Path | None = None, **settings: Any) -> AsyncIterator[EngineClient]:
    values: dict[str, Any] = {
        "model": "null",
        "backend": "faulty",
        "max_num_seqs": 4,
        "num_kv_blocks": 40,
        "block_size": 16,
        "max_model_len": 400,
        "max_num_batched_tokens": 64,
    }
    client = await open_client(EngineConfig(**(values | settings)), path, where=where)
    try:
        yield client
    finally:
        await client.close()


@dataclass(slots=True)
class StreamRecord:
    """Record of what the reader of one stream received."""

    tokens: list[int] = field(default_factory=list)
    scores: list[TokenLogprobs] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    end: FinishReason | None = None
    error: str | None = None


async def read(client: EngineClient, spec: RequestSpec, during: Callable[[int], None] = lambda _: None) -> StreamRecord:
    """Read a stream to its end; `during` is called with the number of tokens so far."""
    record = StreamRecord()
    async for delta in client.submit(spec):
        assert record.end is None
        record.tokens += delta.token_ids
        record.scores += delta.logprobs or ()
        record.cached += [] if delta.cached_tokens is None else [delta.cached_tokens]
        record.end, record.error = delta.finish_reason, delta.error
        during(len(record.tokens))
    return record


async def all_texts_are(client: EngineClient, expected: Texts) -> None:
    everything = await asyncio.gather(*(read(client, spec) for spec in SPECS))
    for spec, record in zip(SPECS, everything, strict=True):
        name = spec.request_id
        assert (record.tokens, record.scores, record.end) == (
            expected.tokens[name],
            expected.scores[name],
            expected.ends[name],
        )
        assert len(record.cached) == 1, "cached_tokens is reported once"
    assert client.active_requests == 0
    await until(lambda: client.stats.scheduler.blocks.used == 0 and client.stats.scheduler.slots.running == 0)


def signal_to(client: EngineClient, number: int) -> None:
    assert isinstance(client, ProcessClient)
    assert client.pid is not None
    os.kill(client.pid, number)


def submit_and_kill(client: EngineClient, spec: RequestSpec = LONG) -> AsyncIterator[Delta]:
    """Submit a request to an engine that is killed before it computes it."""
    signal_to(client, signal.SIGSTOP)
    stream = client.submit(spec)
    signal_to(client, signal.SIGKILL)
    return stream


def run_test(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await test()

    asyncio.run(bounded())


# Kinds of death -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hows", "transport", "depth"),
    [
        pytest.param(("kill", "exit"), "memory", 1, id="hows0-memory-1"),
        pytest.param(("raise", "hold"), "zmq", 2, id="hows1-zmq-2"),
        pytest.param(("kill", "exit"), "zmq", 1, id="hows0-zmq-1", marks=pytest.mark.soak),
        pytest.param(("kill", "exit"), "memory", 2, id="hows0-memory-2", marks=pytest.mark.soak),
        pytest.param(("kill", "exit"), "zmq", 2, id="hows0-zmq-2", marks=pytest.mark.soak),
        pytest.param(("raise", "hold"), "memory", 1, id="hows1-memory-1", marks=pytest.mark.soak),
        pytest.param(("raise", "hold"), "zmq", 1, id="hows1-zmq-1", marks=pytest.mark.soak),
        pytest.param(("raise", "hold"), "memory", 2, id="hows1-memory-2", marks=pytest.mark.soak),
    ],
)
def test_texts_survive_two_engine_deaths(
    faults: Faults, undisturbed: Texts, hows: tuple[str, str], transport: str, depth: int
) -> None:
    """Both deaths occur mid-text, with running and waiting requests; the second one strikes later."""
    faults.arm(*hows, position=50, every=40)

    async def main() -> None:
        watchdog = STALL if "hold" in hows else 60.0
        async with opened(output_transport=transport, pipeline_depth=depth, watchdog_seconds=watchdog) as client:
            await all_texts_are(client, undisturbed)
            assert (faults.count, client.info.epoch) == (2, 3)
            assert client.requests_requeued > len(SPECS)

    run_test(main)


def test_speculative_texts_survive_engine_death(faults: Faults, undisturbed: Texts) -> None:
    faults.arm("kill", position=70)

    async def main() -> None:
        async with opened(speculative=NGRAM, pipeline_depth=2) as client:
            await all_texts_are(client, undisturbed)
            assert client.info.epoch == 2

    run_test(main)


def test_suspended_engine_is_replaced(faults: Faults) -> None:
    """The engine is suspended mid-stream and killed by the watchdog."""
    faults.arm("hold", position=200)

    async def main() -> None:
        async with opened(watchdog_seconds=STALL) as client:
            reading = asyncio.create_task(read(client, LONG))
            await until(lambda: faults.count == 1)
            signal_to(client, signal.SIGSTOP)
            faults.release()
            assert (await reading).tokens == golden([LONG])["long"]
            assert (client.info.epoch, client.requests_requeued) == (2, 1)

    run_test(main)


def test_real_model_resumes_after_kill(faults: Faults, tmp_path: Path) -> None:
    from tests.models.tiny import write_tiny

    path = write_tiny("llama", tmp_path / "model").folder
    faults.arm("hold", position=40)
    settings: dict[str, Any] = {"backend": "reference", "max_model_len": 128, "num_threads": 1}
    specs = [greedy("a", range(9), 90, logprobs=2), greedy("b", range(5, 15), 90, temperature=1.0, seed=7)]

    async def main() -> None:
        async with opened("inproc", path, **settings) as client:
            expected = [await read(client, spec) for spec in specs]
        async with opened("process", path, **settings | {"backend": "faulty_reference"}) as client:
            reading = asyncio.gather(*(read(client, spec) for spec in specs))
            await until(lambda: faults.count == 1)
            signal_to(client, signal.SIGKILL)
            record = await reading
            assert (client.info.epoch, client.requests_requeued) == (2, 2)
            for mine, whole in zip(record, expected, strict=True):
                assert (mine.tokens, mine.end) == (whole.tokens, whole.end)
                assert [score.top_ids for score in mine.scores] == [score.top_ids for score in whole.scores]
                assert [score.logprob for score in mine.scores] == pytest.approx(
                    [s.logprob for s in whole.scores], abs=1e-4
                )

    run_test(main)


# Limits of retrying -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["process", "inproc"])
def test_poison_request_fails_and_others_resume(faults: Faults, where: str) -> None:
    faults.arm(*["kill" if where == "process" else "raise"] * 9, token=POISON, position=2)
    poison = greedy("poison", [1, 2, POISON], 5)

    async def main() -> None:
        async with opened(where) as client:
            feast: asyncio.Task[StreamRecord] | None = None

            def invite(count: int) -> None:
                nonlocal feast
                if feast is None:
                    feast = asyncio.create_task(read(client, poison))

            record = await read(client, LONG, invite)
            assert record.tokens == golden([LONG])["long"]
            assert feast is not None
            victim = await feast
            assert (victim.tokens, victim.end) == ([], FinishReason.ERROR)
            # A killed engine may not have sent yet that the request was admitted: such a death does not count.
            assert victim.error is not None and re.search("died [23] times with this request", victim.error)
            await read(client, greedy("next", [1], 1))  # the last death may have come after the long text
            assert 3 <= client.info.epoch <= 8

    run_test(main)


@pytest.mark.parametrize("where", ["process", "inproc"])
def test_requests_admitted_with_poison_request_survive(faults: Faults, where: str) -> None:
    faults.arm(*["kill" if where == "process" else "raise"] * 9, token=POISON, position=2)
    poison = greedy("poison", [1, 2, POISON], 5)
    # One request is submitted before it and one after it.
    others = [LONG, greedy("late", range(7), 30)]

    async def main() -> None:
        async with opened(where) as client:
            first, victim, second = await asyncio.gather(
                *(read(client, spec) for spec in (others[0], poison, others[1]))
            )
            expected = golden(others)
            assert (first.tokens, second.tokens) == (expected["long"], expected["late"])
            assert (victim.tokens, victim.end) == ([], FinishReason.ERROR)
            assert client.active_requests == 0

    run_test(main)


def test_requests_fail_when_restart_fails(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    faults.arm("load")
    monkeypatch.setattr(clients, "_FIRST_SECONDS", 0.01)

    async def main() -> None:
        async with opened(restart_attempts=2) as client:
            stream = client.submit(LONG)
            signal_to(client, signal.SIGKILL)
            with pytest.raises(EngineDead, match="failed to restart 2 times; restart the server"):
                async for _ in stream:
                    pass
            assert not client.alive
            assert client.permanently_failed and not client.healthy and client.start_failures == 2
            for use in (client.abort_all, lambda: client.submit(SPECS[0])):
                with pytest.raises(EngineDead, match="restart the server"):
                    use()

    run_test(main)


def test_engine_recovers_after_requests_gave_up(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    faults.arm("load")
    monkeypatch.setattr(clients, "_FIRST_SECONDS", 0.01)
    monkeypatch.setattr(clients, "_MAX_FAILED_STARTS", 1)

    async def main() -> None:
        async with opened(restart_attempts=0) as client:
            stream = client.submit(LONG)
            signal_to(client, signal.SIGKILL)
            with pytest.raises(EngineDead, match="the server keeps trying"):
                async for _ in stream:
                    pass
            with pytest.raises(EngineDead, match="the server keeps trying"):
                client.submit(LONG)
            assert not client.healthy and not client.permanently_failed
            faults.arm()
            await until(lambda: client.alive)
            assert client.start_failures >= 1
            assert (await read(client, LONG)).tokens == golden([LONG])["long"]

    run_test(main)


def test_failed_fork_counts_as_failed_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_FIRST_SECONDS", 0.01)

    async def main() -> None:
        async with opened(backend="null", restart_attempts=3) as client:
            monkeypatch.setattr(process.EngineProcess, "begin", no_room)
            stream = submit_and_kill(client)
            with pytest.raises(EngineDead, match="failed to restart 3 times"):
                async for _ in stream:
                    pass

    async def no_room(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    run_test(main)


def test_restart_backoff_doubles_up_to_one_minute() -> None:
    assert [clients.pause_after(failures) for failures in (1, 2, 3, 6, 7, 10**6)] == [1, 2, 4, 32, 60, 60]


def test_engine_stuck_during_start_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_FIRST_SECONDS", 0.01)
    begin = process.EngineProcess.begin

    async def stuck(*arguments: Any) -> process.EngineProcess:
        begun = await begin(*arguments)
        os.kill(begun.process.pid, signal.SIGSTOP)
        return begun

    async def main() -> None:
        async with opened(backend="null") as client:
            monkeypatch.setattr(process, "_START_SECONDS", 0.01)
            monkeypatch.setattr(process.EngineProcess, "begin", stuck)
            stream = submit_and_kill(client)
            with pytest.raises(EngineDead, match="failed to restart"):
                async for _ in stream:
                    pass

        with pytest.raises(EngineDead, match=r"did not respond for 0.01 s while it started"):
            async with opened(backend="null"):
                pass

    run_test(main)


# Aborts and disconnects between epochs ------------------------------------------------------------------------


def test_abort_survives_engine_death(faults: Faults) -> None:
    """The aborted request ends as aborted, waiting or running; the other one resumes."""
    faults.arm("hold", position=60)

    async def main() -> None:
        async with opened(max_num_seqs=1) as client:
            running, waiting = client.submit(LONG), client.submit(greedy("w", [1], 370))
            third = asyncio.create_task(read(client, SPECS[2]))
            await anext(running)
            await until(lambda: faults.count == 1)
            assert client.abort(["long", "w"]) == ["long", "w"]
            signal_to(client, signal.SIGKILL)
            for stream in (running, waiting):
                assert [delta.finish_reason async for delta in stream][-1] is FinishReason.ABORT
            assert (await third).tokens == golden(SPECS)["r2"]
            assert client.requests_requeued == 1

    run_test(main)


def test_requests_aborted_or_abandoned_between_epochs_not_requeued(faults: Faults) -> None:
    faults.arm("hold", "hold", every=45)  # the first step, until all are submitted, and one in the middle of each text

    async def main() -> None:
        async with opened() as client:
            aborted, left = client.submit(LONG), client.submit(greedy("left", [1], 370))
            kept = asyncio.create_task(read(client, SPECS[4]))
            await until(lambda: client.active_requests == 3)
            faults.release()
            await asyncio.gather(anext(aborted), anext(left))
            await until(lambda: faults.count == 2)
            signal_to(client, signal.SIGKILL)
            await until(lambda: not client.alive)
            with pytest.raises(EngineDead, match="the engine failed"):
                client.submit(SPECS[5])
            assert client.abort(["long", "unknown"]) == ["long"]
            assert [delta.finish_reason async for delta in aborted][-1] is FinishReason.ABORT
            await left.aclose()  # type: ignore[attr-defined]
            assert (await kept).tokens == golden(SPECS)["r4"]
            assert client.requests_requeued == 1
            assert client.active_requests == 0

    run_test(main)


def test_close_during_restart_ends_streams_and_processes() -> None:
    async def main() -> None:
        async with opened(backend="null") as client:
            assert isinstance(client, ProcessClient)
            stream = client.submit(LONG)
            signal_to(client, signal.SIGKILL)
            await until(lambda: not client.alive)
            await client.close()
            with pytest.raises(EngineDead, match="closed"):
                async for _ in stream:
                    pass
            child = client._process
            assert child is not None and child.process.returncode is not None

    run_test(main)


# Engine in a thread --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_engine_thread_with_failed_step_is_replaced(faults: Faults, undisturbed: Texts, depth: int) -> None:
    faults.arm("raise", "raise", position=50, every=40)

    async def main() -> None:
        async with opened("inproc", pipeline_depth=depth) as client:
            await all_texts_are(client, undisturbed)
            assert (faults.count, client.info.epoch) == (2, 3)

    run_test(main)


@pytest.mark.parametrize("depth", [1, 2])
def test_stalled_engine_thread_fails_requests_with_reason(faults: Faults, depth: int) -> None:
    faults.arm("hold", position=60)

    async def main() -> None:
        async with opened("inproc", pipeline_depth=depth, watchdog_seconds=0.3) as client:
            assert isinstance(client, InprocClient)
            with pytest.raises(EngineDead, match="a thread cannot be replaced, so restart the server"):
                await read(client, LONG)
            assert not client.alive

    run_test(main)


def test_server_exits_with_code_5_when_engine_is_lost(tmp_path: Path) -> None:
    log, port = tmp_path / "log", free_port()
    words = ("serve", "null", "--backend", "null", "--num-threads", "1", "--restart-attempts", "1")
    with started_process(log, sys.executable, "-m", "fd_core.cli", *words, "--port", str(port)) as server:
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
        deadline = time.monotonic() + 60
        while "Ctrl-C" not in log.read_text():
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        descriptors = len(list(Path(f"/proc/{server.pid}/fd").iterdir()))
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (descriptors, descriptors))  # no process can be started
        for child in children.read_text().split():
            os.kill(int(child), signal.SIGKILL)
        assert server.wait(60) == 5, log.read_text()
        assert log.read_text().splitlines()[-1] == "fdcore: the server exited because the engine is not running"
