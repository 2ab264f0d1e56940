"""Shortest remaining first: the request with the least expected work left is admitted first.

fdcore serve smollm2 --scheduling-policy examples/policies/shortest_remaining_first.py:ShortestRemainingFirst
"""

from collections import deque

from fd_core.scheduling.policies import SchedulingPolicy

AGEING = 8
"""Tokens added to the rank for each later arrival, so that no request starves."""
DECODE_COST = 4
"""Cost of a token of the answer, in tokens of a prompt: tokens of a prompt are computed together."""


class ShortestRemainingFirst(SchedulingPolicy):
    """Order by length of the prompt and expected length of the answer, of which the client gives only the limit.

    The expectation is that limit times the share of their limits which the last answers reached. Preempted requests
    go first, as they have the least left.
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
