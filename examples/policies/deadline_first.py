"""Earliest deadline first: each class of priority may be overtaken by a limited number of later requests.

fdcore serve smollm2 --scheduling-policy examples/policies/deadline_first.py:DeadlineFirst
"""

import numpy as np

from fd_core.scheduling.policies import SchedulingPolicy

PATIENCE = {0: 0, 1: 4, 2: 16}
"""Number of later arrivals that may overtake a request, by priority."""
LAST = 64
"""Patience of every other priority."""


class DeadlineFirst(SchedulingPolicy):
    """Order by deadline: arrival plus the patience of the class.

    A policy has no clock, so that equal requests give equal plans; it counts arrivals in its place. Unlike strict
    priority no class starves, since later arrivals have later deadlines.
    """

    name = "deadline_first"

    def rank(self, request):
        return (request.arrival + PATIENCE.get(max(request.priority, 0), LAST), request.arrival)

    def preemption_candidates(self, running):
        deadlines = running.arrivals + [PATIENCE.get(max(int(each), 0), LAST) for each in running.priorities]
        return np.flatnonzero(deadlines == deadlines.max())
