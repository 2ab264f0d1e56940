"""`python -m tests.mutants [NAME ...]`: fail unless every mutant is killed."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from tests.mutants.catalog import MUTANTS, NOT_APPLICABLE
from tests.mutants.copies import mutated, pristine, runner
from tests.mutants.groups import Group, groups, in_order, killer_group, known_killers, remember_killers
from tests.mutants.mutant import DoesNotApply, Mutant
from tests.mutants.session import Baseline, Fate, SessionFault, baseline, judge


def main() -> int:
    """Print the verdict of each mutant; return 0 if all of them were killed, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to judge (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="number of mutants to judge in parallel (default: 2)")
    parser.add_argument("--remember", action="store_true", help="record the killer of each mutant, to run it first")
    parser.add_argument("--list", action="store_true", help="list names and invariants without running anything")
    options = parser.parse_args()
    unknown = set(options.names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in MUTANTS if not options.names or mutant.name in options.names]
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name:<44} {mutant.law}")
        return 0
    return _session(chosen, max(1, options.jobs), remember=options.remember)


def _session(chosen: Sequence[Mutant], jobs: int, *, remember: bool) -> int:
    began = time.monotonic()
    found = groups()
    with pristine() as original:
        try:
            measured = baseline(found, runner(original), jobs)
        except SessionFault as fault:
            print(fault, file=sys.stderr)
            return 1
        tests = sum(len(run.passed) for run in measured.runs.values())
        print(
            f"without a mutant {tests} tests pass in {_time(sum(measured.seconds.values()))} of process time",
            flush=True,
        )
        failed, killers = [], {}
        for mutant, killer, words in _in_turn(original, found, chosen, measured, jobs):
            print(words, flush=True)
            if killer is None:
                failed.append(mutant)
            else:
                killers[mutant.name] = killer
    if remember:
        remember_killers(killers, {mutant.name for mutant in MUTANTS})
    for missing in NOT_APPLICABLE:
        print(f"{missing.name:<44} NOT APPLICABLE, {missing.reason} (invariant {missing.law})")
    print(f"{len(chosen) - len(failed)} of {len(chosen)} mutants killed in {_time(time.monotonic() - began)}")
    for mutant in failed:
        print(f"missing: a test of invariant {mutant.law} that kills {mutant.name}")
    return 1 if failed else 0


def _in_turn(
    original: Path, found: tuple[Group, ...], chosen: Sequence[Mutant], measured: Baseline, jobs: int
) -> Iterator[tuple[Mutant, str | None, str]]:
    """Judge every mutant; yield each with the test that killed it, if any, and a line of progress."""
    began = time.monotonic()
    killers = known_killers()
    with ThreadPoolExecutor(jobs) as pool:
        under_way = {
            pool.submit(_judged, original, found, mutant, measured, killers.get(mutant.name)): mutant
            for mutant in chosen
        }
        for count, done in enumerate(as_completed(under_way), 1):
            mutant = under_way[done]
            killer, words = done.result()
            left = (time.monotonic() - began) / count * (len(chosen) - count)
            yield mutant, killer, f"{count:>4}/{len(chosen)}, {_time(left)} left  {mutant.name:<44} {words}"


def _judged(
    original: Path, found: tuple[Group, ...], mutant: Mutant, measured: Baseline, last_killer: str | None
) -> tuple[str | None, str]:
    passed = {name: run.passed for name, run in measured.runs.items()}
    ordered = in_order(found, mutant, measured.seconds)
    first = killer_group(last_killer, ordered, passed)
    try:
        with mutated(original, mutant) as copy:
            verdict = judge(ordered if first is None else (first, *ordered), runner(copy), measured)
    except DoesNotApply as error:
        return None, f"DOES NOT APPLY: {error}"
    except SessionFault as error:
        return None, f"COULD NOT RUN: {error}"
    return verdict.tests[0] if verdict.fate is Fate.KILLED else None, str(verdict)


def _time(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
