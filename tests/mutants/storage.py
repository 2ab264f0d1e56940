"""Faults against section 5 of the protocol, and against section 3 where an operation holds blocks."""

from __future__ import annotations

from tests.mutants.mutant import mutant

ADMISSIONS = "scheduling/waiting/admission_planner.py"
RESIDENCIES = "scheduling/running/running_batch.py"
OFFLOADING = "scheduling/operations/kv_offloading.py"
OPERATIONS = "scheduling/operations/registry.py"
SLOTS = "scheduling/running/slots.py"
CORE = "engine/core.py"
KV_OFFLOAD = "engine/building/kv_offload.py"
OFFLOAD = "kv/tiers/offload.py"
COPIER = "kv/tiers/copier.py"
READER = "kv/tiers/reader.py"
PORT = "effects/port.py"
PENDING = "effects/pending.py"
GUARDED_STORE = "kv/tiers/guarded_store.py"
ENVELOPE = "kv/stores/envelope.py"

MUTANTS = (
    mutant(
        "store-under-the-lock",
        "5.1: storage is an effect, performed outside planning; no plan waits for it",
        (
            OFFLOAD,
            "            self._copier.loop.post(job)\n",
            "            self._copier.loop.post(job)\n"
            "            if isinstance(answer, Found):\n                self._queue.wait(self._lookup_seconds)\n",
        ),
    ),
    mutant(
        "the-loop-waits-for-the-store",
        "5.1: a stalled store does not move the p99 of planning",
        (
            CORE,
            "        for completion in self._outside.completions():\n",
            "        self._outside.wait(1.0)\n        for completion in self._outside.completions():\n",
        ),
    ),
    mutant(
        "free-while-a-load-is-in-flight",
        "3.2: a block leaves fenced only when no storage operation writes it; an aborted load still does",
        (OFFLOADING, "begin(load, request, blocks)", "begin(load, request)"),
    ),
    mutant(
        "free-while-a-save-reads",
        "3.2: a block leaves fenced only when no storage operation reads it",
        (OFFLOADING, "begin(save, request, copied)", "begin(save, request)"),
    ),
    mutant(
        "blocks-of-a-load-stay-pinned",
        "3.6: at idle every gauge equals its value at start",
        (
            OPERATIONS,
            "        if blocks is not None:\n            self._pool.unpin",
            '        if blocks is not None and kind.__name__ != "Load":\n            self._pool.unpin',
        ),
    ),
    mutant(
        "unsettled-blocks-are-saved",
        "3.5 and 5.2: only settled blocks of a victim are stored",
        (
            RESIDENCIES,
            "request.save = self._offloading.save(request, slots.tables[:, slot], int(slots.num_registered[slot]))",
            "request.save = self._offloading.save(request, slots.tables[:, slot], len(request.chain))",
        ),
    ),
    mutant(
        "partial-load-counts-as-complete",
        "5.4: missing KV is computed, never used",
        (OFFLOADING, "count, entries = min(answer.blocks, len(load.keys)), ", "count, entries = len(load.keys), "),
    ),
    mutant(
        "loaded-slot-is-not-announced",
        "5.2: readmission uses the loaded prefix and recomputes the rest",
        (RESIDENCIES, "        self.kv_loaded.append(slot)\n", ""),
    ),
    mutant(
        "digest-is-not-checked",
        "5.4: a keyed digest binds payload to key; any mismatch is a miss",
        (ENVELOPE, "if not hmac.compare_digest(", "if False and hmac.compare_digest("),
    ),
    mutant(
        "value-is-not-bound-to-its-key",
        "5.4: a keyed digest binds payload to key",
        (ENVELOPE, 'if (key_length, padded_key) != (len(key), key.ljust(MAX_KEY_BYTES, b"\\0")):', "if False:"),
    ),
    mutant(
        "damaged-value-is-used-partially",
        "5.4: any mismatch is a miss, and the value is never used partially",
        (
            READER,
            "        except Damaged as damaged:\n            self._stats",
            "        except Damaged as damaged:\n"
            "            if len(value) == self._limit:\n"
            "                return self._block.array(value[HEADER_BYTES:])\n"
            "            self._stats",
        ),
    ),
    mutant(
        "prefix-continues-after-a-damaged-value",
        "5.4: a prefix ends before a damaged value",
        (
            READER,
            "            if array is None:\n                break\n",
            "            if array is None:\n                continue\n",
        ),
    ),
    mutant(
        "prefix-is-loaded-under-another-salt",
        "5.3: keys chain over the tenant's salt: change it, no hit",
        (
            "scheduling/prefixes.py",
            "self.hasher.extend(request.chain, request.root, ",
            'self.hasher.extend(request.chain, self.hasher.root(""), ',
        ),
    ),
    mutant(
        "values-are-shared-between-models",
        "5.3: keys chain over digests, dtype and layout: change any of them, no hit",
        (KV_OFFLOAD, 'return f"{weights}/{tokenizer}/{numerics}/{_LAYOUT}/rank-0-of-1"', 'return "the same"'),
    ),
    mutant(
        "load-copies-after-its-completion",
        "3.2 and 5.5: a late answer of an expired load is not applied",
        (
            PENDING,
            "            pending = self._awaited(number)\n"
            "            if pending is None:\n                return False\n            pending.copying = True",
            "            pending = self._pending.get(number)\n"
            "            if pending is None:\n                return True\n            pending.copying = True",
        ),
    ),
    mutant(
        "operation-ends-during-its-copy",
        "3.2: a block belongs to an operation until its copies have ended",
        (
            PENDING,
            "        if not pending.copying:\n            del",
            "        if True:\n            del",
        ),
    ),
    mutant(
        "completion-of-an-abandoned-load-counts",
        "1.7: completions of operations of a finished request have no effect",
        (OPERATIONS, "effect, None, blocks", "effect, _ if isinstance(effect, Load) else None, blocks"),
    ),
    mutant(
        "request-aborted-during-lookup-is-requeued",
        "1.7: abort is prompt in every state",
        (
            ADMISSIONS,
            "        self._waiting.remove(request)\n        self._offloading",
            "        if request.lookup is None:\n            self._waiting.remove(request)\n        self._offloading",
        ),
    ),
    mutant(
        "loading-does-not-count-against-max-num-seqs",
        "5.2: a loading request holds its slot",
        (SLOTS, "return self.running | self.loading | self.draining", "return self.running | self.draining"),
    ),
    mutant(
        "lookup-is-not-awaited",
        "5.2: the longest stored prefix is loaded",
        (ADMISSIONS, "        if operation is None:\n", "        if operation in (None, request.lookup):\n"),
    ),
    mutant(
        "operations-never-expire",
        "5.5: every wait has a deadline",
        (OFFLOAD, "        for answer in self._pending.expire(now):\n", "        for answer in ():\n"),
    ),
    mutant(
        "lost-saves-are-not-reported",
        "5.5: a store may fail; failed writes are repeated",
        (COPIER, "        self._notify(NotStored(tuple(keys)))\n", ""),
    ),
    mutant(
        "completion-does-not-wake-the-engine",
        "5.5: lost writes are reported at once, also to an idle engine",
        (PORT, "            self._wake()\n", "            pass\n"),
    ),
    mutant(
        "save-reports-pending-blocks-as-stored",
        "5.2: readmission loads the longest stored prefix",
        (
            COPIER,
            "Saved(save.operation, index + 1, min(index + 1, self._room))",
            "Saved(save.operation, index + 1, index + 1)",
        ),
    ),
    mutant(
        "circuit-breaker-is-ignored",
        "5.5: a circuit breaker stops requests to a dead store",
        (GUARDED_STORE, "if self._store is None or not self._breaker.admit(now):", "if self._store is None:"),
    ),
    mutant(
        "loading-is-never-compared-with-computing",
        "5.6: the engine measures loading and computing and chooses the faster",
        ("scheduling/operations/kv_offloading.py", "load * self._trust < recompute", "True"),
    ),
    mutant(
        "lookup-miss-keeps-the-stored-key",
        "5.5: a store may forget; evicted values are stored again",
        (OFFLOADING, "        self.not_stored(lookup.keys[answer.total :])\n", ""),
    ),
)
