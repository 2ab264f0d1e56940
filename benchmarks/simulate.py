"""Time the simulator itself: how many requests, steps and events of a simulated deployment one core gets through.

    python benchmarks/simulate.py
    python benchmarks/simulate.py --workers 1,64 --requests 10000 --code-requests 0
    python benchmarks/simulate.py --million --out simulate_million

Each case runs in a separate process, without checks of the answers. Times are processor time, since a run uses one
core and does nothing but compute. Costs of steps are those of a calculated device, which no measurement is about.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from harness.options import RESULTS, shown
from rich.console import Console
from rich.table import Table

from fd_core.cli.bench.compare import machine
from fd_core.config import EngineConfig, Limits
from fd_core.plugins import installed_plugins
from fd_core.router.config import RouterConfig
from fd_core.router.selection import RouteRequest, Selection
from fd_core.simulation.costs.naming import profile_named
from fd_core.simulation.costs.profile import Costs
from fd_core.simulation.engines.engine import SimulatedPool
from fd_core.simulation.workloads.conversations import Conversation, Piece, UserTurn
from fd_core.simulation.world import SimulatedDeployment, World

PROFILE = "h100:llama-8b"
COLLECTIONS = (50_000, 50, 100)
"""Thresholds of the garbage collector, as `fdcore simulate` sets them."""
SHOW_PROGRESS_FROM = 50_000
"""Requests from which on a run shows its progress."""
HEADINGS = (
    *("load", "workers", "requests", "steps", "running", "processor s", "requests/s", "steps/s", "events/s"),
    *("simulated s a second", "us a request", "us a step", "us to route", "peak MiB"),
)
LIMITS = Limits(
    max_num_seqs=64,
    max_num_batched_tokens=8192,
    max_model_len=8192,
    block_size=32,
    num_kv_blocks=8000,
    vocab_size=128_256,
    pipeline_depth=2,
)


@dataclass(frozen=True, slots=True)
class Load:
    """Lengths in tokens, each drawn from a logarithmic normal distribution."""

    name: str
    prompt: tuple[float, float]
    """Median and mean."""
    output: tuple[float, float]
    step_seconds: float
    """Approximate seconds of a step of `running` such requests on the calculated device."""
    running: int = 16
    """Requests that each worker has at once, about: arrivals are as fast as they end then."""


LOADS = {
    "short": Load("short", (64, 80), (48, 64), 0.0063),
    "busy": Load("busy", (64, 80), (48, 64), 0.0085, running=48),
    # Patel et al., Splitwise (2024), table 2 and figure 3: the Azure code trace.
    "code": Load("code", (1500, 2048), (13, 28), 0.033),
}


@dataclass(frozen=True, slots=True)
class SimulatorFigures:
    """Cost of one run. Seconds are processor time."""

    load: str
    workers: int
    requests: int
    steps: int
    events: int
    running: float
    """Requests in slots of a worker, the mean of samples in the middle half of the run."""
    simulated_seconds: float
    seconds: float
    route_us: float
    """Microseconds to choose a worker and to give it back, afterwards."""
    peak_mib: float
    growth: tuple[tuple[int, float, float], ...] = ()
    """Requests that ended, processor seconds and MiB by then, at twenty places."""

    def cells(self) -> tuple[str, ...]:
        """Return the cells of a row, as HEADINGS names them."""
        rates = (self.requests / self.seconds, self.steps / self.seconds, self.events / self.seconds)
        return (
            *(self.load, f"{self.workers:,}", f"{self.requests:,}", f"{self.steps:,}", f"{self.running:.1f}"),
            f"{self.seconds:.1f}",
            *(f"{rate:,.0f}" for rate in rates),
            f"{self.simulated_seconds / self.seconds:.2f}",
            *(f"{1e6 * self.seconds / count:,.0f}" for count in (self.requests, self.steps)),
            f"{self.route_us:,.0f}",
            f"{self.peak_mib:,.0f}",
        )


def conversations(load: Load, count: int, workers: int, seed: int) -> Iterator[Conversation]:
    """Yield `count` conversations of one request, as fast as `workers` end them."""
    draw, at = random.Random(seed), 0.0
    rate = workers * load.running / (load.output[1] * load.step_seconds)

    def length(median: float, mean: float, most: int) -> int:
        return min(max(round(draw.lognormvariate(math.log(median), math.sqrt(2 * math.log(mean / median)))), 1), most)

    for number in range(count):
        at += draw.expovariate(rate)
        prompt, output = length(*load.prompt, 7168), length(*load.output, 1000)
        turn = UserTurn((Piece(2 * number, prompt),), Piece(2 * number + 1, output), max_tokens=1024)
        yield Conversation(str(number), at, (turn,))


def simulate(name: str, workers: int, requests: int, seed: int) -> SimulatorFigures:
    """Run one case in this process."""
    load = LOADS[name]
    pool = SimulatedPool(
        config=EngineConfig(model="calculated"),
        limits=LIMITS,
        costs=Costs(profile_named(PROFILE)),
        profile=PROFILE,
        count=workers,
    )
    # The router tracks as many blocks as a worker can hold: by default it tracks 131,072 for each.
    held = LIMITS.num_kv_blocks * LIMITS.block_size // RouterConfig().cache_block_size
    router = RouterConfig(policy="cache_aware", max_index_blocks=held)
    deployment = SimulatedDeployment(label=name, groups=(pool,), router=router, check=False)
    world = World(deployment, installed_plugins(), seed)
    gc.set_threshold(*COLLECTIONS)
    began, every = time.process_time(), max(1, requests // 20)
    growth: list[tuple[int, float, float]] = []

    def note() -> None:
        if len(world.outcomes) % every == 0:
            growth.append((len(world.outcomes), time.process_time() - began, resident_mib()))
            if requests >= SHOW_PROGRESS_FROM:
                print(*growth[-1], flush=True)

    world.on_event = note
    run = world.run(conversations(load, requests, workers, seed))
    seconds = time.process_time() - began
    if (ended := sum(outcome.end in ("stop", "length") for outcome in run.outcomes)) < requests:
        raise RuntimeError(f"{requests - ended:,} of {requests:,} requests did not complete")
    last = run.samples[-1].at
    middle = [sample.running for sample in run.samples if last / 4 <= sample.at <= 3 * last / 4]
    return SimulatorFigures(
        load=name,
        workers=workers,
        requests=requests,
        steps=int(run.counters["steps"]),
        events=world.timeline.events,
        running=float(np.mean(middle)),
        simulated_seconds=run.seconds,
        seconds=seconds,
        route_us=_route(world, round(load.prompt[0])),
        peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        growth=tuple(growth),
    )


def resident_mib() -> float:
    """Return the memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def _route(world: World, tokens: int, count: int = 200) -> float:
    router, now = world.gateways[0].router, world.timeline.now
    asked = [RouteRequest(np.full(tokens, number, np.int32)) for number in range(count)]
    began = time.process_time()
    for request in asked:
        chosen = router.select(request, now, 0.5)
        if not isinstance(chosen, Selection):
            raise RuntimeError("the router knows no worker")
        chosen.release()
    return 1e6 * (time.process_time() - began) / count


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; `workers` becomes a list."""
    parser = argparse.ArgumentParser(
        prog="simulate.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", default="1,10,100,1000", help="sizes of deployments (default: 1,10,100,1000)")
    parser.add_argument("--requests", type=int, default=10_000, help="requests of each of them")
    parser.add_argument("--code-requests", type=int, default=20_000, help="requests of the Azure-like run; 0: none")
    parser.add_argument("--code-workers", type=int, default=64, help="workers of that run (default: 64)")
    parser.add_argument("--million", action="store_true", help="a million short requests on one busy worker alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="simulate", help="name or path of the result, without suffix")
    options = parser.parse_args(arguments)
    try:
        options.workers = [int(word) for word in options.workers.split(",") if word]
    except ValueError:
        parser.error("--workers expects whole numbers with commas between them")
    if min(*options.workers, options.requests, options.code_workers, 1) < 1 or options.code_requests < 0:
        parser.error("--workers, --requests and --code-workers must be at least 1")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the cases one after the other and write the table after each."""
    options = parse(arguments)
    console = Console() if sys.stdout.isatty() else Console(width=200)
    cases = [("short", workers, options.requests) for workers in options.workers]
    if options.million:
        cases = [("busy", 1, 1_000_000)]
    elif options.code_requests:
        cases.append(("code", options.code_workers, options.code_requests))
    facts = {
        "command": shown("simulate.py", arguments or sys.argv[1:]),
        "machine": machine.describe(),
        "load_average_before": machine.load_average(),
        "profile": PROFILE,
        "seed": options.seed,
    }
    rows: list[SimulatorFigures] = []
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        for case in cases:
            rows.append(processes.submit(simulate, *case, options.seed).result())
            as_markdown = write(rows, facts, RESULTS / options.out)
    show(rows, console)
    console.print(f"wrote {as_markdown}", highlight=False)
    return 0


