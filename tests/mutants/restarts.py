"""Faults of the state that survives an engine: the requests of the next epoch, and the streams of clients."""

from __future__ import annotations

from tests.mutants.mutant import mutant

LEDGER = "engine/clients/request_ledger.py"
STREAMS = "engine/clients/client.py"

MUTANTS = (
    mutant(
        "next-epoch-starts-from-the-prompt",
        "1.1: no token is repeated",
        (LEDGER, "delivered=tuple(entry.delivered)", "delivered=()"),
    ),
    mutant(
        "only-the-last-delta-is-remembered",
        "1.1: no token is lost or repeated",
        (LEDGER, "entry.delivered += delta.token_ids", "entry.delivered = list(delta.token_ids)"),
    ),
    mutant(
        "delivered-tokens-are-not-prefilled",
        "4: a restart does not change the text",
        ("scheduling/requests.py", "            self.tokens.append(spec.delivered)\n", "            pass\n"),
    ),
    mutant(
        "finished-request-is-requeued",
        "1.8: only unfinished requests are requeued",
        (LEDGER, "            del self._entries[delta.request_id]\n", ""),
    ),
    mutant(
        "abort-is-lost-with-the-epoch",
        "1.7: abort is prompt in every state",
        (LEDGER, "    if entry.aborting:\n", "    if False:\n"),
    ),
    mutant(
        "request-may-crash-engines-indefinitely",
        "1.8: requeued or ended with an error",
        (LEDGER, "    if entry.in_vain < MAX_DEATHS_IN_VAIN and", "    if"),
    ),
    mutant(
        "waiting-request-is-suspected",
        "1.8: requeued, unless it may be the cause",
        (LEDGER, "    elif entry.admitted:\n", "    else:\n"),
    ),
    mutant(
        "all-suspects-are-admitted-together",
        "1.8: requeued, unless it may be the cause",
        (LEDGER, "dict.fromkeys(suspects[1:])", "{}"),
    ),
    mutant(
        "suspect-is-held-back-indefinitely",
        "1.8: requeued or ended with an error",
        (STREAMS, "        if self._ledger.held_suspects and (", "        if False and ("),
    ),
    mutant(
        "events-of-a-dead-epoch-are-accepted",
        "1.5: output of another epoch is dropped",
        (STREAMS, "if not self.alive or events.epoch != self.info.epoch:", "if not self.alive:"),
    ),
)
