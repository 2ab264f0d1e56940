"""Faults against section 2 of the protocol: what a step may compute, and who yields when it is tight.

FastDeploy changed its formula three times in ten days; each of them stands here in place of the exact accounting.
"""

from __future__ import annotations

from tests.mutants.mutant import mutant

SCHEDULER = "scheduling/scheduler.py"
BUDGET = "scheduling/budget.py"

_LIMIT = "        budget = Budget(self.limits.max_num_batched_tokens)\n"
_DECODES = "        self._decode(rows, budget, draft)\n        self._continue_prefills(rows, budget, draft)\n"
_RESERVED_BEFORE = (
    SCHEDULER,
    "        chosen, granted = allot_decodes(budget, drafts, slots.last_step[decoding])\n",
    "        chosen = np.arange(min(len(decoding), budget.left))\n"
    "        granted = drafts[chosen]\n"
    "        budget.take(len(chosen))\n",
)
"""Decodes are charged one token each: their drafts were paid for by the reserve."""
_SMALLEST = "    if config.max_num_batched_tokens < 1 + max_drafts:\n"

MUTANTS = (
    mutant(
        "one-token-a-decode-whatever-it-drafts",
        "2: a decode is charged 1 + its drafts",
        (BUDGET, "    budget.take(int(granted.sum()))\n", ""),
    ),
    mutant(
        "one-token-a-decode-and-drafts-as-they-like",
        "2: a decode is charged 1 + its drafts",
        (
            BUDGET,
            "    granted = deal(drafts, budget.left)\n    budget.take(int(granted.sum()))\n    return rows, granted\n",
            "    return rows, drafts\n",
        ),
    ),
    mutant(
        "reserve-for-every-slot-with-a-floor",
        "2.1: no blanket reserve for max_num_seqs, no floor, no magic number",
        (
            SCHEDULER,
            _LIMIT,
            "        whole, width = self.limits.max_num_batched_tokens, 1 + self.limits.max_drafts\n"
            "        budget = Budget(max(whole - self.limits.max_num_seqs * width, min(whole, 512)))\n",
        ),
        _RESERVED_BEFORE,
    ),
    mutant(
        "reserve-for-every-slot-without-a-floor",
        "2.4: budget equal to the decode demand still makes progress",
        (
            SCHEDULER,
            _LIMIT,
            "        whole, width = self.limits.max_num_batched_tokens, 1 + self.limits.max_drafts\n"
            "        budget = Budget(max(whole - self.limits.max_num_seqs * width, 0))\n",
        ),
        _RESERVED_BEFORE,
    ),
    mutant(
        "reserve-for-every-decode",
        "2.4: budget equal to the decode demand still makes progress",
        (
            SCHEDULER,
            _LIMIT,
            "        table, width = self.slots, 1 + self.limits.max_drafts\n"
            "        decoding = int((table.running & (table.length - table.computed == 1)).sum())\n"
            "        budget = Budget(max(self.limits.max_num_batched_tokens - decoding * width, 0))\n",
        ),
        _RESERVED_BEFORE,
    ),
    mutant(
        "refuse-a-budget-below-the-largest-decode-demand",
        "2.5: only a budget below 1 + k is refused",
        (
            "config.py",
            _SMALLEST,
            "    if config.max_num_batched_tokens < config.max_num_seqs * (1 + max_drafts):\n",
        ),
    ),
    mutant(
        "accept-a-budget-below-one-decode",
        "2.5: a configuration that cannot keep the rule is refused at start",
        ("config.py", _SMALLEST, "    if config.max_num_batched_tokens < 1:\n"),
    ),
    mutant(
        "prefills-go-first",
        "2.2: a decode is left out only in rotation",
        (
            SCHEDULER,
            _DECODES,
            "        self._continue_prefills(rows, budget, draft)\n        self._decode(rows, budget, draft)\n",
        ),
    ),
    mutant(
        "a-decode-is-left-out-before-drafts-shrink",
        "2.2: drafts are the first to shrink",
        (
            BUDGET,
            "    if count >= budget.left:\n",
            "    if count + int(drafts.sum()) > budget.left:\n"
            "        fits = np.flatnonzero(np.cumsum(drafts + 1) <= budget.left)\n"
            "        budget.take(int((drafts[fits] + 1).sum()))\n"
            "        return fits, drafts[fits]\n"
            "    if count >= budget.left:\n",
        ),
    ),
    mutant(
        "no-rotation",
        "2.2: a decode is left out only in rotation, so every request advances",
        (BUDGET, 'np.argsort(last_step, kind="stable")[: budget.left]', "np.arange(count)[: budget.left]"),
    ),
    mutant(
        "an-unfinished-prefill-starves",
        "2.2: every request advances",
        (SCHEDULER, "        if len(decoding) >= budget.left:\n            decoding = rows\n", ""),
    ),
    mutant(
        "an-aborted-request-is-charged",
        "2.3: what an aborted request was charged in the same pass is refunded",
        (
            SCHEDULER,
            "        self._take_back_aborted(draft)\n        rows = self._make_room(self.slots.ready(), draft)\n",
            "        for request in self._aborting:\n"
            "            budget.take(1 if request.state is State.RUNNING else 0)\n"
            "        self._take_back_aborted(draft)\n"
            "        rows = self._make_room(self.slots.ready(), draft)\n",
        ),
    ),
    mutant(
        "a-preempted-request-is-charged",
        "2.3: what a preempted request was charged in the same pass is refunded",
        (
            SCHEDULER,
            "        self._decode(rows, budget, draft)\n",
            "        budget.take(int(self.slots.draining.sum()))\n        self._decode(rows, budget, draft)\n",
        ),
    ),
    mutant(
        "a-cached-prefix-is-charged",
        "2.1: the chunk is charged after the cached prefix",
        (
            SCHEDULER,
            "            self._prefill(slot, budget, draft)\n            slot = self.slots.free_slot()\n",
            "            budget.take(int(self.slots.computed[slot]))\n"
            "            self._prefill(slot, budget, draft)\n"
            "            slot = self.slots.free_slot()\n",
        ),
    ),
    mutant(
        "the-runner-does-not-count",
        "2: tokens are counted where the runner builds its input",
        ("runner/inputs.py", "    if total > limits.max_num_batched_tokens:\n", "    if total < 0:\n"),
    ),
    mutant(
        "padding-is-not-charged",
        "2.1: the alignment that the backend declares is charged",
        ("runner/inputs.py", "total = int(counts.sum()) + padding", "total = int(counts.sum())"),
    ),
    mutant(
        "a-new-residency-is-charged-for-drafts-of-the-one-before",
        "2.1: the charge is the request's real number of drafts",
        ("scheduling/slots.py", "= self.registered[slot] = self.drafts_ready[slot] = 0", "= self.registered[slot] = 0"),
    ),
)
