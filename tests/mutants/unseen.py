"""Mutants of pairs that hostile worlds cannot see, and why: unit tests alone kill them."""

from __future__ import annotations

__all__ = ["UNSEEN"]

UNSEEN = {
    "a-late-piece-is-taken": "the receiver forgets a lease that is over, so nothing reaches its machine",
    "a-late-copy-is-credited": "the receiver clears what is to be copied when a lease ends, and a copy is one job",
    "a-block-is-sent-twice": "the sender offers each block once as well, and the scheduler sends none twice",
    "half-a-prompt-is-waited-for": "the scheduler sends every block of a prompt before it says that it is complete",
    "any-silence-will-do": "what simulated pairs say is not encoded, and limits are checked where it is decoded",
    "an-engine-sleeps-on-what-it-has-to-say": "a turn of an engine always plans, and a plan says it",
}
