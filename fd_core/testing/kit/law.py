"""The law: what every backend, scheduler and store keeps, one sentence for each rule, and how a kit says it is broken.

Tests name the rules that they hold with the marker `law`, mutants with the beginning of their `law`.
`docs/understand/law.md` is the table of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NoReturn

SECTIONS_OF_THE_LAW: Final[Mapping[str, str]] = {
    "1": "Preempted-slot signalling",
    "2": "Step token budget",
    "3": "KV blocks",
    "4": "The golden stream",
    "5": "KV storage",
    "6": "Prefill/decode disaggregation",
    "7": "Router",
    "8": "Interfaces that plugins may replace",
}

RULES: Final[Mapping[str, str]] = {
    "1": "A step is answered by one matrix in the device's own arrays: a function of that step alone, written without "
    "waiting for the device, and changed by no later step.",
    "1.1": "Delivered tokens are a prefix of the generated tokens, and these of the golden stream: no token is lost, "
    "repeated, reordered or given to another request.",
    "1.2": "A request leaves DRAINING only on the -9 of its own gen: at most one revocation for each gen, and exactly "
    "one -9 for each revocation. Neither -1 nor an absent row means a release.",
    "1.3": "A row with -9 carries nothing else, a step whose whole batch was revoked still yields an output, and an "
    "error in one row swallows no other row.",
    "1.4": "A draining request keeps its slot; running, draining and loading requests together never exceed "
    "`max_num_seqs`. What a preempted request prefills at its return is decided after the -9.",
    "1.5": "An output applies only if epoch, step and gen match; anything else is dropped and counted.",
    "1.6": "A text whose last token was in flight while its request drained is finished; the request is not requeued.",
    "1.7": "An abort is idempotent and prompt in every state, and everything that the request holds is freed once.",
    "1.8": "A handshake that is not answered within the watchdog's time is an engine fault, never a silent hang.",
    "1.9": "No negative id reaches a client, log-probabilities, usage, statistics, drafters, hashes or storage. Token "
    "id 0 is a token.",
    "2": "A step computes at most `max_num_batched_tokens` tokens, counted where the runner builds its input.",
    "2.1": "The charge of a request is exact: its chunk behind the cached prefix, or one plus its real drafts.",
    "2.2": "Drafts shrink before a decode is left out, and decodes are left out in rotation.",
    "2.3": "What a preempted or aborted request was charged in the same plan is refunded.",
    "2.4": "Block growth, aborts and revocations never depend on budget being left; the smallest legal budget makes "
    "progress.",
    "2.5": "A configuration that cannot keep the budget is refused at start with its numbers.",
    "2.6": "Planning costs what the step computes, not what waits: a request that cannot be admitted is parked under "
    "its reason and looked at again when the reason changes.",
    "3.1": "Blocks are free, owned or fenced; references equal owners; no free block is in a table.",
    "3.2": "A block leaves `fenced` only when the last step that touches it was answered and no copy, transfer or "
    "storage operation reads or writes it.",
    "3.3": "Matching a prefix never evicts what it matched.",
    "3.4": "An allocation that fails counts fenced blocks that will come free before another victim is chosen.",
    "3.5": "Only settled positions are hashed, cached or stored; rejected drafts never are.",
    "3.6": "At idle every gauge has its value at start.",
    "4": "A text depends on model, prompt, sampling parameters and seed; batching, chunking, preemption, restoring, "
    "hand-off, speculation and restarts do not change it.",
    "5.1": "Storage is an effect outside planning: no plan waits for a store.",
    "5.2": "At a preemption the victim's settled blocks are pinned, copied and written; at its return the longest "
    "stored prefix is loaded and the rest computed.",
    "5.3": "Keys chain over format, weights and their forms, adapter, tokenizer, dtypes, block size, layout, rank, "
    "salt, parent and token ids.",
    "5.4": "A stored value carries header, lengths, payload and a keyed digest; anything wrong is a counted miss.",
    "5.5": "Storage is best effort: requests complete without it, every wait has a deadline, and a circuit breaker "
    "leaves a dead store alone.",
    "5.6": "KV is loaded only if that beats computing it; the engine measures both.",
    "6": "Prefill and decode workers trust only who knows their secret, fit together or part at the handshake, and "
    "send within a window; a lost message costs only time.",
    "6.1": "A KV lease has one owner and expires; it is granted only with room for what runs; an abort on either side "
    "ends it on both.",
    "6.2": "The decode side starts after a commit that covers all blocks with a digest; duplicates change nothing and "
    "late writes are refused.",
    "6.3": "A failed transfer means computing again or a clear error, never foreign or empty text; a preemption on the "
    "decode side resumes there.",
    "7.1": "A selection yields one guard that is released exactly once; at idle every counter is zero.",
    "7.2": "The policy sees the prompt, never an empty string; a prefix is recorded for a worker after the worker "
    "served it.",
    "7.3": "Retries go to another worker and only before the first byte; afterwards an error event and no `[DONE]`.",
    "7.4": "A worker that comes back is a new incarnation; health checks never write counters.",
    "8": "What replaces a scheduler, a `postprocess` or a store takes and returns frozen values; it never reaches into "
    "the core's objects.",
    "8.1": "Whatever the cuts of an answer, what a parser says of the pieces, joined, is what it says of the whole.",
    "8.2": "A parser holds text back only where it may be the beginning of a marker, or white space before one.",
    "8.3": "A parser loses and repeats no character. What belongs to the format is no text, each call begins once, and "
    "what a grammar makes the model write is read as that call.",
    "8.4": "A text may end anywhere and hold anything: what was said stays, and a call that was cut off has no end.",
    "8.5": "Markup, whole or cut off, is never content, and calls that were complete before a fault stay.",
    "8.6": "The time that a parser takes is linear in the text.",
}
"""Rule by number. `1`, `2`, `4`, `6` and `8` without a second number are the sentence that heads the section."""


class LawBroken(AssertionError):
    """Violation of a rule by the code under test."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"law {rule}: {what}")
        self.rule = rule


def broken(rule: str, what: str) -> NoReturn:
    """Fail the running test: `what` was seen, against `rule`."""
    assert rule in RULES
    raise LawBroken(rule, what)


def require(condition: object, rule: str, what: str) -> None:
    """Fail the running test unless `condition` holds."""
    if not condition:
        broken(rule, what)
