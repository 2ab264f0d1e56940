"""Compare the simulator with reality: the same requests on real servers of this machine and on simulated ones.

    python benchmarks/fidelity.py
    python benchmarks/fidelity.py --cases steady,pressure --rounds 1

The costs of steps are measured first (`fdcore calibrate`, one processor thread). Then each case is played by real
processes over HTTP, several times, and simulated once with the same arrivals, lengths and settings. What is compared:
mean and 99th percentile of the time to the first token, of the time per output token and of whole requests, and
output tokens a second. The real figure is the median of the rounds, with the spread of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from hashlib import blake2b
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import aiohttp
import numpy as np
from harness.options import RESULTS
from harness.pace import Pace, Pacer, background_load, paced
from pairs import FDCORE, MODEL, free_port, started, until_ready
from rich.console import Console
from rich.table import Table

from fd_core.cli.bench.compare import machine
from fd_core.cli.bench.compare.workloads import SHAPES, Shape
from fd_core.plugins import installed_plugins
from fd_core.simulation.costs.profile import CostProfile, read_profile
from fd_core.simulation.setups import Setup
from fd_core.simulation.workloads.conversations import Conversation, Piece, UserTurn, tokens_of
from fd_core.simulation.world import World

LIMIT = 0.10
"""Largest relative error of a simulated figure."""
FIGURES = ("ttft_mean", "ttft_p99", "tpot_mean", "tpot_p99", "e2e_mean", "e2e_p99", "tokens_per_s")
THREADS = 1
_TURNS, _SHORT = 5, 0.6
PROFILE_FLAGS = ("--num-threads", str(THREADS))


Row = Sequence[float]
"""Times in seconds of one request, its first and its last token, and the tokens of the answer."""


@dataclass(frozen=True, slots=True)
class Case:
    """A load, and the servers for it."""

    name: str
    title: str
    load: Callable[[int], list[Conversation]]
    """Makes the conversations from the number of a round."""
    num_kv_blocks: int = 256
    """Small enough for every case to use the whole pool: the first write to a page is slow (page fault)."""
    engine: dict[str, Any] = field(default_factory=dict)
    roles: tuple[str, ...] = ("mixed",)
    routers: int = 0
    policy: str = "request_num"

    @property
    def shares(self) -> bool:
        """True if each worker has one processor; routers and clients share the first one."""
        return len(self.roles) > 1


def at_once(shape: Shape) -> Callable[[int], list[Conversation]]:
    """Return a generator of the requests of a shape, all of which arrive at once."""

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
    """Return a generator of requests with random arrivals, `rate` a second, and lengths from ranges."""

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
    """Return a name for which a simulated client selects the same router as a real one: the first, the second..."""
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
        "two routers in front of two workers, 40 requests, 2 a second",
        arriving(40, 2.0, (64, 384), (16, 64)),
        roles=("mixed", "mixed"),
        routers=2,
        policy="round_robin",  # others break ties at random: two real rounds then differ by a third
    ),
)


# Reality --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Address:
    """Address that clients send requests to."""

    url: str
    router: int | None = None
    """Process id of the router there."""


@contextlib.contextmanager
def serving(case: Case, folder: Path, *, traced: bool = False) -> Iterator[list[Address]]:
    """Start the servers of a case, with logs and perhaps traces in `folder`; yield the addresses for clients."""
    processors = sorted(os.sched_getaffinity(0))
    engine = {"num_kv_blocks": case.num_kv_blocks, **case.engine}
    flags = [word for name, value in engine.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with contextlib.ExitStack() as stack:
        workers: list[tuple[str, str]] = []
        for index, role in enumerate(case.roles):
            port = free_port()
            serve = [str(FDCORE), "serve", MODEL, "--port", str(port), "--role", role, *PROFILE_FLAGS, *flags]
            if traced:  # writing one takes 0.16 ms a step of the same processor
                serve += ["--trace", str(folder / f"{case.name}-{role}{index}.trace")]
            pinned = processors[index % len(processors)] if case.shares else None
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
            # Pinned: otherwise the kernel places routers and clients at random.
            pid = stack.enter_context(
                started(route, processors[0] if case.shares else None, folder / f"router{index}.log")
            )
            routers.append(Address(f"http://127.0.0.1:{port}", pid))
        asyncio.run(until_ready([*(url for _, url in workers), *(router.url for router in routers)]))
        if case.shares:
            stack.callback(os.sched_setaffinity, 0, processors)
            os.sched_setaffinity(0, processors[:1])
        yield routers or [Address(workers[0][1])]


_TOKENS = re.compile(rb'"token_ids": ?\[([^]]+)\]')


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
                    if (found := _TOKENS.search(line)) is not None:  # a client shares the machine: it does little
                        seen.last = time.perf_counter() - start
                        seen.first = seen.first or seen.last
                        seen.tokens += 1 + found[1].count(b",")
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


def stable_pace(pacer: Pacer) -> Pace:
    """Measure the machine's pace with access to all of its processors."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        return pacer.measure()
    finally:
        os.sched_setaffinity(0, own)


