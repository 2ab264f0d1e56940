"""Faults of what outlives an engine: what the next epoch is asked, and what the readers are told."""

from __future__ import annotations

from tests.mutants.mutant import mutant

LEDGER = "engine/clients/request_ledger.py"
STREAMS = "engine/clients/client.py"

MUTANTS = (
    mutant(
        "the-next-epoch-begins-again",
        "1.1: no token is repeated",
        (LEDGER, "delivered=tuple(entry.delivered)", "delivered=()"),
    ),
    mutant(
        "only-the-last-delta-is-remembered",
        "1.1: no token is lost or repeated",
        (LEDGER, "entry.delivered += delta.token_ids", "entry.delivered = list(delta.token_ids)"),
    ),
    mutant(
        "what-was-delivered-is-not-prefilled",
        "4: a restart does not change the text",
        ("scheduling/requests.py", "            self.tokens.append(spec.delivered)\n", "            pass\n"),
    ),
    mutant(
        "what-ended-is-asked-again",
        "1.8: only what had not ended is requeued",
        (LEDGER, "            del self._entries[delta.request_id]\n", ""),
    ),
    mutant(
        "an-abort-is-forgotten-with-the-epoch",
        "1.7: abort is prompt in every state",
        (LEDGER, "    if entry.aborting:\n", "    if False:\n"),
    ),
    mutant(
        "a-request-kills-engines-for-ever",
        "1.8: requeued or ended with an error",
        (LEDGER, "    if entry.in_vain < MAX_DEATHS_IN_VAIN and", "    if"),
    ),
    mutant(
        "who-waited-is-blamed",
        "1.8: requeued, unless it may be the cause",
        (LEDGER, "    elif entry.admitted:\n", "    else:\n"),
    ),
    mutant(
        "all-suspects-enter-together",
        "1.8: requeued, unless it may be the cause",
        (LEDGER, "dict.fromkeys(suspects[1:])", "{}"),
    ),
    mutant(
        "a-suspect-is-held-back-for-ever",
        "1.8: requeued or ended with an error",
        (STREAMS, "        if self._ledger.held_suspects and (", "        if False and ("),
    ),
    mutant(
        "a-dead-epoch-is-still-heard",
        "1.5: an epoch that does not match is dropped",
        (STREAMS, "if not self.alive or events.epoch != self.info.epoch:", "if not self.alive:"),
    ),
)
