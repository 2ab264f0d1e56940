"""The lifecycle of a request, as a table of transitions.

    WAITING --admit--> RUNNING --revoke--> DRAINING --released--> WAITING (preempted) or FINISHED (aborted)
       |                 ^  |                  |
       +-load-> LOADING -+  +----- finish -----+--> FINISHED (end of text, length, error)

LOADING is an admission whose KV is still being loaded from outside the device; the runner is notified of the request
afterwards. A request leaves DRAINING only on the release of its gen. If the last token of a request arrives while it
drains, the client receives the end at once, and the slot follows on the release.
"""

from __future__ import annotations

import enum
from dataclasses import InitVar, dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from fd_core.deprecations import accept_old_names
from fd_core.errors import BadRequest
from fd_core.scheduling.images import salted
from fd_core.scheduling.phases import PhaseTimes
from fd_core.scheduling.running.tokens import TokenBuffer
from fd_core.types import (
    FinishReason,
    Image,
    IntArray,
    Phase,
    Pooling,
    PrefillOutcome,
    PromptLogprobRows,
    RequestSpec,
    TokenLogprobs,
)

__all__ = ["TRANSITIONS", "Event", "QueuedRequest", "Request", "State"]


class State(enum.IntEnum):
    """Lifecycle state of a request."""

    WAITING = 0
    RUNNING = 1
    DRAINING = 2
    FINISHED = 3
    LOADING = 4


class Event(enum.Enum):
    """Events of the request lifecycle."""

    ADMIT = enum.auto()
    REVOKE = enum.auto()
    RELEASED_PREEMPTED = enum.auto()
    RELEASED_ABORTED = enum.auto()
    RELEASED_ENDED = enum.auto()
    FINISH = enum.auto()
    ABORT_WAITING = enum.auto()
    FAIL_WAITING = enum.auto()
    LOAD = enum.auto()
    LOADED = enum.auto()
    ABORT_LOADING = enum.auto()


TRANSITIONS: Final = {
    (State.WAITING, Event.ADMIT): State.RUNNING,
    (State.WAITING, Event.ABORT_WAITING): State.FINISHED,
    (State.WAITING, Event.FAIL_WAITING): State.FINISHED,
    (State.WAITING, Event.LOAD): State.LOADING,
    (State.LOADING, Event.LOADED): State.RUNNING,
    (State.LOADING, Event.ABORT_LOADING): State.FINISHED,
    (State.RUNNING, Event.REVOKE): State.DRAINING,
    (State.RUNNING, Event.FINISH): State.FINISHED,
    (State.DRAINING, Event.RELEASED_PREEMPTED): State.WAITING,
    (State.DRAINING, Event.RELEASED_ABORTED): State.FINISHED,
    (State.DRAINING, Event.RELEASED_ENDED): State.FINISHED,
}


@dataclass(frozen=True, slots=True)
class QueuedRequest:
    """View of a waiting request that scheduling policies receive."""

    arrival: int
    """Order of arrival; unique."""
    num_tokens: int
    """Prompt tokens, and tokens that were delivered before the request was preempted."""
    max_new_tokens: int
    """Tokens that the request may still generate."""
    priority: int
    """Lower values are more important."""
    tenant: str
    preempted: bool
    """True if the request ran before and was preempted."""


