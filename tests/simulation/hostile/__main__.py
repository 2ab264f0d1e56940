"""`python -m tests.simulation.hostile`: run hostile worlds, or replay one of them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from tests.simulation.hostile.plans import HostilePlan, draw_plan, without
from tests.simulation.hostile.session import command_of, run_session, run_world, show_progress, shrunk


def main() -> int:
    """Return 0 if all invariants held and every expected event occurred, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.hostile", description=__doc__)
    parser.add_argument("--worlds", type=int, default=20_000, help="how many worlds to run (default: 20000)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one (default: 0)")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: one per core")
    parser.add_argument("--stop-after", type=int, default=1000, help="start no more worlds after this many failures")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--seed", type=int, help="run only this world and report its failure")
    parser.add_argument("--trace", action="store_true", help="with --seed: print all events")
    parser.add_argument("--shrink", action="store_true", help="with --seed: minimize the failing world")
    parser.add_argument("--without-clients", default="", metavar="NAMES", help="with --seed: omit, comma-separated")
    parser.add_argument("--without-faults", default="", metavar="INDEXES", help="with --seed: omit, comma-separated")
    options = parser.parse_args()
    if options.seed is not None:
        clients = {name for name in options.without_clients.split(",") if name}
        faults = {int(index) for index in options.without_faults.split(",") if index}
        plan = without(draw_plan(options.seed), clients, faults)
        return _shrink(plan) if options.shrink else _again(plan, trace=options.trace)
    seeds = range(options.first, options.first + options.worlds)
    session = run_session(seeds, options.processes, show_progress(len(seeds)), options.stop_after)
    print(session)
    if options.json is not None:
        figures = {
            "worlds": session.worlds,
            "steps": session.steps,
            "seconds": round(session.seconds, 1),
            "processes": options.processes,
            "worlds_a_minute": round(60 * session.worlds / session.seconds),
            "failed": len(session.failures),
            "occurred": dict(sorted(session.occurred.items())),
        }
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    missing = session.missing if session.worlds >= 1000 else []
    for what in missing:
        print(f"{what} occurred in no world")
    return 1 if session.failures or missing else 0


def _again(plan: HostilePlan, *, trace: bool) -> int:
    if trace:
        print(plan.limits)
        for config, count in plan.configs:
            print(f"{count} {config.role}: {config}")
        print(plan.router if plan.routers else "no router")
    counts, failure = run_world(plan, print if trace else None)
    print(dict(sorted(counts.items())) if failure is None else failure.what)
    return 0 if failure is None else 1


def _shrink(plan: HostilePlan) -> int:
    if run_world(plan)[1] is None:
        print("this world does not fail")
        return 0
    clients, faults = shrunk(plan)
    left = len(plan.faults) + len(plan.accidents) - len(faults)
    print(f"{len(plan.conversations) - len(clients)} clients and {left}faults suffice:")
    print(f"  {command_of(plan.seed, clients=clients, faults=faults)}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