def contention(pacer: Pacer) -> tuple[float, float]:
    """Return the slowdown of the two steps while another process computes on the other processor."""
    processors = sorted(os.sched_getaffinity(0) | {*range(os.cpu_count() or 1)})
    found = []
    with background_load(MODEL, THREADS, processors[-1]) as halted:
        for _ in range(_TURNS):  # in turns, since the pace differs from second to second
            with halted():
                alone = pacer.measure(_SHORT)
            found.append(pacer.measure(_SHORT).over(alone))
    return max(1.0, median(one.memory for one in found)), max(1.0, median(one.compute for one in found))


def relaying(addresses: Sequence[Address], vocab_size: int) -> float:
    """Return the processor seconds that router and client take for a part of an answer, requests included."""
    draw = random.Random("relay")
    asked = [conversation(index, 0.0, (Piece(draw.getrandbits(60), 64),), 40, draw) for index in range(4)]

    def spent() -> float:
        # The clock of another process's processor time has this number on Linux.
        routers = [time.clock_gettime(~each.router << 3 | 2) for each in addresses if each.router is not None]
        return time.process_time() + sum(routers)

    before = spent()
    for one in asked:
        asyncio.run(play([each.url for each in addresses], [one], vocab_size))
    return (spent() - before) / (40 * len(asked))


