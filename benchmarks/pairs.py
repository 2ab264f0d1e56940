"""Compare a prefill and a decode worker with two mixed ones: the effect of long prompts on running decodes.

    python benchmarks/pairs.py
    python benchmarks/pairs.py --rounds 1 --seconds 10

Each arrangement is a router and two workers with one processor each, on the same model and the same two processors. A
number of chats goes on without end, each a short prompt and a text; at random times a long prompt arrives that asks for
a short answer. Arrangements take turns in every round. Times between tokens are those of the chats, taken where the
client reads them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import aiohttp
import numpy as np
from harness.options import RESULTS
from rich.console import Console
from rich.progress import track
from rich.table import Table

import fd_core
from fd_core.cli.bench.compare import machine

FDCORE = Path(sys.executable).with_name("fdcore")
MODEL = "smollm2"
START_SECONDS = 180
TOKENS = range(1000, 40000)
"""Ids that prompts are drawn from."""
HEADINGS = (
    *("arrangement", "tokens/s", "between tokens ms p50", "p99", "longest", "chat TTFT s p50"),
    *("long TTFT s p50", "p95", "long prompts", "transferred"),
)


@dataclass(slots=True)
class Seen:
    """Times of one run as measured by a client, in seconds."""

    gaps: list[float] = field(default_factory=list)
    chat_ttft: list[float] = field(default_factory=list)
    long_ttft: list[float] = field(default_factory=list)
    tokens: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """The figures of one arrangement in one round."""

    arrangement: str
    round: int
    tokens_per_second: float
    gap_p50: float
    gap_p99: float
    gap_max: float
    chat_ttft_p50: float
    long_ttft_p50: float
    long_ttft_p95: float
    long_prompts: int
    transferred: int
    failed: int


def free_port() -> int:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


@contextlib.contextmanager
def started(command: Sequence[str], processor: int | None, log: Path) -> Iterator[int]:
    """Run a process until the block ends, on one processor if one is named; yield its id."""
    pinned = ["taskset", "-c", str(processor)] if processor is not None else []
    with log.open("w") as file:
        process = subprocess.Popen([*pinned, *command], stdout=file, stderr=file)
    try:
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


@contextlib.contextmanager
def arrangement(roles: Sequence[str], options: argparse.Namespace, folder: Path) -> Iterator[str]:
    """Start two workers of these roles and their router; yield the router's address."""
    processors = sorted(os.sched_getaffinity(0))
    ports = [free_port() for _ in roles]
    route = [str(FDCORE), "route", "--port", str(free_port()), "--health-check-interval-secs", "1"]
    with contextlib.ExitStack() as stack:
        for index, (role, port) in enumerate(zip(roles, ports, strict=True)):
            serve = [str(FDCORE), "serve", MODEL, "--port", str(port), "--role", role, "--num-threads", "1"]
            serve += ["--dtype", "bfloat16", "--kv-connector", options.connector]
            serve += ["--max-num-batched-tokens", str(options.budget)]
            log = folder / f"{role}-{index}.log"
            stack.enter_context(started(serve, processors[index % len(processors)], log))
            route += [f"--{role}" if role != "mixed" else "--worker", f"http://127.0.0.1:{port}"]
        stack.enter_context(started(route, None, folder / "router.log"))
        url = f"http://127.0.0.1:{route[3]}"
        asyncio.run(until_ready([*(f"http://127.0.0.1:{port}" for port in ports), url]))
        yield url


async def until_ready(urls: Sequence[str]) -> None:
    """Wait until all of them serve."""
    async with aiohttp.ClientSession() as session:
        deadline = time.monotonic() + START_SECONDS
        for url in urls:
            while True:
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{url}/ready") as answer:
                        if answer.status == 200:
                            break
                if time.monotonic() > deadline:
                    raise SystemExit(f"{url} does not get ready")
                await asyncio.sleep(0.2)