def _growth(row: SimulatorFigures) -> str:
    parts = ", ".join(f"{count:,} at {seconds:,.0f} s, {mib:,.0f} MiB" for count, seconds, mib in row.growth[3::4])
    return f"Requests of {row.load} that had ended, processor time and memory by then: {parts}.\n"


def show(rows: Sequence[SimulatorFigures], console: Console) -> None:
    """Print the table."""
    table = Table(*HEADINGS, title="simulated runs on one core", title_justify="left")
    for row in rows:
        table.add_row(*row.cells())
    console.print(table)


def write(rows: Sequence[SimulatorFigures], facts: Mapping[str, Any], out: Path) -> Path:
    """Write OUT.json and OUT.md; return the latter."""
    as_json, as_markdown = (out.with_name(out.name + suffix) for suffix in (".json", ".md"))
    as_json.write_text(json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    table = [HEADINGS, ["---"] * len(HEADINGS), *(row.cells() for row in rows)]
    lines = [
        f"# {out.name}",
        "",
        f"    {facts['command']}",
        "",
        f"{facts['machine']['cpu']}, one core, processor time; load before: {facts['load_average_before']:.1f}. "
        f"Costs of steps: {facts['profile']}, calculated. Prompts and outputs, median and mean: "
        + "; ".join(f"{name} {load.prompt}, {load.output} tokens" for name, load in LOADS.items())
        + ".",
        "",
        *("| " + " | ".join(cells) + " |" for cells in table),
        "",
        *(_growth(row) for row in rows if row.requests >= SHOW_PROGRESS_FROM),
    ]
    as_markdown.write_text("\n".join(lines))
    return as_markdown


if __name__ == "__main__":
    sys.exit(main())
