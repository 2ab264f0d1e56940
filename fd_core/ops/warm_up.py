"""Computations that a pack runs before the first request, so that no request pays one-time costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fd_core.types import SamplingParams

_GREEDY: Final = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class WarmUpRow:
    """A synthetic request: a prompt that one step computes, and samples the next token."""

    tokens: int = 1
    """Length of the prompt. With one token the step is a decode."""
    drafts: int = 0
    """Drafts that a second step verifies."""
    params: SamplingParams = _GREEDY


WarmUpStep = Sequence[WarmUpRow]
"""Requests that are computed in one step, and in a second one if they have drafts, all of them equally many."""
