"""Warm-up steps that a pack runs before the first request, so that no request pays one-time costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from fd_core.types import SamplingParams

_GREEDY: Final = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class WarmUpRow:
    """A synthetic request whose prompt is computed in one step, with a sampled token."""

    tokens: int = 1
    """Length of the prompt; with 1 the step has the shape of a decode."""
    drafts: int = 0
    """Drafts that a second step verifies."""
    params: SamplingParams = _GREEDY


WarmUpStep = Sequence[WarmUpRow]
"""Requests computed in one step, and in a second one if they have drafts, whose number must be equal for all."""
