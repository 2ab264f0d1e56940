"""`python -m tests.mutants.in_worlds [NAME ...]`: find the mutants that die in hostile worlds, and in which world."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.mutants.catalog import MUTANTS
from tests.mutants.copies import mutated, pristine
from tests.mutants.mutant import DoesNotApply, Mutant

SIMULATED = (
    "scheduling/",
    "kv/",
    "router/",
    "disagg/",
    "engine/core",
    "engine/client",
    "engine/request_ledger",
    "signals",
)
"""Code that worlds run; they cannot detect other faults."""
_ELSEWHERE = ("router/gateway/", "kv/stores/disk", "disagg/connectors/", "disagg/wire")
"""Exceptions within that code: worlds do not run these parts."""


def main() -> int:
    """Print the world in which each mutant died; return 0 if the worlds pass without a fault."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.in_worlds", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to judge (default: all in simulated code)")
    parser.add_argument("--worlds", type=int, default=100, help="number of worlds for each mutant (default: 100)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="default: one a core")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results; other entries of the file stay")
    options = parser.parse_args()
    chosen = [one for one in MUTANTS if one.name in options.names or (not options.names and _is_simulated(one))]
    died: dict[str, int | None] = {}
    with pristine() as original:
        if _world_of_death(original, options.worlds) is not None:
            print("the worlds fail without any fault", file=sys.stderr)
            return 1
        for mutant, world in _each(original, chosen, options.worlds, options.jobs):
            died[mutant.name] = world
            print(f"{mutant.name:<48} {'survives' if world is None else f'dies in world {world}'}", flush=True)
    dead = sum(world is not None for world in died.values())
    print(f"{dead} of {len(died)} die within {options.worlds} worlds")
    if options.json is not None:
        _write(options.json, options.worlds, died)
    return 0


def _write(path: Path, worlds: int, died: dict[str, int | None]) -> None:
    """Write the result of each mutant; the file's entries for other mutants stay."""
    before = json.loads(path.read_text())["in_world"] if path.exists() else {}
    there = {mutant.name for mutant in MUTANTS}
    merged = {name: world for name, world in (before | died).items() if name in there}
    dead = sum(world is not None for world in merged.values())
    figures = {"worlds": worlds, "died": dead, "judged": len(merged), "in_world": dict(sorted(merged.items()))}
    path.write_text(json.dumps(figures, indent=1) + "\n")


def _is_simulated(mutant: Mutant) -> bool:
    files = [edit.file for edit in mutant.edits]
    return any(file.startswith(SIMULATED) and not file.startswith(_ELSEWHERE) for file in files)


def _each(original: Path, chosen: Sequence[Mutant], worlds: int, jobs: int) -> Iterator[tuple[Mutant, int | None]]:
    def one(mutant: Mutant) -> tuple[Mutant, int | None]:
        with mutated(original, mutant) as copy:
            return mutant, _world_of_death(copy, worlds)

    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(one, mutant) for mutant in chosen]):
            try:
                yield done.result()
            except DoesNotApply as error:
                print(error, file=sys.stderr)


def _world_of_death(copy: Path, worlds: int) -> int | None:
    """Return the number of the first world that fails; None if none fails, or not in time.

    A world that livelocks detects that itself. A copy that cannot be imported dies in world 0.
    """
    command = [sys.executable, "-m", "tests.simulation.hostile", "--processes", "1", "--stop-after", "1"]
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    try:
        ran = subprocess.run(
            [*command, "--worlds", str(worlds)],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60 + worlds,
        )
    except subprocess.TimeoutExpired:
        print(f"{copy.name}: {worlds} worlds did not finish in time: no verdict", file=sys.stderr)
        return None
    if ran.returncode == 0 or not (found := re.search(r"--seed (\d+)", ran.stdout)):
        return None if ran.returncode == 0 else 0
    return int(found[1])


if __name__ == "__main__":
    sys.exit(main())
