"""The life of a request, as a table of transitions.

    WAITING --admit--> RUNNING --take back--> DRAINING --released--> WAITING (preempted) or FINISHED (aborted)
       |                 ^  |                       |
       +-load-> LOADING -+  +------ finish ---------+--> FINISHED (end of text, length, error)

LOADING is an admission whose KV is still on its way from outside the device; the runner hears of it afterwards. A
request leaves DRAINING only on the release of its own gen; if its last token arrives while it drains, it is finished
for its client at once and its slot follows on the release.
"""

from __future__ import annotations

import enum
from typing import Final

import numpy as np

from fd_core.kv.effects import Outcome
from fd_core.types import FinishReason, IntArray, RequestSpec

__all__ = ["TRANSITIONS", "Event", "Request", "State"]


class State(enum.IntEnum):
    """Where a request is in its life."""

    WAITING = 0
    RUNNING = 1
    DRAINING = 2
    FINISHED = 3
    LOADING = 4


class Event(enum.Enum):
    """What can happen to a request."""

    ADMIT = enum.auto()
    TAKE_BACK = enum.auto()
    RELEASED_PREEMPTED = enum.auto()
    RELEASED_ABORTED = enum.auto()
    RELEASED_ENDED = enum.auto()
    FINISH = enum.auto()
    ABORT_WAITING = enum.auto()
    LOAD = enum.auto()
    LOADED = enum.auto()
    ABORT_LOADING = enum.auto()


TRANSITIONS: Final = {
    (State.WAITING, Event.ADMIT): State.RUNNING,
    (State.WAITING, Event.ABORT_WAITING): State.FINISHED,
    (State.WAITING, Event.LOAD): State.LOADING,
    (State.LOADING, Event.LOADED): State.RUNNING,
    (State.LOADING, Event.ABORT_LOADING): State.FINISHED,
    (State.RUNNING, Event.TAKE_BACK): State.DRAINING,
    (State.RUNNING, Event.FINISH): State.FINISHED,
    (State.DRAINING, Event.RELEASED_PREEMPTED): State.WAITING,
    (State.DRAINING, Event.RELEASED_ABORTED): State.FINISHED,
    (State.DRAINING, Event.RELEASED_ENDED): State.FINISHED,
}


class Request:
    """One generation inside the engine; owned by the scheduler."""

    __slots__ = (
        "abort_wanted",
        "arrival",
        "asked",
        "cached_tokens",
        "chain",
        "ended",
        "fetch",
        "generated",
        "held",
        "held_on_host",
        "limit",
        "load",
        "lookup",
        "preemptions",
        "prefill",
        "rank",
        "root",
        "sent",
        "sent_all",
        "slot",
        "spec",
        "state",
    )

    def __init__(self, spec: RequestSpec, arrival: int, max_model_len: int, root: bytes) -> None:
        self.spec = spec
        self.arrival = arrival
        """Order of arrival."""
        self.state = State.WAITING
        self.limit = min(len(spec.prompt) + spec.params.max_tokens, max_model_len)
        """Tokens at which the request ends for its length."""
        self.generated: IntArray = np.array(spec.delivered, np.int32)
        """int32[g]: tokens delivered before the request last left a slot, or by epochs before this one; the slot table
        holds them all meanwhile."""
        self.root = root
        self.chain: list[bytes] = []
        """Keys of the full blocks of settled tokens."""
        self.slot: int | None = None
        self.abort_wanted = False
        self.ended: FinishReason | None = None
        """Set once the client was told the end, also while the slot still drains."""
        self.preemptions = 0
        self.rank: tuple[int, ...] | None = None
        """Place among waiting requests, given by the policy once."""
        self.cached_tokens: int | None = None
        """Tokens found in the prefix cache at first admission."""

        self.asked = False
        """Whether it was asked, since it waits, what of its prefix is held outside the device."""
        self.lookup: int | None = None
        """Operation that looks for the prefix outside the device; the request waits for it."""
        self.held = 0
        """Leading blocks that were found outside the device."""
        self.held_on_host = 0
        """How many of them in the host tier."""
        self.load: int | None = None
        """Operation that brings KV back while the request is LOADING."""

        self.fetch: int | None = None
        """Operation that has another worker compute the prompt while the request is LOADING."""
        self.prefill: Outcome | None = None
        """What became of that, if it was asked for."""
        self.sent = 0 if spec.prefill_job is None else spec.prefill_job.held_blocks
        """Leading blocks of a prefill job that were sent to the decode worker, or that the decode worker holds."""
        self.sent_all = False

    def known_tokens(self) -> IntArray:
        """Return int32[n]: the prompt and the tokens delivered before the request last left a slot."""
        return np.concatenate([np.array(self.spec.prompt, np.int32), self.generated])

    def advance(self, event: Event) -> None:
        """Move along `TRANSITIONS`; anything else is a fault of the engine."""
        target = TRANSITIONS.get((self.state, event))
        if target is None:
            raise RuntimeError(f"request in state {self.state.name} cannot take {event.name}")
        self.state = target