async def ask(session: aiohttp.ClientSession, url: str, prompt: Sequence[int], tokens: int, seen: Seen) -> list[float]:
    """Stream one answer; return the time of the request and of each event with a token."""
    body = {"prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    times = [time.perf_counter()]
    async with session.post(f"{url}/v1/completions", json=body | {"return_token_ids": True}) as answer:
        outcome = answer.headers.get("X-FD-Prefill-Outcome", "none")
        seen.outcomes[outcome] = seen.outcomes.get(outcome, 0) + 1
        async for line in answer.content:
            if line.startswith(b"data: {") and (ids := json.loads(line[6:])["choices"][0].get("token_ids")):
                times.append(time.perf_counter())
                seen.tokens += len(ids)
    if len(times) < 2 or answer.status != 200:
        seen.failed += 1
    return times


async def crowd(url: str, options: argparse.Namespace, seed: int) -> Seen:
    """Send the chats and the long prompts for a while."""
    seen, chance = Seen(), random.Random(seed)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for length in (options.chat_tokens, options.long_tokens):  # warm-up: no first request is measured
            await asyncio.gather(*(ask(session, url, chance.choices(TOKENS, k=length), 4, Seen()) for _ in range(2)))
        end = time.perf_counter() + options.seconds

        async def chat() -> None:
            while time.perf_counter() < end:
                prompt = chance.choices(TOKENS, k=options.chat_tokens)
                times = await ask(session, url, prompt, options.chat_output, seen)
                seen.chat_ttft.append(times[1] - times[0])
                seen.gaps += np.diff(times[1:]).tolist()

        async def long() -> None:
            times = await ask(session, url, chance.choices(TOKENS, k=options.long_tokens), 8, seen)
            seen.long_ttft.append(times[1] - times[0])

        async with asyncio.TaskGroup() as group:
            for _ in range(options.chats):
                group.create_task(chat())
            due, arrivals = time.perf_counter(), random.Random(f"{seed}/long")
            # At random, or chats that wait for the same long prompt would meet the next one together, too.
            while (due := due + arrivals.expovariate(1 / options.long_every)) < end:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                group.create_task(long())
    return seen


def measure(name: str, roles: Sequence[str], number: int, options: argparse.Namespace) -> Run:
    """Run one arrangement once."""
    with tempfile.TemporaryDirectory() as folder, arrangement(roles, options, Path(folder)) as url:
        time.sleep(2)  # until health checks have found the workers
        began = time.perf_counter()
        seen = asyncio.run(crowd(url, options, number))
        seconds = time.perf_counter() - began
    gaps, long = np.array(seen.gaps), np.array(seen.long_ttft)
    return Run(
        name,
        number,
        seen.tokens / seconds,
        float(np.quantile(gaps, 0.5)),
        float(np.quantile(gaps, 0.99)),
        float(gaps.max()),
        median(seen.chat_ttft),
        float(np.quantile(long, 0.5)),
        float(np.quantile(long, 0.95)),
        len(long),
        seen.outcomes.get("transferred", 0),
        seen.failed,
    )


def cells(name: str, runs: Sequence[Run]) -> tuple[str, ...]:
    """Return one row of the table: medians over rounds."""

    def mid(value: str) -> float:
        return median(getattr(run, value) for run in runs)

    return (
        name,
        f"{mid('tokens_per_second'):.0f}",
        *(f"{1000 * mid(value):.1f}" for value in ("gap_p50", "gap_p99", "gap_max")),
        *(f"{mid(value):.2f}" for value in ("chat_ttft_p50", "long_ttft_p50", "long_ttft_p95")),
        str(sum(run.long_prompts for run in runs)),
        str(sum(run.transferred for run in runs)),
    )


def write(runs: Sequence[Run], rows: Sequence[tuple[str, ...]], options: argparse.Namespace) -> None:
    """Store the measurements."""
    command = shlex.join(["python", "benchmarks/pairs.py", *sys.argv[1:]])
    facts: dict[str, Any] = {"command": command, "version": fd_core.__version__, "machine": machine.describe()}
    facts |= {"settings": vars(options), "runs": [asdict(run) for run in runs]}
    (RESULTS / "pairs.json").write_text(json.dumps(facts, indent=1) + "\n")
    lines = [f"`{command}`", "", f"{facts['machine']['cpu']}, one processor for each worker.", ""]
    lines += ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    failed = sum(run.failed for run in runs)
    lines += [
        "",
        f"{options.chats} chats of {options.chat_tokens} tokens in and {options.chat_output} out at all times, ",
    ]
    lines[-1] += (
        f"and a prompt of {options.long_tokens} tokens every {options.long_every:g} s in the mean; "
        f"{failed} answers failed."
    )
    (RESULTS / "pairs.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30, help="of one run")
    parser.add_argument("--chats", type=int, default=6)
    parser.add_argument("--chat-tokens", type=int, default=100)
    parser.add_argument("--chat-output", type=int, default=150)
    parser.add_argument("--long-tokens", type=int, default=1200)
    parser.add_argument("--long-every", type=float, default=2.5, help="seconds between long prompts, in the mean")
    parser.add_argument("--budget", type=int, default=2048, help="--max-num-batched-tokens of every worker")
    parser.add_argument("--connector", default="tcp")
    parser.add_argument("--keep", action="store_true", help="write benchmarks/results/pairs.*")
    options = parser.parse_args()
    arrangements = {"two mixed": ("mixed", "mixed"), "prefill and decode": ("prefill", "decode")}
    console = Console()
    runs = [
        measure(name, roles, number, options)
        for number in track(range(options.rounds), "Rounds", console=console)
        for name, roles in list(arrangements.items())[:: 1 if number % 2 == 0 else -1]
    ]
    rows = [cells(name, [run for run in runs if run.arrangement == name]) for name in arrangements]
    table = Table(*HEADINGS)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if options.keep:
        write(runs, rows, options)


if __name__ == "__main__":
    main()
