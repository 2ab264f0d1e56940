"""Invariants of every backend, scheduler and store, one entry per rule, and the error that a kit raises on a violation.

The marker `law` of a test and the field `law` of a mutant name the rules that they verify.
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
    "1": "The output of a step is one token matrix in device arrays. It depends on that step alone, is written "
    "without waiting for the device, and no later step changes it.",
    "1.1": "Delivered tokens are a prefix of the generated tokens, and these of the golden stream: no token is lost, "
    "repeated, reordered or sent to another request.",
    "1.2": "A request leaves DRAINING only on the -9 row of its own generation. A generation is revoked at most once, "
    "and exactly one -9 acknowledges it. Neither -1 nor a missing row frees a slot.",
    "1.3": "A row with -9 carries no tokens, a step whose whole batch was revoked still yields an output, and an "
    "error in one row does not suppress any other row.",
    "1.4": "A draining request keeps its slot; running, draining and loading requests together never exceed "
    "`max_num_seqs`. How much a preempted request prefills when it resumes is decided after the -9.",
    "1.5": "An output applies only if its epoch, step and generation match; anything else is dropped and counted.",
    "1.6": "A request whose last token was in flight while it drained is finished, not requeued.",
    "1.7": "An abort is idempotent and prompt in every state, and everything the request holds is freed exactly once.",
    "1.8": "A revocation that is not acknowledged within the watchdog timeout is an engine fault, never a silent hang.",
    "1.9": "No negative id reaches clients, log-probabilities, usage, statistics, drafters, hashes or storage. Token "
    "id 0 is a valid token.",
    "2": "A step computes at most `max_num_batched_tokens` tokens, counted where the runner builds its input.",
    "2.1": "A request is charged exactly its chunk after the cached prefix, or one token plus its real drafts.",
    "2.2": "Drafts shrink before a decode is skipped, and decodes are skipped in rotation.",
    "2.3": "Tokens charged to a request that is preempted or aborted in the same plan are refunded.",
    "2.4": "Block growth, aborts and preemptions never require remaining budget; the smallest legal budget makes "
    "progress.",
    "2.5": "A configuration that cannot keep the budget is rejected at startup with its numbers.",
    "2.6": "The cost of a plan depends on its step, not on the waiting queue: a request that cannot be admitted is "
    "parked under its wait reason and reconsidered when that reason changes.",
    "3.1": "Blocks are free, owned or fenced; refcounts equal owners; no block table contains a free block.",
    "3.2": "A block leaves `fenced` only when the last step that touches it has completed and no copy, transfer or "
    "storage operation reads or writes it.",
    "3.3": "Matching a prefix never evicts the matched blocks.",
    "3.4": "An allocation that fails counts fenced blocks that will become free before another victim is chosen.",
    "3.5": "Only settled positions are hashed, cached or stored; rejected drafts never are.",
    "3.6": "At idle every gauge equals its value at startup.",
    "4": "The text of a request depends only on model, prompt, sampling parameters and seed; batching, chunking, "
    "preemption, restore, hand-off, speculation and restarts do not change it.",
    "5.1": "Storage is an effect outside planning: no plan waits for a store.",
    "5.2": "On preemption the victim's settled blocks are pinned, copied and written; on resume the longest stored "
    "prefix is loaded and the rest is recomputed.",
    "5.3": "Keys chain over format, weights and their formats, adapter, tokenizer, dtypes, block size, layout, rank, "
    "salt, parent and token ids.",
    "5.4": "A stored value has a header, lengths, payload and keyed digest; one that fails a check is a counted miss.",
    "5.5": "Storage is best effort: requests complete without it, every wait has a timeout, and a circuit breaker "
    "bypasses a failed store.",
    "5.6": "KV is loaded only when that is faster than recomputing it; the engine measures both.",
    "6": "Prefill and decode workers accept only peers that know their secret, disconnect at the handshake unless "
    "they are compatible, and send within a window; a lost message costs only time.",
    "6.1": "A KV lease has one owner and expires; it is granted only if running requests keep enough blocks; an abort "
    "on either side ends it on both.",
    "6.2": "The decode side starts after a commit that covers all blocks with a digest; duplicates have no effect and "
    "late writes are rejected.",
    "6.3": "A failed transfer leads to recomputation or a clear error, never to another request's text or an empty "
    "one; a request preempted on the decode side resumes there.",
    "7.1": "A selection returns one guard that is released exactly once; at idle every counter is zero.",
    "7.2": "The policy receives the prompt, never an empty string; a prefix is recorded for a worker only after the "
    "worker served it.",
    "7.3": "A retry goes to another worker, and only before the first byte; after that the client receives an error "
    "event and no `[DONE]`.",
    "7.4": "A worker that returns is a new incarnation; health checks never write counters.",
    "8": "A plugin's scheduler, `postprocess` or store receives and returns frozen values, and never accesses core "
    "objects.",
    "8.1": "The joined output of a parser does not depend on how the text was split into pieces.",
    "8.2": "A parser holds text back only while it may be the start of a marker, or white space before one.",
    "8.3": "A parser loses and repeats no character. Markup is not content, each call begins once, and text that a "
    "grammar forced parses as that call.",
    "8.4": "A text may end anywhere and contain anything: emitted output stays, and a truncated call has no end event.",
    "8.5": "Markup, complete or truncated, is never content, and calls completed before an error stay.",
    "8.6": "Parsing time is linear in the length of the text.",
}
"""Rule by number. `1`, `2`, `4`, `6` and `8`, without a second number, apply to their whole section."""


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
