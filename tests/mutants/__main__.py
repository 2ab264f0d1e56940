"""`python -m tests.mutants [NAME ...]`: every mutant is killed, or the session fails."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.mutants.catalog import MUTANTS, NOT_APPLICABLE
from tests.mutants.mutant import DoesNotApply, Mutant
from tests.mutants.session import SessionFault, run


def main() -> int:
    """Print what became of each mutant; return 0 if all of them died, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to run; all if none is named")
    parser.add_argument("--jobs", type=int, default=2, choices=(1, 2), help="how many at a time")
    parser.add_argument("--list", action="store_true", help="show names and laws, run nothing")
    options = parser.parse_args()
    unknown = set(options.names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        parser.error(f"no such mutant: {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in MUTANTS if not options.names or mutant.name in options.names]
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name:<44} {mutant.law}")
        return 0
    return _session(chosen, options.jobs)


def _session(chosen: list[Mutant], jobs: int) -> int:
    baseline = run(None)
    if baseline.killer is not None:
        print(
            f"the code without a mutant fails {baseline.killer}: nothing can be learned from mutants", file=sys.stderr
        )
        return 1
    failed = []
    with ThreadPoolExecutor(jobs) as pool:
        for mutant, (good, words) in zip(chosen, pool.map(_report, chosen), strict=True):
            print(f"{mutant.name:<44} {words}", flush=True)
            if not good:
                failed.append(mutant)
    for missing in NOT_APPLICABLE:
        print(f"{missing.name:<44} NOT APPLICABLE, {missing.reason} (law {missing.law})")
    print(f"{len(chosen) - len(failed)} of {len(chosen)} mutants killed")
    for mutant in failed:
        print(f"missing: a test of law {mutant.law} that kills {mutant.name}")
    return 1 if failed else 0


def _report(mutant: Mutant | None) -> tuple[bool, str]:
    try:
        killer = run(mutant).killer
    except DoesNotApply as error:
        return False, f"DOES NOT APPLY: {error}"
    except SessionFault as error:
        return False, f"COULD NOT RUN: {error}"
    return killer is not None, "SURVIVED" if killer is None else f"killed by {killer}"


if __name__ == "__main__":
    sys.exit(main())
