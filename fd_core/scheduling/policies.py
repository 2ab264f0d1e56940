"""Scheduling policies: which waiting request is admitted first.

A policy is pure: it receives frozen values and returns an order. Plugins register their own through
`fd_core.hookspecs.fd_register_scheduling_policies`.
"""

from __future__ import annotations

import abc
from collections import Counter
from typing import Final

import numpy as np
import numpy.typing as npt

from fd_core.deprecations import accept_old_names
from fd_core.scheduling.requests import QueuedRequest
from fd_core.scheduling.victims import RunningRequests, VictimPolicy

__all__ = ["FairShare", "Fcfs", "Priority", "SchedulingPolicy"]

Rank = tuple[int, ...]


@accept_old_names
class SchedulingPolicy(abc.ABC):
    """Orders waiting requests, and restricts the preemption candidates.

    Requests wait in flows. Within a flow the smallest rank is first; among flows, the flow with the smallest turn is
    served next. A policy without flows has one.
    """

    name: str

    @abc.abstractmethod
    def rank(self, request: QueuedRequest) -> Rank:
        """Return the sort key of a new request; the smallest in its flow is admitted first.

        The queue calls this once for each request: a preempted request keeps its rank, and so its position before every
        younger request. A request with a larger `priority` is admitted no earlier than with a smaller one.
        """

    def flow(self, request: QueuedRequest) -> str | None:
        """Return the flow in which a request waits; called when it begins to wait, new or after a preemption.

        The tenant of a request without one is the empty string, a tenant like any other.
        """
        return ""

    def turn(self, flow: str | None) -> int:
        """Return the sort key of a flow, a finite number, also of one whose requests have all ended.

        It may only change in `arrived`, `admitted` and `ended`, called for a request that waits in that flow, or waited
        there before it was preempted.
        """
        return 0

    def arrived(self, request: QueuedRequest) -> None:  # noqa: B027 - most policies need not know
        """Handle a new request that begins to wait."""

    def admitted(self, request: QueuedRequest) -> None:  # noqa: B027
        """Handle a request that left the queue for a slot; also when it returns after a preemption."""

    def ended(self, request: QueuedRequest, num_computed: int) -> None:  # noqa: B027
        """Handle the end of a request: `num_computed` prompt and generated tokens were used in all.

        `request.num_tokens` is the same number. The whole prompt counts, also of a request that was aborted within it.

        Also called, with its tokens so far, for a request that ended while it waited, before any `admitted`, and before
        `rank` if it waited for an operation such as the compilation of its grammar.
        """

    def preemption_candidates(self, running: RunningRequests) -> npt.NDArray[np.intp]:
        """Return indices into `running`, at least one: the preemption candidates, which depend on these requests alone.

        A candidate would be one as well if it were less important.
        """
        return np.arange(len(running.slots))

    def displaced_by(self, request: QueuedRequest, running: RunningRequests, victims: VictimPolicy) -> int | None:
        """Return the row of `running` that is preempted for a waiting request without slot or blocks; none by default.

        `request` is the first of the queue, and must stay before the preempted one. `victims` chooses among several.
        Turns may increase.
        """
        return None


class Fcfs(SchedulingPolicy):
    """First come, first served."""

    name = "fcfs"

    def rank(self, request: QueuedRequest) -> Rank:
        """Order of arrival."""
        return (request.arrival,)


class Priority(SchedulingPolicy):
    """Lower `priority` first, then order of arrival; the least important requests are preempted first."""

    name = "priority"

    def rank(self, request: QueuedRequest) -> Rank:
        """(priority, arrival)"""
        return (request.priority, request.arrival)

    def preemption_candidates(self, running: RunningRequests) -> npt.NDArray[np.intp]:
        """Return the requests with the largest priority value."""
        return np.flatnonzero(running.priorities == running.priorities.max())


