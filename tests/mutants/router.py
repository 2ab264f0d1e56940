"""Faults against section 7 of the protocol: who serves a request, and what is counted while it does."""

from __future__ import annotations

from tests.mutants.mutant import mutant

ACCOUNTING = "router/selection.py"
AFFINITY = "router/policies.py"
ATTEMPTS = "router/attempts.py"
HOLDERS = "router/prefix_index.py"
INDEX = "router/prefix_index.py"
PLACEMENT = "router/placement.py"
REPORTED_KV = "router/prefix_index.py"
ROUTER = "router/router.py"
SELECTION = "router/selection.py"
WORKERS = "router/workers.py"

_COUNTED = "7.1: at idle every counter is exactly zero, and none is ever negative"
_ONCE = "7.1: a guard is released exactly once"
_SERVED = "7.2: a prefix is recorded for a worker only after that worker served it"
_RETRY = "7.3: retries go to another worker and only before the first byte"
_BACK = "7.4: a worker that comes back is a new incarnation; health checks never write counters"

_GIVE_BACK = "        self.loads.subtract(worker, self.held.pop(worker))\n"
_TRIED = "tried = selection.tried | {worker.url for worker in failed or selection.workers}"

_HELD = "7.2: what a worker tells counts exactly, for its own incarnation and while it goes on telling"

