"""Shortest remaining first: who probably has least left to compute is admitted first.

fdcore serve smollm2 --scheduling-policy examples/policies/shortest_remaining_first.py:ShortestRemainingFirst
"""

from collections import deque

from fd_core.scheduling.policies import SchedulingPolicy

AGEING = 8
"""Tokens that each later arrival costs a request less than its elder: nobody waits for ever."""
DECODE_COST = 4
"""What a token of the answer costs, in tokens of a prompt: tokens of a prompt are computed together."""


class ShortestRemainingFirst(SchedulingPolicy):
    """Order by prompt and expected answer. How long the answer will be nobody knows: the client said at most how long.

    The expectation is that limit times the share of their limits which the last answers reached. Whoever was preempted
    goes first, as least remains of it.
    """

    name = "shortest_remaining"

    def __init__(self):
        self._admitted = {}
        """Prompt and limit of each admitted request, by arrival."""
        self._ended = deque([(1, 1)], maxlen=64)
        """Length and limit of the last answers."""

    def rank(self, request):
        lengths, limits = map(sum, zip(*self._ended, strict=True))
        expected = request.max_new_tokens * lengths // limits
        return (request.num_tokens + DECODE_COST * expected + AGEING * request.arrival, request.arrival)

    def flow(self, request):
        return "preempted" if request.preempted else "new"

    def turn(self, flow):
        return 0 if flow == "preempted" else 1

    def admitted(self, request):
        self._admitted.setdefault(request.arrival, (request.num_tokens, request.max_new_tokens))

    def ended(self, request, num_computed):
        prompt, limit = self._admitted.pop(request.arrival, (0, 0))
        if limit:
            self._ended.append((num_computed - prompt, limit))
