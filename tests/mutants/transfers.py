"""Faults against section 6 of the protocol where the scheduler grants leases, or sends computed blocks."""

from __future__ import annotations

from tests.mutants.mutant import mutant

RESIDENCIES = "scheduling/running/running_batch.py"
OPERATIONS = "scheduling/operations/registry.py"
SCHEDULER = "scheduling/scheduler.py"
TRANSFERRING = "scheduling/operations/kv_transferring.py"
CONTROL = "scheduling/waiting/admission_control.py"
REQUESTS = "scheduling/requests.py"

_HELD = "3.2: a block leaves fenced only when no network operation reads or writes it"
_IDLE = "3.6: at idle every gauge equals its value at start"
_RECOMPUTE = "6.3: after a failed transfer the KV is recomputed"
_ALL = "6.2: decoding starts after a commit that covers all blocks"
_BOTH = "6.1: an abort by either worker ends the lease on both"
_UNPIN = "        if blocks is not None:\n            self._pool.unpin"
_ONCE = "6.3: a request preempted on the decode worker resumes there"

MUTANTS = (
    mutant(
        "free-while-a-fetch-is-in-flight",
        _HELD,
        (TRANSFERRING, "begin(fetch, request, blocks)", "begin(fetch, request)"),
    ),
    mutant(
        "free-while-a-send-is-read",
        _HELD,
        (TRANSFERRING, "begin(send, request, sent)", "begin(send, request)"),
    ),
    mutant(
        "blocks-of-a-fetch-stay-pinned",
        _IDLE,
        (
            OPERATIONS,
            _UNPIN,
            '        if blocks is not None and kind.__name__ != "Fetch":\n            self._pool.unpin',
        ),
    ),
    mutant(
        "blocks-of-a-send-stay-pinned",
        _IDLE,
        (
            OPERATIONS,
            _UNPIN,
            '        if blocks is not None and kind.__name__ != "Send":\n            self._pool.unpin',
        ),
    ),
    mutant(
        "partial-transfer-counts-as-complete",
        _RECOMPUTE,
        (TRANSFERRING, 'if answer.outcome != "transferred":', "if False:"),
    ),
    mutant(
        "completion-of-an-abandoned-fetch-counts",
        "1.7: completions of operations of a finished request have no effect",
        (OPERATIONS, "effect, None, blocks", "effect, _ if isinstance(effect, Fetch) else None, blocks"),
    ),
    mutant(
        "last-token-is-not-computed-locally",
        "4: the text is a function of the request; its last prompt token yields the first one",
        (
            TRANSFERRING,
            "spec, count, size = request.spec, request.num_tokens - 1, self.block_size",
            "spec, count, size = request.spec, request.num_tokens, self.block_size",
        ),
    ),
    mutant(
        "partial-block-is-not-leased",
        _ALL,
        (
            TRANSFERRING,
            "range(first, -(-count // size))",
            "range(first, count // size)",
        ),
    ),
    mutant(
        "last-block-is-not-sent",
        _ALL,
        (TRANSFERRING, "upto=-(-prompt // self.block_size)", "upto=prompt // self.block_size"),
    ),
    mutant(
        "blocks-are-sent-before-they-are-settled",
        "3.5: only settled positions are",
        (
            RESIDENCIES,
            "self.slots.tables[:, slot], int(self.slots.num_registered[slot]))",
            "self.slots.tables[:, slot], int(self.slots.num_computed[slot]) // self.slots.block_size)",
        ),
    ),
    mutant(
        "blocks-are-sent-again-after-a-preemption",
        "6.2: each block is sent once",
        (TRANSFERRING, "        request.sent = upto\n", "        request.sent = request.sent_all\n"),
    ),
    mutant(
        "blocks-held-by-the-decode-worker-are-sent",
        "6.1: a lease covers the blocks that it was opened for",
        (REQUESTS, "self.sent = 0 if spec.prefill_job is None else spec.prefill_job.held_blocks", "self.sent = 0"),
    ),
    mutant(
        "cached-prefix-is-sent-late",
        "6: blocks are sent while the rest is computed",
        (
            RESIDENCIES,
            "            counters.prefix_hits += num_cached\n        if request.spec.prefill_job is not None:\n",
            "            counters.prefix_hits += num_cached\n        if False:\n",
        ),
    ),
    mutant(
        "preempted-request-fetches-again",
        _ONCE,
        (
            TRANSFERRING,
            "return request.prefill is None and not request.num_generated",
            "return not request.num_generated",
        ),
    ),
    mutant(
        "request-with-output-fetches-again",
        _ONCE,
        (
            TRANSFERRING,
            "return request.prefill is None and not request.num_generated",
            "return request.prefill is None",
        ),
    ),
    mutant(
        "failed-request-commits",
        _ALL,
        (TRANSFERRING, " and reason in (FinishReason.STOP, FinishReason.LENGTH):", ":"),
    ),
    mutant(
        "abandoned-lease-is-not-reported",
        _BOTH,
        (TRANSFERRING, "if job is not None and not request.sent_all:", "if False:"),
    ),
    mutant(
        "lease-is-abandoned-after-its-last-send",
        "6.2: a lease ends once",
        (TRANSFERRING, "            request.sent_all = True\n", ""),
    ),
    mutant(
        "abort-does-not-cancel-the-lease",
        _BOTH,
        (TRANSFERRING, "            self.operations.cancel(request.fetch)\n", ""),
    ),
    mutant(
        "engine-sleeps-with-pending-effects",
        _BOTH,
        (SCHEDULER, "operations.open or operations.effects or", "operations.open or"),
    ),
    mutant(
        "lease-is-granted-without-room-to-grow",
        "6.1: granted only with room for the growth of running requests",
        (CONTROL, "(slots.running | slots.loading)\n        if not", "(slots.running)\n        if not"),
        (CONTROL, "(slots.running | slots.loading)\n        if len", "(slots.running)\n        if len"),
    ),
)