class FairShare(SchedulingPolicy):
    """An equal share of tokens and slots for each active tenant, however many requests the tenant sends.

    Start-time fair queuing (Goyal et al., 1996) with tokens as the service: each tenant's clock advances by the tokens
    of its admitted requests, and the tenant with the lowest clock is served next. Output tokens are
    not known at admission, so the charge is the usual length of an output, and is corrected when the request ends
    (Sheng et al., 2024, correct in each step). An idle tenant accumulates no credit.

    A tenant that holds all slots or blocks gives them up one by one to those that were served less and wait: texts of
    one tenant, however long, delay those of another by a few steps.
    """

    name = "fair"

    _USUAL_OUTPUT: Final = 256
    """Expected output tokens before the first request ended."""
    _MEMORY: Final = 0.9
    """Weight of the past in the average length of outputs."""
    _FEW: Final = 16
    """Clocks of idle tenants that may be kept."""

    def __init__(self) -> None:
        self._now = 0
        self._shared = 0
        """Tokens of ended requests that did not advance `_now` yet: less than one for each active tenant."""
        self._clocks: dict[str, int] = {}
        """Of active tenants, of idle ones that are ahead of `_now`, and of some others."""
        self._most_clocks = self._FEW
        """Number of clocks above which those of other tenants are dropped."""
        self._charges: dict[int, tuple[int, int, str]] = {}
        """Tokens at the first admission, charge and tenant of each admitted request, by arrival."""
        self._displaced: set[int] = set()
        """Arrivals of requests that made room for other tenants and did not return yet."""
        self._unfinished: dict[str, int] = {}
        """Requests of each tenant that wait or run."""
        self._usual_output = float(self._USUAL_OUTPUT)

    def rank(self, request: QueuedRequest) -> Rank:
        """Order of arrival within the tenant."""
        return (request.arrival,)

    def flow(self, request: QueuedRequest) -> str | None:
        """The tenant, or the flow of requests that lost their blocks, which go first: their tokens are charged."""
        return None if request.preempted and request.arrival not in self._displaced else request.tenant

    def turn(self, flow: str | None) -> int:
        """The clock of the tenant."""
        return -1 if flow is None else max(self._clocks.get(flow, 0), 0)

    def arrived(self, request: QueuedRequest) -> None:
        """Start the clock of a tenant that was idle at the current virtual time."""
        tenant = request.tenant
        if tenant not in self._unfinished:
            self._clocks[tenant] = max(self._clocks.get(tenant, 0), self._now)
        self._unfinished[tenant] = self._unfinished.get(tenant, 0) + 1

    def admitted(self, request: QueuedRequest) -> None:
        """Advance the clock of the tenant by the tokens that the request will probably use."""
        self._displaced.discard(request.arrival)
        if request.arrival in self._charges:
            return
        tenant = request.tenant
        self._now = max(self._now, self._clocks[tenant])
        charge = request.num_tokens + min(request.max_new_tokens, int(self._usual_output))
        self._charges[request.arrival] = request.num_tokens, charge, tenant
        self._clocks[tenant] += charge

    def ended(self, request: QueuedRequest, num_computed: int) -> None:
        """Replace the charge by the actual use; a request that ended before its admission is charged nothing."""
        tenant = request.tenant
        self._displaced.discard(request.arrival)
        admitted = self._charges.pop(request.arrival, None)
        if admitted is not None:
            num_prompt, charge, _ = admitted
            self._clocks[tenant] += num_computed - charge
            # Otherwise the time stops while each request is of a new tenant, which starts at it and goes first.
            passed, self._shared = divmod(self._shared + num_computed, len(self._unfinished))
            self._now += passed
            self._usual_output += (1.0 - self._MEMORY) * (num_computed - num_prompt - self._usual_output)
        self._unfinished[tenant] -= 1
        if not self._unfinished[tenant]:
            del self._unfinished[tenant]
        if not self._unfinished:
            self._clocks.clear()  # no tenant is active, so no clock is ahead
        if len(self._clocks) > self._most_clocks:
            known = self._clocks.items()
            self._clocks = {each: clock for each, clock in known if each in self._unfinished or clock > self._now}
            self._most_clocks = 2 * len(self._clocks) + self._FEW  # so that each clock is copied about once

    def displaced_by(self, request: QueuedRequest, running: RunningRequests, victims: VictimPolicy) -> int | None:
        """Return a request of the tenant that runs most, and at least two more than that of `request`.

        Its clock is ahead from now on, or its request would return to the slot at once.
        """
        if len(self._unfinished) < 2:
            return None
        tenants = list[str]()
        for arrival, num_tokens in zip(running.arrivals.tolist(), running.num_tokens.tolist(), strict=True):
            num_prompt, charge, tenant = self._charges[arrival]
            tenants.append(tenant)
            if num_tokens > charge:  # a long text: its tenant is charged as it goes on
                self._charges[arrival] = num_prompt, num_tokens, tenant
                self._clocks[tenant] += num_tokens - charge
        counts, clock = Counter(tenants), self._clocks[request.tenant]
        enough = counts[request.tenant] + 2
        over = [tenant for tenant, count in counts.items() if count >= enough and self._clocks[tenant] >= clock]
        if not over:
            return None
        largest = max(over, key=counts.__getitem__)
        self._clocks[largest] = max(self._clocks[largest], clock + 1)
        rows = np.array([row for row, tenant in enumerate(tenants) if tenant == largest], np.intp)
        row = int(rows[victims.choose(running.only(rows))])
        self._displaced.add(int(running.arrivals[row]))
        return row
