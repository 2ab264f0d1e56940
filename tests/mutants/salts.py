"""Faults against salts: requests of two salts share no prefix, however alike the salts are."""

from __future__ import annotations

from tests.mutants.mutant import mutant

_LAW = "5.3: keys chain over the tenant's salt, all of it: change it, no hit"

MUTANTS = (
    mutant(
        "a-key-holds-the-first-letter-of-the-salt",
        _LAW,
        ("kv/prefix.py", "self._identity + salt.encode()", "self._identity + salt[:1].encode()"),
    ),
    mutant(
        "a-request-keeps-the-first-letter-of-its-salt",
        _LAW,
        ("scheduling/scheduler.py", ".root(spec.cache_salt))", ".root(spec.cache_salt[:1]))"),
    ),
    mutant(
        "the-router-looks-at-the-first-letter-of-the-salt",
        _LAW,
        ("router/placement.py", "request.tokens, request.salt)", "request.tokens, request.salt[:1])"),
    ),
    mutant(
        "a-prefill-worker-is-not-told-the-salt",
        "5.3 and 6: a prefill worker keys its prefixes by the salt of the request, as the decode worker does",
        (
            "scheduling/kv_transferring.py",
            "PrefillJob(tokens, first, spec.cache_salt,",
            'PrefillJob(tokens, first, "",',
        ),
    ),
)
