"""Cost of saving KV without preemptions: fd_core with saving off, on the host, and with a store on disk.

    python benchmarks/saving.py

The workloads are those of `fdcore bench compare`, and one whose requests end at different times, so that background
writes overlap with computing. Nothing is ever loaded: prompts are new in every round. The three take turns; ratios are
taken inside rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness.options import RESULTS, add_common, check_common, names, prepare, shown
from pressure import HOST, secret_in
from rich.console import Console
from rich.table import Table

from fd_core.cli.bench.compare import machine, rounds, sessions
from fd_core.cli.bench.compare.comparing import announcer
from fd_core.cli.bench.compare.engines import ENGINES, RunLimits
from fd_core.cli.bench.compare.processes import interrupted_by_sigterm
from fd_core.cli.bench.compare.stats import Summary, summarise
from fd_core.cli.bench.compare.workloads import SHAPES

OFF, ON_HOST, ON_DISK = "off", "host", "disk"
HEADINGS = ("workload", "saving", "output tok/s", "min to max", "ratio", "TTFT ms", "TPOT ms")


def settings(contender: str, stores: Path) -> dict[str, Any]:
    """Return an engine's settings; a store is created under `stores`."""
    if contender == OFF:
        return {"save_preempted_kv": False}
    if contender == ON_HOST:
        return dict(HOST)
    return HOST | {"kv_store": f"disk:{stores / 'store'}", "kv_store_secret_file": str(secret_in(stores))}


def cells(row: Summary) -> tuple[str, ...]:
    """Return a row's cells, as HEADINGS names them."""
    low, high = row.output_tps_range
    ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
    times = (f"{row.ttft_s * 1e3:.0f}", f"{row.tpot_s * 1e3:.2f}")
    return (row.workload, row.engine, f"{row.output_tps:.1f}", f"{low:.1f} to {high:.1f}", ratio, *times)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; `workloads` becomes a list."""
    parser = argparse.ArgumentParser(
        prog="saving.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", default="w1,w2,w3,pressure", help=f"out of: {', '.join(SHAPES)}")
    add_common(parser, rounds=5, out="saving")
    options = parser.parse_args(arguments)
    options.workloads = names(parser, "--workloads", options.workloads, SHAPES)
    check_common(parser, options)
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; return 1 where nothing finished."""
    options = parse(arguments)
    interrupted_by_sigterm()
    console = Console() if sys.stdout.isatty() else Console(width=160)
    checkpoint, corpus = prepare(options, console)
    shapes = [SHAPES[name] for name in options.workloads]
    slots, longest = max(shape.requests for shape in shapes), max(shape.longest for shape in shapes)
    started: list[sessions.PeerSession] = []
    failures: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="fd_core-saving-", ignore_cleanup_errors=True) as stores:
        try:
            for name in (OFF, ON_HOST, ON_DISK):
                limits = RunLimits(options.threads, slots, longest, settings(name, Path(stores)))
                engine = replace(ENGINES["fd_core"], name=name)
                session = options.places.start(engine, checkpoint, limits, console, failures)
                if session is not None:
                    started.append(session)
            probe = machine.BandwidthProbe(options.threads)
            announce = announcer(console)
            measured = rounds.measure(started, options.workloads, options.rounds, corpus, options.seed, probe, announce)
        finally:
            for session in started:
                session.close()
    facts = {
        "command": shown("saving.py", arguments or sys.argv[1:]),
        "machine": machine.describe(),
        "load_average": measured.loads,
        "preemptions": sum(run.counters.get("preemptions", 0) for run in measured.runs),
        **{name: getattr(options, name) for name in ("threads", "rounds", "seed")},
        "version": next((s.version for s in started), None),
        "failures": failures | measured.failures,
    }
    table = summarise(measured.runs, reference=OFF)
    show(table, facts, console)
    runs = [
        {"saving": r.engine, "workload": r.workload, "round": r.round, "wall_s": r.wall_s, "output_tps": r.output_tps}
        for r in measured.runs
    ]
    for path in write(table, runs, facts, RESULTS / options.out):
        console.print(f"wrote {path}", highlight=False)
    return 0 if measured.runs else 1


def heading(facts: Mapping[str, Any]) -> str:
    """Return one line on the machine and the contenders."""
    loads = facts["load_average"]
    return (
        f"{facts['machine']['cpu']}, {facts['threads']} of {facts['machine']['cores']} cores, in-process, bf16; "
        f"medians over {facts['rounds']} rounds, ratio to saving off in the same round; {facts['preemptions']} "
        f"preemptions; load average {min(loads):.1f} to {max(loads):.1f}"
    )


def show(table: Sequence[Summary], facts: Mapping[str, Any], console: Console) -> None:
    """Print the table."""
    console.print(heading(facts))
    shown_table = Table(*HEADINGS)
    for row in table:
        shown_table.add_row(*cells(row))
    console.print(shown_table)
    for name, reason in facts["failures"].items():
        console.print(f"[yellow]{name} left out[/]: {reason}", highlight=False)


def write(
    table: Sequence[Summary], runs: Sequence[Mapping[str, Any]], facts: Mapping[str, Any], out: Path
) -> tuple[Path, Path]:
    """Write OUT.json (every round) and OUT.md (the table and its command); return both paths."""
    out.parent.mkdir(parents=True, exist_ok=True)
    as_json, as_markdown = out.with_suffix(".json"), out.with_suffix(".md")
    as_json.write_text(json.dumps({**facts, "rows": [asdict(row) for row in table], "runs": runs}, indent=1) + "\n")
    lines = ["| " + " | ".join(row) + " |" for row in (HEADINGS, ["---"] * len(HEADINGS), *map(cells, table))]
    titles = [f"- {name}: {SHAPES[name].title}" for name in dict.fromkeys(row.workload for row in table)]
    text = [f"# {out.name}", "", f"    {facts['command']}", "", f"{heading(facts)}.", "", *lines, "", *titles, ""]
    as_markdown.write_text("\n".join(text))
    return as_json, as_markdown


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
