"""The lines of a trace: their content, and the letters of their texts.

Format version 2 added `LOADING` and the entries about KV outside the device; a trace of version 1 has none of them.
Format version 3 added `StepLine.arrived`, `FinishEntry.tokens` and `FinishEntry.phases`.
Format version 4 added `StepLine.forced`.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from fd_core.config import Limits
from fd_core.types import FinishReason

FORMAT_VERSION: Final = 4
OLDEST_VERSION: Final = 1
IDLE, PREFILL, DECODE, DRAINING, LOADING = ".", "p", "d", "x", "l"
"""Letters of `StepLine.slots`."""
COUNT_LETTERS: Final = "0123456789abcdefg"
"""Letters of `StepLine.drafted`, `accepted` and `forced`, by number."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Small = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True):
    """First line of a trace, and of every epoch in it."""

    fdcore_trace: int = FORMAT_VERSION
    model: str
    backend: str
    device: str
    epoch: int
    started: Annotated[float, msgspec.Meta(ge=0, le=2**43)]
    """Seconds since 1970 at time 0 of the lines that follow."""
    speculation: str | None
    """Name of the drafter."""
    limits: Limits


class OccupancyEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request that holds a slot."""

    slot: Small
    gen: Small
    request_id: str


class AdmissionEntry(OccupancyEntry, frozen=True, array_like=True, gc=False):
    """A request enters a slot."""

    tokens: Small
    """Prompt and tokens delivered before."""
    computed: Small
    """Tokens at the front whose KV exists: found in the prefix cache, or loaded before the admission."""


class ArrivalEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request reached the engine."""

    request_id: str
    at: Count
    """Microseconds, like all times here."""
    tokens: Small
    """Length of its prompt."""


class FinishEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The end of a request was sent to its client."""

    request_id: str
    reason: FinishReason
    tokens: Small | None = None
    """Tokens delivered to the client; None in a trace without this field."""
    phases: tuple[Count, ...] | None = None
    """Durations in this epoch by `fd_core.types.Phase`; None if unknown."""


class DecisionEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Decision to load or to recompute a prefix, with the estimates that determined it."""

    at: Count
    request_id: str
    load: bool
    host_blocks: Small
    store_blocks: Small
    tokens: Small
    """Tokens that need not be computed if the blocks are loaded."""
    load_time: Count | None
    """Estimated time of the load; None before any load was measured, then a load is tried."""
    compute_time: Count | None
    """Estimated time to compute the tokens; None before any prefill was measured."""


class LoadEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A load of `blocks` KV blocks for a request that held `slot` meanwhile."""

    began: Count
    ended: Count
    slot: Small
    request_id: str
    blocks: Small
    loaded: Small
    """Blocks that were loaded; the others are computed."""
    from_host: Small
    """Blocks among `loaded` from the host tier; the others are from the store."""


class SaveEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A save of `blocks` KV blocks."""

    began: Count
    ended: Count
    blocks: Small
    saved: Small


KVEntry = DecisionEntry | LoadEntry | SaveEntry
"""Entries of a trace about KV outside the device."""


class StepLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step, and what happened since the line before. Times are microseconds since the header's `started`."""

    step: Count
    began: Count
    """Begin of the turn of the engine's loop that committed this step."""
    ended: Count
    """End of the commit; the step time is `ended - began`."""
    budget: Count = 0
    """Tokens charged against the step token budget."""
    delivered: Count = 0
    waiting: Count = 0
    kv: tuple[Count, Count, Count] = (0, 0, 0)
    """Blocks owned, fenced, and free but with a cached prefix."""
    slots: str = ""
    """One letter for each slot, up to the last that is not idle: its work in the step."""
    drafted: str = ""
    """One letter for each slot: drafts that the step verified for it. Empty if there were none."""
    accepted: str = ""
    """One letter for each slot: drafts that were accepted. Empty if none were verified."""
    forced: str = ""
    """One letter for each slot: accepted drafts that its grammar forced. Empty if there were none."""
    chunks: tuple[tuple[Small, Small], ...] = ()
    """(slot, tokens) of every prefill."""
    arrived: tuple[ArrivalEntry, ...] = ()
    """Requests that arrived since the line before; after a restart, again those of the previous epoch."""
    admitted: tuple[AdmissionEntry, ...] = ()
    revoked: tuple[tuple[Small, Small], ...] = msgspec.field(name="taken_back", default=())
    """(slot, gen) of every slot that was preempted or aborted; the step's output acknowledged it."""
    finished: tuple[FinishEntry, ...] = ()
    decisions: tuple[DecisionEntry, ...] = msgspec.field(name="chosen", default=())
    loads: tuple[LoadEntry, ...] = ()
    saves: tuple[SaveEntry, ...] = ()
    dropped: Count = 0
    """Steps before this one that the writer dropped for lack of space."""
    occupants: tuple[OccupancyEntry, ...] = ()
    """Requests that hold a slot after the step; only after dropped steps."""


class LimitLine(msgspec.Struct, frozen=True, kw_only=True):
    """The file has reached its limit: no further step of this epoch follows."""

    full: Count
    """The limit in bytes."""


class ClosingLine(msgspec.Struct, frozen=True, kw_only=True):
    """Last line of a trace whose engine was closed in order."""

    closed: Count
    """Microseconds since the header's `started`."""
    dropped: Count
    """Steps missing at the end, for lack of time or of space in the file."""


def total(letters: str) -> int:
    """Return the sum of the numbers that `COUNT_LETTERS` in a text stand for."""
    return sum(COUNT_LETTERS.index(letter) * letters.count(letter) for letter in set(letters))
