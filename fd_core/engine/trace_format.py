"""The lines of a trace: what each holds, and the letters of its texts.

Version 2 added `LOADING` and what became of KV outside the device; version 1 is what such a trace is without them.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from fd_core.config import Limits
from fd_core.types import FinishReason

__all__ = [
    "COUNT_LETTERS",
    "DECODE",
    "DRAINING",
    "FORMAT_VERSION",
    "IDLE",
    "LOADING",
    "OLDEST_VERSION",
    "PREFILL",
    "Admitted",
    "Chosen",
    "Closed",
    "Ended",
    "Full",
    "LoadEnded",
    "SaveEnded",
    "Stay",
    "StepLine",
    "TraceHeader",
]

FORMAT_VERSION: Final = 2
OLDEST_VERSION: Final = 1
"""Of those that are read."""
IDLE, PREFILL, DECODE, DRAINING, LOADING = ".", "p", "d", "x", "l"
"""Letters of `StepLine.slots`."""
COUNT_LETTERS: Final = "0123456789abcdefg"
"""Letters of `StepLine.drafted` and `StepLine.accepted`, by number."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Small = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True):
    """First line of a trace, and of every epoch in it."""

    fdcore_trace: int = FORMAT_VERSION
    model: str
    backend: str
    device: str
    epoch: int
    started: float
    """Seconds since 1970 at time 0 of the lines that follow."""
    speculation: str | None
    """Name of the drafter."""
    limits: Limits


class Stay(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request in a slot."""

    slot: Small
    gen: Small
    request_id: str


class Admitted(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A stay begins."""

    slot: Small
    gen: Small
    request_id: str
    tokens: Small
    """Prompt and tokens delivered before."""
    computed: Small
    """Tokens at the front whose KV was there: found in the prefix cache or loaded before."""


class Ended(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request was told its end."""

    request_id: str
    reason: FinishReason


class Chosen(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Whether to load a prefix or to compute it, with what was known."""

    at: Count
    """Microseconds, like all times here."""
    request_id: str
    load: bool
    host_blocks: Small
    store_blocks: Small
    tokens: Small
    """What need not be computed if the blocks are loaded."""
    load_time: Count | None
    """Estimates; None where nothing was measured, which is a reason to try."""
    compute_time: Count | None


class LoadEnded(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A load of `blocks` KV blocks for a request that held `slot` meanwhile."""

    began: Count
    ended: Count
    slot: Small
    request_id: str
    blocks: Small
    loaded: Small
    """How many came; the rest was computed."""
    from_host: Small
    """How many of these came from the host tier, the others from the store."""


class SaveEnded(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A save of `blocks` KV blocks."""

    began: Count
    ended: Count
    blocks: Small
    saved: Small


class StepLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step. Times are microseconds since the header's `started`."""

    step: Count
    began: Count
    """When the turn of the loop began that committed this step."""
    ended: Count
    """When it was committed; the time between is the step time."""
    budget: Count = 0
    """Tokens charged against the step token budget."""
    delivered: Count = 0
    """Tokens that clients got."""
    waiting: Count = 0
    """Length of the queue."""
    kv: tuple[Count, Count, Count] = (0, 0, 0)
    """Blocks owned, fenced, and free but with a cached prefix."""
    slots: str = ""
    """One letter for each slot, up to the last that is not idle: what the step did with it."""
    drafted: str = ""
    """One letter for each slot: drafts it verified. Empty if there were none."""
    accepted: str = ""
    """Likewise: drafts that were kept."""
    chunks: tuple[tuple[Small, Small], ...] = ()
    """(slot, tokens) of every prefill."""
    admitted: tuple[Admitted, ...] = ()
    taken_back: tuple[tuple[Small, Small], ...] = ()
    """(slot, gen) of every take-back; the step's output acknowledged it."""
    finished: tuple[Ended, ...] = ()
    chosen: tuple[Chosen, ...] = ()
    """What happened to KV outside the device since the line before: decisions, and operations that ended."""
    loads: tuple[LoadEnded, ...] = ()
    saves: tuple[SaveEnded, ...] = ()
    dropped: Count = 0
    """Steps before this one that the writer had no room for."""
    occupants: tuple[Stay, ...] = ()
    """Who held which slot after the step; only behind dropped steps."""


class Full(msgspec.Struct, frozen=True, kw_only=True):
    """The file has reached its limit: no further step of this epoch follows."""

    full: Count
    """The limit in bytes."""


class Closed(msgspec.Struct, frozen=True, kw_only=True):
    """Last line of a trace whose engine was closed in order."""

    closed: Count
    """Microseconds since the header's `started`."""
    dropped: Count
    """Steps missing at the end, for want of time or of room in the file."""
