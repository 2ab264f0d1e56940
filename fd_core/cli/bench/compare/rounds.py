"""Interleaved rounds: every engine computes a workload before any computes the next one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from fd_core.cli.bench.compare.machine import BandwidthProbe, load_average
from fd_core.cli.bench.compare.processes import EngineFailedError
from fd_core.cli.bench.compare.sessions import PeerSession
from fd_core.cli.bench.compare.stats import PeerRun, wrong_counts
from fd_core.cli.bench.compare.workloads import build

SETTLE_SECONDS = 0.3
"""Idle time between engines, in which the threads of the last one stop spinning."""


@dataclass(slots=True)
class Measurements:
    """Everything that the rounds produced."""

    runs: list[PeerRun] = field(default_factory=list)
    bandwidths: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)


def order_of(sessions: Sequence[PeerSession], turn: int) -> list[PeerSession]:
    """Return the sessions rotated by `turn`, so that no engine always runs after the same neighbour."""
    start = turn % len(sessions)
    return [*sessions[start:], *sessions[:start]]


def measure(
    sessions: Iterable[PeerSession],
    workloads: Sequence[str],
    rounds: int,
    corpus: Sequence[int],
    seed: int,
    probe: BandwidthProbe,
    report: Callable[[str, str, int, PeerRun | str], None],
    warm_up: Sequence[str] | None = None,
    *,
    result: Measurements | None = None,
    save: Callable[[Measurements], None] = lambda _: None,
) -> Measurements:
    """Run all rounds after one unmeasured warm-up; an engine that breaks or miscounts is left out from then on.

    `report(engine, workload, round, run or reason)` is called for each result; round 0 is the warm-up, which takes the
    same workloads unless `warm_up` names others. Rounds that `result` has are not repeated; `save` is called after
    each workload of a round.
    """
    alive = list(sessions)
    result = result or Measurements()
    done = {(run.workload, run.round) for run in result.runs}
    plan = [(n, [name for name in workloads if (name, n) not in done]) for n in range(1, rounds + 1)]
    missing = [name for name in workloads if any(name in names for _, names in plan)]
    if missing:
        plan.insert(0, (0, list(missing if warm_up is None else warm_up)))
    for number, names in plan:
        if not names:
            continue
        result.bandwidths.append(probe.measure())
        result.loads.append(load_average())
        for at, name in enumerate(names):
            workload = build(name, corpus, seed * 1000 + number)
            for session in order_of(alive, number + at) if alive else ():
                engine = session.engine.name
                time.sleep(SETTLE_SECONDS)
                try:
                    run = session.run(workload, number)
                    problems = wrong_counts(run, workload.max_tokens)
                    if problems:
                        raise EngineFailedError("; ".join(problems))
                except EngineFailedError as error:
                    result.failures[engine] = f"{name}, round {number}: {error}"
                    report(engine, name, number, str(error))
                    alive.remove(session)
                    session.close()
                    continue
                report(engine, name, number, run)
                if number > 0:
                    result.runs.append(run)
            save(result)
    return result
