"""What crosses between an engine and its clients; encoded with msgspec, never pickled."""

from __future__ import annotations

from typing import Final, get_args

import msgspec

from fd_core.breaker import BreakerState
from fd_core.disagg.stats import ReceiverStats, SenderStats
from fd_core.kv.effects import Outcome
from fd_core.kv.events import KVEvent
from fd_core.kv.stores.contract import Trouble
from fd_core.kv.tiers.stats import TierStats
from fd_core.scheduling.tradeoff import Pace
from fd_core.types import FinishReason, RequestSpec, TokenLogprobs

__all__ = [
    "BREAKER_STATES",
    "STORE_TROUBLES",
    "Abort",
    "ClientMessage",
    "Delta",
    "EngineInfo",
    "EngineMessage",
    "EngineStats",
    "Fault",
    "LeaseStats",
    "Shutdown",
    "StepEvents",
    "Submit",
    "TierStats",
]

BREAKER_STATES: Final[tuple[str, ...]] = get_args(BreakerState)
"""Values of `TierStats.breaker` and `TierStats.write_breaker`."""
STORE_TROUBLES: Final = tuple(trouble.value for trouble in Trouble)
"""Keys of `TierStats.store_errors`."""


class Delta(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What one step delivered to one request."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    """Set in the request's last delta and only there."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each token id if the request asked for them."""
    cached_tokens: int | None = None
    """Prompt tokens served from the prefix cache; set in the first delta."""
    error: str | None = None
    """Set with finish reason `error`."""
    prefill: Outcome | None = None
    """What became of a prompt that another worker was to compute; set in the first delta."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine runs, told once when it is ready."""

    model: str
    architecture: str
    num_parameters: int
    backend: str
    backend_reason: str
    """Why this backend was chosen."""
    device: str
    """A line about what computes; it has the word "emulated" where that is so."""
    dtype: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_kv_blocks: int
    kv_cache_bytes: int
    pipeline_depth: int
    host_kv_bytes: int = 0
    """Host memory for KV outside the device."""
    kv_store: str | None = None
    """A line about the KV store, without secrets."""
    kv_store_answers: bool = True
    """Whether it could be used when the engine started."""
    role: str = "mixed"
    """`mixed`, `prefill` or `decode`."""
    kv_port: int | None = None
    """Where decode workers reach a prefill worker's transfers."""
    kv_connector: str | None = None
    """How KV comes to a decode worker."""
    emulated: bool = False
    """The backend computes on another device than the one it is for, and results say nothing about that one."""
    kv_events: bool = False
    """Whether it tells which prefixes its device holds."""
    epoch: int = 1


class LeaseStats(msgspec.Struct, frozen=True, kw_only=True):
    """KV that travels between workers; counters only grow within an epoch."""

    open: int = 0
    """Leases that are not over, on this side."""
    outcomes: dict[str, int] = {}
    """Requests whose prompt was to be computed elsewhere, by what became of that."""
    fetched_tokens: int = 0
    sent_blocks: int = 0
    given_up: int = 0
    """Requests of other workers that ended without all their KV."""
    receiver: ReceiverStats | None = None
    sender: SenderStats | None = None


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges and counters of an engine; counters only grow within an epoch."""

    running: int = 0
    loading: int = 0
    """Requests in a slot whose KV is on its way from outside the device."""
    waiting: int = 0
    take_backs_in_flight: int = 0
    kv_blocks_used: int = 0
    kv_blocks_fenced: int = 0
    kv_blocks_cached: int = 0
    """Free blocks that still hold a reusable prefix."""
    kv_blocks_total: int = 0
    steps: int = 0
    budget_used: int = 0
    """Tokens computed, over all steps."""
    budget_limit: int = 0
    """Tokens that the budget allowed, over all steps."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Prompt tokens found there."""
    drafts_proposed: int = 0
    drafts_accepted: int = 0
    drafts_proposed_per_position: tuple[int, ...] = ()
    """Of the drafts verified, those at each place behind the last token; empty without speculation."""
    drafts_accepted_per_position: tuple[int, ...] = ()
    """Likewise of those kept."""
    loads: int = 0
    """Requests that waited for KV from outside the device."""
    loaded_tokens: int = 0
    """Tokens that they did not have to compute."""
    lost_tokens: int = 0
    """Tokens that were to be loaded and had to be computed after all."""
    declined: int = 0
    """Requests that computed what could have been loaded, because that was sooner."""
    declined_tokens: int = 0
    saved_tokens: int = 0
    """Tokens whose KV was copied from the device."""
    pace: Pace = Pace()
    """What computing and loading were measured to cost."""
    kv: TierStats | None = None
    """Of KV outside the device; None if none is kept there."""
    leases: LeaseStats | None = None
    """Of KV that travels between workers; None for one that does both."""
    stale_outputs: int = 0
    """Outputs dropped because epoch, step or gen did not match."""
    finished_stop: int = 0
    finished_length: int = 0
    finished_abort: int = 0
    finished_error: int = 0


class StepEvents(msgspec.Struct, frozen=True, tag="step"):
    """Everything that one step has for the clients, in one message."""

    deltas: list[Delta]
    stats: EngineStats | None = None
    epoch: int = 1
    admitted: tuple[str, ...] = ()
    """Requests that entered a slot; told before the step that computes them, which may be the engine's last."""
    kv: tuple[KVEvent, ...] = ()
    """Which prefixes the device came to hold and lost, if somebody wants to know."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine serves."""

    info: EngineInfo


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """The engine is starting: `phase` is `load` or `warmup`; units are bytes or steps."""

    phase: str
    done: int
    total: int


class Fault(msgspec.Struct, frozen=True, tag="fault"):
    """The engine cannot start or go on."""

    message: str
    field: str | None = None
    hint: str | None = None
    exit_code: int = 1


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Start a request."""

    spec: RequestSpec


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End requests; unknown ids are ignored."""

    request_ids: tuple[str, ...] = ()
    everything: bool = False


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Stop once nothing runs, or at once if `drain` is false."""

    drain: bool = True


ClientMessage = Submit | Abort | Shutdown
EngineMessage = StepEvents | Ready | Progress | Fault
