"""The simulator beside reality: the same requests at real servers on this machine, and in simulated ones.

    python benchmarks/fidelity.py
    python benchmarks/fidelity.py --cases steady,pressure --rounds 1

The costs of steps are measured first (`fdcore calibrate`, one processor thread). Then each case is played by real
processes over HTTP, several times, and simulated once with the same arrivals, lengths and settings. What is compared:
mean and 99th percentile of the time to the first token, of the time per output token and of whole requests, and
output tokens a second. The real figure is the median of the rounds; how far the rounds are apart stands beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import aiohttp
import numpy as np
from harness import machine
from harness.workloads import SHAPES, Shape
from pairs import FDCORE, MODEL, free_port, started, until_ready
from peers import RESULTS
from rich.console import Console
from rich.table import Table

from fd_core.plugins import installed_plugins
from fd_core.simulation.conversations import Conversation, Piece, UserTurn, tokens_of
from fd_core.simulation.costs.profile import CostProfile, read_profile
from fd_core.simulation.setups import Setup
from fd_core.simulation.world import World

LIMIT = 0.10
"""How far a simulated figure may be from the real one, as a share."""
_SHARED_CORE = (
    "Each worker's engine, its server, the router and the clients share two processors, and between steps pass 0.5 ms "
    "in the median in place of 0.1: a calibration has the machine for itself, and a simulation charges no processor "
    "for serving. That this is all of it was not shown."
)
_FEW = (
    "A 99th percentile of 40 requests is hardly more than the longest one, and which worker that meets changes it. "
    "That this is all of it was not shown."
)
KNOWN: dict[tuple[str, str], str] = {
    **{
        ("pairs", name): _SHARED_CORE
        for name in ("ttft_mean", "ttft_p99", "tpot_mean", "tpot_p99", "e2e_mean", "e2e_p99")
    },
    **{("routers", name): _FEW for name in ("ttft_p99", "tpot_p99")},
}
"""Figures that may be further off, and why."""
FIGURES = ("ttft_mean", "ttft_p99", "tpot_mean", "tpot_p99", "e2e_mean", "e2e_p99", "tokens_per_s")
PROFILE_FLAGS = ("--num-threads", "1")


@dataclass(frozen=True, slots=True)
class Case:
    """A load, and what serves it."""

    name: str
    title: str
    load: Callable[[int], list[Conversation]]
    """Makes the conversations from the number of a round."""
    num_kv_blocks: int = 256
    """A pool that every case uses up: a machine takes long to hand out a page that nobody has written before."""
    engine: dict[str, Any] = field(default_factory=dict)
    roles: tuple[str, ...] = ("mixed",)
    routers: int = 0
    policy: str = "request_num"


def at_once(shape: Shape) -> Callable[[int], list[Conversation]]:
    """Return what makes the requests of a shape, which all come together."""

    def make(number: int) -> list[Conversation]:
        draw = random.Random(f"{shape.title}/{number}")
        lengths = random.Random(shape.title) if shape.steady_lengths else draw
        shared = (Piece(draw.getrandbits(60), shape.shared),) if shape.shared else ()
        made = []
        for index in range(shape.requests):
            own = Piece(draw.getrandbits(60), lengths.randint(shape.min_input, shape.max_input))
            least = shape.max_tokens if shape.min_tokens is None else shape.min_tokens
            count = lengths.randint(least, shape.max_tokens)
            made.append(conversation(index, 0.0, (*shared, own), count, draw))
        return made

    return make


def arriving(
    count: int, rate: float, prompts: tuple[int, int], outputs: tuple[int, int]
) -> Callable[[int], list[Conversation]]:
    """Return what makes requests that come at random, `rate` a second, with lengths from ranges."""

    def make(number: int) -> list[Conversation]:
        draw, at, made = random.Random(f"{count}/{rate}/{number}"), 0.0, []
        shared = [Piece(draw.getrandbits(60), 128) for _ in range(4)]
        for index in range(count):
            at += draw.expovariate(rate)
            own = Piece(draw.getrandbits(60), draw.randint(*prompts))
            made.append(conversation(index, at, (draw.choice(shared), own), draw.randint(*outputs), draw))
        return made

    return make


def name_of(index: int) -> str:
    """Return a name by which a simulated client takes the router that a real one takes: the first, the second..."""
    names = (f"c{index}.{number}" for number in range(1000))
    return next(name for name in names if (blake2b(name.encode(), digest_size=4).digest()[-1] - index) % 2 == 0)


def conversation(index: int, at: float, adds: tuple[Piece, ...], count: int, draw: random.Random) -> Conversation:
    """Return a request whose answer has exactly `count` tokens."""
    answer = Piece(draw.getrandbits(60), count + 1)  # the limit of tokens ends it
    return Conversation(name_of(index), at, (UserTurn(adds, answer, max_tokens=count),))


CASES = (
    Case("w2", SHAPES["w2"].title, at_once(SHAPES["w2"]), 512),
    Case("w3", SHAPES["w3"].title, at_once(SHAPES["w3"])),
    Case(
        "pressure",
        SHAPES["pressure"].title + ", 160 KV blocks",
        at_once(SHAPES["pressure"]),
        160,
        {"max_model_len": 2048},
    ),
    Case("steady", "40 requests, 1.5 a second, 192 to 512 in, 16 to 96 out", arriving(40, 1.5, (64, 384), (16, 96))),
    Case(
        "pairs",
        "a prefill and a decode worker, 24 requests, 0.8 a second",
        arriving(24, 0.8, (64, 384), (16, 64)),
        roles=("prefill", "decode"),
        routers=1,
    ),
    Case(
        "routers",
        "two workers behind two routers, 40 requests, 2 a second",
        arriving(40, 2.0, (64, 384), (16, 64)),
        roles=("mixed", "mixed"),
        routers=2,
        policy="cache_aware",
    ),
)


# Reality --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(case: Case, folder: Path) -> Iterator[list[str]]:
    """Start what serves a case, with logs and traces in `folder`; yield the addresses that clients use."""
    processors = sorted(os.sched_getaffinity(0))
    engine = {"num_kv_blocks": case.num_kv_blocks, **case.engine}
    flags = [word for name, value in engine.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with contextlib.ExitStack() as stack:
        workers: list[tuple[str, str]] = []
        for index, role in enumerate(case.roles):
            port = free_port()
            serve = [str(FDCORE), "serve", MODEL, "--port", str(port), "--role", role, *PROFILE_FLAGS, *flags]
            serve += ["--trace", str(folder / f"{case.name}-{role}{index}.trace")]
            pinned = processors[index % len(processors)] if len(case.roles) > 1 else None
            stack.enter_context(started(serve, pinned, folder / f"{role}{index}.log"))
            workers.append((role, f"http://127.0.0.1:{port}"))
        routers = []
        for index in range(case.routers):
            port = free_port()
            route = [
                str(FDCORE),
                "route",
                "--port",
                str(port),
                "--health-check-interval-secs",
                "1",
                "--policy",
                case.policy,
            ]
            for role, url in workers:
                route += ["--worker" if role == "mixed" else f"--{role}", url]
            stack.enter_context(started(route, None, folder / f"router{index}.log"))
            routers.append(f"http://127.0.0.1:{port}")
        asyncio.run(until_ready([*(url for _, url in workers), *routers]))
        yield routers or [workers[0][1]]


@dataclass(slots=True)
class Seen:
    """One request as its client saw it; seconds from the begin of the run."""

    asked: float
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0


async def play(urls: Sequence[str], conversations: Sequence[Conversation], vocab_size: int) -> list[Seen]:
    """Send every request at its time; raises RuntimeError for an answer that is not whole."""
    bodies = []
    for one in conversations:
        prompt = np.concatenate([tokens_of(piece, vocab_size) for piece in one.turns[0].adds]).tolist()
        asked = {"prompt": prompt, "max_tokens": one.turns[0].max_tokens, "temperature": 0, "ignore_eos": True}
        bodies.append(json.dumps(asked | {"model": MODEL, "stream": True, "return_token_ids": True}).encode())
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        start = time.perf_counter()

        async def send(index: int, at: float, body: bytes) -> Seen:
            await asyncio.sleep(max(0.0, at - (time.perf_counter() - start)))
            seen = Seen(time.perf_counter() - start)
            headers = {"Content-Type": "application/json"}
            async with session.post(f"{urls[index % len(urls)]}/v1/completions", data=body, headers=headers) as answer:
                if answer.status != 200:
                    raise RuntimeError(f"HTTP {answer.status}: {(await answer.text())[:200]}")
                async for line in answer.content:
                    if line.startswith(b"data: {") and (ids := json.loads(line[6:])["choices"][0].get("token_ids")):
                        seen.last = time.perf_counter() - start
                        seen.first = seen.first or seen.last
                        seen.tokens += len(ids)
            return seen

        pairs = zip(conversations, bodies, strict=True)
        return await asyncio.gather(*(send(index, one.at, body) for index, (one, body) in enumerate(pairs)))


def pool_filling(case: Case, block_size: int) -> list[Conversation]:
    """Return requests for one token each whose prompts have as many blocks as all workers together, and some more."""
    draw, most = random.Random(case.name), 16
    count = -(-case.num_kv_blocks // (most - 1)) * len(case.roles)
    return [
        conversation(index, 0.0, (Piece(draw.getrandbits(60), most * block_size - 1),), 1, draw)
        for index in range(count)
    ]


def real_figures(
    case: Case, rounds: int, profile: CostProfile, folder: Path, tell: Callable[[str], None]
) -> list[dict[str, float]]:
    """Return the figures of each round."""
    found, vocab_size = [], profile.limits.vocab_size
    with serving(case, folder) as urls:
        time.sleep(2)  # health checks tell routers who is there
        asyncio.run(play(urls, pool_filling(case, profile.limits.block_size), vocab_size))
        for number in range(rounds):
            conversations = case.load(number)
            seen = asyncio.run(play(urls, conversations, vocab_size))
            if [one.tokens for one in seen] != [one.turns[0].max_tokens for one in conversations]:
                raise RuntimeError(f"{case.name}: an answer is not whole")
            found.append(figures([(one.asked, one.first, one.last, one.tokens) for one in seen]))
            tell(f"{case.name}, round {number + 1}: {found[-1]['tokens_per_s']:.0f} tokens/s")
    return found


# The same, simulated ----------------------------------------------------------------------------------------------


def simulated_figures(case: Case, profile: CostProfile, number: int) -> dict[str, float]:
    """Return the figures of a simulated round."""
    setup = Setup(
        profile=profile,
        workers=case.roles.count("mixed"),
        prefill=case.roles.count("prefill"),
        decode=case.roles.count("decode"),
        routers=case.routers,
        engine={"num_kv_blocks": case.num_kv_blocks, **case.engine},
        router={"policy": case.policy, "health_check_interval_secs": 1.0},
        latency=0.0001,
    )
    run = World(setup.deployment(case.name), installed_plugins()).run(case.load(number))
    rows = [(one.arrived, one.first_token or math.nan, one.ended, one.output_tokens) for one in run.outcomes]
    return figures(rows)


def figures(rows: Sequence[tuple[float, float, float, int]]) -> dict[str, float]:
    """Return what is compared, from when requests were asked, answered first and last, and their tokens."""
    asked, first, last, tokens = (np.array(column, np.float64) for column in zip(*rows, strict=True))
    latencies = {"ttft": first - asked, "tpot": (last - first) / np.maximum(tokens - 1, 1), "e2e": last - asked}
    found = {f"{name}_mean": float(values.mean()) for name, values in latencies.items()}
    found |= {f"{name}_p99": float(np.percentile(values, 99)) for name, values in latencies.items()}
    return found | {"tokens_per_s": float(tokens.sum() / (last.max() - asked.min()))}


# Both ---------------------------------------------------------------------------------------------------------------


def compare(case: Case, profile: CostProfile, measured: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the measured rounds, and real, simulated and the difference of each figure."""
    simulated = [simulated_figures(case, profile, number) for number in range(len(measured))]
    rows = {}
    for name in FIGURES:
        real = median(one[name] for one in measured)
        made = median(one[name] for one in simulated)
        spread = (max(one[name] for one in measured) - min(one[name] for one in measured)) / real
        rows[name] = {"real": real, "simulated": made, "error": made / real - 1, "spread": spread}
    return {"case": case.name, "title": case.title, "rounds": measured, "figures": rows}