MUTANTS = (
    mutant(
        "events-count-for-a-later-incarnation",
        _HELD,
        (REPORTED_KV, "if member is None or member.instance not in (None, instance):\n", "if member is None:\n"),
    ),
    mutant("who-is-gone-still-holds-what-it-told", _HELD, (ROUTER, "        self.reported_kv.remove(worker)\n", "")),
    mutant(
        "what-is-dropped-still-counts",
        _HELD,
        (REPORTED_KV, "                self._holders.discard(self._bit, gone)\n", ""),
    ),
    mutant(
        "a-salted-prompt-is-compared-with-what-is-told",
        _HELD,
        (PLACEMENT, "if not request.tokenized or request.salt or ", "if not request.tokenized or "),
    ),
    mutant(
        "prefill-tokens-are-not-released",
        _COUNTED,
        (
            SELECTION,
            _GIVE_BACK,
            "        held = self.held.pop(worker)\n"
            "        self.loads.subtract(worker, WorkerLoad(held.requests, held.waiting, 0))\n",
        ),
    ),
    mutant(
        "the-first-token-releases-nothing",
        "7.1: in PD mode the prefill side's guard is released at the first token",
        (SELECTION, "        for worker, held in list(self.held.items()):\n", "        for worker, held in ():\n"),
    ),
    mutant(
        "the-prefill-side-counts-until-the-end",
        "7.1: in PD mode the prefill side's guard is released at the first token",
        (SELECTION, 'if worker.role == "prefill":', "if False:"),
    ),
    mutant(
        "a-client-writes-tickets",
        "6: a prefill worker is named by a router that knows the secret, never by a client",
        ("router/gateway/requests/forwarding.py", "_HOP_BY_HOP | _ROUTERS_OWN | {", "_HOP_BY_HOP | {"),
    ),
    mutant(
        "a-prefill-that-was-not-done-is-recorded",
        _SERVED,
        (
            ROUTER,
            "        if self._did_well(selection, selection.decode, now):\n",
            "        if selection.prefill not in selection.verdicts and selection.mode == 'pd':\n"
            "            self._did_well(selection, selection.prefill, now)\n"
            "        if self._did_well(selection, selection.decode, now):\n",
        ),
    ),
    mutant(
        "a-lost-prefill-counts-as-done",
        _SERVED,
        (ATTEMPTS, 'if outcome == "transferred":', 'if outcome in ("transferred", "lost"):'),
    ),
    mutant(
        "a-worker-of-another-role-is-chosen",
        "7.1: the two sides of a pair are what they were given as",
        (WORKERS, " and not self.unfit", ""),
    ),
    mutant(
        "a-decode-worker-that-declines-takes-its-partner-with-it",
        _RETRY,
        (
            ATTEMPTS,
            "            self._router.declined(self.selection, self.selection.decode)\n",
            "            pass\n",
        ),
    ),
    mutant(
        "decode-workers-pay-for-a-prefill-side-that-is-full",
        "7.1: the two sides of a pair are what they were given as",
        (PLACEMENT, "if {*_modes(pools)}.isdisjoint(_modes(free)):", "if not _modes(free):"),
    ),
    mutant(
        "a-decode-worker-alone-beside-pairs",
        "7.1: the two sides of a pair are what they were given as",
        (PLACEMENT, 'return [mode for mode in modes if mode != "alone"] or modes', "return modes"),
    ),
    mutant(
        "only-one-side-of-a-pair-is-released",
        _COUNTED,
        (
            SELECTION,
            "        for worker in list(self.held):\n",
            "        for worker in list(self.held)[-1:]:\n",
        ),
    ),
    mutant(
        "a-guard-is-released-twice",
        _ONCE,
        (SELECTION, _GIVE_BACK, _GIVE_BACK.replace("self.held.pop(worker)", "self.held[worker]")),
    ),
    mutant(
        "a-selection-is-released-twice",
        _ONCE,
        (SELECTION, "        if self.released:\n            self.loads.faults += 1\n            return False\n", ""),
    ),
    mutant(
        "the-policy-sees-an-empty-prompt",
        "7.2: the policy sees the prompt, never an empty string",
        (
            PLACEMENT,
            "RoutingContext(candidates, request.tokens, seen,",
            "RoutingContext(candidates, request.tokens[:0], (),",
        ),
    ),
    mutant(
        "an-empty-prompt-is-let-in",
        "7.2: the policy sees the prompt, never an empty string",
        (SELECTION, "self.tokens.ndim != 1 or not len(self.tokens)", "self.tokens.ndim != 1"),
    ),
    mutant(
        "a-prefix-is-recorded-on-failure",
        _SERVED,
        (
            ROUTER,
            "            selection.suspects += (worker,)\n",
            "            selection.suspects += (worker,)\n"
            "            self._index.record(worker, selection.keys, now)\n",
        ),
    ),
    mutant(
        "a-prefix-is-recorded-at-selection",
        _SERVED,
        (
            ROUTER,
            "        self._modes[chosen.mode] += 1\n",
            "        self._modes[chosen.mode] += 1\n        self._index.record(first, placement.keys, now)\n",
        ),
    ),
    mutant(
        "a-late-success-is-recorded",
        _SERVED,
        (ROUTER, "if selection.released or worker in selection.verdicts:", "if worker in selection.verdicts:"),
    ),
    mutant(
        "credit-only-for-the-deepest-match",
        "7.2: credit for the longest prefix of each worker",
        (
            HOLDERS,
            "            if on != here:\n                open_.append((least, middle - 1, here ^ on))\n",
            "",
        ),
    ),
    mutant(
        "an-expired-prefix-still-attracts",
        "7.2: entries expire",
        (INDEX, "        self._duration = duration\n", '        self._duration = float("inf")\n'),
    ),
    mutant(
        "the-beginning-of-a-prefix-leaves-first",
        "7.2: what is held of a worker is whole paths from the root",
        (INDEX, "for key in reversed(keys[: self._capacity]):", "for key in keys[: self._capacity]:"),
    ),
    mutant(
        "tenants-share-prefixes",
        "7.2: requests of different salts share no prefix",
        (
            PLACEMENT,
            "request.tokens, request.salt, self._adapter(request))",
            'request.tokens, "", self._adapter(request))',
        ),
    ),
    mutant(
        "the-router-ignores-the-adapter",
        "7.2: prompts of different adapters share no prefix",
        (PLACEMENT, "request.salt, self._adapter(request))", "request.salt)"),
    ),
    mutant(
        "a-prompt-of-an-adapter-is-compared-with-what-is-told",
        _HELD,
        (PLACEMENT, " or self._adapter(request) or ", " or "),
    ),
    mutant(
        "a-retry-goes-to-the-same-worker",
        _RETRY,
        (ROUTER, _TRIED, "tried = selection.tried"),
    ),
    mutant(
        "a-retry-forgets-earlier-attempts",
        _RETRY,
        (ROUTER, _TRIED, _TRIED.replace("selection.tried | ", "frozenset() | ")),
    ),
    mutant(
        "a-retry-after-the-first-byte",
        _RETRY,
        (ROUTER, "        if selection.started:\n", "        if False:\n"),
    ),
    mutant(
        "retries-without-end",
        _RETRY,
        (ROUTER, "        if selection.attempt >= self.config.max_attempts:\n", "        if False:\n"),
    ),
    mutant(
        "a-health-check-resets-counters",
        _BACK,
        (
            ROUTER,
            "        if worker != after:\n",
            "        self._loads._by_worker.pop(worker, None)\n        if worker != after:\n",
        ),
        (ACCOUNTING, "left = self._by_worker[worker].minus(load)", "left = self.of(worker).minus(load)"),
        (ACCOUNTING, "        del self._by_worker[worker]\n", "        self._by_worker.pop(worker, None)\n"),
    ),
    mutant(
        "who-comes-back-is-who-it-was",
        _BACK,
        (
            WORKERS,
            "        if member.state is WorkerState.UNHEALTHY and not same_process:\n",
            "        if False:\n",
        ),
    ),
    mutant(
        "another-process-is-not-noticed",
        _BACK,
        (
            WORKERS,
            "        if instance is not None and member.instance not in (None, instance):\n",
            "        if False:\n",
        ),
    ),
    mutant(
        "incarnations-share-their-counters",
        _BACK,
        (
            WORKERS,
            "    incarnation: int\n",
            "    incarnation: int\n\n"
            "    def __eq__(self, other):\n        return self.url == other.url\n\n"
            "    def __hash__(self):\n        return hash(self.url)\n\n",
        ),
    ),
    mutant(
        "a-stale-check-counts",
        _BACK,
        (
            WORKERS,
            "        member = self.member(worker)\n        if member is None or member.state is WorkerState.DRAINING:\n"
            "            return worker\n        if not ok:\n",
            "        member = self._members.get(worker.url)\n"
            "        if member is None or member.state is WorkerState.DRAINING:\n"
            "            return worker\n        if not ok:\n",
        ),
    ),
    mutant(
        "who-is-gone-still-holds-prefixes",
        _BACK,
        (
            ROUTER,
            "        self._index.remove(worker)\n        self.reported_kv.remove(worker)\n",
            "        self.reported_kv.remove(worker)\n",
        ),
    ),
    mutant(
        "a-place-is-given-on-while-requests-count-there",
        _COUNTED,
        (ROUTER, "if self._loads.of(worker) == IDLE and worker not in self._in_flight:", "if True:"),
    ),
    mutant(
        "a-place-is-given-on-while-a-prompt-is-computed-there",
        "7.2: a worker is believed to compute a prefix only while a request that computes it runs",
        (
            ROUTER,
            "if self._loads.of(worker) == IDLE and worker not in self._in_flight:",
            "if self._loads.of(worker) == IDLE:",
        ),
    ),
    mutant(
        "a-breaker-whose-time-has-come-is-not-noticed",
        "7.4: a worker that failed is tried again",
        (PLACEMENT, " and now < self._until:", ":"),
    ),
    mutant(
        "a-success-is-recorded-for-who-is-gone",
        _SERVED,
        (
            ROUTER,
            "            member.circuit.success()\n            if self._policies",
            "            member.circuit.success()\n        if True:\n            if self._policies",
        ),
    ),
    mutant(
        "who-may-be-chosen-is-kept-when-workers-change",
        "7.2: unhealthy workers count nowhere",
        (WORKERS, "        self.version += 1\n", "        pass\n"),
    ),
    mutant(
        "a-breaker-that-opens-is-not-noticed",
        "7.2: unhealthy workers count nowhere",
        (WORKERS, '        if name == "state":\n            self._on_turn()\n', ""),
    ),
    mutant(
        "a-place-is-given-on-with-the-blocks-of-another",
        _BACK,
        (INDEX, "            self._holders.discard(self._holders.bit(worker), held)\n", "            pass\n"),
    ),
    mutant(
        "an-unhealthy-worker-counts",
        "7.2: unhealthy workers count nowhere",
        (
            WORKERS,
            "return self.state is WorkerState.HEALTHY and self.circuit.ready(now)",
            "return self.circuit.ready(now)",
        ),
    ),
    mutant(
        "a-prompt-that-ended-is-still-in-flight",
        "7.2: a worker is believed to compute a prefix only while a request that computes it runs",
        (
            INDEX,
            "        self._holders.discard(self._holders.bit(worker), gone)\n        if not nodes:\n",
            "        if not nodes:\n",
        ),
    ),
    mutant(
        "a-prefix-ends-with-the-first-of-its-prompts",
        "7.2: a worker is believed to compute a prefix as long as a request that computes it runs",
        (
            INDEX,
            "            if left:\n                nodes[key] = left\n                break\n",
            "",
        ),
    ),
    mutant(
        "an-unhealthy-worker-counts-as-load",
        "7.2: unhealthy workers count nowhere",
        (
            PLACEMENT,
            "        loads, seen = self.loads.at(pool.indices), keys if",
            "        pool = self._pool([one for one in self.registry if one.worker.role == role])\n"
            "        loads, seen = self.loads.at(pool.indices), keys if",
        ),
    ),
    mutant(
        "an-open-circuit-counts-as-healthy",
        "7.2: unhealthy workers count nowhere",
        (WORKERS, "self.state is WorkerState.HEALTHY and self.circuit.ready(now)", "self.state is WorkerState.HEALTHY"),
    ),
    mutant(
        "a-trial-that-was-left-locks-the-worker-out",
        "7.4: a worker that failed is tried again",
        (ROUTER, "                member.circuit.withdraw()\n", "                pass\n"),
    ),
    mutant(
        "a-request-that-fails-everywhere-opens-circuits",
        "7.3: who failed is to blame once another worker served the request",
        (
            ROUTER,
            "            selection.suspects += (worker,)\n",
            "            if member is not None:\n                member.circuit.failure(now, severe=False)\n",
        ),
    ),
    mutant(
        "who-fails-where-others-serve-goes-on",
        "7.3: who failed is to blame once another worker served the request",
        (ROUTER, "member.circuit.convict(now)", "pass"),
    ),
    mutant(
        "a-third-worker-is-tried",
        "7.3: a request on which two workers failed is tried on no third",
        (ROUTER, "selection.failures += worker == selection.decode", "pass"),
    ),
    mutant(
        "who-drains-is-gone-at-once",
        "7.1: a guard is released from the stream itself",
        (ROUTER, "if worker is not None and self._loads.of(worker) == IDLE:", "if worker is not None:"),
    ),
    mutant(
        "out-of-balance-is-not-noticed",
        "7.2: load and hit are weighed, and load alone decides out of balance",
        (AFFINITY, "apart > self.config.balance_abs_threshold and apart >", "False and apart >"),
    ),
)
