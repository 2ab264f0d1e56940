"""Time a start: from the command to the answer of /ready, with the processor time of both processes.

    python benchmarks/start_up.py [--rounds 5]
    python benchmarks/start_up.py --before ../before/.venv/bin/fdcore     # two commits, which take turns

The model is in the cache, and the first start is not counted, so that kernels are compiled and files are in memory.
A start is watched from outside, every 20 ms: which libraries and which checkpoint its processes have mapped,
and, in further starts inside a terminal, the progress bars. Bars are drawn ten times a second, so their marks may be
late by as much, and drawing takes time: the figure of a start is the one without a terminal.
"""

from __future__ import annotations

import argparse
import json
import shlex
import socket
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness.start_watch import Mark, Start, Waymarks, watched
from rich.console import Console
from rich.table import Table

from fd_core.cli.bench.compare.machine import describe, load_average
from fd_core.cli.bench.compare.processes import EngineFailedError, interrupted_by_sigterm

RESULTS = Path(__file__).resolve().parent / "results"
WAYMARKS = Waymarks(
    server={".gguf": "server: the checkpoint is mapped"},
    engine={
        "": "engine: its process exists",
        "fd_native": "engine: the kernels' library is loaded",
        ".gguf": "engine: the checkpoint is mapped",
    },
    terminal={"Loading weights": "bar: loading weights", "Warming up": "bar: warming up"},
)
NOW, BEFORE = "fd_core", "fd_core-before"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="start_up.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = Path(sys.executable).with_name("fdcore")
    parser.add_argument("--rounds", type=int, default=5, help="starts of each kind (default: 5)")
    parser.add_argument("--fdcore", type=Path, default=here, help="the program (default: in this Python's folder)")
    parser.add_argument("--before", type=Path, help="program `fdcore` of another commit, which takes turns")
    parser.add_argument("--model", default="smollm2", help="what is served (default: smollm2)")
    parser.add_argument("--backend", default="cpu", help="by what (default: cpu)")
    parser.add_argument("--out", default="start_up", help="name of the file in results/ (default: start_up)")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def start(program: Path, options: argparse.Namespace, *, terminal: bool) -> Start:
    """Start a server once, on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
    command = [str(program), "serve", options.model, "--backend", options.backend, "--port", str(port)]
    return watched(command, port, WAYMARKS, terminal=terminal)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the middle, the least and the most."""
    return {"median": round(median(values), 2), "least": round(min(values), 2), "most": round(max(values), 2)}


def summary(starts: Sequence[Start]) -> dict[str, Any]:
    """Return the figures of some starts, and in the order of time the marks that all of them have."""
    ready = [each.ready for each in starts]
    marks: dict[str, list[Mark]] = defaultdict(list)
    for each in starts:
        for mark in each.marks:
            marks[mark.name].append(mark)
    seen = [
        {
            "mark": name,
            "wall_s": round(median(mark.wall_s for mark in found), 2),
            "server_cpu_s": round(median(mark.server_cpu_s for mark in found), 2),
            "engine_cpu_s": round(median(mark.engine_cpu_s for mark in found), 2),
        }
        for name, found in marks.items()
        if len(found) == len(starts)
    ]
    return {
        "ready_wall_s": spread([mark.wall_s for mark in ready]),
        "server_cpu_s": spread([mark.server_cpu_s for mark in ready]),
        "engine_cpu_s": spread([mark.engine_cpu_s for mark in ready]),
        "both_cpu_s": spread([mark.server_cpu_s + mark.engine_cpu_s for mark in ready]),
        "marks": sorted(seen, key=lambda row: row["wall_s"]),
    }


def show(title: str, found: dict[str, Any], console: Console) -> None:
    """Print the figures of one kind of start."""
    table = Table(title=title)
    for heading in ("seconds since the command", "wall", "server CPU", "engine CPU"):
        table.add_column(heading, justify="left" if heading.startswith("seconds") else "right")
    for row in found["marks"]:
        table.add_row(row["mark"], *(f"{row[name]:.2f}" for name in ("wall_s", "server_cpu_s", "engine_cpu_s")))
    wall, both = found["ready_wall_s"], found["both_cpu_s"]
    table.caption = (
        f"/ready after {wall['median']:.2f} s ({wall['least']:.2f} to {wall['most']:.2f}), "
        f"CPU of both {both['median']:.2f} s ({both['least']:.2f} to {both['most']:.2f})"
    )
    console.print(table)


def main(arguments: list[str] | None = None) -> int:
    """Start in turns, print and write."""
    options = parse(arguments)
    interrupted_by_sigterm()
    programs = {NOW: options.fdcore} | ({BEFORE: options.before} if options.before else {})
    console = Console(width=100)
    loads = [load_average()]
    starts: dict[tuple[str, bool], list[Start]] = {(name, shown): [] for shown in (False, True) for name in programs}
    try:
        for program in programs.values():
            start(program, options, terminal=False)
        for number in range(options.rounds):
            turns = list(starts) if number % 2 == 0 else list(reversed(starts))
            for name, terminal in turns:
                starts[name, terminal].append(start(programs[name], options, terminal=terminal))
            loads.append(load_average())
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
    except EngineFailedError as error:
        print(error, file=sys.stderr)
        return 1
    found = {f"{name}{', in a terminal' if shown else ''}": summary(each) for (name, shown), each in starts.items()}
    for title, each in found.items():
        show(title, each, console)
    facts = {
        "command": shlex.join(
            ["python", "benchmarks/start_up.py", *(sys.argv[1:] if arguments is None else arguments)]
        ),
        "machine": describe(),
        "load_average": loads,
        "model": options.model,
        "backend": options.backend,
        "rounds": options.rounds,
        "figures": "seconds since the command; a mark's are medians. The load counts the starts themselves.",
        "summaries": found,
        "starts": {
            f"{name}{', in a terminal' if shown else ''}": [
                [{k: v if isinstance(v, str) else round(v, 3) for k, v in asdict(mark).items()} for mark in one.marks]
                for one in each
            ]
            for (name, shown), each in starts.items()
        },
    }
    (RESULTS / f"{options.out}.json").write_text(json.dumps(facts, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
