"""A virtual token counter for each tenant: the tenant with the least service goes first (Sheng et al., 2024).

fdcore serve smollm2 --scheduling-policy examples/policies/virtual_token_counter.py:VirtualTokenCounter
"""

from fd_core.scheduling.policies import SchedulingPolicy

PROMPT_COST, ANSWER_COST = 1, 2
"""Cost of a token to its tenant: an answer takes a step for each of its tokens, a prompt does not."""


class VirtualTokenCounter(SchedulingPolicy):
    """Serve the tenant with the smallest counter; a prompt is charged when it is admitted, an answer when it ends.

    The paper counts each token of an answer when it is generated. A policy is notified only of the end, so that tenants
    with long answers are charged late. A tenant that returns starts at the smallest counter of the others.
    """

    name = "virtual_token_counter"

    def __init__(self):
        self._counters = {}
        """Cost so far of each tenant that waits or runs."""
        self._unfinished = {}
        self._prompts = {}
        """Prompt tokens of each admitted request, by arrival."""

    def rank(self, request):
        return (request.arrival,)

    def flow(self, request):
        return None if request.preempted else request.tenant

    def turn(self, flow):
        return -1 if flow is None else self._counters.get(flow, 0)

    def arrived(self, request):
        tenant = request.tenant
        if tenant not in self._unfinished:
            least = min((self._counters[each] for each in self._unfinished), default=0)
            self._counters[tenant] = max(self._counters.get(tenant, 0), least)
        self._unfinished[tenant] = self._unfinished.get(tenant, 0) + 1

    def admitted(self, request):
        if request.arrival not in self._prompts:  # else it returns after a preemption
            self._prompts[request.arrival] = request.num_tokens
            self._counters[request.tenant] += PROMPT_COST * request.num_tokens

    def ended(self, request, num_computed):
        prompt = self._prompts.pop(request.arrival, num_computed)
        tenant = request.tenant
        self._counters[tenant] += ANSWER_COST * (num_computed - prompt)
        self._unfinished[tenant] -= 1
        if not self._unfinished[tenant]:
            del self._unfinished[tenant]
        if not self._unfinished:
            self._counters.clear()  # without competition no tenant is ahead
