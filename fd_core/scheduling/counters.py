"""What a scheduler counts in its steps."""

from __future__ import annotations

from typing import Annotated

import msgspec

from fd_core.metrics import counter

__all__ = ["SchedulerCounters"]


class SchedulerCounters(msgspec.Struct, kw_only=True):
    """What happened since the start; only grows."""

    steps: Annotated[int, counter("steps", "Steps planned.")] = 0
    budget_used: Annotated[int, counter("budget_used_tokens", "Tokens computed, over all steps.")] = 0
    budget_limit: Annotated[
        int, counter("budget_limit_tokens", "Tokens that the step budgets allowed, over all steps.")
    ] = 0
    prompt_tokens: Annotated[int, counter("prompt_tokens", "Prompt tokens of the requests admitted.")] = 0
    preemptions: Annotated[int, counter("preemptions", "Requests preempted to free KV blocks for others.")] = 0
    recomputed_tokens: Annotated[
        int, counter("recomputed_tokens", "Tokens computed a second time after a preemption.")
    ] = 0
    prefix_queries: Annotated[int, counter("prefix_queries_tokens", "Prompt tokens looked up in the prefix cache.")] = 0
    prefix_hits: Annotated[int, counter("prefix_hits_tokens", "Prompt tokens found in the prefix cache.")] = 0
