"""Faults against section 2 of the protocol: the tokens of a step, and who yields when the budget is tight.

FastDeploy changed its formula three times in ten days; each of them replaces the exact accounting here.
"""

from __future__ import annotations

from tests.mutants.mutant import mutant

PLANNER = "scheduling/running/planner.py"
ADMISSIONS = "scheduling/waiting/admission_planner.py"
BUDGET = "scheduling/running/plan.py"

_LIMIT = (
    "        images = ImageBudget(limits.max_image_tokens, whole=limits.whole_images)\n"
    "        builder = PlanBuilder(self._epoch, self._step, limits.max_num_batched_tokens, images)\n"
)
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
"""Charges one token for each decode, as if the reserve had paid for its drafts."""
_SMALLEST = "    if budget < 1 + max_drafts:\n"

MUTANTS = (
    mutant(
        "decodes-are-charged-one-token",
        "2: a decode is charged 1 + its drafts",
        (BUDGET, "    budget.take(int(granted.sum()))\n", ""),
    ),
    mutant(
        "decodes-are-charged-one-token-with-unlimited-drafts",
        "2: a decode is charged 1 + its drafts",
        (
            BUDGET,
            "    granted = deal(drafts, budget.left)\n    budget.take(int(granted.sum()))\n    return rows, granted\n",
            "    return rows, drafts\n",
        ),
    ),
    mutant(
        "reserve-for-every-slot-with-a-floor",
        "2.1: no blanket reserve for max_num_seqs, no floor, no arbitrary constant",
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
        "2.4: a budget equal to the decode demand makes progress",
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
        "2.4: a budget equal to the decode demand makes progress",
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
        "budget-below-the-largest-decode-demand-is-rejected",
        "2.5: only a budget below 1 + k is rejected",
        (
            "config/__init__.py",
            _SMALLEST,
            "    if budget < config.max_num_seqs * (1 + max_drafts):\n",
        ),
    ),
    mutant(
        "budget-below-one-decode-is-accepted",
        "2.5: a configuration that violates the rule is rejected at startup",
        ("config/__init__.py", _SMALLEST, "    if budget < 1:\n"),
    ),
    mutant(
        "prefills-are-planned-first",
        "2.2: a decode is skipped only in rotation",
        (
            PLANNER,
            _DECODES + _PREFILLS,
            _PREFILLS + _DECODES,
        ),
    ),
    mutant(
        "decode-is-skipped-before-drafts-shrink",
        "2.2: drafts shrink first",
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
        "2.2: a decode is skipped only in rotation, so every request advances",
        (BUDGET, "np.lexsort(((np.arange(count) - first) % max(count, 1), last_step))", "np.arange(count)"),
    ),
    mutant(
        "lower-slots-run-more-often",
        "2.2: a decode is skipped only in rotation, so every request advances",
        (
            BUDGET,
            "np.lexsort(((np.arange(count) - first) % max(count, 1), last_step))",
            'np.argsort(last_step, kind="stable")',
        ),
    ),
    mutant(
        "unfinished-prefill-starves",
        "2.2: every request advances",
        (PLANNER, "        if len(decoding) >= builder.budget.left:\n            decoding = rows\n", ""),
    ),
    mutant(
        "aborted-request-is-charged",
        "2.3: the charge of a request aborted in the same pass is refunded",
        (
            PLANNER,
            "                self._running_batch.revoke(slot_of(request), request, builder)\n",
            "                builder.budget.take(1)\n"
            "                self._running_batch.revoke(slot_of(request), request, builder)\n",
        ),
    ),
    mutant(
        "preempted-request-is-charged",
        "2.3: the charge of a request preempted in the same pass is refunded",
        (
            PLANNER,
            _DECODES,
            "                builder.budget.take(int(self._slots.draining.sum()))\n" + _DECODES,
        ),
    ),
    mutant(
        "cached-prefix-is-charged",
        "2.1: the chunk is charged after the cached prefix",
        (
            ADMISSIONS,
            "        chunk = min(request.num_tokens, room) - cached\n",
            "        builder.budget.take(cached)\n        chunk = min(request.num_tokens, room) - cached\n",
        ),
    ),
    mutant(
        "runner-reports-no-token-count",
        "2: the runner counts the tokens of its input",
        ("runner/inputs/inputs.py", "    if total > limits.max_num_batched_tokens:\n", "    if total < 0:\n"),
    ),
    mutant(
        "padding-is-not-charged",
        "2.1: the declared alignment of the backend is charged",
        ("runner/inputs/inputs.py", "int(counts.sum()) if shape is None else shape[0] * shape[1]", "int(counts.sum())"),
    ),
    mutant(
        "readmission-is-charged-for-earlier-drafts",
        "2.1: the charge is the request's real number of drafts",
        (
            "scheduling/running/slots.py",
            "self.num_registered[slot], self.drafts_ready[slot] = count, known, 0",
            "self.num_registered[slot] = count, known",
        ),
    ),
    mutant(
        "drafts-of-an-earlier-gen-are-accepted",
        "2.1, 1.5: an output applies to its own gen, and the charge is the real number of drafts",
        (
            "scheduling/running/output_processor.py",
            "current = (slots.last_step <= plan.step) & (slots.gen == output.gens)",
            "current = slots.last_step <= plan.step",
        ),
    ),
    mutant(
        "plan-is-mutable",
        "8: scheduler outputs are frozen",
        ("scheduling/running/plan.py", "for column in (slots, gens,", "for column in (gens,"),
    ),
    mutant(
        "all-requests-are-planned-with-forced-tokens",
        "2.1: a request is charged its real number of drafts",
        (PLANNER, "self._drafts.most(sampling)", "self._limits.max_drafts"),
    ),
)
