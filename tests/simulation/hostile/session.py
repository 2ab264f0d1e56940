"""Runs many hostile worlds on all cores; reports what occurred, which worlds failed, and how to replay them."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType

from tests.simulation.hostile.plans import HABITS, HostilePlan, draw_plan, without
from tests.simulation.hostile.world import run_plan

__all__ = ["EXPECTED", "Failure", "Session", "command_of", "run_session", "run_world", "shrunk"]

CPU_SECONDS = 20.0
"""Seconds of CPU time after which a world counts as looping forever."""

EXPECTED = (
    *("preemptions", "returned_with_tokens", "prefill_chunks", "several_in_a_step", "admitted_with_kv", "prefix_hits"),
    *("drafts_verified", "drafts_accepted", "loads", "loads_in_part", "saves", "store_errors", "values_damaged"),
    *("prefill_transferred", "prefill_lost", "prefill_expired", "prefill_damaged", "prefill_refused"),
    *("told_prefill_held", "rows_failed", "strangers", *(f"habit_{habit or 'none'}" for habit in HABITS)),
    *("retries", "engine_deaths", "messages_held", "ended_stop", "ended_length", "ended_left"),
    *("ended_refused", "ended_failed", "reports_followed"),
    *("fault_engine_dies", "fault_engine_hangs", "fault_process_killed", "fault_process_stands_still"),
    *("fault_worker_drains", "fault_device_slow", "fault_clock_wrong", "fault_places_parted", "fault_network_slow"),
    *("fault_router_restarted", "fault_transfers_lost", "fault_transfers_repeated", "fault_store_down"),
    *("accident_messages_late", "accident_requests_aborted", "accident_rows_fail", "accident_worker_deregistered"),
    *("accident_role_changed", "poisoned", "ended_abort"),
    *("fault_store_slow", "fault_store_full", "fault_store_loses", "fault_store_damages", "fault_clients_leave"),
)
"""Events that must occur in a session of a thousand worlds: otherwise the worlds do not test them."""


@dataclass(frozen=True, slots=True)
class Failure:
    """World in which an invariant was broken."""

    seed: int
    what: str


@dataclass(slots=True)
class Session:
    """Results of many worlds."""

    worlds: int = 0
    steps: int = 0
    seconds: float = 0.0
    occurred: Counter[str] = field(default_factory=Counter)
    """Number of worlds in which each event occurred."""
    failures: list[Failure] = field(default_factory=list)

    @property
    def missing(self) -> list[str]:
        """Expected events that did not occur."""
        return [what for what in EXPECTED if not self.occurred[what]]

    def __str__(self) -> str:
        rate = 60 * self.worlds / max(self.seconds, 1e-9)
        lines = [f"{self.worlds} worlds with {self.steps} steps in {self.seconds:.0f} s: {rate:.0f} worlds per minute"]
        width = max(map(len, self.occurred), default=0)
        lines += [f"  {what:<{width}}  {count:>7}" for what, count in sorted(self.occurred.items())]
        for failure in sorted(self.failures, key=lambda each: each.seed)[:20]:
            lines += [f"seed {failure.seed}: {failure.what}", f"  replay: {command_of(failure.seed)}"]
        lines.append(f"{len(self.failures)} worlds failed")
        return "\n".join(lines)


def command_of(seed: int, *, clients: Iterable[str] = (), faults: Iterable[int] = ()) -> str:
    """Return the command that replays one world, without some of its clients and faults."""
    words = [f"python -m tests.simulation.hostile --seed {seed} --trace"]
    words += [f"--without-clients {','.join(sorted(clients))}"] if clients else []
    words += [f"--without-faults {','.join(map(str, sorted(faults)))}"] if faults else []
    return " ".join(words)


def run_world(plan: HostilePlan, log: Callable[[str], None] | None = None) -> tuple[Counter[str], Failure | None]:
    """Run one world with a limit on CPU time; return what occurred, and its failure."""

    def give_up(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"protocol 1.8: the world did not end within {CPU_SECONDS:g} s of CPU time")

    before = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS)
    try:
        return run_plan(plan, log)[0], None
    except Exception as error:  # noqa: BLE001 - any exception is a failure of the world
        return Counter(), Failure(plan.seed, f"{type(error).__name__}: {error}")
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def run_session(
    seeds: range, processes: int = 1, progress: Callable[[Session], None] = lambda _: None, stop_after: int = 1000
) -> Session:
    """Run the worlds of `seeds`; start no more once `stop_after` have failed."""
    session, began = Session(), time.monotonic()
    for counts, failure in _outcomes(seeds, processes):
        session.worlds += 1
        session.steps += counts["steps"]
        session.occurred.update(counts.keys())
        if failure is not None:
            session.failures.append(failure)
        session.seconds = time.monotonic() - began
        progress(session)
        if len(session.failures) >= stop_after:
            break
    return session


def shrunk(plan: HostilePlan) -> tuple[set[str], set[int]]:
    """Return the clients and faults that a failing world does not need."""
    clients: set[str] = set()
    faults: set[int] = set()
    for fault in range(len(plan.faults) + len(plan.accidents)):
        if run_world(without(plan, clients, faults | {fault}))[1] is not None:
            faults.add(fault)
    for conversation in plan.conversations:
        if run_world(without(plan, clients | {conversation.name}, faults))[1] is not None:
            clients.add(conversation.name)
    return clients, faults


def show_progress(total: int) -> Callable[[Session], None]:
    """Return a function that draws a progress bar on standard error."""

    def show(session: Session) -> None:
        if session.worlds % 20 and session.worlds != total:
            return
        done = 30 * session.worlds // total
        left = session.seconds / session.worlds * (total - session.worlds)
        line = f"[{'#' * done}{'.' * (30 - done)}] {session.worlds}/{total}, {len(session.failures)} failed"
        end = "\n" if session.worlds == total else ""
        print(f"\r{line}, {left:.0f} s left ", end=end, file=sys.stderr, flush=True)

    return show


def _outcomes(seeds: range, processes: int) -> Iterator[tuple[Counter[str], Failure | None]]:
    if processes == 1:
        _begin()
        yield from map(_one, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(processes, _begin_process) as pool:
        yield from pool.imap_unordered(_one, seeds, chunksize=8)


def _begin() -> None:
    logging.disable(logging.WARNING)


def _begin_process() -> None:
    _begin()
    gc.set_threshold(50_000, 50, 100)  # worlds create few reference cycles; this saves 5% of the time


def _one(seed: int) -> tuple[Counter[str], Failure | None]:
    return run_world(draw_plan(seed))
