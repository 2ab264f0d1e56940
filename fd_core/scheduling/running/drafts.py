"""Number of draft tokens that a request may verify in its next step.

Draft tokens are proposed by a drafter, or forced by a grammar that leaves one continuation. The latter are always
accepted, so a request that has only those is always allowed them; a request that has neither is planned without any.

A draft token costs one token of the step and yields one token if it is accepted. So a request's share follows its
recent acceptance rate, and all draft tokens together stay below the number of tokens at which a step stops being bound
by reading weights and each further token costs time.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from fd_core.config import CHEAP_TOKENS, Limits, SpeculativeConfig
from fd_core.scheduling.running.plan import deal
from fd_core.types import IntArray
from fd_core.types.metrics import counter

_MEMORY = 0.9
"""Weight of the past in a request's acceptance rate."""
_RECOVERY = 0.02
"""Pull of the rate towards 1 in each step without drafts, so that a request is tried again now and then."""


class DraftStats(msgspec.Struct, frozen=True, kw_only=True):
    """Drafts verified and accepted since the start, by position: 0 is the draft right after the last token."""

    proposed_per_position: Annotated[
        tuple[int, ...],
        counter(
            "drafts_proposed_per_position_tokens",
            "Draft tokens verified, by position: 0 is the draft right after the last token.",
            label="position",
        ),
    ] = ()
    accepted_per_position: Annotated[
        tuple[int, ...],
        counter(
            "drafts_accepted_per_position_tokens",
            "Draft tokens accepted, by position: 0 is the draft right after the last token.",
            label="position",
            vllm=("spec_decode_num_accepted_tokens_per_pos",),
        ),
    ] = ()

    @property
    def proposed(
        self,
    ) -> Annotated[
        int, counter("drafts_proposed_tokens", "Draft tokens verified.", vllm=("spec_decode_num_draft_tokens",))
    ]:
        """Draft tokens verified."""
        return sum(self.proposed_per_position)

    @property
    def accepted(
        self,
    ) -> Annotated[
        int, counter("drafts_accepted_tokens", "Draft tokens accepted.", vllm=("spec_decode_num_accepted_tokens",))
    ]:
        """Draft tokens accepted."""
        return sum(self.accepted_per_position)


class DraftControl:
    """Acceptance rates by slot, and the draft counts derived from them."""

    def __init__(self, num_slots: int, max_drafts: int, cheap_tokens: int, *, drafter: bool = True) -> None:
        """`cheap_tokens`: step size up to which a token is nearly free. No `drafter`: only grammars provide drafts."""
        self.max_drafts = max_drafts
        self._cheap_tokens = cheap_tokens
        self._drafter = drafter
        self.learning = drafter and max_drafts > 0
        """True if a drafter proposes draft tokens, of which many may be rejected."""
        self._most = np.full(num_slots, max_drafts if drafter else 0, np.int32)
        self.possible = bool(self._most.any())
        """True if any slot may hold draft tokens."""
        self._rate = np.ones(num_slots, np.float64)
        self._drafted = np.zeros(max_drafts, np.int64)
        self._accepted = np.zeros(max_drafts, np.int64)

    def stats(self) -> DraftStats:
        """Return counters of a drafter's drafts; the runner counts those that a grammar forces."""
        if not self._drafter:
            return DraftStats()
        return DraftStats(
            proposed_per_position=tuple(self._drafted.tolist()), accepted_per_position=tuple(self._accepted.tolist())
        )

    def admit(self, slot: int, grammar: bool = False) -> None:
        """Start a running request: its acceptance rate is unknown, so the maximum of drafts is allowed."""
        self._rate[slot] = 1.0
        self._most[slot] = self.max_drafts if grammar or self._drafter else 0
        self.possible = bool(self._most.any())

    def most(self, slots: npt.NDArray[np.intp]) -> IntArray:
        """Return int32[n]: the maximum of drafts that the runner may hold for each of `slots`."""
        most: IntArray = self._most[slots]
        return most

    def allowed(self, slots: npt.NDArray[np.intp], ready: IntArray) -> IntArray:
        """Return int32[n]: how many of the `ready` int32[n] drafts each of the decoding `slots` may verify."""
        own = np.floor(self._rate[slots] * self.max_drafts + 0.5).astype(np.int32)
        wanted = np.minimum(own, ready)
        return deal(wanted, max(self._cheap_tokens - len(slots), 0))

    def observe(self, slots: npt.NDArray[np.intp], drafted: IntArray, accepted: IntArray) -> None:
        """Update rates from a step: `drafted` and `accepted` int32[n] of its decoding `slots`."""
        if not self.learning:
            return
        some = drafted > 0
        idle = slots[~some]
        self._rate[idle] += _RECOVERY * (1.0 - self._rate[idle])
        if not some.any():
            return
        busy, drafted, accepted = slots[some], drafted[some], accepted[some]
        self._rate[busy] = _MEMORY * self._rate[busy] + (1 - _MEMORY) * accepted / drafted
        self._drafted += np.bincount(drafted, minlength=self.max_drafts + 1)[::-1].cumsum()[::-1][1:]
        self._accepted += np.bincount(accepted, minlength=self.max_drafts + 1)[::-1].cumsum()[::-1][1:]


def make_draft_control(limits: Limits, speculative: SpeculativeConfig | None) -> DraftControl | None:
    """Return the control of an engine with these settings; None if no row can have drafts."""
    if not limits.max_drafts:
        return None
    drafter = speculative is not None and speculative.num_speculative_tokens > 0
    cheap_tokens = CHEAP_TOKENS if speculative is None else speculative.cheap_tokens
    return DraftControl(limits.max_num_seqs, limits.max_drafts, cheap_tokens, drafter=drafter)
