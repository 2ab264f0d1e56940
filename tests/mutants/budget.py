"""Faults against section 2 of the protocol: what a step may compute, and who yields when it is tight.

FastDeploy changed its formula three times in ten days; each of them stands here in place of the exact accounting.
"""

from __future__ import annotations

from tests.mutants.mutant import mutant

PLANNER = "scheduling/running/planner.py"
ADMISSIONS = "scheduling/waiting/admission_planner.py"
BUDGET = "scheduling/running/plan.py"

_LIMIT = "        builder = PlanBuilder(self._epoch, self._step, self._limits.max_num_batched_tokens)\n"
_PREFILLS = (
    "                if builder.num_rows < len(rows):\n                    self._continue_prefills(rows, builder)\n"
)
_DECODES = "                self._decode(rows, builder)\n"
_RESERVED_BEFORE = (
    PLANNER,
    "        chosen, granted = allot_decodes(builder.budget, wanted, slots.last_step[decoding])\n",
    "        chosen = np.arange(min(len(decoding), builder.budget.left))\n"
    "        granted = wanted[chosen]\n"
    "        builder.budget.take(len(chosen))\n",
)
"""Decodes are charged one token each: their drafts were paid for by the reserve."""
_SMALLEST = "    if budget < 1 + max_drafts:\n"

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
            PLANNER,
            _LIMIT,
            "        whole, width = self._limits.max_num_batched_tokens, 1 + self._limits.max_drafts\n"
            "        left = max(whole - self._limits.max_num_seqs * width, min(whole, 512))\n"
            "        builder = PlanBuilder(self._epoch, self._step, left)\n",
        ),
        _RESERVED_BEFORE,
    ),
    mutant(
        "reserve-for-every-slot-without-a-floor",
        "2.4: budget equal to the decode demand still makes progress",
        (
            PLANNER,
            _LIMIT,
            "        whole, width = self._limits.max_num_batched_tokens, 1 + self._limits.max_drafts\n"
            "        left = max(whole - self._limits.max_num_seqs * width, 0)\n"
            "        builder = PlanBuilder(self._epoch, self._step, left)\n",
        ),
        _RESERVED_BEFORE,
    ),
    mutant(
        "reserve-for-every-decode",
        "2.4: budget equal to the decode demand still makes progress",
        (
            PLANNER,
            _LIMIT,
            "        table, width = self._slots, 1 + self._limits.max_drafts\n"
            "        decoding = int((table.running & (table.num_planned - table.num_computed == 1)).sum())\n"
            "        left = max(self._limits.max_num_batched_tokens - decoding * width, 0)\n"
            "        builder = PlanBuilder(self._epoch, self._step, left)\n",
        ),
        _RESERVED_BEFORE,
    ),
    mutant(
        "refuse-a-budget-below-the-largest-decode-demand",
        "2.5: only a budget below 1 + k is refused",
        (
            "config/__init__.py",
            _SMALLEST,
            "    if budget < config.max_num_seqs * (1 + max_drafts):\n",
        ),
    ),
    mutant(
        "accept-a-budget-below-one-decode",
        "2.5: a configuration that cannot keep the rule is refused at start",
        ("config/__init__.py", _SMALLEST, "    if budget < 1:\n"),
    ),
    mutant(
        "prefills-go-first",
        "2.2: a decode is left out only in rotation",
        (
            PLANNER,
            _DECODES + _PREFILLS,
            _PREFILLS + _DECODES,
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
        (BUDGET, "np.lexsort(((np.arange(count) - first) % max(count, 1), last_step))", "np.arange(count)"),
    ),
    mutant(
        "lower-slots-run-more-often",
        "2.2: a decode is left out only in rotation, so every request advances",
        (
            BUDGET,
            "np.lexsort(((np.arange(count) - first) % max(count, 1), last_step))",
            'np.argsort(last_step, kind="stable")',
        ),
    ),
    mutant(
        "an-unfinished-prefill-starves",
        "2.2: every request advances",
        (PLANNER, "        if len(decoding) >= builder.budget.left:\n            decoding = rows\n", ""),
    ),
    mutant(
        "an-aborted-request-is-charged",
        "2.3: what an aborted request was charged in the same pass is refunded",
        (
            PLANNER,
            "                self._running_batch.revoke(slot_of(request), request, builder)\n",
            "                builder.budget.take(1)\n"
            "                self._running_batch.revoke(slot_of(request), request, builder)\n",
        ),
    ),
    mutant(
        "a-preempted-request-is-charged",
        "2.3: what a preempted request was charged in the same pass is refunded",
        (
            PLANNER,
            _DECODES,
            "                builder.budget.take(int(self._slots.draining.sum()))\n" + _DECODES,
        ),
    ),
    mutant(
        "a-cached-prefix-is-charged",
        "2.1: the chunk is charged after the cached prefix",
        (
            ADMISSIONS,
            "        builder.add_row(slot, builder.budget.take(request.num_tokens - cached))\n",
            "        builder.budget.take(cached)\n"
            "        builder.add_row(slot, builder.budget.take(request.num_tokens - cached))\n",
        ),
    ),
    mutant(
        "the-runner-does-not-count",
        "2: tokens are counted where the runner builds its input",
        ("runner/inputs/inputs.py", "    if total > limits.max_num_batched_tokens:\n", "    if total < 0:\n"),
    ),
    mutant(
        "padding-is-not-charged",
        "2.1: the alignment that the backend declares is charged",
        ("runner/inputs/inputs.py", "int(counts.sum()) if shape is None else shape[0] * shape[1]", "int(counts.sum())"),
    ),
    mutant(
        "a-new-residency-is-charged-for-drafts-of-the-one-before",
        "2.1: the charge is the request's real number of drafts",
        (
            "scheduling/running/slots.py",
            "self.num_registered[slot], self.drafts_ready[slot] = count, known, 0",
            "self.num_registered[slot] = count, known",
        ),
    ),
    mutant(
        "drafts-of-an-earlier-gen-are-believed",
        "2.1, 1.5: an output applies to the gen that it names, and the charge is the real number of drafts",
        (
            "scheduling/running/output_processor.py",
            "current = (slots.last_step <= plan.step) & (slots.gen == output.gens)",
            "current = slots.last_step <= plan.step",
        ),
    ),
    mutant(
        "a-plan-can-be-written",
        "8: a scheduler returns frozen values",
        ("scheduling/running/plan.py", "for column in (slots, gens,", "for column in (gens,"),
    ),
    mutant(
        "every-request-is-expected-to-have-forced-tokens",
        "2.1: a request is charged its real number of drafts",
        (PLANNER, "self._drafts.most(sampling)", "self._limits.max_drafts"),
    ),
)
