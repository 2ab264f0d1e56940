"""Correct scheduling and victim policies that differ from those of the core."""

from __future__ import annotations

from collections import Counter

import numpy as np

from fd_core.scheduling.policies import Fcfs, Priority, SchedulingPolicy
from fd_core.scheduling.victims import VictimPolicy


class AgingPriority(Fcfs):
    """A step of priority is worth fifty arrivals."""

    def rank(self, request):
        return (50 * request.priority + request.arrival, request.arrival)


class DisplacesTheLessImportant(Priority):
    """Preempts a running request for a more important one that waits."""

    def displaced_by(self, request, running, victims):
        rows = np.flatnonzero(running.priorities == running.priorities.max())
        less_important = running.priorities[rows[0]] > request.priority
        return int(rows[victims.choose(running.only(rows))]) if less_important else None


class RoundRobin(SchedulingPolicy):
    """Tenants take turns, whatever their requests use; a new tenant is next."""

    def __init__(self):
        self._turns, self._unfinished, self._now = {}, Counter(), 0

    def rank(self, request):
        return (request.arrival,)

    def flow(self, request):
        return None if request.preempted else request.tenant

    def turn(self, flow):
        return -1 if flow is None else self._turns.get(flow, 0)

    def arrived(self, request):
        if not self._unfinished[request.tenant]:
            self._turns[request.tenant] = self._now + 1
        self._unfinished[request.tenant] += 1

    def admitted(self, request):
        if not request.preempted:
            self._now = max(self._now + 1, self._turns[request.tenant])
            self._turns[request.tenant] = self._now + len(self._unfinished)

    def ended(self, request, num_computed):
        self._unfinished[request.tenant] -= 1
        if not self._unfinished[request.tenant]:
            del self._unfinished[request.tenant], self._turns[request.tenant]


class LeastImportant(VictimPolicy):
    """Among the least important requests, the one that is cheapest to resume."""

    def choose(self, running):
        spared = running.preempted_before & (running.num_gained < running.block_size)
        return int(np.lexsort((-running.arrivals, running.num_tokens, spared, -running.priorities))[0])
