"""Faults against section 6 of the protocol where the scheduler leases blocks out, or sends what it computed."""

from __future__ import annotations

from tests.mutants.mutant import mutant

SCHEDULER = "scheduling/scheduler.py"
TRANSFERS = "scheduling/transfers.py"
REQUESTS = "scheduling/requests.py"

_HELD = "3.2: a block leaves fenced only when no network operation reads or writes it"
_IDLE = "3.6: at idle every gauge equals its value at start"
_RECOMPUTE = "6.3: a failed transfer means recompute"
_ALL = "6.2: the decode side starts after a commit that covers everything"
_BOTH = "6.1: an abort on either side ends it on both"
_ONCE = "6.3: preemption on the decode side resumes there"

MUTANTS = (
    mutant(
        "free-while-a-fetch-is-in-flight",
        _HELD,
        (TRANSFERS, "        self._pool.pin(blocks)\n", ""),
        (TRANSFERS, "        self._pool.unpin(fetching.blocks)\n", ""),
    ),
    mutant(
        "free-while-a-send-is-read",
        _HELD,
        (TRANSFERS, "        self._pool.pin(sent)\n", ""),
        (TRANSFERS, "self._pool.unpin(self._sends.pop(answer.operation))", "self._sends.pop(answer.operation)"),
    ),
    mutant("blocks-of-a-fetch-stay-pinned", _IDLE, (TRANSFERS, "        self._pool.unpin(fetching.blocks)\n", "")),
    mutant(
        "blocks-of-a-send-stay-pinned",
        _IDLE,
        (TRANSFERS, "self._pool.unpin(self._sends.pop(answer.operation))", "self._sends.pop(answer.operation)"),
    ),
    mutant(
        "whatever-came-counts-as-transferred",
        _RECOMPUTE,
        (TRANSFERS, 'if answer.outcome != "transferred":', "if False:"),
    ),
    mutant(
        "the-answer-of-an-abandoned-fetch-counts",
        "1.7: what a request that left was waiting for changes nothing",
        (TRANSFERS, "        if request.fetch != answer.operation:\n", "        if False:\n"),
    ),
    mutant(
        "the-last-token-is-not-computed-here",
        "4: the text is a function of the request; its last prompt token yields the first one",
        (TRANSFERS, "wanted = len(tokens) - 1\n", "wanted = len(tokens)\n"),
    ),
    mutant(
        "the-partial-block-is-not-leased",
        _ALL,
        (TRANSFERS, "frozen(table[first : -(-wanted // size)].copy())", "frozen(table[first : wanted // size].copy())"),
    ),
    mutant(
        "the-last-block-is-not-sent",
        _ALL,
        (TRANSFERS, "blocks[: -(-prompt // self._block_size)]", "blocks[: prompt // self._block_size]"),
    ),
    mutant(
        "blocks-are-sent-before-they-are-settled",
        "3.5: only settled positions are",
        (
            SCHEDULER,
            "self.slots.blocks(slot)[: int(self.slots.registered[slot])])",
            "self.slots.blocks(slot)[: int(self.slots.computed[slot]) // self.limits.block_size])",
        ),
    ),
    mutant(
        "blocks-are-sent-again-after-a-preemption",
        "6.2: each block is sent once",
        (TRANSFERS, "        request.sent = len(blocks)\n", "        request.sent = request.sent_all\n"),
    ),
    mutant(
        "blocks-that-the-other-worker-has-are-sent",
        "6.1: a lease covers what it was opened for",
        (REQUESTS, "self.sent = 0 if spec.prefill_job is None else spec.prefill_job.held_blocks", "self.sent = 0"),
    ),
    mutant(
        "a-cached-prefix-is-sent-late",
        "6: blocks leave while the rest is computed",
        (
            SCHEDULER,
            "            self.counters.prefix_hits += cached\n        self._send_settled(slot, request)\n",
            "            self.counters.prefix_hits += cached\n",
        ),
    ),
    mutant(
        "who-was-preempted-fetches-again",
        _ONCE,
        (
            TRANSFERS,
            "bool(request.spec.prefill_at) and request.prefill is None and",
            "bool(request.spec.prefill_at) and",
        ),
    ),
    mutant(
        "who-has-a-text-fetches-again",
        _ONCE,
        (TRANSFERS, " and request.prefill is None and not len(request.generated)", " and request.prefill is None"),
    ),
    mutant(
        "a-request-that-failed-commits",
        _ALL,
        (TRANSFERS, " and reason in (FinishReason.STOP, FinishReason.LENGTH):", ":"),
    ),
    mutant(
        "nobody-is-told-that-a-lease-was-given-up",
        _BOTH,
        (TRANSFERS, "if job is not None and not request.sent_all:", "if False:"),
    ),
    mutant(
        "a-lease-is-given-up-behind-its-last-send",
        "6.2: a lease ends once",
        (TRANSFERS, "            request.sent_all = True\n", ""),
    ),
    mutant(
        "a-lease-is-not-cancelled-by-an-abort",
        _BOTH,
        (TRANSFERS, "            self._effects.append(Cancel(request.fetch))\n", ""),
    ),
    mutant(
        "an-engine-sleeps-on-what-it-has-to-say",
        _BOTH,
        (TRANSFERS, "bool(self._fetches or self._sends or self._effects)", "bool(self._fetches or self._sends)"),
    ),
    mutant(
        "a-lease-is-taken-without-room-to-grow",
        "6.1: granted only with what running requests may still grow to",
        (SCHEDULER, "rows = np.flatnonzero(slots.running | slots.loading)\n", "rows = np.flatnonzero(slots.running)\n"),
    ),
)
