"""What the scheduler wants done with KV outside a step, and what became of it.

Effects are values: the scheduler returns them, the engine's loop hands them to `fd_core.kv.tiers`, which performs them
on threads of its own, and brings the completions back before the next plan. Nothing here waits for anything.

Where prefill and decode are on different workers, `fd_core.disagg` performs `Fetch`, `Send` and `GiveUp` likewise.

An operation is a number chosen by the scheduler. A `Lookup` is answered by one `Found`, a `Load` by one `Loaded`, a
`Save` by one `Saved`, a `Fetch` by one `Fetched`, a `Send` by one `Sent`, in any order, each within its deadline.
`Cancel` hurries the answer, it does not replace it: blocks of an operation belong to it until its completion arrived.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fd_core.types import IntArray, PrefillJob

__all__ = [
    "Cancel",
    "Completion",
    "Effect",
    "Fetch",
    "Fetched",
    "Found",
    "GiveUp",
    "Load",
    "Loaded",
    "Lookup",
    "Outcome",
    "Save",
    "Saved",
    "Send",
    "Sent",
    "Transfer",
    "Transferred",
]


@dataclass(frozen=True, slots=True)
class Lookup:
    """How many of the leading `keys` are held outside the device?"""

    operation: int
    keys: tuple[bytes, ...]
    """Block keys of one prefix, in order."""


@dataclass(frozen=True, slots=True)
class Load:
    """Copy the KV named by `keys` into device `blocks`, int32[len(keys)], which belong to the operation meanwhile."""

    operation: int
    keys: tuple[bytes, ...]
    blocks: IntArray
    slot: int = 0
    """The slot that waits for the blocks, for traces."""
    request_id: str = ""
    """The request in that slot, for traces."""


@dataclass(frozen=True, slots=True)
class Save:
    """Copy settled device `blocks`, int32[len(keys)], to the host tier under `keys`; nobody writes them meanwhile."""

    operation: int
    keys: tuple[bytes, ...]
    blocks: IntArray
    persist: bool
    """Whether the store gets them too, written behind."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for an operation any more; unknown and completed ones are ignored."""

    operation: int


@dataclass(frozen=True, slots=True)
class Found:
    """Answer to a `Lookup`."""

    operation: int
    host: int
    """Leading keys that the host tier holds."""
    total: int
    """Leading keys that host tier and store hold together, at least `host`."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Answer to a `Load`: whatever was not loaded is as it was or worthless."""

    operation: int
    blocks: int
    """Leading blocks that hold exactly the KV of their keys."""
    from_host: int = 0
    """How many of them came from the host tier."""
    seconds: float = 0.0
    """From the effect to the last copy."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Answer to a `Save`: its device blocks are not read any more."""

    operation: int
    blocks: int
    """Leading blocks that were copied to the host."""


Outcome = Literal["transferred", "held", "refused", "lost", "expired", "damaged", "aborted"]
"""What became of a prefill elsewhere. `held`: nothing was asked, as the decode side had the prefix; `lost`: the other
side broke off or could not be reached; `damaged`: what came was not what was sent. All but the first are computed
where the text is decoded."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Have a prefill worker compute the KV of a prompt, and copy that KV into device blocks leased for it."""

    operation: int
    peer: str
    """`host:port` of the prefill worker's transfers."""
    job: PrefillJob
    blocks: IntArray
    """int32[m]: device blocks behind `job.held_blocks`, up to the one of the last token; they belong to the operation
    until it is completed."""
    slot: int = 0
    """The slot that waits for the blocks, for traces."""
    request_id: str = ""
    """The request in that slot, for traces."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """Answer to a `Fetch`: unless it was transferred, the blocks are as they were or worthless."""

    operation: int
    outcome: Outcome
    cached: int = 0
    """Tokens whose KV the prefill worker had in its prefix cache."""
    seconds: float = 0.0
    """From the effect to the last copy."""
    reason: str = ""
    """Why the transfer failed, for people; empty if it did not. Never holds a prompt."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send settled device `blocks` to the decode worker that owns the lease; nobody writes the blocks meanwhile."""

    operation: int
    lease: str
    first: int
    """Place of `blocks[0]` among the blocks of the prompt."""
    blocks: IntArray
    """int32[m], m may be 0 if `tokens` is given."""
    tokens: int | None = None
    """Set with the last blocks: tokens whose KV was sent in all."""
    cached: int = 0
    """With `tokens`: how many of them came from the prefix cache."""


@dataclass(frozen=True, slots=True)
class Sent:
    """Answer to a `Send`: its device blocks are not read any more, whether or not they were wanted."""

    operation: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The request that computes for a lease ended without all its KV, or the engine does not take the job at all."""

    lease: str
    reason: str = ""
    """For people; never holds a prompt."""


Transfer = Fetch | Send | GiveUp | Cancel
Transferred = Fetched | Sent

Effect = Lookup | Load | Save | Fetch | Send | GiveUp | Cancel
Completion = Found | Loaded | Saved | Fetched | Sent
