"""Faults against section 7 of the protocol: the choice of workers, and the counters of requests in flight."""

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
_BACK = "7.4: a returning worker is a new incarnation; health checks never write counters"

_GIVE_BACK = (
    "self.loads.change(worker, -held.requests, -held.waiting, -held.prefill_tokens)\n        self.held.clear()\n"
)
_TRIED = "tried = selection.tried | {worker.url for worker in failed or selection.workers}"

_HELD = "7.2: reports of a worker count exactly, for its own incarnation and while they continue"

MUTANTS = (
    mutant(
        "events-count-for-a-later-incarnation",
        _HELD,
        (REPORTED_KV, "if member is None or member.instance not in (None, instance):\n", "if member is None:\n"),
    ),
    mutant(
        "removed-worker-keeps-its-reported-blocks", _HELD, (ROUTER, "        self.reported_kv.remove(worker)\n", "")
    ),
    mutant(
        "removed-blocks-still-count",
        _HELD,
        (REPORTED_KV, "                self._holders.discard(self.name, gone)\n", ""),
    ),
    mutant(
        "salted-prompt-matches-reported-blocks",
        _HELD,
        (PLACEMENT, "if not request.tokenized or request.salt or ", "if not request.tokenized or "),
    ),
    mutant(
        "prefill-tokens-are-not-released",
        _COUNTED,
        (
            SELECTION,
            _GIVE_BACK,
            _GIVE_BACK.replace("-held.prefill_tokens", "0"),
        ),
    ),
    mutant(
        "first-token-releases-nothing",
        "7.1: in PD mode the prefill side's guard is released at the first token",
        (SELECTION, "            left = 0 if worker.role", "            continue\n            left = 0 if worker.role"),
    ),
    mutant(
        "prefill-load-is-held-until-the-end",
        "7.1: in PD mode the prefill side's guard is released at the first token",
        (SELECTION, '0 if worker.role == "prefill" else held.requests', "held.requests"),
    ),
    mutant(
        "tickets-of-clients-are-accepted",
        "6: only a router with the secret, never a client, names the prefill worker",
        ("router/gateway/requests/forwarding.py", "HOP_BY_HOP | _ROUTERS_OWN | {", "HOP_BY_HOP | {"),
    ),
    mutant(
        "prefill-that-was-not-done-is-recorded",
        _SERVED,
        (
            ROUTER,
            "        if self._did_well(selection, selection.workers[-1], now):\n",
            "        if selection.prefill not in selection.verdicts and selection.mode == 'pd':\n"
            "            self._did_well(selection, selection.prefill, now)\n"
            "        if self._did_well(selection, selection.workers[-1], now):\n",
        ),
    ),
    mutant(
        "lost-prefill-counts-as-done",
        _SERVED,
        (ATTEMPTS, 'if outcome == "transferred":', 'if outcome in ("transferred", "lost"):'),
    ),
    mutant(
        "worker-of-another-role-is-chosen",
        "7.1: the workers of a pair have the configured roles",
        (WORKERS, " and not self.unfit", ""),
    ),
    mutant(
        "declining-decode-worker-excludes-its-prefill-worker",
        _RETRY,
        (
            ATTEMPTS,
            "            self._router.declined(self.selection, self.selection.decode)\n",
            "            pass\n",
        ),
    ),
    mutant(
        "full-prefill-worker-excludes-decode-workers",
        "7.1: the workers of a pair have the configured roles",
        (PLACEMENT, "if {*pools.options}.isdisjoint(free.options):", "if not free.options:"),
    ),
    mutant(
        "decode-worker-serves-alone-despite-pairs",
        "7.1: the workers of a pair have the configured roles",
        (PLACEMENT, 'return [mode for mode in modes if mode != "alone"] or modes', "return modes"),
    ),
    mutant(
        "only-one-side-of-a-pair-is-released",
        _COUNTED,
        (
            SELECTION,
            "        for worker, held in self.held.items():\n            if held.requests:\n",
            "        for worker, held in [*self.held.items()][-1:]:\n            if held.requests:\n",
        ),
    ),
    mutant(
        "guard-is-released-twice",
        _ONCE,
        (SELECTION, "            if held.requests:\n", "            for _ in range(2):\n"),
    ),
    mutant(
        "selection-is-released-twice",
        _ONCE,
        (SELECTION, "        if self.released:\n            self.loads.faults += 1\n            return False\n", ""),
    ),
    mutant(
        "policy-receives-an-empty-prompt",
        "7.2: the policy receives the prompt, never an empty string",
        (
            PLACEMENT,
            "RoutingContext(candidates, request.tokens, seen,",
            "RoutingContext(candidates, request.tokens[:0], (),",
        ),
    ),
    mutant(
        "empty-prompt-is-accepted",
        "7.2: the policy receives the prompt, never an empty string",
        (SELECTION, "self.tokens.ndim != 1 or not len(self.tokens)", "self.tokens.ndim != 1"),
    ),
    mutant(
        "prefix-is-recorded-on-failure",
        _SERVED,
        (
            ROUTER,
            "            selection.suspects += (worker,)\n",
            "            selection.suspects += (worker,)\n"
            "            self._index.record(worker, selection.keys, now)\n",
        ),
    ),
    mutant(
        "prefix-is-recorded-at-selection",
        _SERVED,
        (
            ROUTER,
            "        self._modes[chosen.mode] += 1\n",
            "        self._modes[chosen.mode] += 1\n        self._index.record(first, placement.keys, now)\n",
        ),
    ),
    mutant(
        "late-success-is-recorded",
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
        "expired-prefix-still-attracts",
        "7.2: entries expire",
        (INDEX, "        self._duration = duration\n", '        self._duration = float("inf")\n'),
    ),
    mutant(
        "root-of-a-prefix-is-evicted-first",
        "7.2: the index holds complete paths from the root for each worker",
        (INDEX, "for key in reversed(keys[: self._capacity]):", "for key in keys[: self._capacity]:"),
    ),
    mutant(
        "tenants-share-prefixes",
        "7.2: requests of different salts share no prefix",
        (
            PLACEMENT,
            "request.tokens, request.salt, adapter=",
            'request.tokens, "", adapter=',
        ),
    ),
    mutant(
        "router-ignores-the-adapter",
        "7.2: prompts of different adapters share no prefix",
        (PLACEMENT, 'request.salt, adapter=adapter or "")', "request.salt)"),
    ),
    mutant(
        "adapter-prompt-matches-reported-blocks",
        _HELD,
        (PLACEMENT, " or adapter or ", " or "),
    ),
    mutant(
        "retry-goes-to-the-same-worker",
        _RETRY,
        (ROUTER, _TRIED, "tried = selection.tried"),
    ),
    mutant(
        "retry-forgets-earlier-attempts",
        _RETRY,
        (ROUTER, _TRIED, _TRIED.replace("selection.tried | ", "frozenset() | ")),
    ),
    mutant(
        "retry-after-the-first-byte",
        _RETRY,
        (ROUTER, "        if selection.started:\n", "        if False:\n"),
    ),
    mutant(
        "unlimited-retries",
        _RETRY,
        (ROUTER, "        if selection.attempt >= self.config.max_attempts:\n", "        if False:\n"),
    ),
    mutant(
        "health-check-resets-counters",
        _BACK,
        (
            ROUTER,
            "        if worker != after:\n",
            "        self._loads.by_worker.pop(worker, None)\n        if worker != after:\n",
        ),
        (ACCOUNTING, "            del self.by_worker[worker]\n", "            self.by_worker.pop(worker, None)\n"),
    ),
    mutant(
        "returning-worker-keeps-its-incarnation",
        _BACK,
        (
            WORKERS,
            "        if member.state is WorkerState.UNHEALTHY and not same_process:\n",
            "        if False:\n",
        ),
    ),
    mutant(
        "new-process-is-not-detected",
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
        "stale-health-check-counts",
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
        "removed-worker-keeps-its-prefixes",
        _BACK,
        (
            ROUTER,
            "        self._index.remove(worker)\n        self.reported_kv.remove(worker)\n",
            "        self.reported_kv.remove(worker)\n",
        ),
    ),
    mutant(
        "index-is-reused-while-requests-count",
        _COUNTED,
        (ROUTER, "if worker not in self._loads.by_worker and worker not in self._in_flight:", "if True:"),
    ),
    mutant(
        "index-is-reused-while-a-prompt-is-computed",
        "7.2: a worker counts as computing a prefix only while a request that computes it runs",
        (
            ROUTER,
            "if worker not in self._loads.by_worker and worker not in self._in_flight:",
            "if worker not in self._loads.by_worker:",
        ),
    ),
    mutant(
        "half-open-breaker-is-not-noticed",
        "7.4: a worker that failed is retried",
        (PLACEMENT, " and now < self._until:", ":"),
    ),
    mutant(
        "success-of-a-removed-worker-is-recorded",
        _SERVED,
        (
            ROUTER,
            "            member.circuit.success()\n            if self._policies",
            "            member.circuit.success()\n        if True:\n            if self._policies",
        ),
    ),
    mutant(
        "candidates-are-not-refreshed-when-workers-change",
        "7.2: unhealthy workers are never counted",
        (WORKERS, "        self.version += 1\n", "        pass\n"),
    ),
    mutant(
        "opened-breaker-is-not-noticed",
        "7.2: unhealthy workers are never counted",
        (WORKERS, '        if name == "state":\n            self._on_turn()\n', ""),
    ),
    mutant(
        "reused-index-keeps-reported-blocks",
        _BACK,
        (INDEX, "            self._holders.discard(worker, held)\n", "            pass\n"),
    ),
    mutant(
        "unhealthy-worker-is-a-candidate",
        "7.2: unhealthy workers are never counted",
        (
            WORKERS,
            "return self.state is WorkerState.HEALTHY and self.circuit.ready(now)",
            "return self.circuit.ready(now)",
        ),
    ),
    mutant(
        "finished-prompt-stays-in-flight",
        "7.2: a worker counts as computing a prefix only while a request that computes it runs",
        (
            INDEX,
            "        self._holders.discard(worker, gone)\n        if not nodes:\n",
            "        if not nodes:\n",
        ),
    ),
    mutant(
        "prefix-ends-with-its-first-prompt",
        "7.2: a worker counts as computing a prefix as long as a request that computes it runs",
        (
            INDEX,
            "            if left:\n                nodes[key] = left\n                break\n",
            "",
        ),
    ),
    mutant(
        "unhealthy-worker-counts-as-load",
        "7.2: unhealthy workers are never counted",
        (
            PLACEMENT,
            "        seen = keys if policy.uses_prefix",
            "        pool = self._pool([one for one in self.registry if one.worker.role == role])\n"
            "        seen = keys if policy.uses_prefix",
        ),
    ),
    mutant(
        "open-circuit-counts-as-healthy",
        "7.2: unhealthy workers are never counted",
        (WORKERS, "self.state is WorkerState.HEALTHY and self.circuit.ready(now)", "self.state is WorkerState.HEALTHY"),
    ),
    mutant(
        "abandoned-probe-locks-the-worker-out",
        "7.4: a worker that failed is retried",
        (ROUTER, "                member.circuit.withdraw()\n", "                pass\n"),
    ),
    mutant(
        "request-failing-everywhere-opens-circuits",
        "7.3: the failed worker is blamed once another one has served the request",
        (
            ROUTER,
            "            selection.suspects += (worker,)\n",
            "            if member is not None:\n                member.circuit.failure(now, severe=False)\n",
        ),
    ),
    mutant(
        "worker-failing-where-others-succeed-stays-closed",
        "7.3: the failed worker is blamed once another one has served the request",
        (ROUTER, "member.circuit.convict(now)", "pass"),
    ),
    mutant(
        "third-worker-is-tried",
        "7.3: a request that failed on two workers is not sent to a third",
        (ROUTER, "selection.failures += worker == selection.decode", "pass"),
    ),
    mutant(
        "draining-worker-is-removed-at-once",
        "7.1: a guard is released from the stream itself",
        (ROUTER, "if worker is not None and worker not in self._loads.by_worker:", "if worker is not None:"),
    ),
    mutant(
        "load-imbalance-is-ignored",
        "7.2: load and hits are weighed; load alone decides when out of balance",
        (AFFINITY, "if most - fewest > max(config", "if False and max(config"),
    ),
)
