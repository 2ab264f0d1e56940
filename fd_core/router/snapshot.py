"""What the router shows of itself, for metrics and the live page: frozen, and complete at one moment."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from fd_core.breaker import BreakerState
from fd_core.router.accounting import Load
from fd_core.router.selection import Mode
from fd_core.router.workers import Role, Worker, WorkerState

__all__ = ["RouterSnapshot", "SelectionCounts", "WorkerSnapshot"]


class SelectionCounts(msgspec.Struct):
    """What became of selections, of one worker or of several; every count only grows."""

    selected: int = 0
    served: int = 0
    failed: int = 0
    declined: int = 0
    """The worker had no room, or does not serve what was asked for; nothing is wrong with it."""
    unused: int = 0
    """Ended well without this worker: the decode side of the pair had the KV of the prompt, or computed it itself."""
    left: int = 0
    """Ended without a verdict: the client left, or the other side of the pair failed."""
    prompt_blocks: int = 0
    """Prompt blocks of selections for which the prefix index was asked, on the prefill side."""
    hit_blocks: int = 0
    """Prompt blocks that the chosen worker was believed to hold."""

    @classmethod
    def total(cls, parts: Iterable[SelectionCounts]) -> SelectionCounts:
        """Return the sum of all parts, as a value of its own."""
        columns = zip(*map(msgspec.structs.astuple, (cls(), *parts)), strict=True)
        return cls(*map(sum, columns))


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """One incarnation. Its tally starts at zero with it."""

    worker: Worker
    state: WorkerState
    since: float
    """When it came into that state, by the clock that is passed in."""
    circuit: BreakerState
    load: Load
    tally: SelectionCounts
    index_blocks: int
    """Blocks that it is believed to hold, as it served them."""
    held_blocks: int | None = None
    """Blocks of its own size that it says it holds; None if it does not tell."""
    kv_events: int = 0
    """What it told of them, so many times."""
    kv_port: int | None = None
    """The port of its transfers, if it told one."""
    unfit: str = ""
    """Why it is not chosen for its role although it is healthy, in words."""


@dataclass(frozen=True, slots=True)
class RouterSnapshot:
    """The whole router."""

    workers: tuple[WorkerSnapshot, ...]
    departed: tuple[tuple[Worker, Load], ...]
    """Earlier incarnations on which requests have not ended yet."""
    index_blocks: int
    """Blocks that take memory in the prefix index."""
    total: Load
    """Everything that is counted, on `departed` ones too."""
    tally: SelectionCounts
    """Of all workers there ever were."""
    roles: dict[Role, SelectionCounts]
    """The same by role."""
    modes: dict[Mode, int]
    """Attempts on a mixed worker, and on a pair."""
    refused: dict[str, int]
    """Requests that got no worker, by reason."""
    retries: int
    faults: int
    """Releases and verdicts that came twice or too late: 0 if the gateway is right."""
