"""What the router shows of itself, for metrics and the live page: frozen, and complete at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from fd_core.kv.breaker import BreakerState
from fd_core.router.selection import Mode, WorkerLoad
from fd_core.router.workers import Role, RouterWorker, WorkerState
from fd_core.types.metrics import counter, gauge

_PROMPT_BLOCKS: Final = counter("prompt_blocks", "Prompt blocks looked up in what workers hold.")
_HIT_BLOCKS: Final = counter("hit_blocks", "Prompt blocks that the chosen worker was believed to hold.")


class SelectionCounts(msgspec.Struct):
    """What became of selections, of one worker or of all workers of a role; every count only grows."""

    selected: Annotated[int, counter("selected", "Attempts given to the worker.")] = 0
    served: Annotated[int, counter("served", "Attempts whose answer ended well.")] = 0
    failed: Annotated[int, counter("failed", "Attempts that failed.")] = 0
    declined: Annotated[
        int, counter("declined", "Attempts that the worker had no room for, or whose model it does not serve.")
    ] = 0
    unused: Annotated[
        int,
        counter(
            "unused", "Answers that ended well without this prefill worker: the decode worker had the prompt's KV."
        ),
    ] = 0
    left: Annotated[
        int,
        counter(
            "left", "Attempts that ended without a verdict, as when a client leaves or the pair's other side fails."
        ),
    ] = 0
    prompt_blocks: Annotated[int, _PROMPT_BLOCKS] = 0
    hit_blocks: Annotated[int, _HIT_BLOCKS] = 0


OUTCOMES: Final = ("served", "failed", "declined", "unused", "left")
"""Fields of `SelectionCounts` of which each ended attempt is in one."""


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """One incarnation of a worker."""

    worker: RouterWorker
    state: WorkerState
    since: float
    """When the worker came into that state, by the clock that is passed in."""
    circuit: BreakerState
    load: WorkerLoad
    tally: SelectionCounts
    """Counts since this incarnation came."""
    index_blocks: Annotated[int, gauge("index_blocks", "Prompt blocks that the worker is believed to hold.")]
    """Blocks of prompts that the worker served, of the router's block size."""
    held_blocks: int | None
    """Blocks that the worker reports to hold, of its own block size; None if it does not report."""
    kv_events: Annotated[int, counter("kv_events", "KV events taken from the worker.")]
    kv_port: int | None
    """Port on which a prefill worker listens for decode workers, if it named one."""
    unfit: str
    """Why the worker is not chosen for its role although it is healthy, in words."""

    @property
    def healthy(self) -> Annotated[bool, gauge("healthy", "1 while health checks of the worker pass, 0 otherwise.")]:
        """Whether health checks pass."""
        return self.state is WorkerState.HEALTHY

    @property
    def circuit_closed(
        self,
    ) -> Annotated[
        bool, gauge("circuit_closed", "1 while the worker's circuit breaker lets requests through, else 0.")
    ]:
        """Whether the circuit breaker lets requests through."""
        return self.circuit == "closed"

    @property
    def tells_kv(
        self,
    ) -> Annotated[bool, gauge("tells_kv", "1 while the worker reports the KV that it holds, else 0.")]:
        """Whether the worker reports what it holds."""
        return self.held_blocks is not None

    @property
    def reported_blocks(
        self,
    ) -> Annotated[int, gauge("held_blocks", "KV blocks, of the worker's own size, that the worker reports to hold.")]:
        """Blocks that the worker reports to hold; 0 if it does not report."""
        return self.held_blocks or 0


@dataclass(frozen=True, slots=True)
class RouterSnapshot:
    """The whole router."""

    workers: tuple[WorkerSnapshot, ...]
    departed: tuple[tuple[RouterWorker, WorkerLoad], ...]
    """Earlier incarnations on which requests have not ended yet."""
    index_blocks: int
    """Blocks that take memory in the prefix index."""
    total: WorkerLoad
    """Load of all incarnations, departed ones included."""
    roles: dict[Role, SelectionCounts]
    """Counts of all workers there ever were, by role."""
    modes: Annotated[
        dict[Mode, int],
        counter("attempts", "Attempts on a mixed worker, a pair or a decode worker.", label="mode"),
    ]
    refused: Annotated[dict[str, int], counter("refused", "Requests that got no worker, by reason.", label="reason")]
    retries: Annotated[int, counter("retries", "Attempts on another worker after one that failed.")]
    faults: Annotated[
        int, counter("faults", "Releases and verdicts that came twice or too late: 0 if the gateway is right.")
    ]

    @property
    def tally(self) -> SelectionCounts:
        """Counts of all workers there ever were."""
        columns = zip(*map(msgspec.structs.astuple, self.roles.values()), strict=True)
        return SelectionCounts(*map(sum, columns))

    @property
    def prompt_blocks(self) -> Annotated[int, _PROMPT_BLOCKS]:
        """Blocks of all prompts that were looked up."""
        return self.tally.prompt_blocks

    @property
    def hit_blocks(self) -> Annotated[int, _HIT_BLOCKS]:
        """Blocks of all prompts that the chosen worker was believed to hold."""
        return self.tally.hit_blocks
