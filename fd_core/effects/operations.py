"""Operations that the scheduler requests outside a step, most of them on KV, and their completions.

Effects are values: `Scheduler.plan` and `Scheduler.commit` return them, the engine's loop hands their operations to its
`fd_core.effects.port.EffectPort`, which performs them on other threads, and returns the completions before the next
plan. Nothing here blocks. `fd_core.kv.tiers` performs `Lookup`, `Load` and `Save`; `fd_core.disagg`
performs `Fetch`, `Send`, `AbandonLease` and `ChangeTransfers`; `fd_core.structured` performs `CompileGrammar`.

An operation is a number chosen by the scheduler, unique within an engine. The scheduler may assume:

- A `Lookup` is answered by one `Found`, a `Load` by one `Loaded`, a `Save` by one `Saved`, a `Fetch` by one `Fetched`,
  a `Send` by one `Sent`, a `CompileGrammar` by one `GrammarReady`, in any order, each within its deadline.
- `Cancel` speeds up the completion, it does not replace it: blocks of an operation belong to it until it is completed.
- After `Saved`, the blocks that it reports in the host tier need no `Lookup`: a `Load` that follows finds them there,
  unless others evicted them meanwhile. A `Load` may always be partial, and reports how much it loaded.
- The other completions answer no operation and may arrive at any time, also while the engine is idle.
"""

from __future__ import annotations

import msgspec

from fd_core.types import IntArray, PrefillJob, PrefillOutcome, PrefillTrace
from fd_core.types.kv_events import KVEvent


class Lookup(msgspec.Struct, frozen=True):
    """Look up how many of the leading `keys` are stored outside the device."""

    operation: int
    keys: tuple[bytes, ...]


class Load(msgspec.Struct, frozen=True):
    """Copy the KV named by `keys` into device `blocks`, int32[len(keys)], which belong to the operation meanwhile."""

    operation: int
    keys: tuple[bytes, ...]
    blocks: IntArray
    slot: int = 0
    """The slot that waits for the blocks, for traces."""
    request_id: str = ""


class Save(msgspec.Struct, frozen=True):
    """Copy settled device `blocks`, int32[len(keys)], to the host tier under `keys`; they are not written meanwhile."""

    operation: int
    keys: tuple[bytes, ...]
    blocks: IntArray
    persist: bool
    """True if the blocks are also written to the KV store, some time after the copy to the host."""


class Cancel(msgspec.Struct, frozen=True):
    """Cancellation of an operation that no request waits for; unknown and completed ones are ignored."""

    operation: int


class Found(msgspec.Struct, frozen=True):
    """Completion of a `Lookup`."""

    operation: int
    host: int
    """Leading keys that the host tier holds."""
    total: int
    """Leading keys that host tier and store hold together, at least `host`."""


class Loaded(msgspec.Struct, frozen=True):
    """Completion of a `Load`: blocks that were not loaded are unchanged or invalid."""

    operation: int
    blocks: int
    """Leading blocks that hold exactly the KV of their keys."""
    from_host: int = 0
    """Number of them that were loaded from the host tier."""
    seconds: float = 0.0
    """Time from the effect to the last copy."""


class Saved(msgspec.Struct, frozen=True):
    """Completion of a `Save`: its device blocks are no longer read."""

    operation: int
    blocks: int
    """Leading blocks that were copied to the host."""
    host: int = 0
    """Number of them that the host tier holds: a `Load` of these keys needs no `Lookup`."""


class NotStored(msgspec.Struct, frozen=True):
    """Blocks of completed `Save`s that were to be written to the KV store and may not be there."""

    keys: tuple[bytes, ...]


class LoadPaceMeasured(msgspec.Struct, frozen=True):
    """Current cost of loading, in seconds; None where there is no recent measurement."""

    host_block: float | None = None
    """Time to copy one block from the host tier to the device."""
    store_block: float | None = None
    """Time to fetch and check one block of the store; its copy to the device overlaps with the next fetch."""
    store_latency: float | None = None
    """Time of one store query."""


class PrefillPaceMeasured(msgspec.Struct, frozen=True):
    """Current cost of computing a prompt."""

    token: float
    """Seconds for one token."""


