"""What computing a prompt costs, learnt from steps, so that the scheduler can compare it with loading."""

from __future__ import annotations

from typing import Final

from fd_core.effects.operations import PrefillPaceMeasured
from fd_core.types import StepPlan

__all__ = ["PrefillPace"]

_MIN_PREFILL_TOKENS: Final = 32
"""A step with a smaller prefill says more about the step's own cost than about a token's."""
_SHARE: Final = 0.2
"""Weight of a step in the moving average."""


class PrefillPace:
    """A moving average of the seconds that one token of a prompt takes."""

    def __init__(self, token: float) -> None:
        """`token`: seconds that a token took before the first request, in the warm-up."""
        self._token = token
        self._answered = 0.0

    def observe(self, plan: StepPlan, submitted: float, answered: float) -> PrefillPaceMeasured | None:
        """Learn from a step; return the new average if the step tells something. Times in seconds of one clock."""
        begun = max(submitted, self._answered)  # the device computes one step after the other
        self._answered = answered
        tokens = int(plan.num_tokens.sum())
        if tokens < _MIN_PREFILL_TOKENS or tokens == len(plan.num_tokens):
            return None
        prefill = int(plan.num_tokens[plan.num_tokens > plan.num_drafts + 1].sum())
        if prefill < max(_MIN_PREFILL_TOKENS, tokens // 2):
            return None
        self._token += _SHARE * ((answered - begun) / tokens - self._token)
        return PrefillPaceMeasured(self._token)