@accept_old_names
@dataclass(slots=True, eq=False, repr=False)
class Request:
    """One generation inside the engine; owned by the scheduler."""

    spec: RequestSpec
    arrival: int
    max_model_len: InitVar[int]
    root: bytes
    """Root of the chain of its block keys."""
    prompt_len: int = field(init=False)
    limit: int = field(init=False)
    """Number of tokens at which the request ends with reason length."""
    tokens: TokenBuffer = field(init=False)
    """Prompt and delivered tokens."""
    images: tuple[Image, ...] = field(init=False)
    """Images of the prompt, named so that only requests of the same salt share their states."""
    chain: list[bytes] = field(default_factory=list)
    """Keys of the leading full blocks of `tokens`."""
    state: State = State.WAITING
    slot: int | None = None
    abort_requested: bool = False
    ended: FinishReason | None = None
    """Set once the client received the end, also while the slot still drains."""
    preemptions: int = 0
    rank: tuple[int, ...] | None = None
    """Sort key among the waiting requests, assigned by the policy once."""
    queued_view: QueuedRequest | None = None
    """View of the request for the policy while it is in the waiting queue."""
    delivered_first: bool = False
    """True once the first delta with tokens was delivered."""
    cached_tokens: int | None = None
    """Tokens found in the prefix cache at the first admission."""
    announced: int = 0
    """Leading blocks that the request announced to compute or load, for others with the same prefix to wait for."""
    times: PhaseTimes = field(init=False)

    compiling: int | None = None
    """Operation that compiles the grammar; the request waits for its completion."""
    lookup_issued: bool = False
    """True if a lookup of its prefix outside the device was issued since the request began to wait."""
    lookup: int | None = None
    """Operation that looks for the prefix outside the device; the request waits for its completion."""
    save: int | None = None
    """Operation that saves the KV of the request since its preemption."""
    stored: int = 0
    """Leading blocks that are stored outside the device."""
    stored_on_host: int = 0
    """Leading blocks that the host tier stores, at most `stored`."""
    load: int | None = None
    load_entries: range = range(0)
    """Table entries that `load` loads."""
    """Operation that loads KV while the request is LOADING."""

    fetch: int | None = None
    """Operation that has another worker compute the prompt while the request is LOADING."""
    prefill: PrefillOutcome | None = None
    """Outcome of the prefill on another worker, if one was requested."""
    prompt_logprobs: PromptLogprobs | None = None
    """Prompt log-probabilities computed so far; None if they were not requested, or were delivered."""
    pooled: PooledState | None = None
    """The vector of the prompt, as far as it was computed; None if none was requested."""
    sent: int = field(init=False)
    """Leading blocks of a prefill job that were sent to the decode worker, or that the decode worker holds."""
    sent_all: bool = False

    def __post_init__(self, max_model_len: int) -> None:
        spec = self.spec
        self.prompt_len = len(spec.prompt)
        self.limit = min(self.prompt_len + spec.params.max_tokens, max_model_len)
        self.times = PhaseTimes([0.0] * len(Phase))
        self.tokens = TokenBuffer(spec.prompt, self.limit)
        self.images = salted(spec.images, spec.cache_salt)
        if spec.delivered:
            self.tokens.append(spec.delivered)
        top_n = spec.params.prompt_logprobs
        if top_n is not None and not spec.delivered:
            self.prompt_logprobs = PromptLogprobs(self.prompt_len, top_n)
        if spec.pooling is not None:
            self.pooled = PooledState(spec.pooling)
        self.sent = 0 if spec.prefill_job is None else spec.prefill_job.held_blocks

    @property
    def num_tokens(self) -> int:
        """Prompt and delivered tokens."""
        # Without a slot, all tokens are in the buffer.
        return self.tokens.taken if self.slot is None else self.tokens.count

    @property
    def needs_every_position(self) -> bool:
        """Return True if every prompt position must be computed here, even if its KV is available."""
        return self.prompt_logprobs is not None or (self.pooled is not None and self.pooled.pooling.reads_all)

    @property
    def num_generated(self) -> int:
        """Delivered tokens."""
        return self.num_tokens - self.prompt_len

    def queued(self) -> QueuedRequest:
        """Return the view of the request for scheduling policies."""
        spec, length = self.spec, self.num_tokens
        left = self.limit - length
        return QueuedRequest(self.arrival, length, left, spec.priority, spec.tenant, self.preemptions > 0)

    def advance(self, event: Event) -> None:
        """Move along `TRANSITIONS`. Raises `RuntimeError` for anything else: a fault of the engine."""
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            raise RuntimeError(f"request in state {self.state.name} cannot take {event.name}")
        self.state = target


def check_spec(spec: RequestSpec, max_model_len: int) -> None:
    """Raise `BadRequest` if a request can never run: empty or too long a prompt, or no token left to generate."""
    if not len(spec.prompt):
        raise BadRequest("the prompt has no tokens", field="prompt")
    if len(spec.prompt) >= max_model_len:
        raise BadRequest(
            f"the prompt has {len(spec.prompt)} tokens, but the context length (prompt plus output) is {max_model_len}",
            field="prompt",
            hint="shorten the prompt",
        )
    most = min(spec.params.max_tokens, max_model_len - len(spec.prompt))
    if spec.params.min_tokens > most:
        raise BadRequest(
            f"min_tokens={spec.params.min_tokens} exceeds the {most} tokens that may be generated", field="min_tokens"
        )
    if len(spec.delivered) >= most:
        raise BadRequest(
            f"{len(spec.delivered)} tokens are already delivered, so none of the at most {most} remains to be "
            "generated",
            field="delivered",
        )


class PromptLogprobs:
    """Log-probabilities of a prompt except its first token, by position: recomputed positions are replaced."""

    def __init__(self, prompt_len: int, top_n: int) -> None:
        """`top_n` most likely tokens are stored for each position."""
        self._chosen = np.full(prompt_len - 1, np.nan, np.float32)
        self._top_ids = np.zeros((prompt_len - 1, top_n), np.int32)
        self._top = np.zeros((prompt_len - 1, top_n), np.float32)
        self._ranks = np.zeros(prompt_len - 1, np.int32)

    def take(self, rows: PromptLogprobRows, mine: IntArray) -> None:
        """Store rows `mine` int[n] of a step's results."""
        places, top_n = rows.positions[mine] - 1, self._top.shape[1]
        self._chosen[places] = rows.chosen[mine]
        self._top_ids[places] = rows.top_ids[mine, :top_n]
        self._top[places] = rows.top[mine, :top_n]
        self._ranks[places] = rows.ranks[mine]

    def delivered(self) -> tuple[TokenLogprobs, ...]:
        """Return them in prompt order."""
        columns = self._chosen.tolist(), self._top_ids.tolist(), self._top.tolist(), self._ranks.tolist()
        return tuple(
            TokenLogprobs(chosen, tuple(ids), tuple(top), rank) for chosen, ids, top, rank in zip(*columns, strict=True)
        )


class PooledState:
    """The vector of a request's prompt; one of several tokens restarts where the prompt does, as after a preemption."""

    def __init__(self, pooling: Pooling) -> None:
        self.pooling = pooling
        self._sum: npt.NDArray[np.float64] = np.zeros(0)
        self._count = 0

    def take(self, start: int, count: int, value: npt.NDArray[np.float32]) -> None:
        """Add a step's result for `count` tokens, the first of them at position `start`."""
        if self.pooling.kind == "all":
            self._sum, self._count = np.concatenate((self._sum, value)) if start else value.astype(np.float64), 1
        elif self.pooling.kind == "mean" and start:
            self._sum = self._sum + value
            self._count += count
        else:
            self._sum, self._count = value.astype(np.float64), count

    def delivered(self) -> bytes:
        """Return the vector as float32, little-endian."""
        return (self._sum / self._count).astype("<f4").tobytes()
