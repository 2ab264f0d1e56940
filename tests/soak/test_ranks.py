"""One model on two ranks while rank 1 is killed, stopped or slowed: no token is lost or repeated, and nothing hangs.

Part of `nox -s soak`. A failure prints the seed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from tests.process_state import lives
from tests.server.processes import Server, serving
from tests.soak.test_http import Answer, ask, bodies

pytestmark = pytest.mark.soak

SEED = int(os.environ.get("FD_SOAK_SEED", "20261121"))
STREAMS: Final = 32
WATCHDOG: Final = 16.0
MODELS: Final = {"null": ("--backend", "null"), "smollm2": ("--backend", "cpu")}
SERVE: Final = (
    *("--tensor-parallel-size", "2", "--watchdog-seconds", str(WATCHDOG), "--log-level", "warning"),
    *("--max-model-len", "256", "--block-size", "16", "--max-num-seqs", str(STREAMS), "--num-kv-blocks", "512"),
)
GOES_ON: Final = ("slow", "pause of all")
FAULTS: Final = ("kill", "stop", *GOES_ON, "kill at rest", "stop at rest")
_LOST_SECONDS: Final = 5 * WATCHDOG
"""Seconds until a lost rank has to be detected, on a slow machine, too."""
_BACK_SECONDS: Final = 240.0


def requests(model: str) -> list[dict[str, Any]]:
    """Return streams with answers of up to 160 tokens."""
    known = 256 if model == "null" else 49152
    chosen = [{**body, "model": model, "ignore_eos": True} for body in bodies()[:STREAMS]]
    return [{**body, "prompt": [token % known for token in body["prompt"]]} for body in chosen]


async def ask_all(server: Server, model: str) -> list[Answer]:
    """Send all requests at once."""
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(server.url, connector=connector, timeout=timeout) as session:
        return await asyncio.gather(*(ask(session, body) for body in requests(model)))


def processes() -> tuple[int, int, int]:
    """Return the process ids of the server that this process has started, of its engine and of rank 1."""
    (server,) = (
        child for child in children(os.getpid()) if b"fd_core.cli" in Path(f"/proc/{child}/cmdline").read_bytes()
    )
    (engine,) = (
        child for child in children(server) if b"fd_core.engine" in Path(f"/proc/{child}/cmdline").read_bytes()
    )
    (rank,) = children(engine)
    return server, engine, rank


def children(pid: int) -> list[int]:
    return [
        int(each) for task in Path(f"/proc/{pid}/task").iterdir() for each in (task / "children").read_text().split()
    ]


def ready(server: Server) -> bool:
    try:
        with urllib.request.urlopen(f"{server.url}/ready", timeout=10) as page:
            return page.status == 200
    except urllib.error.HTTPError:
        return False


async def until(happened: Callable[[], bool], seconds: float) -> float:
    """Wait for the condition and return the seconds that it took."""
    began = time.monotonic()
    while not await asyncio.to_thread(happened):
        assert time.monotonic() - began < seconds
        await asyncio.sleep(0.02)
    return time.monotonic() - began


async def inject(server: Server, fault: str) -> None:
    """Inject a fault into rank 1, and return once the server has recovered."""
    await until(lambda: ready(server), _BACK_SECONDS)
    *_, rank = processes()
    if fault == "pause of all":
        epoch = server.metrics()["engine_epoch"]
        for pid in processes():
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(WATCHDOG + 1)
        for pid in processes():
            os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(WATCHDOG / 2)
        assert server.metrics()["engine_epoch"] == epoch, "a pause of all processes caused a restart"
        return
    if fault == "slow":
        for _ in range(12):
            os.kill(rank, signal.SIGSTOP)
            await asyncio.sleep(0.2)
            os.kill(rank, signal.SIGCONT)
            await asyncio.sleep(0.05)
        return
    os.kill(rank, signal.SIGKILL if fault.startswith("kill") else signal.SIGSTOP)
    missed = await until(lambda: not ready(server), _LOST_SECONDS)
    back = await until(lambda: ready(server), _BACK_SECONDS)
    print(f"{fault}: detected after {missed:.2f} s, recovered after another {back:.1f} s")
    assert not lives(rank)


async def check_model(server: Server, model: str, rng: random.Random) -> None:
    whole = await ask_all(server, model)
    assert all(answer.finish_reason == "length" for answer in whole)
    total = sum(len(answer.token_ids) for answer in whole)
    lost = 0
    for fault in rng.sample(FAULTS, len(FAULTS)):
        lost += fault not in GOES_ON
        if fault.endswith("at rest"):
            await inject(server, fault)
            assert await ask_all(server, model) == whole
        else:
            begun = server.metrics()["generated_tokens_total"]
            asking = asyncio.create_task(ask_all(server, model))
            some = begun + rng.uniform(0.1, 0.6) * total
            await until(lambda: asking.done() or server.metrics()["generated_tokens_total"] > some, _BACK_SECONDS)  # noqa: B023 - called at once
            await inject(server, fault)
            assert await asking == whole, fault
        metrics = server.metrics()
        # An overloaded machine may delay an engine without any fault.
        assert metrics["engine_epoch"] > metrics["rank_failures_total[1]"] >= lost, fault
    assert metrics["engine_finished_total[error]"] == metrics["stale_outputs_total"] == 0
    assert not any(server.gauges().values())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", MODELS)
def test_model_on_ranks_survives_faults_of_one_rank(tmp_path: Path, model: str) -> None:
    print(f"seed {SEED}")
    log = tmp_path / "server.log"
    with serving(log, model, *MODELS[model], *SERVE) as server:
        asyncio.run(check_model(server, model, random.Random(SEED)))
    for words in ("rank 1 was ended by SIGKILL", "rank 1 did not respond|rank 1 did not answer"):
        assert any(each in log.read_text() for each in words.split("|")), words
