"""Faults of admission: wait reasons, wake-ups and fairness."""

from __future__ import annotations

from tests.mutants.mutant import mutant

SCHEDULER = "scheduling/scheduler.py"
ADMISSIONS = "scheduling/waiting/admission_planner.py"
OFFLOADING = "scheduling/operations/kv_offloading.py"
POLICIES = "scheduling/policies.py"
PREFIXES = "scheduling/prefixes.py"
WAITING = "scheduling/waiting/queue.py"

_WAIT = "2.6: no computable request waits; a wait for the prefix of another request is bounded"
_SHARE = "policy `fair`: active tenants get equal shares of the computed tokens"

MUTANTS = (
    mutant(
        "abandoned-prefix-wakes-no-waiter",
        _WAIT,
        (PREFIXES, "            if key not in self.computing:\n                self._on_end(key)\n", ""),
    ),
    mutant(
        "completed-prefix-wakes-no-waiter",
        _WAIT,
        (
            PREFIXES,
            "            self._end(key)\n            self._on_end(key)\n        plain",
            "            self._end(key)\n        plain",
        ),
    ),
    mutant(
        "prefix-wait-is-unbounded",
        _WAIT,
        (ADMISSIONS, "park(request, key, step + _MAX_PREFIX_WAIT_STEPS + 2 * steps)", "park(request, key)"),
    ),
    mutant(
        "expired-prefix-wait-starts-again",
        _WAIT,
        (ADMISSIONS, "None if request.arrival in self._prefix_wait_expired else self._prefixes", "self._prefixes"),
    ),
    mutant(
        "fetch-delays-requests-with-the-same-prompt",
        _WAIT,
        (
            ADMISSIONS,
            "            running_batch.load(slot, Phase.TRANSFER)\n",
            "            running_batch.load(slot, Phase.TRANSFER)\n"
            "            self._prefixes.announce(request, first, len(self._prefixes.keys(request)))\n",
        ),
    ),
    mutant(
        "requests-after-a-blocked-one-are-examined",
        "2.6: the cost of planning is independent of the queue length",
        (ADMISSIONS, "if self._blocked is not None:", "if False:"),
    ),
    mutant(
        "blocked-request-is-never-retried",
        "2.6: no computable request waits",
        (ADMISSIONS, " and freed == pool.num_freed and step - since < _RETRY_STEPS", ""),
    ),
    mutant(
        "expired-prefix-waits-are-never-forgotten",
        "3.6: at idle nothing is left of a request",
        (
            ADMISSIONS,
            "        self._prefix_wait_expired.discard(request.arrival)\n        self._blocked = None\n",
            "        self._blocked = None\n",
        ),
    ),
    mutant(
        "effects-of-an-abort-are-dropped",
        "1.7: abort frees everything and cancels pending operations",
        (
            SCHEDULER,
            "self._admission_planner.remove(request)\n            request.advance(Event.ABORT_WAITING)\n",
            "self._admission_planner.remove(request)\n            self._operations.take()\n"
            "            request.advance(Event.ABORT_WAITING)\n",
        ),
    ),
    mutant(
        "preempted-request-does-not-wait-for-its-save",
        "5.2: the stored prefix is used on readmission",
        (OFFLOADING, "            return request.save\n", "            return None\n"),
    ),
    mutant(
        "save-does-not-update-host-keys",
        "5.2: readmission does not look up blocks that were just saved",
        (OFFLOADING, "            if entries is None:\n", "            if True:\n"),
    ),
    mutant(
        "fair-charge-is-never-corrected",
        _SHARE,
        (POLICIES, "            self._clocks[tenant] += num_computed - charge\n", ""),
    ),
    mutant(
        "idle-tenant-accumulates-credit",
        _SHARE,
        (POLICIES, "max(self._clocks.get(tenant, 0), self._now)", "self._clocks.get(tenant, 0)"),
    ),
    mutant(
        "lowered-turn-is-noticed-late",
        _SHARE,
        (WAITING, "            if name in self._flows:\n                self._enter(name)\n", "            pass\n"),
    ),
)
