"""Compare the planning of two commits of fd_core: `fdcore bench scheduler` of each in turns, ratios inside rounds.

git worktree add ../before REV && python -m venv ../before/.venv
../before/.venv/bin/pip install -e '../before[cpu]'
python benchmarks/scheduler_before.py --before ../before/.venv/bin/fdcore
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

PARTS = ("plan", "commit", "step")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(sys.executable).with_name("fdcore")
    parser.add_argument("--before", type=Path, required=True, help="program `fdcore` of the other commit")
    parser.add_argument(
        "--fdcore", type=Path, default=here, help="program of this commit (default: in this Python's folder)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns of each (default: 7)")
    parser.add_argument("--running", default="16,256,1024,4096", help="requests at once (default: 16,256,1024,4096)")
    parser.add_argument("--steps", type=int, default=100, help="steps in a turn (default: 100)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rounds to FILE")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.steps < 1:
        parser.error("--rounds and --steps must be at least 1")
    return options


def measure(program: Path, options: argparse.Namespace, seed: int) -> dict[tuple[int, int, str], float]:
    """Return the median microseconds of each part, by running requests and drafts."""
    running = [word for count in options.running.split(",") for word in ("--running", count)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [str(program), "bench", "scheduler", *running, "--steps", str(options.steps), "--seed", str(seed)]
        subprocess.run([*command, "--json", str(out)], check=True, stdout=subprocess.DEVNULL)
        cases = json.loads(out.read_text())["cases"]
    return {(case["running"], case["drafts"], part): case["us"][part]["median"] for case in cases for part in PARTS}


def main(arguments: list[str] | None = None) -> int:
    """Measure in turns and print microseconds of each commit, with the median of the ratios of the rounds."""
    options = parse(arguments)
    before, after = defaultdict(list), defaultdict(list)
    for number in range(options.rounds):
        turns = [(options.before, before), (options.fdcore, after)]
        for program, found in turns if number % 2 == 0 else reversed(turns):
            for case, microseconds in measure(program, options, number).items():
                found[case].append(microseconds)
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
    print("| running | drafts | part | before, us | after, us | after / before |\n|---|---|---|---|---|---|")
    for case in before:
        ratio = median(new / old for old, new in zip(before[case], after[case], strict=True))
        running, drafts, part = case
        print(
            f"| {running} | {drafts} | {part} | {median(before[case]):.0f} | {median(after[case]):.0f} | {ratio:.2f} |"
        )
    if options.json is not None:
        rounds = [{"case": case, "before": before[case], "after": after[case]} for case in before]
        options.json.write_text(json.dumps(rounds) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
