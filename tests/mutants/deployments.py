"""Faults of deployments: which processes live, and how many of them."""

from __future__ import annotations

from tests.mutants.mutant import mutant

CONTROLLER = "cluster/controller.py"
SCALING = "cluster/scaling.py"
RESTART = "deployments: what dies is started again, and what cannot start is given up"
ROOM = "deployments: a lost node is waited for"
DRAIN = "deployments: who leaves ends its requests first"
SIZE = "deployments: a group has as many processes as its policy and its bounds say"

MUTANTS = (
    mutant(
        "a-start-that-failed-is-tried-again-at-once",
        RESTART,
        (
            CONTROLLER,
            "pause = 0.0 if worked else min(limits.first_pause * 2 ** (group.failures - 1), limits.longest_pause)",
            "pause = 0.0",
        ),
    ),
    mutant(
        "failed-starts-have-no-end",
        RESTART,
        (CONTROLLER, "if not hopeless and group.failures <= limits.max_failures:", "if not hopeless:"),
    ),
    mutant(
        "what-cannot-ever-start-is-tried-again",
        RESTART,
        (CONTROLLER, "hopeless = end.code in _OWN_FAULT and not group.served", "hopeless = False"),
    ),
    mutant(
        "a-taken-port-gives-up-a-group-that-served",
        RESTART,
        (CONTROLLER, "hopeless = end.code in _OWN_FAULT and not group.served", "hopeless = end.code in _OWN_FAULT"),
    ),
    mutant(
        "who-served-long-is-replaced-late",
        RESTART,
        (
            CONTROLLER,
            "return process.phase is ProcessPhase.READY and now - process.since > self.supervision.stable_seconds",
            "return False",
        ),
    ),
    mutant(
        "who-is-never-ready-is-kept",
        RESTART,
        (CONTROLLER, "if process.phase is ProcessPhase.STARTING and passed > limits.start_seconds:", "if False:"),
    ),
    mutant(
        "who-stands-still-is-kept",
        RESTART,
        (
            CONTROLLER,
            "elif process.phase is ProcessPhase.READY and now - process.last_healthy > limits.unhealthy_seconds:",
            "elif False:",
        ),
    ),
    mutant(
        "a-time-in-which-nobody-looked-counts",
        RESTART,
        (CONTROLLER, "        if away <= 0:\n            return\n", "        return\n"),
    ),
    mutant(
        "a-process-without-a-place-counts-as-a-failed-start",
        ROOM,
        (CONTROLLER, "if self.complete and not end.placed:", "if False:"),
    ),
    mutant(
        "a-process-without-a-place-is-placed-again-at-once",
        ROOM,
        (
            CONTROLLER,
            "group.no_capacity, group.not_before = True, now + limits.no_capacity_pause",
            "group.no_capacity = True",
        ),
    ),
    mutant(
        "workers-leave-before-their-routers",
        DRAIN,
        (
            CONTROLLER,
            "each.counts and (not routers or self._is_router(each) or each.phase is ProcessPhase.STARTING)",
            "each.counts",
        ),
    ),
    mutant(
        "a-drain-has-no-end",
        DRAIN,
        (CONTROLLER, "and process.deadline is not None and now >= process.deadline:", "and False:"),
    ),
    mutant(
        "a-drain-is-cut-short",
        DRAIN,
        (
            CONTROLLER,
            "now + (self.supervision.drain_seconds if seconds is None else seconds)",
            "now + self.supervision.hurry_seconds",
        ),
    ),
    mutant(
        "the-second-stop-hurries-nobody",
        DRAIN,
        (CONTROLLER, "            return self._hurry(now)\n", "            return []\n"),
    ),
    mutant("the-oldest-process-leaves", SIZE, (CONTROLLER, "youngest_first = living[::-1]", "youngest_first = living")),
    mutant(
        "who-serves-leaves-before-who-does-not",
        SIZE,
        (CONTROLLER, "sorted(youngest_first, key=lambda each: each.ready)", "youngest_first"),
    ),
    mutant(
        "a-policy-leaves-the-bounds",
        SIZE,
        (CONTROLLER, "target = min(max(wanted, group.plan.minimum), group.plan.maximum)", "target = wanted"),
    ),
    mutant(
        "a-moment-of-too-much-is-enough",
        SIZE,
        (SCALING, "now - self._too_much_since >= options.up_seconds", "now - self._too_much_since >= 0"),
    ),
    mutant(
        "a-group-grows-as-its-queue",
        SIZE,
        (SCALING, "math.ceil(load.ready * min(pressure, 2.0))", "math.ceil(load.ready * pressure)"),
    ),
    mutant(
        "who-starts-is-not-waited-for",
        SIZE,
        (SCALING, "if load.ready < load.target or not load.ready:", "if not load.ready:"),
    ),
    mutant(
        "who-would-be-missed-leaves",
        SIZE,
        (SCALING, "            and self._pressure(load, others) <= options.room\n", ""),
    ),
    mutant(
        "who-is-needed-for-its-slots-leaves",
        SIZE,
        (SCALING, "            and load.running <= options.room * load.slots * others / load.ready\n", ""),
    ),
)
