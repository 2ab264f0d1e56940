"""Faults against section 4 of the protocol: what runs beside a request must not change its text."""

from __future__ import annotations

from tests.mutants.mutant import mutant

PLANNER = "scheduling/running/planner.py"
OUTPUTS = "scheduling/running/output_processor.py"
INPUTS = "runner/inputs/inputs.py"
BATCH = "runner/batch.py"
RUNNER = "runner/runner.py"
SAMPLING = "runner/sampling/sampler.py"
PENALTIES = "runner/sampling/sampler.py"
BANS = "runner/sampling/sampler.py"
LAST_TOKENS = "runner/inputs/inputs.py"
SLOT_GRAMMARS = "runner/sampling/grammars.py"
MATCHER = "structured/matcher.py"

_DETACHED = "        self._delivered, self.row, self.slot = None, None, -1\n"

MUTANTS = (
    mutant(
        "block-table-off-by-one",
        "4: the KV of a position is read where it was written",
        (
            BATCH,
            "self.tables[grant.slot, grant.offset : grant.offset + len(grant.blocks)] = grant.blocks",
            "self.tables[grant.slot, max(grant.offset - 1, 0) :][: len(grant.blocks)] = grant.blocks",
        ),
    ),
    mutant(
        "kv-slot-off-by-one",
        "4: the KV of a position is written where it is read",
        (INPUTS, "* size + offsets\n", "* size + (offsets + 1) % size\n"),
    ),
    mutant(
        "a-prefix-counts-as-computed-to-the-last-token",
        "4: the last token is always computed, it yields the next one",
        (
            "scheduling/prefixes.py",
            "(request.num_tokens - 1) // self.hasher.block_size",
            "request.num_tokens // self.hasher.block_size",
        ),
    ),
    mutant(
        "a-cached-prefix-is-one-block-too-long",
        "4: what was not computed is not skipped",
        (
            "scheduling/waiting/admission_planner.py",
            "        cached = first * self._limits.block_size\n",
            "        cached = min((first + 1) * self._limits.block_size, request.num_tokens - 1)\n",
        ),
    ),
    mutant(
        "a-new-residency-keeps-stale-drafts",
        "4: the drafts of one residency are not those of the next",
        (BATCH, "        self.num_drafts[slot] = 0\n        self.adapter_slots", "        self.adapter_slots"),
    ),
    mutant(
        "a-step-is-fed-the-last-token-of-another-request",
        "4: a text depends on its own request only, whatever is launched ahead",
        (LAST_TOKENS, "slots[: len(fed)] = rows.slots\n", "slots[: len(fed)] = rows.slots[::-1]\n"),
    ),
    mutant(
        "a-step-is-fed-the-token-before-the-last",
        "4: a text depends on all tokens before it, whatever is launched ahead",
        (RUNNER, "            self._last.keep(work.slots, grid)\n", "            pass\n"),
    ),
    mutant(
        "a-token-in-flight-reaches-the-next-residency",
        "4: a token belongs to the generation that its step was launched for",
        (RUNNER, "        if not stays.all():  #", "        if False:  #"),
    ),
    mutant(
        "what-is-banned-does-not-wait-for-the-token-before",
        "4: a banned sequence never comes, whatever is launched ahead",
        (RUNNER, "        if self._sampler.reads_text(slots):\n", "        if False:\n"),
    ),
    mutant(
        "the-drafter-keeps-the-residency-before",
        "4: the drafts of one residency are not those of the next",
        (RUNNER, "self._admit_to_drafter(self.drafter, slot, admission.token_ids)", "pass"),
    ),
    mutant(
        "set-back-is-omitted",
        "4: neither rejected drafts nor their KV exist",
        (OUTPUTS, "            slots.rollback_drafts(rows_of, rejected)\n", ""),
    ),
    mutant(
        "set-back-leaves-the-kv-of-rejected-drafts",
        "4: neither rejected drafts nor their KV exist",
        ("scheduling/running/slots.py", "        self.num_computed[rows] -= rejected\n", ""),
    ),
    mutant(
        "a-row-begins-where-the-plan-hoped",
        "4: a row begins behind the tokens that were really kept",
        (INPUTS, "starts = np.where(plan.samples, length - own, plan.starts)", "starts = plan.starts"),
    ),
    mutant(
        "a-draft-after-a-wrong-one-is-kept",
        "4: drafts are verified against the token that would have been sampled",
        ("ops/numpy/sampling.py", "np.cumprod(right, axis=1).sum(axis=1)", "right.sum(axis=1)"),
    ),
    mutant(
        "every-draft-is-kept",
        "4: drafts are verified against the token that would have been sampled",
        ("ops/numpy/sampling.py", "right = (sampled[:, :k] == drafts) & (", "right = (drafts == drafts) & ("),
    ),
    mutant(
        "the-token-after-the-drafts-is-lost",
        "4: a row with a accepted drafts delivers 1 + a tokens",
        (BATCH, "live = (column <= accepted) &", "live = (column < np.maximum(accepted, 1)) &"),
    ),
    mutant(
        "sampling-position-ignores-drafts",
        "4: one uniform number per (seed, position)",
        (
            INPUTS,
            "positions = positions[row_of] + columns\n",
            "positions = positions[row_of]\n",
        ),
    ),
    mutant(
        "sampling-position-counts-output-only",
        "4: one uniform number per (seed, position), whatever was preempted",
        (
            SAMPLING,
            "                positions=positions,\n",
            "                positions=positions - positions.min(),\n",
        ),
    ),
    mutant(
        "penalties-ignore-drafts",
        "4: penalties see every token before the one that is chosen",
        (
            SAMPLING,
            "penalties = self.penalties.gather(slots, positions, columns, tokens)",
            "penalties = self.penalties.gather(slots, positions - columns, 0 * columns, tokens)",
        ),
    ),
    mutant(
        "rejected-drafts-count-for-penalties",
        "4: neither rejected drafts nor their KV exist",
        (PENALTIES, "kept = (np.arange(tokens.shape[1]) <= accepted[:, None]) & ", "kept = (tokens == tokens) & "),
    ),
    mutant(
        "penalties-take-a-return-for-a-prompt",
        "4: after a preemption only the client's prompt is the prompt",
        ("scheduling/running/plan.py", "prompt_len=request.prompt_len,", "prompt_len=request.num_tokens,"),
    ),
    mutant(
        "a-new-residency-keeps-stale-penalties",
        "4: a row's result depends on its own request only",
        (PENALTIES, "            self._row_of[slot] = -1\n", ""),
    ),
    mutant(
        "banned-sequences-begin-in-the-prompt",
        "4: a text depends on what it may not contain, not on how its prompt ends",
        (BANS, "self._begin = begin", "self._begin = 0"),
    ),
    mutant(
        "banned-sequences-look-one-token-back",
        "4: a banned sequence never comes, whatever its length",
        (BANS, "tokens[position - len(before) : position].tolist() == before", "tokens[position - 1] == before[-1]"),
    ),
    mutant(
        "a-new-residency-keeps-allowed-tokens",
        "4: a row's result depends on its own request only",
        (SAMPLING, "        self._allowed.pop(slot, None)\n", ""),
    ),
    mutant(
        "logprobs-of-rejected-drafts-are-delivered",
        "4: log-probabilities belong to delivered tokens",
        (OUTPUTS, "reason, given[:count] if given else None)", "reason, given)"),
    ),
    mutant(
        "logprobs-in-reverse-order",
        "4: log-probabilities belong to their tokens",
        (OUTPUTS, "np.lexsort((rows.columns, rows.slots))", "np.lexsort((-rows.columns, rows.slots))"),
    ),
    mutant(
        "a-stop-token-inside-accepted-drafts-is-ignored",
        "4: a text ends at its stop token, in whatever column it comes",
        (OUTPUTS, "dtype=np.int32) < counts[:, None]\n", "dtype=np.int32) == counts[:, None] - 1\n"),
    ),
    mutant(
        "one-token-above-the-limit",
        "4: a text has at most max_tokens tokens",
        (
            "scheduling/requests.py",
            "min(self.prompt_len + spec.params.max_tokens, max_model_len)",
            "min(self.prompt_len + spec.params.max_tokens + 1, max_model_len)",
        ),
    ),
    mutant(
        "one-token-below-the-limit",
        "4: a text has max_tokens tokens unless it stops before",
        (
            OUTPUTS,
            "full = counts >= room",
            "full = counts >= room - 1",
        ),
    ),
    mutant(
        "decodes-are-planned-past-the-limit",
        "4: a text has at most max_tokens tokens, accepted drafts included",
        (PLANNER, " or not decodes.plans_left)", ")"),
    ),
    mutant(
        "a-slot-that-left-is-still-planned",
        "1.2: a request leaves DRAINING only on the -9 of its own gen",
        (PLANNER, "decodes.membership != self._slots.membership or ", ""),
    ),
    mutant(
        "accepted-drafts-pass-the-limit",
        "4: a text has at most max_tokens tokens, accepted drafts included",
        (OUTPUTS, "            counts = np.minimum(counts, room)\n", ""),
        (PLANNER, "np.minimum(ready, slots.limit[rows] - slots.num_planned[rows] - 1)", "ready"),
    ),
    mutant(
        "the-context-limit-is-ignored",
        "4: prompt and output fit the context",
        (
            "scheduling/requests.py",
            "min(self.prompt_len + spec.params.max_tokens, max_model_len)",
            "self.prompt_len + spec.params.max_tokens",
        ),
    ),
    mutant(
        "a-request-leaves-its-slot-without-its-last-tokens",
        "4: a preempted request continues with all tokens that were delivered",
        (
            "scheduling/running/tokens.py",
            "        self.take_delivered()\n" + _DETACHED,
            "        if self.row is not None:\n            self.row[self.slot] = 0\n" + _DETACHED,
        ),
    ),
    mutant(
        "a-look-forgets-to-empty-the-row",
        "4: a token is delivered once",
        ("scheduling/running/tokens.py", "            self.row[self.slot] = 0\n", ""),
    ),
    mutant(
        "a-draft-that-the-grammar-forbids-is-verified",
        "4: a draft that the mask forbids is rejected where it stands",
        (SLOT_GRAMMARS, "counts[row] = matcher.allowed(drafts[row, : counts[row]].tolist())", "pass"),
    ),
    mutant(
        "the-matcher-does-not-roll-back",
        "4: a mask is a function of the grammar and of the tokens before the position",
        (MATCHER, "            self._grammar.rollback(num_excess)\n", "            pass\n"),
    ),
    mutant(
        "the-grammar-begins-a-token-late-among-drafts",
        "4: a mask is a function of the grammar and of the tokens before the position",
        (
            MATCHER,
            "            masked[index] = self._query(self._write_mask, masks[index])\n",
            "            masked[index] = self._query(self._write_mask, masks[index])"
            " and bool(self._tokens or not index)\n",
        ),
    ),
    mutant(
        "a-mask-sees-the-wrong-slot",
        "4: a mask never sees the batch",
        (
            SLOT_GRAMMARS,
            "rows[part] = np.arange(first, first + len(drafts) + 1)",
            "rows[part] = np.arange(total)[part]",
        ),
    ),
    mutant(
        "a-return-forgets-what-the-grammar-saw",
        "4: structured output survives preemption and restarts",
        (SLOT_GRAMMARS, "matcher.consume(admission.token_ids[admission.prompt_len :].tolist())", "pass"),
    ),
    mutant(
        "a-new-residency-keeps-the-grammar-before",
        "4: a row's result depends on its own request only",
        (SLOT_GRAMMARS, "        self.matchers.pop(slot, None)\n        self._forced.pop(slot, None)\n", ""),
    ),
    mutant(
        "a-text-may-end-where-its-grammar-goes-on",
        "4: a mask is a function of the grammar and of the tokens before the position",
        (MATCHER, "if not location.reasoning and self._grammar.is_accepting():", "if not location.reasoning:"),
    ),
    mutant(
        "what-is-asked-of-a-prompt-is-read-from-the-cache",
        "4: what is known of a prompt is computed again where something is asked of it",
        (
            "scheduling/prefixes.py",
            " or ((request.prompt_logprobs or request.pooled) and request.needs_every_position):",
            ":",
        ),
    ),
    mutant(
        "a-prompt-that-something-is-asked-of-is-computed-elsewhere",
        "4: what is known of a prompt is computed again where something is asked of it",
        (
            "scheduling/operations/kv_transferring.py",
            "not request.spec.prefill_at or request.needs_every_position",
            "not request.spec.prefill_at",
        ),
    ),
)
