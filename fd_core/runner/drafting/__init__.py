"""Drafters: guess the next tokens of requests, so that one step can verify several.

A guess never changes a text: it is kept only if it equals the token that would have been sampled in its place. So a
drafter is free to be wrong; it only has to be cheap.
"""

from fd_core.runner.drafting.contract import (
    FLAG,
    DraftContext,
    Drafter,
    PerSlotDrafter,
    SlotError,
    check_drafter,
    make_drafter,
)

__all__ = ["FLAG", "DraftContext", "Drafter", "PerSlotDrafter", "SlotError", "check_drafter", "make_drafter"]
