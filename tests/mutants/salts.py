"""Faults against salts: requests of two salts share no prefix, however alike the salts are."""

from __future__ import annotations

from tests.mutants.mutant import mutant

_LAW = "5.3: keys chain over the tenant's salt, all of it: change it, no hit"

MUTANTS = (
    mutant(
        "a-key-holds-the-first-letter-of-the-salt",
        _LAW,
        ("kv/prefix.py", "+ model + salt.encode()", "+ model + salt[:1].encode()"),
    ),
    mutant(
        "a-request-keeps-the-first-letter-of-its-salt",
        _LAW,
        ("scheduling/scheduler.py", ".root(spec.cache_salt,", ".root(spec.cache_salt[:1],"),
    ),
    mutant(
        "the-router-looks-at-the-first-letter-of-the-salt",
        _LAW,
        ("router/placement.py", "request.tokens, request.salt,", "request.tokens, request.salt[:1],"),
    ),
    mutant(
        "a-prefill-worker-is-not-told-the-salt",
        "5.3 and 6: a prefill worker keys its prefixes by the salt of the request, as the decode worker does",
        (
            "scheduling/operations/kv_transferring.py",
            "tokens, first, spec.cache_salt,",
            'tokens, first, "",',
        ),
    ),
    mutant(
        "the-hash-ignores-the-adapter",
        "5.3: keys chain over the adapter: no KV is shared with another one, or with the model itself",
        ("kv/prefix.py", ' + (f"/{adapter}".encode() if adapter else b"")', ""),
    ),
    mutant(
        "the-scheduler-ignores-the-adapter",
        "5.3: keys chain over the adapter: no KV is shared with another one, or with the model itself",
        ("scheduling/scheduler.py", "spec.cache_salt, spec.adapter)", 'spec.cache_salt, "")'),
    ),
    mutant(
        "a-prefill-worker-is-not-told-the-adapter",
        "5.3 and 6: a prefill worker computes with the adapter of the request",
        ("scheduling/operations/kv_transferring.py", ", adapter=spec.adapter", ""),
    ),
    mutant(
        "a-slot-keeps-the-adapter-of-the-residency-before",
        "4: the text of a request depends on its own adapter",
        (
            "runner/batch.py",
            "self.adapter_slots[slot] = adapter_slot",
            "self.adapter_slots[slot] = self.adapter_slots[slot] or adapter_slot",
        ),
    ),
    mutant(
        "an-unloaded-adapter-leaves-the-requests-that-use-it",
        "4: the text of a request depends on its own adapter",
        ("engine/loaded_adapters.py", "used = named.union(self._users.values())", "used = named"),
    ),
)
