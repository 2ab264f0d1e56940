"""Faults of cache salts: requests with different salts share no prefix, however similar the salts are."""

from __future__ import annotations

from tests.mutants.mutant import mutant

_INVARIANT = "5.3: keys chain over the tenant's salt, all of it: change it, no hit"

MUTANTS = (
    mutant(
        "prefix-key-uses-only-the-first-letter-of-the-salt",
        _INVARIANT,
        ("kv/prefix.py", "+ model + salt.encode()", "+ model + salt[:1].encode()"),
    ),
    mutant(
        "request-keeps-only-the-first-letter-of-its-salt",
        _INVARIANT,
        ("scheduling/scheduler.py", ".root(spec.cache_salt,", ".root(spec.cache_salt[:1],"),
    ),
    mutant(
        "router-uses-only-the-first-letter-of-the-salt",
        _INVARIANT,
        ("router/placement.py", "request.tokens, request.salt,", "request.tokens, request.salt[:1],"),
    ),
    mutant(
        "prefill-worker-does-not-receive-the-salt",
        "5.3 and 6: a prefill worker keys its prefixes by the salt of the request, as the decode worker does",
        (
            "scheduling/operations/kv_transferring.py",
            "            spec.cache_salt,",
            '            "",',
        ),
    ),
    mutant(
        "hash-ignores-the-adapter",
        "5.3: keys chain over the adapter: no KV is shared with another one, or with the model itself",
        ("kv/prefix.py", ' + (f"/{adapter}".encode() if adapter else b"")', ""),
    ),
    mutant(
        "scheduler-ignores-the-adapter",
        "5.3: keys chain over the adapter: no KV is shared with another one, or with the model itself",
        ("scheduling/scheduler.py", "spec.cache_salt, spec.adapter)", 'spec.cache_salt, "")'),
    ),
    mutant(
        "prefill-worker-does-not-receive-the-adapter",
        "5.3 and 6: a prefill worker computes with the adapter of the request",
        ("scheduling/operations/kv_transferring.py", "            adapter=spec.adapter,\n", ""),
    ),
    mutant(
        "slot-keeps-the-adapter-of-its-previous-occupant",
        "4: the text of a request depends on its own adapter",
        (
            "runner/batch.py",
            "self.adapter_slots[slot] = adapter_slot",
            "self.adapter_slots[slot] = self.adapter_slots[slot] or adapter_slot",
        ),
    ),
    mutant(
        "unload-removes-an-adapter-in-use",
        "4: the text of a request depends on its own adapter",
        ("engine/loaded_adapters.py", "used = named.union(self._users.values())", "used = named"),
    ),
)
