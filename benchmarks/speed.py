"""Compare the speed of this commit with another one on this machine, in rounds that take turns; see `nox -s speed`.

    python benchmarks/speed.py --before PYTHON

`--before` is the interpreter of an environment with the other commit. Ends with status 1 if this commit is more than
5 % slower in any comparison, and with 2 if the rounds do not decide one of them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from rich.console import Console

from fd_core.cli.bench.compare import comparing, machine, rounds, weights
from fd_core.cli.bench.compare.engines import ENGINES, RunLimits
from fd_core.cli.bench.compare.processes import interrupted_by_sigterm
from fd_core.cli.bench.compare.workloads import SHAPES
from fd_core.models.catalog import resolve_model

LIMIT = 1.05
"""Time of this commit over that of the other one, above which it fails."""
CONFIDENCE = 0.95
LOOKS = (8, 12, 16, 24, 32)
"""Rounds after which the interval is checked; after the last one a comparison is decided or fails."""
NOW, BEFORE = "fd_core", "fd_core-before"
WORKLOADS = ("w1", "w2", "w3")
PLANNING = {
    "planning": (("scheduler", "--running", "256", "--drafts", "0"), lambda case: case["us"]["step"]["median"]),
    "router": (("router", "--in-flight", "1000"), lambda case: case["us"]["both"]["median"]),
}
"""Commands of `fdcore bench` that need no model, and the time in a case of their results."""


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the exact interval of the median, from the order of the values alone; infinite for too few of them.

    Every look may err, so each has its share of the error.
    """
    ordered, count = sorted(ratios), len(ratios)
    error = (1 - CONFIDENCE) / len(LOOKS)
    skipped = [n for n in range(count // 2) if sum(math.comb(count, i) for i in range(n + 1)) * 2 / 2**count <= error]
    return (ordered[skipped[-1]], ordered[-1 - skipped[-1]]) if skipped else (0.0, math.inf)


def verdict(ratios: Sequence[float]) -> str:
    """Return "slower", "not slower" or "not decided" for ratios of times, new over old."""
    low, high = interval(ratios)
    return "slower" if low > LIMIT else "not slower" if high <= LIMIT else "not decided"


def decided(times: Callable[[int], dict[str, list[float]]], console: Console) -> dict[str, str]:
    """Return the verdict on each comparison; `times(count)` measures up to `count` rounds and returns all ratios."""
    verdicts: dict[str, str] = {}
    for count in LOOKS:
        ratios = times(count)
        verdicts = {name: verdict(each) for name, each in ratios.items()}
        for name, each in ratios.items():
            low, high = interval(each)
            console.print(
                f"{name}: {median(each):.3f} of the time before (from {low:.3f} to {high:.3f}, {len(each)} rounds): "
                f"{verdicts[name]}",
                highlight=False,
            )
        if "not decided" not in verdicts.values():
            break
    return verdicts


def planning(before: Path, ratios: dict[str, list[float]], count: int) -> dict[str, list[float]]:
    """Extend the ratios of commands without a model to `count` rounds."""
    pythons = (Path(sys.executable), before)
    with tempfile.TemporaryDirectory() as folder:
        for name, (arguments, time_in) in PLANNING.items():
            found = ratios.setdefault(name, [])
            while len(found) < count:
                order = pythons if len(found) % 2 else pythons[::-1]
                spent = {}
                for python in order:
                    result = Path(folder) / "figures.json"
                    command = [str(python), "-m", "fd_core", "bench", *arguments, "--json", str(result)]
                    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder)
                    spent[python] = time_in(json.loads(result.read_text())["cases"][0])
                found.append(spent[pythons[0]] / spent[before])
    return ratios


def main() -> int:
    """Measure until every comparison is decided or the rounds are used up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, metavar="PYTHON")
    parser.add_argument("--threads", type=int, default=2, help="threads of each engine (default: 2)")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="of the engines (default: w1,w2,w3)")
    options = parser.parse_args()
    interrupted_by_sigterm()
    os.environ.pop("PYTHONPATH", None)  # either environment has its own fd_core
    console = Console(width=120)
    comparing.warn_if_busy(console)
    places = comparing.places(None, [f"before={options.before.parents[1]}"], install=False)
    prepared, corpus = weights.prepare(resolve_model("smollm2").path, places.cache / "models")
    names = comparing.known(options.workloads, SHAPES, "--workloads")
    shapes = [SHAPES[name] for name in names]
    limits = RunLimits(options.threads, max(s.requests for s in shapes), max(s.longest for s in shapes))
    failures: dict[str, str] = {}
    measured = rounds.Measurements()
    with ExitStack() as stack:
        started = []
        for name in (NOW, BEFORE):
            session = places.start(ENGINES[name], prepared, limits, console, failures)
            if session is None:
                raise SystemExit(f"{failures}")
            stack.callback(session.close)
            started.append(session)
        probe = machine.BandwidthProbe(options.threads)

        def generating(count: int) -> dict[str, list[float]]:
            warm_up = None if count == LOOKS[0] else []
            rounds.measure(started, names, count, corpus, 0, probe, lambda *_: None, warm_up, result=measured)
            if measured.failures:
                raise SystemExit(f"{measured.failures}")
            walls = {(run.engine, run.workload, run.round): run.wall_s for run in measured.runs}
            return {name: [walls[NOW, name, n] / walls[BEFORE, name, n] for n in range(1, count + 1)] for name in names}

        verdicts = decided(generating, console)
    ratios: dict[str, list[float]] = {}
    verdicts |= decided(lambda count: planning(options.before, ratios, count), console)
    slower = [name for name, each in verdicts.items() if each == "slower"]
    open_ = [name for name, each in verdicts.items() if each == "not decided"]
    if slower:
        console.print(f"more than {LIMIT - 1:.0%} slower: {', '.join(slower)}", highlight=False)
    if open_:
        console.print(f"not decided after {LOOKS[-1]} rounds: {', '.join(open_)}", highlight=False)
    return 1 if slower else 2 if open_ else 0


if __name__ == "__main__":
    sys.exit(main())
