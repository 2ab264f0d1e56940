"""The scheduler with a device that answers at once, with made-up tokens.

There is no device and no model, so a step costs its plan and its commit, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from fd_core.config import Limits
from fd_core.kv.prefix import PrefixHasher
from fd_core.scheduling.contract import Scheduler, SchedulerSetup
from fd_core.scheduling.drafts import DraftControl
from fd_core.scheduling.policies import Fcfs
from fd_core.scheduling.scheduler import ContinuousBatchingScheduler
from fd_core.scheduling.victims import FewestTokens
from fd_core.signals import EMPTY_TOKEN_ID
from fd_core.types import Delta, RequestSpec, SamplingParams, StepOutput, StepPlan

__all__ = ["EOS", "REJECT_EVERY", "ScriptedEngine"]

EOS: Final = 2
"""Token that ends a request. No answer holds it, but every token is compared with it."""
REJECT_EVERY: Final = 8
"""In one of so many steps a request has its last draft rejected; the steps differ between requests."""


class ScriptedEngine:
    """The production scheduler under the policies `fcfs` and `cheapest`, and answers to its plans."""

    def __init__(self, limits: Limits, draw: np.random.Generator) -> None:
        """`draw` makes up the tokens and the secret of the prefix keys."""
        self.limits = limits
        count, width = limits.max_num_seqs, 1 + limits.max_drafts
        # Drafts of the whole batch count as cheap, so that each request verifies as many as it may.
        drafts = DraftControl(count, limits.max_drafts, count * width) if limits.max_drafts else None
        hasher = PrefixHasher(block_size=limits.block_size, identity="benchmark", secret=draw.bytes(32))
        self._scheduler: Scheduler = ContinuousBatchingScheduler(
            SchedulerSetup(limits=limits, policy=Fcfs(), victims=FewestTokens(), hasher=hasher, drafts=drafts)
        )
        self._gens = np.zeros(count, np.int32)
        self._draw = draw
        self._requests = 0

    @property
    def num_running(self) -> int:
        """Requests that compute."""
        return self._scheduler.held().running

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return self._scheduler.held().waiting

    def add(self, prompt: Sequence[int], max_tokens: int) -> None:
        """Queue a request."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        name = str(self._requests)
        self._requests += 1
        self._scheduler.add(RequestSpec(request_id=name, prompt=tuple(prompt), params=params, eos_token_ids=(EOS,)))

    def plan(self) -> StepPlan:
        """Plan the next step."""
        plan, _ = self._scheduler.plan()
        if plan is None:
            raise RuntimeError("nothing is left to plan: more steps were asked for than there is room for")
        return plan

    def answer(self, plan: StepPlan) -> StepOutput:
        """Play the device: every row that samples delivers its token and, but for a rejected one now and then, its
        drafts; every slot holds new drafts."""
        count, width = self.limits.max_num_seqs, 1 + self.limits.max_drafts
        self._gens[plan.slots] = plan.gens
        rejected = ((plan.slots + plan.step) % REJECT_EVERY == 0) & (plan.num_drafts > 0)
        delivered = np.zeros(count, np.int32)
        delivered[plan.slots] = np.where(plan.samples, 1 + plan.num_drafts - rejected, 0)
        drawn = self._draw.integers(self.limits.vocab_size // 2, self.limits.vocab_size, (count, width), np.int32)
        return StepOutput(
            epoch=plan.epoch,
            step=plan.step,
            tokens=np.where(np.arange(width) < delivered[:, None], drawn, np.int32(EMPTY_TOKEN_ID)),
            gens=self._gens.copy(),
            drafts_ready=np.full(count, self.limits.max_drafts, np.int32) if self.limits.max_drafts else None,
        )

    def commit(self, plan: StepPlan, output: StepOutput) -> list[Delta]:
        """Commit the answer; returns what the clients would be told."""
        deltas, _ = self._scheduler.commit(plan, output)
        return deltas

    def check_integrity(self) -> None:
        """Audit slots and blocks; raises `RuntimeError` if they contradict each other."""
        self._scheduler.check_integrity()
