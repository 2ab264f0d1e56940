"""Processes that compile grammars: limits, slots per client, crashes, and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from fd_core.structured.compiler import VocabularyTable
from fd_core.structured.grammar import GrammarConstraint, OutputConstraint, RequestedConstraint, SchemaConstraint
from fd_core.structured.workers.messages import ConstraintOutcome
from fd_core.structured.workers.pool import CompilePool, _TaskSlots
from fd_core.text.fair_thread import CLIENT

TABLE = VocabularyTable([bytes([each]) for each in range(256)] + [b""], [256], [256])
LONG = GrammarConstraint("grammar", "start: T\nT: " + " & ".join(f"/(.*a{i}.*b.*)*/" for i in range(200)))
"""Grammar that takes far more CPU time than a task may."""
DEEP = GrammarConstraint(
    "grammar", "\n".join(["start: r0", *(f'r{i}: r{i + 1} r{i + 1} | "a"' for i in range(3000)), 'r3000: "z"'])
)
"""Grammar that overflows the library's stack."""


def ordinary(name: str = "name") -> SchemaConstraint:
    schema = {"type": "object", "properties": {name: {"type": "string"}}, "required": [name]}
    return SchemaConstraint(schema=schema)


def used(work: Any, **options: Any) -> Any:
    """Run `work(pool)` and close the pool."""

    async def main() -> Any:
        pool = CompilePool(lambda: TABLE, **options)
        try:
            return await work(pool)
        finally:
            processes = [each._process for each in pool._processes]
            pool.close()
            assert all(each.returncode is not None for each in processes)

    return asyncio.run(main())


def run(pool: CompilePool, constraint: OutputConstraint, client: str = "a") -> Coroutine[Any, Any, ConstraintOutcome]:
    async def one() -> ConstraintOutcome:
        CLIENT.set(client)
        return await pool.run(RequestedConstraint("field", constraint))

    return one()


def test_concurrent_requests_compile_a_grammar_once() -> None:
    async def work(pool: CompilePool) -> None:
        outcomes = await asyncio.gather(*(run(pool, ordinary(), str(index)) for index in range(20)))
        assert {each.grammar for each in outcomes} == {ordinary().grammar("field")}
        assert len(pool._processes) == 1
        assert await run(pool, ordinary()) is outcomes[0]

    used(work)


@pytest.mark.timing
def test_slow_task_is_killed_while_others_are_served() -> None:
    async def work(pool: CompilePool) -> None:
        await run(pool, ordinary("first"), "b")
        slow = asyncio.create_task(run(pool, LONG))
        served = 0
        while not slow.done():
            assert (await run(pool, ordinary(f"n{served}"), "b")).grammar
            served += 1
        outcome = await slow
        assert served > 3
        assert (outcome.field, outcome.code) == ("field", "invalid_grammar")
        assert "CPU time" in outcome.message
        began = time.monotonic()
        assert await run(pool, LONG) == outcome  # cached, without another attempt
        assert time.monotonic() - began < 0.5

    used(work, seconds=120.0)


def test_deadline_kills_the_process_and_caches_no_failure() -> None:
    async def work(pool: CompilePool) -> None:
        await run(pool, ordinary())
        [process] = [each._process for each in pool._processes]
        pool._seconds = 0.05
        outcome = await run(pool, LONG)
        assert "more than 0.05 s" in outcome.message
        assert process.wait(30) == -signal.SIGKILL
        assert not any(each.message for each in pool._cache.values())

    used(work)


def test_grammar_that_crashes_its_process_is_rejected() -> None:
    async def work(pool: CompilePool) -> None:
        outcome = await run(pool, DEEP)
        assert "nests too deeply" in outcome.message
        assert (await run(pool, ordinary())).grammar

    used(work)


@pytest.mark.parametrize("answer", ["2**31 - 1", "2**32 - 1"])
def test_oversized_result_ends_its_process_immediately(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import socket, time\n"
        "server = socket.socket(fileno=0)\n"
        "server.recv(1 << 20)\n"
        "server.sendall(bytes(4))\n"
        "server.recv(1 << 20)\n"
        f"server.sendall(({answer}).to_bytes(4, 'little') + bytes(10))\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr("fd_core.structured.workers.pool.child_command", lambda *_: [sys.executable, "-c", script])

    async def work(pool: CompilePool) -> None:
        outcome = await asyncio.wait_for(run(pool, ordinary()), 30)
        assert (outcome.grammar, outcome.code) == ("", "invalid_grammar")
        assert "too much memory" in outcome.message

    used(work, seconds=60.0)


def test_process_killed_while_idle_is_replaced() -> None:
    async def work(pool: CompilePool) -> None:
        await run(pool, ordinary())
        [process] = pool._processes
        process._process.kill()
        process._process.wait()
        assert (await run(pool, ordinary("other"))).grammar

    used(work)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_task_whose_process_is_killed_runs_in_another(number: signal.Signals) -> None:
    async def work(pool: CompilePool) -> None:
        await run(pool, ordinary())
        [process] = [each._process for each in pool._processes]
        process.send_signal(signal.SIGSTOP)
        running = asyncio.create_task(run(pool, ordinary("other")))
        await asyncio.sleep(0.1)
        for each in (number, signal.SIGCONT):
            process.send_signal(each)
        assert (await running).grammar
        assert process.returncode == -number

    used(work)


def test_cancelled_work_kills_its_process() -> None:
    async def work(pool: CompilePool) -> None:
        await run(pool, ordinary())
        [process] = [each._process for each in pool._processes]
        waiting = [asyncio.create_task(run(pool, LONG)) for _ in range(2)]
        await asyncio.sleep(0.2)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert not pool._running
        while process.returncode is None:
            await asyncio.sleep(0.01)
        assert process.returncode == -signal.SIGKILL

    used(work)


def test_slots_rotate_between_clients_and_none_takes_all() -> None:
    async def main() -> list[str]:
        slots, order = _TaskSlots(4, 3), []

        async def one(client: str, rest: float = 0.0) -> None:
            await slots.take(client)
            order.append(client)
            await asyncio.sleep(0)
            slots.free(client, rest)

        greedy = [asyncio.create_task(one("a", 30.0)) for _ in range(10)]
        await asyncio.sleep(0.01)
        assert order == ["a"] * 3  # whose slots are resting now
        await asyncio.gather(*(one(client) for client in "bcbc"))
        for task in greedy:
            task.cancel()
        await asyncio.gather(*greedy, return_exceptions=True)
        assert slots._free == 4 and not slots._waiting
        return order

    assert sorted(asyncio.run(main())[3:]) == ["b", "b", "c", "c"]


def test_cancelled_wait_for_a_slot_takes_none() -> None:
    async def main() -> None:
        slots = _TaskSlots(1, 1)
        await slots.take("a")
        waiting = asyncio.create_task(slots.take("b"))
        await asyncio.sleep(0)
        waiting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiting
        slots.free("a", 0.0)
        await asyncio.wait_for(slots.take("c"), 5)

    asyncio.run(main())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_their_parent(number: signal.Signals) -> None:
    program = (
        "import asyncio\n"
        "from tests.structured.workers.test_pool import *\n"
        "async def main():\n"
        "    pool = CompilePool(lambda: TABLE)\n"
        "    await run(pool, ordinary())\n"
        "    [process] = pool._processes\n"
        "    task = asyncio.create_task(run(pool, LONG))\n"
        "    await asyncio.sleep(0.2)\n"
        "    print(process._process.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": ":".join(sys.path)}
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.send_signal(number)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and _runs(child):
        time.sleep(0.02)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"
