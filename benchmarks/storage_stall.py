"""Time planning while the KV store is stopped, compared with a healthy store.

    python benchmarks/storage_stall.py
    python benchmarks/storage_stall.py --rounds 40 --running 64

One engine on the null backend and a private Redis server. Requests that decode steadily share the engine with a
trickle of short ones, each of which asks the store for its prefix and writes it there when it is done. In every other
turn the server is stopped (SIGSTOP) just before and continued after; between turns the engine goes on, uncounted, until
it uses the store again. The timed part of each step is the engine thread's work on scheduling and KV outside
the device: `Scheduler.plan` and both exchanges of effects and completions.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy
from harness.options import RESULTS, shown
from rich.console import Console

import fd_core
from fd_core.cli.bench.compare import machine
from fd_core.config import EngineConfig
from fd_core.engine.building.builder import load_engine
from fd_core.engine.process.messages import TierStats
from fd_core.types import RequestSpec, SamplingParams

WELL, STOPPED = "well", "stopped"
BLOCK_SIZE = 16
TRICKLE_EVERY = 4
"""Steps from one short request to the next."""
MAX_WAITING = 8
HEADINGS = ("store", "steps", "median us", "p95 us", "p99 us", "longest us", "failed calls")


@dataclass(slots=True)
class Turns:
    """Seconds of planning of each step, by turn, and failures."""

    seconds: dict[str, list[list[float]]] = field(default_factory=lambda: {WELL: [], STOPPED: []})
    failed: dict[str, int] = field(default_factory=lambda: {WELL: 0, STOPPED: 0})

    def percentile(self, store: str, share: float) -> float:
        """Return a percentile over all steps, in seconds."""
        return float(numpy.percentile(list(itertools.chain(*self.seconds[store])), share))

    def ratio(self, share: float) -> float:
        """Return how much longer planning takes while the store is stopped: of percentiles over all steps."""
        return self.percentile(STOPPED, share) / self.percentile(WELL, share)

    def ratio_in_rounds(self, share: float) -> float:
        """Return the same inside rounds, in the median round."""
        pairs = zip(self.seconds[STOPPED], self.seconds[WELL], strict=True)
        return median(float(numpy.percentile(a, share) / numpy.percentile(b, share)) for a, b in pairs)

    def rows(self) -> list[tuple[str, ...]]:
        """Return the cells of the table, as HEADINGS names them."""
        return [
            (
                store,
                f"{sum(map(len, self.seconds[store])):,}",
                *(f"{1e6 * self.percentile(store, share):,.0f}" for share in (50, 95, 99, 100)),
                str(self.failed[store]),
            )
            for store in self.seconds
        ]


class Bench:
    """Running engine whose planning is timed."""

    def __init__(self, location: str, secret: Path, running: int) -> None:
        short = 8
        config = EngineConfig(
            model="null",
            backend="null",
            block_size=BLOCK_SIZE,
            max_num_seqs=running + short,
            max_model_len=8000,
            num_kv_blocks=running * 8000 // BLOCK_SIZE + short * 8,
            max_num_batched_tokens=512,
            pipeline_depth=1,
            kv_store=location,
            kv_store_secret_file=str(secret),
            host_kv_memory=1 << 20,
        )
        self.engine = load_engine(config, None, progress=lambda *_: None)
        self._running = running
        self._numbers = itertools.count()
        self._steps = 0
        self._spent = 0.0
        scheduler = self.engine.probe().scheduler
        self._probe = scheduler.probe()
        # Instance attributes shadow the methods: the engine is timed and not changed otherwise.
        scheduler.plan = self._timed(scheduler.plan)  # type: ignore[method-assign]
        self.engine._complete = self._timed(self.engine._complete)  # type: ignore[method-assign]
        self.engine._perform = self._timed(self.engine._perform)  # type: ignore[method-assign]

    def step(self) -> float:
        """Run a step; return the seconds that planning took."""
        while int(self._probe.slots.running.sum()) + len(self._probe.waiting) < self._running:
            self._submit(16, 7000)
        self._steps += 1
        if self._steps % TRICKLE_EVERY == 0 and len(self._probe.waiting) < MAX_WAITING:
            self._submit(3 * BLOCK_SIZE + 1, 4)
        self._spent = 0.0
        self.engine.step()
        return self._spent

    def turn(self, steps: int) -> list[float]:
        """Return the seconds of planning of each of so many steps."""
        return [self.step() for _ in range(steps)]

    def failures(self) -> int:
        """Return how many calls of the store failed so far."""
        return sum(self._kv_stats().store_errors.values())

    def _kv_stats(self) -> TierStats:
        stats = self.engine.stats().kv
        assert stats is not None
        return stats

    def settle(self, seconds: float) -> None:
        """Continue until the store is used again and no request waits for it. Raises `TimeoutError`."""
        ends = time.monotonic() + seconds
        while True:
            self.turn(20)
            stats = self._kv_stats()
            if (stats.breaker, stats.write_breaker, stats.pending_write_bytes) == ("closed", "closed", 0):
                return
            if time.monotonic() > ends:
                raise TimeoutError(f"the store is not used again: {stats}")

    def _submit(self, prompt: int, tokens: int) -> None:
        number = next(self._numbers)
        self.engine.submit(
            RequestSpec(
                request_id=f"r{number}",
                prompt=tuple((number * 7 + position) % 256 for position in range(prompt)),
                params=SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
                cache_salt=str(number),
            )
        )

    def _timed(self, method: Any) -> Any:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                self._spent += time.perf_counter() - began

        return timed


def measure(location: str, secret: Path, server: int, *, rounds: int, steps: int, running: int) -> Turns:
    """Take turns with the server of process id `server` well and stopped."""
    bench = Bench(location, secret, running)
    turns = Turns()
    try:
        bench.turn(200)
        bench.settle(20.0)
        gc.collect()
        gc.freeze()
        for number in range(rounds):
            for store in (WELL, STOPPED) if number % 2 == 0 else (STOPPED, WELL):
                failures = bench.failures()
                try:
                    if store == STOPPED:
                        os.kill(server, signal.SIGSTOP)
                    turns.seconds[store].append(bench.turn(steps))
                finally:
                    os.kill(server, signal.SIGCONT)
                bench.settle(40.0)
                turns.failed[store] += bench.failures() - failures
    finally:
        gc.unfreeze()
        bench.engine.abort_all()
        while bench.engine.has_work:
            bench.engine.step()
        bench.engine.close()
    return turns


@contextmanager
def redis_server(folder: Path) -> Iterator[tuple[str, int]]:
    """Start a server; give its location and its process id."""
    binary = os.environ.get("FD_TEST_REDIS_SERVER") or shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        raise FileNotFoundError("neither redis-server nor valkey-server is installed")
    socket = folder / "s"
    command = [binary, "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(folder)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, "--maxmemory", "200mb", "--maxmemory-policy", "allkeys-lru"], stdout=log)
    try:
        ends = time.monotonic() + 10
        while not socket.exists():
            if process.poll() is not None or time.monotonic() > ends:
                raise RuntimeError((folder / "log").read_text()[-2000:])
            time.sleep(0.01)
        yield f"unix://{socket}", process.pid
    finally:
        process.kill()
        process.wait()


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        prog="storage_stall.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12, help="turns of each kind (default: 12)")
    parser.add_argument("--steps", type=int, default=400, help="steps in a turn (default: 400)")
    parser.add_argument("--running", type=int, default=32, help="requests that decode all the time (default: 32)")
    parser.add_argument("--out", default="storage_stall", help="name or path of the result, without suffix")
    options = parser.parse_args(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=120)
    load = machine.load_average()
    if load > 0.5:
        console.print(f"[yellow]other work is running (load average {load:.1f}): the figures will be noisy[/]")
    with tempfile.TemporaryDirectory(prefix="fds") as text:
        folder = Path(text)
        secret = folder / "secret"
        secret.write_bytes(os.urandom(32).hex().encode())
        secret.chmod(0o600)
        with redis_server(folder) as (location, server):
            turns = measure(
                location, secret, server, rounds=options.rounds, steps=options.steps, running=options.running
            )
    facts = {
        "command": shown("storage_stall.py", arguments or sys.argv[1:]),
        "machine": machine.describe(),
        "load_average_before": load,
        "versions": {"fd_core": fd_core.__version__, "numpy": numpy.__version__},
        **{name: getattr(options, name) for name in ("rounds", "steps", "running")},
    }
    for row in (HEADINGS, *turns.rows()):
        console.print("".join(cell.rjust(14) for cell in row), highlight=False)
    console.print(_verdict(turns), highlight=False)
    for path in write(turns, facts, RESULTS / options.out):
        console.print(f"wrote {path}", highlight=False)
    return 0


def _verdict(turns: Turns) -> str:
    parts = [
        f"p{share:.0f} {turns.ratio(share):.3f} ({turns.ratio_in_rounds(share):.3f} in the median round)"
        for share in (50, 95, 99)
    ]
    return f"stopped against well, times: {', '.join(parts)}"


def write(turns: Turns, facts: Mapping[str, Any], out: Path) -> Sequence[Path]:
    """Write OUT.json (every step) and OUT.md (the table and its command); return both paths."""
    out.parent.mkdir(parents=True, exist_ok=True)
    as_json, as_markdown = out.with_suffix(".json"), out.with_suffix(".md")
    ratios = {f"p{share}": [turns.ratio(share), turns.ratio_in_rounds(share)] for share in (50, 95, 99)}
    micros = {
        store: [[round(second * 1e6, 1) for second in turn] for turn in seconds]
        for store, seconds in turns.seconds.items()
    }
    values = {**facts, "ratios": ratios, "failed_calls": turns.failed, "turns_us": micros}
    as_json.write_text(json.dumps(values) + "\n")
    lines = [
        f"# {out.name}",
        "",
        f"    {facts['command']}",
        "",
        f"{facts['machine']['cpu']}; load average before: {facts['load_average_before']:.1f}.",
        "",
        *("| " + " | ".join(cells) + " |" for cells in (HEADINGS, ["---"] * len(HEADINGS), *turns.rows())),
        "",
        f"{_verdict(turns)}.",
        "",
        f"Planning of each step: `plan` and both `exchange`. {facts['running']} requests decode all the time, a short "
        f"one joins every {TRICKLE_EVERY} steps at most. {facts['rounds']} turns of each kind with {facts['steps']} "
        "steps each, one after the other; the server is stopped during a turn of its kind.",
        "",
    ]
    as_markdown.write_text("\n".join(lines))
    return as_json, as_markdown


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
