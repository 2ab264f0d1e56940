"""Faults of deployments: which processes run, and how many."""

from __future__ import annotations

from tests.mutants.mutant import mutant

CONTROLLER = "cluster/controller.py"
SCALING = "cluster/scaling.py"
RESTART = "deployments: exited processes are restarted, those that cannot start are abandoned"
ROOM = "deployments: a lost node is awaited"
DRAIN = "deployments: a stopping process finishes its requests first"
SIZE = "deployments: the size of a group follows its policy within its bounds"

MUTANTS = (
    mutant(
        "failed-start-is-retried-without-backoff",
        RESTART,
        (
            CONTROLLER,
            "pause = 0.0 if worked else min(limits.first_pause * 2 ** (group.failures - 1), limits.longest_pause)",
            "pause = 0.0",
        ),
    ),
    mutant(
        "failed-starts-are-unlimited",
        RESTART,
        (CONTROLLER, "if not hopeless and group.failures <= limits.max_failures:", "if not hopeless:"),
    ),
    mutant(
        "permanent-start-failure-is-retried",
        RESTART,
        (CONTROLLER, "hopeless = end.code in _OWN_FAULT and not group.served", "hopeless = False"),
    ),
    mutant(
        "port-conflict-ends-a-group-that-has-served",
        RESTART,
        (CONTROLLER, "hopeless = end.code in _OWN_FAULT and not group.served", "hopeless = end.code in _OWN_FAULT"),
    ),
    mutant(
        "long-running-process-is-restarted-with-backoff",
        RESTART,
        (
            CONTROLLER,
            "return process.phase is ProcessPhase.READY and now - process.since > self.supervision.stable_seconds",
            "return False",
        ),
    ),
    mutant(
        "process-that-is-never-ready-is-kept",
        RESTART,
        (CONTROLLER, "if process.phase is ProcessPhase.STARTING and passed > limits.start_seconds:", "if False:"),
    ),
    mutant(
        "hung-process-is-kept",
        RESTART,
        (
            CONTROLLER,
            "elif process.phase is ProcessPhase.READY and now - process.last_healthy > limits.unhealthy_seconds:",
            "elif False:",
        ),
    ),
    mutant(
        "time-without-health-checks-counts",
        RESTART,
        (CONTROLLER, "        if away <= 0:\n            return\n", "        return\n"),
    ),
    mutant(
        "unplaced-process-counts-as-a-failed-start",
        ROOM,
        (CONTROLLER, "if self.complete and not end.placed:", "if False:"),
    ),
    mutant(
        "unplaced-process-is-retried-without-backoff",
        ROOM,
        (
            CONTROLLER,
            "group.no_capacity, group.not_before = True, now + limits.no_capacity_pause",
            "group.no_capacity = True",
        ),
    ),
    mutant(
        "workers-stop-before-their-routers",
        DRAIN,
        (
            CONTROLLER,
            "each.counts and (not routers or self._is_router(each) or each.phase is ProcessPhase.STARTING)",
            "each.counts",
        ),
    ),
    mutant(
        "drain-has-no-deadline",
        DRAIN,
        (CONTROLLER, "and process.deadline is not None and now >= process.deadline:", "and False:"),
    ),
    mutant(
        "drain-is-cut-short",
        DRAIN,
        (
            CONTROLLER,
            "now + (self.supervision.drain_seconds if seconds is None else seconds)",
            "now + self.supervision.hurry_seconds",
        ),
    ),
    mutant(
        "second-stop-does-not-hurry",
        DRAIN,
        (CONTROLLER, "            return self._hurry(now)\n", "            return []\n"),
    ),
    mutant("oldest-process-is-stopped", SIZE, (CONTROLLER, "youngest_first = living[::-1]", "youngest_first = living")),
    mutant(
        "ready-process-is-stopped-before-starting-ones",
        SIZE,
        (CONTROLLER, "sorted(youngest_first, key=lambda each: each.ready)", "youngest_first"),
    ),
    mutant(
        "scaling-policy-exceeds-its-bounds",
        SIZE,
        (CONTROLLER, "target = min(max(wanted, group.plan.minimum), group.plan.maximum)", "target = wanted"),
    ),
    mutant(
        "one-overloaded-sample-scales-up",
        SIZE,
        (SCALING, "now - self._too_much_since >= options.up_seconds", "now - self._too_much_since >= 0"),
    ),
    mutant(
        "scale-up-exceeds-factor-two",
        SIZE,
        (SCALING, "math.ceil(load.ready * min(pressure, 2.0))", "math.ceil(load.ready * pressure)"),
    ),
    mutant(
        "scale-up-does-not-wait-for-starting-processes",
        SIZE,
        (SCALING, "if load.ready < load.target or not load.ready:", "if not load.ready:"),
    ),
    mutant(
        "busy-group-is-scaled-down",
        SIZE,
        (SCALING, "            and self._pressure(load, others) <= options.room\n", ""),
    ),
    mutant(
        "group-is-scaled-down-below-its-running-requests",
        SIZE,
        (SCALING, "            and load.running <= options.room * load.slots * others / load.ready\n", ""),
    ),
)
