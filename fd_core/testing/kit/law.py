"""The invariants of every backend, scheduler and store, one sentence per rule, and the exception for violations.

Tests name the rules that they check with the marker `law`, mutants with the beginning of their `law`.
`docs/understand/law.md` is the table of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NoReturn

INVARIANT_SECTIONS: Final[Mapping[str, str]] = {
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
    "1": "A step yields one matrix on the device: a function of that step alone, written without "
    "synchronizing with the device, and not modified by later steps.",
    "1.1": "Delivered tokens are a prefix of the generated tokens, and these of the golden stream: no token is lost, "
    "repeated, reordered or given to another request.",
    "1.2": "A request leaves DRAINING only on the -9 of its gen: at most one revocation per gen, and exactly "
    "one -9 per revocation. Neither -1 nor an absent row is a release.",
    "1.3": "A row with -9 has no other values, a step whose whole batch was revoked still yields an output, and an "
    "error in one row does not affect other rows.",
    "1.4": "A draining request keeps its slot; running, draining and loading requests together never exceed "
    "`max_num_seqs`. The prefill of a resumed request is decided after the -9.",
    "1.5": "An output applies only if epoch, step and gen match; others are dropped and counted.",
    "1.6": "A text whose last token was in flight while its request drained is finished; the request is not requeued.",
    "1.7": "An abort is idempotent and prompt in every state, and everything that the request holds is freed once.",
    "1.8": "A handshake without a response within the watchdog's timeout is an engine error, never a silent hang.",
    "1.9": "No negative id reaches a client, log-probabilities, usage, statistics, drafters, hashes or storage. Token "
    "id 0 is a token.",
    "2": "A step computes at most `max_num_batched_tokens` tokens, counted where the runner builds its input.",
    "2.1": "The charge of a request is exact: its chunk after the cached prefix, or one plus its actual drafts.",
    "2.2": "Drafts shrink before a decode is skipped, decodes are skipped in rotation, and prompts get what decodes "
    "leave.",
    "2.3": "The charge of a request that is preempted or aborted in the same plan is refunded.",
    "2.4": "Block growth, aborts and revocations never need free budget; the smallest legal budget makes progress.",
    "2.5": "A configuration that cannot satisfy the budget is rejected at start with its numbers.",
    "2.6": "The cost of planning depends on the step, not on the queue: an inadmissible request is parked under "
    "its reason and reconsidered when the reason changes.",
    "3.1": "Blocks are free, owned or fenced; references equal owners; no free block is in a table.",
    "3.2": "A block leaves `fenced` only when the last step that touches it has an output and no copy, transfer or "
    "storage operation reads or writes it.",
    "3.3": "Matching a prefix never evicts what it matched. The prefix that was used last stays longest, and of each "
    "one the tail is evicted first.",
    "3.4": "A failed allocation counts fenced blocks that will be freed before another victim is chosen.",
    "3.5": "Only settled positions are hashed, cached or stored; rejected drafts never are.",
    "3.6": "At idle every gauge has its value at start.",
    "4": "A text depends on model, prompt, sampling parameters and seed; batching, chunking, preemption, restoring, "
    "hand-off, speculation and restarts do not change it.",
    "5.1": "Storage is an effect outside planning: no plan waits for a store.",
    "5.2": "At a preemption the victim's settled blocks are pinned, copied and written; at its return the longest "
    "stored prefix is loaded and the rest computed.",
    "5.3": "Keys chain over format, weights and their formats, adapter, tokenizer, dtypes, block size, layout, rank, "
    "salt, parent and token ids.",
    "5.4": "A stored value has header, lengths, payload and a keyed digest; a mismatch is a counted miss.",
    "5.5": "Storage is best effort: requests complete without it, every wait has a deadline, and a circuit breaker "
    "stops calls to a failed store.",
    "5.6": "KV is loaded only if that is faster than computing it; the engine measures both.",
    "6": "Prefill and decode workers trust only peers with their secret, check compatibility in the handshake, and "
    "send within a window; a lost message costs only time.",
    "6.1": "A KV lease has one owner and expires; it is granted only if running requests fit; an abort on either side "
    "ends it on both.",
    "6.2": "The decode side starts after a commit that covers all blocks with a digest; duplicates are ignored and "
    "late writes are rejected.",
    "6.3": "A failed transfer causes recomputation or a clear error, never wrong or empty text; a preemption on the "
    "decode side resumes there.",
    "7.1": "A selection yields one guard that is released exactly once; at idle every counter is zero.",
    "7.2": "The policy sees the prompt, never an empty string; a prefix is recorded for a worker after the worker "
    "served it.",
    "7.3": "Retries go to another worker and only before the first byte; afterwards an error event and no `[DONE]`.",
    "7.4": "A worker that returns is a new incarnation; health checks never write counters.",
    "8": "Replacements of a scheduler, a `postprocess` or a store receive and return frozen values; they never access "
    "internal objects of the core.",
    "8.1": "The result of a parser does not depend on how a response is cut into pieces.",
    "8.2": "A parser holds text back only where it may be the beginning of a marker, or white space before one.",
    "8.3": "A parser neither loses nor repeats characters. Markup is not text, each call begins once, and "
    "calls that a grammar forces are parsed as such.",
    "8.4": "A text may end anywhere and contain anything: emitted events are final, and a truncated call has no end.",
    "8.5": "Markup, complete or truncated, is never content, and calls that were complete before an error remain.",
    "8.6": "The time of a parser is linear in the length of the text.",
}
"""Rules by number. `1`, `2`, `4`, `6` and `8` without a second number are the head of the section."""


class InvariantViolated(AssertionError):
    """Violation of a rule by the code under test."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"law {rule}: {what}")
        self.rule = rule


def broken(rule: str, what: str) -> NoReturn:
    """Fail the running test: `what` was observed, which violates `rule`."""
    assert rule in RULES
    raise InvariantViolated(rule, what)


def require(condition: object, rule: str, what: str) -> None:
    """Fail the running test unless `condition` holds."""
    if not condition:
        broken(rule, what)
