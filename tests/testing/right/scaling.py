"""Correct scaling policies that differ from those of the core."""

from __future__ import annotations

import math

from fd_core.cluster.scaling import LoadPolicy, ScalingPolicy


class OneForEight(ScalingPolicy):
    """A worker for each eight requests; fewer after five minutes that need fewer, as the scaffold's."""

    def __init__(self, options):
        self.since, self.most = None, 0

    def propose(self, load, now):
        needed = math.ceil((load.running + load.waiting) / 8)
        if needed >= load.target:
            self.since = None
            return needed
        if self.since is None:
            self.since, self.most = now, 0
        self.most = max(self.most, needed)
        if now - self.since < 300:
            return load.target
        self.since = None
        return self.most


class TracksATarget(ScalingPolicy):
    """As many that three quarters of the slots, or of the KV blocks, are in use; the most of five minutes."""

    def __init__(self, options):
        self.recent = []

    def propose(self, load, now):
        if not load.ready or load.ready < load.target:
            self.recent = [(now, load.target)]
            return load.target
        use = max((load.running + load.waiting) / load.slots, load.kv_usage) / 0.75
        needed = load.target if 0.9 < use < 1.1 else max(1, math.ceil(load.ready * min(use, 2)))
        self.recent = [(at, number) for at, number in self.recent if now - at < 300 and number > needed]
        self.recent.append((now, needed))
        return self.recent[0][1]


class Cautious(LoadPolicy):
    def __init__(self, options):
        super().__init__({"down-seconds": 400, "up-seconds": 15, "room": 0.5, **options})


class Eager(LoadPolicy):
    def __init__(self, options):
        super().__init__({"waiting": 0.5, "up-seconds": 2, "kv-usage": 0.7, **options})


class Late(LoadPolicy):
    def __init__(self, options):
        super().__init__({"ttft-seconds": 2.0, "waiting": 4, **options})
