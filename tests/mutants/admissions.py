"""Faults of admission: who waits for what, who is woken, and whose turn it is."""

from __future__ import annotations

from tests.mutants.mutant import mutant

SCHEDULER = "scheduling/scheduler.py"
ADMISSIONS = "scheduling/waiting/admission_planner.py"
OFFLOADING = "scheduling/operations/kv_offloading.py"
POLICIES = "scheduling/policies.py"
PREFIXES = "scheduling/prefixes.py"
WAITING = "scheduling/waiting/queue.py"

_WAIT = "2.6: whoever can compute does; a wait for the prefix of another request is bounded"
_SHARE = "policy `fair`: tenants that ask get equal shares of the tokens that are used"

MUTANTS = (
    mutant(
        "a-prefix-that-was-given-up-wakes-nobody",
        _WAIT,
        (PREFIXES, "            if key not in self.computing:\n                self._on_end(key)\n", ""),
    ),
    mutant(
        "a-prefix-that-is-complete-wakes-nobody",
        _WAIT,
        (PREFIXES, "                self._on_end(chain[index])\n", ""),
    ),
    mutant(
        "a-wait-for-a-prefix-has-no-bound",
        _WAIT,
        (ADMISSIONS, "park(request, key, step + _MAX_PREFIX_WAIT_STEPS + 2 * steps)", "park(request, key)"),
    ),
    mutant(
        "who-waited-long-enough-waits-again",
        _WAIT,
        (ADMISSIONS, "None if request.arrival in self._prefix_wait_expired else self._prefixes", "self._prefixes"),
    ),
    mutant(
        "a-fetch-holds-back-whoever-has-its-prompt",
        _WAIT,
        (
            ADMISSIONS,
            "            running_batch.load(slot, Phase.TRANSFER)\n            upto",
            "            running_batch.load(slot, Phase.TRANSFER)\n"
            "            self._prefixes.announce(request, first, len(self._prefixes.keys(request)))\n"
            "            upto",
        ),
    ),
    mutant(
        "who-waits-behind-one-that-does-not-fit-is-looked-at",
        "2.6: planning costs the same however many requests wait",
        (ADMISSIONS, "if self._blocked is not None:", "if False:"),
    ),
    mutant(
        "one-that-does-not-fit-is-never-looked-at-again",
        "2.6: whoever can compute does",
        (ADMISSIONS, " and freed == pool.num_freed and step - since < _RETRY_STEPS", ""),
    ),
    mutant(
        "what-an-abort-decides-is-dropped",
        "1.7: abort frees everything, and hurries what a request was waiting for",
        (
            SCHEDULER,
            "            self._admission_planner.remove(request)\n",
            "            self._admission_planner.remove(request)\n            self._operations.take()\n",
        ),
    ),
    mutant(
        "a-preempted-request-does-not-wait-for-its-save",
        "5.2: on return the stored prefix is used",
        (OFFLOADING, "            return request.save\n", "            return None\n"),
    ),
    mutant(
        "a-save-says-nothing-about-the-host",
        "5.2: a preempted request that returns does not look up what was just saved",
        (OFFLOADING, "            if answer.operation in self._partial_saves:\n", "            if True:\n"),
    ),
    mutant(
        "a-charge-is-never-corrected",
        _SHARE,
        (POLICIES, "            self._clocks[tenant] += num_computed - charge\n", ""),
    ),
    mutant(
        "a-tenant-that-was-idle-saves-up",
        _SHARE,
        (POLICIES, "max(self._clocks.get(tenant, 0), self._now)", "self._clocks.get(tenant, 0)"),
    ),
    mutant(
        "a-turn-that-fell-is-noticed-late",
        _SHARE,
        (WAITING, "            if name in self._flows:\n                self._enter(name)\n", "            pass\n"),
    ),
)
