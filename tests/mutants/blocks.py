"""Faults against section 3 of the protocol: owners of KV blocks, and when a block may be reused."""

from __future__ import annotations

from tests.mutants.mutant import mutant

SCHEDULER = "scheduling/scheduler.py"
PLANNER = "scheduling/running/planner.py"
ADMISSIONS = "scheduling/waiting/admission_planner.py"
RESIDENCIES = "scheduling/running/running_batch.py"
OUTPUTS = "scheduling/running/output_processor.py"
POOL = "kv/blocks.py"
PREFIX = "kv/prefix.py"
EVENTS = "types/kv_events.py"
PREFIXES = "scheduling/prefixes.py"

_RELEASE = "self._pool.release(slots.take_blocks(slot), int(slots.last_step[slot]))"
_SETTLED = "upto = plan.starts[rows] + plan.num_tokens[rows]"

_EVENTS = "published events reproduce the content of the pool"
_ACQUIRED = "            del (self._pinned if self._pins[block] else self._cached)[block]\n"

MUTANTS = (
    mutant(
        "eviction-is-not-published", _EVENTS, (POOL, "            self._recorder.removed(keys)\n", "            pass\n")
    ),
    mutant(
        "events-are-published-in-reverse",
        _EVENTS,
        (EVENTS, "self._size = tuple(self._events), [], 0", "self._size = tuple(self._events[::-1]), [], 0"),
    ),
    mutant(
        "path-of-a-stored-block-is-not-published",
        _EVENTS,
        (EVENTS, "            start -= 1\n", "            break\n"),
    ),
    mutant(
        "ancestors-are-published-as-held",
        _EVENTS,
        (EVENTS, "        self.removed([key for key in keys if not holds(key)])\n", ""),
    ),
    mutant(
        "salted-prefix-is-published",
        "prompts of different salts share nothing",
        (PREFIXES, "not (request.spec.cache_salt or ", "not ("),
    ),
    mutant(
        "free-with-a-step-in-flight",
        "3.2: a block leaves fenced only when the last step that touches it has completed",
        (RESIDENCIES, _RELEASE, _RELEASE.replace("int(slots.last_step[slot])", "-1")),
    ),
    mutant(
        "fence-is-one-step-short",
        "3.2: a block leaves fenced only when the last step that touches it has completed",
        (RESIDENCIES, _RELEASE, _RELEASE.replace("[slot]))", "[slot]) - 1)")),
    ),
    mutant(
        "pool-does-not-fence",
        "3.2: a block leaves fenced only when the last step that touches it has completed",
        (POOL, "            if step <= self._answered:\n", "            if step >= 0:\n"),
    ),
    mutant(
        "pool-lifts-a-fence-one-step-early",
        "3.2: a block leaves fenced only when the last step that touches it has completed",
        (POOL, "self._answered = max(self._answered, step)", "self._answered = max(self._answered, step + 1)"),
    ),
    mutant(
        "fence-ignores-other-owners",
        "3.2: the last scheduled step that touches a block counts, for any owner",
        (POOL, "self._fence[blocks] = np.maximum(self._fence[blocks], fence)", "self._fence[blocks] = fence"),
    ),
    mutant(
        "free-while-another-owner-holds-it",
        "3.1: a reference count equals the number of owners; no free block is in a block table",
        (POOL, "dict.fromkeys(orphans[self._references[orphans] == 0].tolist())", "dict.fromkeys(orphans.tolist())"),
    ),
    mutant(
        "shared-block-has-one-owner",
        "3.1: a reference count equals the number of owners",
        (POOL, "        self._references[blocks] += 1\n", "        self._references[blocks] = 1\n"),
    ),
    mutant(
        "blocks-are-not-released",
        "3.6: at idle every gauge equals its value at start",
        (
            RESIDENCIES,
            "slots.tables[:, slot], reason)\n        self._give_up_blocks(slot, request)\n",
            "slots.tables[:, slot], reason)\n",
        ),
    ),
    mutant(
        "matching-evicts-the-matched-blocks",
        "3.3: matching a prefix never evicts the matched blocks",
        (ADMISSIONS, "            pool.acquire(known)\n", ""),
        (
            ADMISSIONS,
            "            if blocks is None:\n                pool.release(known, -1)\n",
            "            if blocks is not None:\n                pool.acquire(known)\n            else:\n",
        ),
    ),
    mutant(
        "fenced-block-matches",
        "3.2: a fenced block gets no owner before its fence has completed",
        (
            POOL,
            "            if found[index] not in self._cached and found[index] not in self._pinned:\n",
            "            if False:\n",
        ),
        (POOL, _ACQUIRED, "            (self._pinned if self._pins[block] else self._cached).pop(block, None)\n"),
    ),
    mutant(
        "pinned-block-does-not-match",
        "3.3: a cached prefix stays cached while its blocks are not needed",
        (POOL, " and found[index] not in self._pinned:\n", ":\n"),
    ),
    mutant(
        "pinned-block-counts-as-owned",
        "3.1: blocks are partitioned into free, owned and fenced",
        (POOL, _ACQUIRED, "            self._cached.pop(block, None)\n"),
    ),
    mutant(
        "fenced-blocks-are-ignored-when-choosing-a-victim",
        "3.4: fenced blocks are counted before another victim is chosen: no cascade",
        (PLANNER, "pool.num_free + pool.num_fenced + (slots", "pool.num_free + (slots"),
    ),
    mutant(
        "admission-in-a-pass-with-preemption",
        "3.4: no cascade; an admission in a pass with preemption uses the victim's blocks",
        (
            PLANNER,
            "        if builder.preempted and not self.paused:\n            self._times",
            "        if False:\n            self._times",
        ),
    ),
    mutant(
        "drafts-are-registered-before-acceptance",
        "3.5: rejected drafts are never hashed; only settled positions are",
        (OUTPUTS, "np.where(sampled, slots.num_tokens[rows_of] - 1, upto)", "upto"),
    ),
    mutant(
        "positions-in-flight-are-registered",
        "3.5: only positions with a completed output are hashed",
        (OUTPUTS, _SETTLED, "upto = slots.num_computed[rows_of]"),
    ),
    mutant(
        "prefix-names-a-second-block",
        "3.1: a prefix names one block",
        (POOL, "key not in block_of and block not in key_of", "block not in key_of"),
    ),
    mutant(
        "reused-block-keeps-its-prefix",
        "3.5: a block matches a prefix only while it holds it",
        (POOL, "            del self._block_of[key]\n", "            self._block_of[key] = self._block_of[key]\n"),
    ),
    mutant(
        "finished-prefill-still-claims-its-prefix",
        "1.7: all resources of a request are freed exactly once",
        (RESIDENCIES, "        if request.announced:\n", "        if False:\n"),
    ),
    mutant(
        "hash-ignores-the-salt",
        "5.3: tenants do not share KV",
        (PREFIX, "+ model + salt.encode()", "+ model"),
    ),
    mutant(
        "scheduler-ignores-the-salt",
        "5.3: tenants do not share KV",
        (SCHEDULER, "self._prefixes.root(spec.cache_salt,", 'self._prefixes.root("",'),
    ),
    mutant(
        "hash-ignores-the-parent",
        "5.3: keys chain over the parent hash",
        (PREFIX, "state.update(parent + data", "state.update(root + data"),
    ),
)