def unexplained(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return what is too far off without a reason."""
    return [
        f"{result['case']} {name}: {100 * row['error']:+.0f} %"
        for result in results
        for name, row in result["figures"].items()
        if abs(row["error"]) > LIMIT and (result["case"], name) not in KNOWN
    ]


def markdown(results: Sequence[dict[str, Any]], title: str) -> str:
    """Return the table of all figures and the reasons of those that do not fit."""
    lines = [f"# The simulator beside reality\n\n{title}\n", "| case | figure | real | simulated | error | rounds |"]
    lines.append("|---|---|---|---|---|---|")
    for result in results:
        for name, row in result["figures"].items():
            real, made = f"{row['real']:.4g}", f"{row['simulated']:.4g}"
            off = f"{100 * row['error']:+.1f} %"
            off = off if abs(row["error"]) <= LIMIT else f"**{off}**"
            lines.append(f"| {result['case']} | {name} | {real} | {made} | {off} | {len(result['rounds'])} |")
    lines += ["", *(f"- {result['case']}: {result['title']}." for result in results)]
    off_limits = {
        reason: [f"{case} {name}" for (case, name), other in KNOWN.items() if other == reason]
        for reason in KNOWN.values()
    }
    lines += ["", *(f"- May be further off: {', '.join(names)}. {reason}" for reason, names in off_limits.items())]
    return "\n".join(lines).rstrip() + "\n"


def show(results: Sequence[dict[str, Any]], console: Console) -> None:
    """Print what was found."""
    table = Table("case", "figure", "real", "simulated", "error", "rounds apart")
    for result in results:
        for name, row in result["figures"].items():
            style = "" if abs(row["error"]) <= LIMIT else "bold red"
            values = [f"{row['real']:.4g}", f"{row['simulated']:.4g}", f"{100 * row['error']:+.1f} %"]
            table.add_row(result["case"], name, *values, f"{100 * row['spread']:.1f} %", style=style)
    console.print(table)


def main() -> None:
    """Calibrate, play, simulate, compare, write."""
    parser = argparse.ArgumentParser(
        prog="fidelity.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(case.name for case in CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", type=Path, help="measured before, with one thread; by default it is measured now")
    parser.add_argument("--keep", type=Path, help="folder for logs and traces of the real servers")
    parser.add_argument("--again", action="store_true", help="simulate again, beside what was measured before")
    parser.add_argument("--out", default="fidelity", help="name or path of the result, without suffix")
    options = parser.parse_args()
    wanted = options.cases.split(",")
    if unknown := set(wanted) - {case.name for case in CASES}:
        parser.error(f"there is no case {', '.join(sorted(unknown))}")
    console = Console(stderr=True)
    out = RESULTS / f"{options.out}.json"
    # Cases that are not played now stay as they were measured.
    before = {one["case"]: one["rounds"] for one in json.loads(out.read_text())["results"]} if out.exists() else {}
    results = []
    with tempfile.TemporaryDirectory() as folder:
        path = options.profile or Path(folder) / "here.json"
        if options.profile is None:
            subprocess.run([FDCORE, "calibrate", MODEL, "-o", path, *PROFILE_FLAGS], check=True)
        profile = read_profile(path)
        kept = options.keep or Path(folder)
        kept.mkdir(exist_ok=True)
        for case in CASES:
            measured = before.get(case.name, [])
            if case.name in wanted and not options.again:
                measured = real_figures(case, options.rounds, profile, kept, console.log)
            if measured:
                results.append(compare(case, profile, measured))
    show(results, console)
    errors = {one.kind: {"mean": one.mean, "p99": one.p99} for one in profile.error}
    written = {
        "machine": machine.describe(),
        "profile": {"name": profile.name, "spread": profile.spread, "error": errors},
        "limit": LIMIT,
        "results": results,
    }
    out.write_text(json.dumps(written, indent=1) + "\n")
    out.with_suffix(".md").write_text(markdown(results, f"{MODEL}, {profile.device}, {profile.when}."))
    if wrong := unexplained(results):
        raise SystemExit(f"more than {LIMIT:.0%} off: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
