"""Counters of the output side; a file of their own because messages carry them and the output side makes messages."""

from __future__ import annotations

from typing import Annotated

import msgspec

from fd_core.metrics import counter
from fd_core.types import FinishReason

__all__ = ["OutputCounters"]


class OutputCounters(msgspec.Struct, kw_only=True):
    """What was delivered or dropped since the start; only grows."""

    generated_tokens: Annotated[int, counter("generated_tokens", "Tokens generated and delivered.")] = 0
    stale_outputs: Annotated[
        int, counter("stale_outputs", "Outputs dropped because epoch, step or generation did not match.")
    ] = 0
    overrun_rows: int = 0
    """Rows computed for a request that had ended by the time its output arrived."""
    finished: Annotated[
        dict[FinishReason, int],
        counter("engine_finished", "Requests that the engine ended, by finish reason.", label="reason"),
    ] = msgspec.field(default_factory=lambda: dict.fromkeys(FinishReason, 0))
