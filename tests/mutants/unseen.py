"""Mutants of pairs that hostile worlds cannot detect, and why: only unit tests kill them."""

from __future__ import annotations

__all__ = ["UNSEEN"]

UNSEEN = {
    "late-piece-is-accepted": "the receiver drops finished leases, so nothing reaches their state machine",
    "late-copy-is-credited": "the receiver clears pending copies when a lease ends, and a copy is one job",
    "block-is-sent-twice": "the sender also offers each block once, and the scheduler sends none twice",
    "partial-prompt-is-awaited": "the scheduler sends every block of a prompt before it reports completion",
    "lease-silence-limits-are-not-checked": "simulated pairs do not encode messages, and decoding checks the limits",
    "engine-sleeps-with-pending-effects": "an iteration of the engine always plans, and a plan sends the effects",
}
