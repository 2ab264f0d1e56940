"""Faults against section 4 of the protocol: other requests must not change a request's text."""

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
        "only-the-first-eos-id-ends-a-text",
        "4: a text is a function of the request, and ends at any of its EOS ids",
        ("scheduling/running/slots.py", "*spec.eos_token_ids)", "*spec.eos_token_ids[:1])"),
    ),
    mutant(
        "block-table-off-by-one",
        "4: the KV of a position is read where it was written",
        (
            BATCH,
            "self.tables[grant.group, grant.slot, grant.offset : grant.offset + len(grant.blocks)] = grant.blocks",
            "self.tables[grant.group, grant.slot, max(grant.offset - 1, 0) :][: len(grant.blocks)] = grant.blocks",
        ),
    ),
    mutant(
        "kv-slot-off-by-one",
        "4: the KV of a position is written where it is read",
        (INPUTS, "* size + offsets\n", "* size + (offsets + 1) % size\n"),
    ),
    mutant(
        "prefix-hit-includes-the-last-token",
        "4: the last token is always computed, since it yields the next one",
        (
            "scheduling/prefixes.py",
            "(request.num_tokens - 1) // self.hasher.block_size",
            "request.num_tokens // self.hasher.block_size",
        ),
    ),
    mutant(
        "cached-prefix-is-one-block-too-long",
        "4: positions without KV are not skipped",
        (
            "scheduling/waiting/admission_planner.py",
            "        cached = first * self._limits.block_size\n",
            "        cached = min((first + 1) * self._limits.block_size, request.num_tokens - 1)\n",
        ),
    ),
    mutant(
        "readmission-keeps-stale-drafts",
        "4: drafts do not survive a change of the slot's occupant",
        (BATCH, "        self.num_drafts[slot] = 0\n        self.adapter_slots", "        self.adapter_slots"),
    ),
    mutant(
        "step-input-is-the-token-of-another-request",
        "4: a text depends on its own request only, with any number of steps in flight",
        (LAST_TOKENS, "slots[: len(fed)] = rows.slots\n", "slots[: len(fed)] = rows.slots[::-1]\n"),
    ),
    mutant(
        "step-input-is-the-second-to-last-token",
        "4: a text depends on all tokens before it, with any number of steps in flight",
        (RUNNER, "            self._last.keep(work.slots, grid)\n", "            pass\n"),
    ),
    mutant(
        "token-in-flight-reaches-the-next-occupant",
        "4: a token belongs to the generation that its step was launched for",
        (RUNNER, "        if not stays.all():  #", "        if False:  #"),
    ),
    mutant(
        "banned-sequences-ignore-the-token-in-flight",
        "4: a banned sequence is never generated, with any number of steps in flight",
        (RUNNER, " or self._sampler.reads_text(pending)\n", "\n"),
    ),
    mutant(
        "step-is-launched-after-drafts-in-flight",
        "4: a text depends on all tokens before it, with any number of steps in flight",
        (RUNNER, "        if self._drafted:\n", "        if False:\n"),
    ),
    mutant(
        "forced-tokens-ignore-the-token-in-flight",
        "4: a draft that violates the mask is rejected at its position",
        (SLOT_GRAMMARS, "            forced = forced[skipped:]\n", ""),
    ),
    mutant(
        "drafter-keeps-the-previous-occupant",
        "4: drafts do not survive a change of the slot's occupant",
        (RUNNER, "self._admit_to_drafter(self.drafter, slot, admission.token_ids)", "pass"),
    ),
    mutant(
        "rollback-is-omitted",
        "4: rejected drafts and their KV are discarded",
        (OUTPUTS, "            slots.rollback_drafts(rows_of, rejected)\n", ""),
    ),
    mutant(
        "rollback-keeps-the-kv-of-rejected-drafts",
        "4: rejected drafts and their KV are discarded",
        ("scheduling/running/slots.py", "        self.num_computed[rows] -= rejected\n", ""),
    ),
    mutant(
        "row-starts-at-the-planned-position",
        "4: a row starts after the accepted tokens",
        (INPUTS, "starts = np.where(plan.samples, length - own, plan.starts)", "starts = plan.starts"),
    ),
    mutant(
        "draft-after-a-rejected-one-is-accepted",
        "4: drafts are verified against the token that would have been sampled",
        ("ops/numpy/sampling.py", "np.cumprod(right, axis=1).sum(axis=1)", "right.sum(axis=1)"),
    ),
    mutant(
        "every-draft-is-accepted",
        "4: drafts are verified against the token that would have been sampled",
        ("ops/numpy/sampling.py", "right = (sampled[:, :k] == drafts) & (", "right = (drafts == drafts) & ("),
    ),
    mutant(
        "bonus-token-is-dropped",
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
        "4: one uniform number per (seed, position), also after preemption",
        (
            SAMPLING,
            "                positions=positions,\n",
            "                positions=positions - positions.min(),\n",
        ),
    ),
    mutant(
        "penalties-ignore-drafts",
        "4: penalties include every token before the sampled one",
        (
            SAMPLING,
            "penalties = self.penalties.gather(slots, positions, columns, tokens=tokens)",
            "penalties = self.penalties.gather(slots, positions - columns, 0 * columns, tokens=tokens)",
        ),
    ),
    mutant(
        "rejected-drafts-count-for-penalties",
        "4: rejected drafts and their KV are discarded",
        (PENALTIES, "kept = (np.arange(tokens.shape[1]) <= accepted[:, None]) & ", "kept = (tokens == tokens) & "),
    ),
    mutant(
        "penalties-treat-generated-tokens-as-prompt-after-preemption",
        "4: after a preemption only the client's prompt counts as the prompt",
        ("scheduling/running/plan.py", "prompt_len=request.prompt_len,", "prompt_len=request.num_tokens,"),
    ),
    mutant(
        "readmission-keeps-stale-penalties",
        "4: a row's result depends on its own request only",
        (PENALTIES, "            self._row_of[slot] = -1\n", ""),
    ),
    mutant(
        "banned-sequences-match-in-the-prompt",
        "4: banned sequences do not match across the end of the prompt",
        (BANS, "self._begin = begin", "self._begin = 0"),
    ),
    mutant(
        "banned-sequences-match-one-token-only",
        "4: a banned sequence of any length is never generated",
        (BANS, "tokens[position - len(before) : position].tolist() == before", "tokens[position - 1] == before[-1]"),
    ),
    mutant(
        "readmission-keeps-allowed-tokens",
        "4: a row's result depends on its own request only",
        (SAMPLING, "        self._allowed.pop(slot, None)\n", ""),
    ),
    mutant(
        "logprobs-of-rejected-drafts-are-delivered",
        "4: log-probabilities belong to delivered tokens",
        (OUTPUTS, "reason, logprobs=given[:count] if given else None)", "reason, logprobs=given)"),
    ),
    mutant(
        "logprobs-in-reverse-order",
        "4: log-probabilities belong to their tokens",
        (OUTPUTS, "np.lexsort((rows.columns, rows.slots))", "np.lexsort((-rows.columns, rows.slots))"),
    ),
    mutant(
        "stop-token-inside-accepted-drafts-is-ignored",
        "4: a text ends at its stop token, in any column of the matrix",
        (OUTPUTS, "dtype=np.int32) < counts[:, None]\n", "dtype=np.int32) == counts[:, None] - 1\n"),
    ),
    mutant(
        "one-token-over-max-tokens",
        "4: a text has at most max_tokens tokens",
        (
            "scheduling/requests.py",
            "min(self.prompt_len + spec.params.max_tokens, max_model_len)",
            "min(self.prompt_len + spec.params.max_tokens + 1, max_model_len)",
        ),
    ),
    mutant(
        "one-token-under-max-tokens",
        "4: a text has max_tokens tokens unless it stops earlier",
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
        "released-slot-is-still-planned",
        "1.2: a request leaves DRAINING only on the -9 with its gen",
        (PLANNER, "decodes.membership != self._slots.membership or ", ""),
    ),
    mutant(
        "accepted-drafts-pass-the-limit",
        "4: a text has at most max_tokens tokens, accepted drafts included",
        (OUTPUTS, "            counts = np.minimum(counts, room)\n", ""),
        (PLANNER, "np.minimum(ready, slots.limit[rows] - slots.num_planned[rows] - 1)", "ready"),
    ),
    mutant(
        "context-limit-is-ignored",
        "4: prompt and output fit the context",
        (
            "scheduling/requests.py",
            "min(self.prompt_len + spec.params.max_tokens, max_model_len)",
            "self.prompt_len + spec.params.max_tokens",
        ),
    ),
    mutant(
        "preempted-request-loses-its-last-tokens",
        "4: a preempted request continues with all delivered tokens",
        (
            "scheduling/running/tokens.py",
            "        self.take_delivered()\n" + _DETACHED,
            "        if self.row is not None:\n            self.row[self.slot] = 0\n" + _DETACHED,
        ),
    ),
    mutant(
        "token-row-is-not-cleared-after-delivery",
        "4: a token is delivered once",
        ("scheduling/running/tokens.py", "            self.row[self.slot] = 0\n", ""),
    ),
    mutant(
        "draft-forbidden-by-the-grammar-is-verified",
        "4: a draft that violates the mask is rejected at its position",
        (SLOT_GRAMMARS, "counts[row] = matcher.allowed(drafts[row, : counts[row]].tolist())", "pass"),
    ),
    mutant(
        "matcher-does-not-roll-back",
        "4: a mask is a function of the grammar and of the tokens before the position",
        (MATCHER, "            self._grammar.rollback(num_excess)\n", "            pass\n"),
    ),
    mutant(
        "grammar-mask-skips-the-first-draft",
        "4: a mask is a function of the grammar and of the tokens before the position",
        (
            MATCHER,
            "            masked[index] = self._query(self._write_mask, masks[index])\n",
            "            masked[index] = self._query(self._write_mask, masks[index])"
            " and bool(self._tokens or not index)\n",
        ),
    ),
    mutant(
        "mask-is-taken-from-the-wrong-slot",
        "4: a mask is independent of the batch",
        (
            SLOT_GRAMMARS,
            "rows[part] = np.arange(first, first + len(drafts) + 1)",
            "rows[part] = np.arange(total)[part]",
        ),
    ),
    mutant(
        "readmission-resets-the-grammar",
        "4: structured output survives preemption and restarts",
        (SLOT_GRAMMARS, "matcher.consume(admission.token_ids[admission.prompt_len :].tolist())", "pass"),
    ),
    mutant(
        "readmission-keeps-the-previous-grammar",
        "4: a row's result depends on its own request only",
        (SLOT_GRAMMARS, "        self.matchers.pop(slot, None)\n        self._forced.pop(slot, None)\n", ""),
    ),
    mutant(
        "eos-is-allowed-in-an-unfinished-grammar",
        "4: a mask is a function of the grammar and of the tokens before the position",
        (MATCHER, "if not location.reasoning and self._grammar.is_accepting():", "if not location.reasoning:"),
    ),
    mutant(
        "prompt-outputs-are-read-from-the-cache",
        "4: prompt outputs require computing cached positions again",
        (
            "scheduling/prefixes.py",
            " or ((request.prompt_logprobs or request.pooled) and request.needs_every_position):",
            ":",
        ),
    ),
    mutant(
        "prompt-with-prompt-outputs-is-prefilled-remotely",
        "4: prompt outputs require computing cached positions again",
        (
            "scheduling/operations/kv_transferring.py",
            "not request.spec.prefill_at or request.needs_every_position",
            "not request.spec.prefill_at",
        ),
    ),
)