class Fetch(msgspec.Struct, frozen=True):
    """Have a prefill worker compute the KV of a prompt, and copy that KV into device blocks leased for it."""

    operation: int
    peer: str
    """`host:port` of the prefill worker's transfers."""
    job: PrefillJob
    blocks: IntArray
    """int32[m]: device blocks after the `job.held_blocks` leading ones of each group, up to those of the last token, in
    the order of `LayerGroups.order`; they belong to the operation until it is completed."""
    slot: int = 0
    """The slot that waits for the blocks, for traces."""
    request_id: str = ""


class Fetched(msgspec.Struct, frozen=True):
    """Completion of a `Fetch`: unless it was transferred, the blocks are unchanged or invalid."""

    operation: int
    outcome: PrefillOutcome
    cached: int = 0
    """Tokens whose KV the prefill worker had in its prefix cache."""
    seconds: float = 0.0
    """Time from the effect to the last copy."""
    reason: str = ""
    """Human-readable reason of a failed transfer; empty if it succeeded. Never holds a prompt."""


class Send(msgspec.Struct, frozen=True):
    """Send settled device `blocks` to the decode worker that owns the lease; they are not written meanwhile."""

    operation: int
    lease: str
    first: int
    """Index of `blocks[0]` among the blocks of the prompt, in the order of `LayerGroups.order`."""
    blocks: IntArray
    """int32[m], m may be 0 if `tokens` is given."""
    tokens: int | None = None
    """Set with the last blocks: tokens whose KV was sent in all."""
    cached: int = 0
    """With `tokens`: number of them found in the prefix cache."""


class Sent(msgspec.Struct, frozen=True):
    """Completion of a `Send`: its device blocks are no longer read, even if they were not requested."""

    operation: int


class PrefillJobArrived(msgspec.Struct, frozen=True):
    """A decode worker leased blocks for a prompt: the engine computes it and sends its KV, or gives the lease up."""

    job: PrefillJob


class LeaseEnded(msgspec.Struct, frozen=True):
    """The lease of a job ended before its KV was complete: the rest of the prompt is not needed."""

    lease: str


class PrefillTraced(msgspec.Struct, frozen=True):
    """End of a traced job; for the trace, not for the scheduler."""

    trace: PrefillTrace


class AbandonLease(msgspec.Struct, frozen=True):
    """The request that computes for a lease ended without all its KV, or the engine rejected the job."""

    lease: str
    reason: str = ""
    """Human-readable; never holds a prompt."""
    refused: bool = False
    """True if the engine rejected the job; the decode worker then receives a rejection."""


class ChangeTransfers(msgspec.Struct, frozen=True):
    """The weights of this worker have changed, or it was paused or resumed. Leases of a prefill worker end."""

    weights: str
    """Digest of the weights from now on; empty if they are as before."""
    refusal: str = ""
    """Human-readable reason to refuse the leases of decode workers; empty to accept them."""


class CompileGrammar(msgspec.Struct, frozen=True):
    """Compile the grammar of a waiting request, so that no step has to."""

    operation: int
    grammar: str
    """See `fd_core.types.SamplingParams.grammar`."""


class GrammarReady(msgspec.Struct, frozen=True):
    """Completion of a `CompileGrammar`: the runner finds the grammar compiled, or compiles it if it was evicted."""

    operation: int
    error: str | None = None
    """Human-readable reason why the grammar cannot be used; the request that waits for it ends."""


Effect = Lookup | Load | Save | Fetch | Send | AbandonLease | ChangeTransfers | CompileGrammar | Cancel
Completion = (
    Found
    | Loaded
    | Saved
    | Fetched
    | Sent
    | GrammarReady
    | NotStored
    | LoadPaceMeasured
    | PrefillPaceMeasured
    | PrefillJobArrived
    | LeaseEnded
    | PrefillTraced
)


class LoadDecision(msgspec.Struct, frozen=True):
    """Decision to load KV or to recompute it for one request, with its reasons; for the trace."""

    request_id: str
    load: bool
    host_blocks: int
    store_blocks: int
    num_tokens: int
    """Tokens that need not be computed if the blocks are loaded."""
    load_seconds: float | None
    recompute_seconds: float | None
    """None while unknown; an unknown cost is measured by trying."""


class Effects(msgspec.Struct, frozen=True):
    """Effects that one call of the scheduler requests, in order."""

    operations: tuple[Effect, ...] = ()
    decisions: tuple[LoadDecision, ...] = ()
    events: tuple[KVEvent, ...] = ()
    """Prefixes that the device gained and lost."""


NO_EFFECTS = Effects()
