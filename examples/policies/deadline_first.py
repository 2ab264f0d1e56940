"""Earliest deadline first: each class of priority may be overtaken by so many later requests, and by no more.

fdcore serve smollm2 --scheduling-policy examples/policies/deadline_first.py:DeadlineFirst
"""

import numpy as np

from fd_core.scheduling.policies import SchedulingPolicy

PATIENCE = {0: 0, 1: 4, 2: 16}
"""Later arrivals by which a deadline lies behind a request's own, by priority."""
LAST = 64
"""Patience of every other priority."""


class DeadlineFirst(SchedulingPolicy):
    """Order by deadline: arrival plus the patience of the class.

    A policy has no clock, so that equal requests give equal plans; it counts arrivals in its place. Unlike strict
    priority no class waits for ever, for what arrives later has later deadlines.
    """

    name = "deadline_first"

    def rank(self, request):
        return (request.arrival + PATIENCE.get(max(request.priority, 0), LAST), request.arrival)

    def preemption_candidates(self, running):
        deadlines = running.arrivals + [PATIENCE.get(max(int(each), 0), LAST) for each in running.priorities]
        return np.flatnonzero(deadlines == deadlines.max())
