"""Drafters: propose the next tokens of requests, so that one step can verify several.

A draft token never changes the output: it is accepted only if it equals the token that would have been sampled. So a
drafter may be wrong; it only has to be cheap.
"""

from fd_core.runner.drafting.contract import (
    FLAG,
    DraftContext,
    Drafter,
    HiddenStates,
    PerSlotDrafter,
    SlotError,
    check_drafter,
    make_drafter,
)

__all__ = [
    "FLAG",
    "DraftContext",
    "Drafter",
    "HiddenStates",
    "PerSlotDrafter",
    "SlotError",
    "check_drafter",
    "make_drafter",
]