def played(
    case: Case, rounds: int, profile: CostProfile, folder: Path, pacer: Pacer, report: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return the requests of each round, with the pace of the machine around it."""
    found: list[dict[str, Any]] = []
    vocab_size = profile.limits.vocab_size
    with serving(case, folder) as addresses:
        urls = [address.url for address in addresses]
        time.sleep(2)  # until health checks have found the workers
        asyncio.run(play(urls, pool_filling(case, profile.limits.block_size), vocab_size))
        relay = relaying(addresses, vocab_size) if case.shares else 0.0
        crowding = contention(pacer) if case.shares else None
        pace = stable_pace(pacer)
        for number in range(rounds):
            conversations = case.load(number)
            before = pace
            seen = asyncio.run(play(urls, conversations, vocab_size))
            if [one.tokens for one in seen] != [one.turns[0].max_tokens for one in conversations]:
                raise RuntimeError(f"{case.name}: an answer is not whole")
            pace = stable_pace(pacer)
            requests = [[round(value, 6) for value in astuple(one)] for one in seen]
            found.append(
                {"requests": requests, "pace": asdict(before.mean(pace)), "relay": relay, "crowding": crowding}
            )
            report(f"{case.name}, round {number + 1}: {figures(requests)['tokens_per_s']:.0f} tokens/s, {pace}")
    return found


# The same, simulated ----------------------------------------------------------------------------------------------


def simulated(case: Case, profile: CostProfile, number: int, measured: Mapping[str, Any]) -> list[Row]:
    """Return the requests of a simulated round."""
    setup = Setup(
        profile=profile,
        workers=case.roles.count("mixed"),
        prefill=case.roles.count("prefill"),
        decode=case.roles.count("decode"),
        routers=case.routers,
        engine={"num_kv_blocks": case.num_kv_blocks, **case.engine},
        router={"policy": case.policy, "health_check_interval_secs": 1.0},
        spare_processors=0 if case.shares else None,
        relay=measured["relay"],
        crowding=measured["crowding"],
        latency=0.0001,
    )
    run = World(setup.deployment(case.name), installed_plugins()).run(case.load(number))
    return [(one.arrived, one.first_token or math.nan, one.ended, one.output_tokens) for one in run.outcomes]


def figures(*rounds: Sequence[Row]) -> dict[str, float]:
    """Return the compared figures over the requests of all rounds; tokens a second are the mean of the rounds."""
    asked, first, last, tokens = np.array([row for rows in rounds for row in rows], np.float64).T
    latencies = {"ttft": first - asked, "tpot": (last - first) / np.maximum(tokens - 1, 1), "e2e": last - asked}
    found = {f"{name}_mean": float(values.mean()) for name, values in latencies.items()}
    found |= {f"{name}_p99": float(np.percentile(values, 99)) for name, values in latencies.items()}
    rates = []
    for rows in rounds:
        begun, _, ended, count = np.array(rows, np.float64).T
        rates.append(count.sum() / (ended.max() - begun.min()))
    return found | {"tokens_per_s": float(np.mean(rates))}


# Both ---------------------------------------------------------------------------------------------------------------


def compare(case: Case, profile: CostProfile, pace: Pace, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the measured rounds, and real, simulated and the difference of each figure; `pace` is the profile's."""
    paces = [Pace(**one["pace"]).over(pace) for one in rounds]
    real = [one["requests"] for one in rounds]
    steady = [simulated(case, profile, number, one) for number, one in enumerate(rounds)]
    made = [simulated(case, paced(profile, paces[number]), number, one) for number, one in enumerate(rounds)]
    each = [figures(rows) for rows in real]
    measured, unpaced, found = figures(*real), figures(*steady), figures(*made)
    rows = {}
    for name in FIGURES:
        apart = max(one[name] for one in each) - min(one[name] for one in each)
        rows[name] = {
            "real": measured[name],
            "simulated": found[name],
            "error": found[name] / measured[name] - 1,
            "unpaced": unpaced[name] / measured[name] - 1,
            "spread": apart / measured[name],
        }
    return {
        "case": case.name,
        "title": case.title,
        "pace": [asdict(one) for one in paces],
        "figures": rows,
        "rounds": list(rounds),
    }


def above_limit(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the figures that are beyond the limit."""
    return [
        f"{result['case']} {name}: {100 * row['error']:+.0f} %"
        for result in results
        for name, row in result["figures"].items()
        if abs(row["error"]) > LIMIT
    ]


def markdown(results: Sequence[dict[str, Any]], title: str) -> str:
    """Return the table of all figures."""
    lines = [f"# The simulator compared with reality\n\n{title}\n"]
    lines.append("| case | figure | real | simulated | error | error without pace | rounds apart | requests |")
    lines.append("|---|---|---|---|---|---|---|---|")
    for result in results:
        for name, row in result["figures"].items():
            real, made = f"{row['real']:.4g}", f"{row['simulated']:.4g}"
            off = f"{100 * row['error']:+.1f} %"
            off = off if abs(row["error"]) <= LIMIT else f"**{off}**"
            others = f"{100 * row['unpaced']:+.1f} % | {100 * row['spread']:.1f} %"
            count = sum(len(one["requests"]) for one in result["rounds"])
            lines.append(f"| {result['case']} | {name} | {real} | {made} | {off} | {others} | {count} |")
    lines += ["", *(f"- {result['case']}: {result['title']}." for result in results)]
    return "\n".join(lines).rstrip() + "\n"


def show(results: Sequence[dict[str, Any]], console: Console) -> None:
    """Print the results."""
    table = Table("case", "figure", "real", "simulated", "error", "without pace", "rounds apart")
    for result in results:
        for name, row in result["figures"].items():
            style = "" if abs(row["error"]) <= LIMIT else "bold red"
            values = [f"{row['real']:.4g}", f"{row['simulated']:.4g}", f"{100 * row['error']:+.1f} %"]
            values += [f"{100 * row['unpaced']:+.1f} %", f"{100 * row['spread']:.1f} %"]
            table.add_row(result["case"], name, *values, style=style)
    console.print(table)


def write(results: Sequence[dict[str, Any]], profile: CostProfile, out: Path) -> None:
    """Write the results so far as JSON and as a table."""
    errors = {one.kind: {"mean": one.mean, "p99": one.p99} for one in profile.error}
    written = {
        "machine": machine.describe(),
        "profile": {"name": profile.name, "spread": profile.spread, "error": errors},
        "limit": LIMIT,
        "results": results,
    }
    out.write_text(re.sub(r"\[\s+([-\d.,\s]+?)\s+\]", _joined, json.dumps(written, indent=1)) + "\n")
    out.with_suffix(".md").write_text(markdown(results, f"{MODEL}, {profile.device}, {profile.when}."))


def _joined(numbers: re.Match[str]) -> str:
    return f"[{' '.join(numbers[1].split())}]"


def calibrated(path: Path, pacer: Pacer) -> None:
    """Measure the costs of steps, and the machine's pace before and after."""
    before = pacer.measure(undisturbed=True)
    subprocess.run([FDCORE, "calibrate", MODEL, "-o", path, *PROFILE_FLAGS], check=True)
    path.with_suffix(".pace").write_text(json.dumps(asdict(before.mean(pacer.measure(undisturbed=True)))))


def main() -> None:
    """Calibrate, play, simulate, compare, write."""
    parser = argparse.ArgumentParser(
        prog="fidelity.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(case.name for case in CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", type=Path, help="measured before, with one thread; by default it is measured now")
    parser.add_argument("--keep", type=Path, help="folder for logs and traces of the real servers")
    parser.add_argument("--again", action="store_true", help="simulate again and compare with the last measurement")
    parser.add_argument("--out", default="fidelity", help="name or path of the result, without suffix")
    options = parser.parse_args()
    wanted = options.cases.split(",")
    if unknown := set(wanted) - {case.name for case in CASES}:
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}")
    console = Console(stderr=True)
    out = RESULTS / f"{options.out}.json"
    # Cases that are not run now keep their last measurement.
    known = json.loads(out.read_text())["results"] if out.exists() else []
    before = {one["case"]: one["rounds"] for one in known if all("requests" in each for each in one["rounds"])}
    results = []
    with tempfile.TemporaryDirectory() as folder:
        kept = options.keep or Path(folder)
        kept.mkdir(exist_ok=True)
        pacer = Pacer(MODEL, THREADS)
        path = options.profile or kept / "profile.json"
        if options.profile is None:
            calibrated(path, pacer)
        profile, pace = read_profile(path), Pace(**json.loads(path.with_suffix(".pace").read_text()))
        for case in CASES:
            measured = before.get(case.name, [])
            if case.name in wanted and not options.again:
                measured = played(case, options.rounds, profile, kept, pacer, console.log)
            if measured:
                results.append(compare(case, profile, pace, measured))
                write(results, profile, out)
    show(results, console)
    if wrong := above_limit(results):
        raise SystemExit(f"more than {LIMIT:.0%} off: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
