"""Workloads for the scheduler alone: requests that decode steadily, and a burst of long prompts with a common prefix.

There is no device and no model: synthetic tokens are returned at once, so a step costs its plan and its commit only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from fd_core.config import Limits
from fd_core.kv.prefix import PrefixHasher
from fd_core.scheduling.contract import Scheduler, SchedulerSetup
from fd_core.scheduling.policies import Fcfs
from fd_core.scheduling.running.drafts import DraftControl
from fd_core.scheduling.scheduler import ContinuousBatchingScheduler
from fd_core.scheduling.victims import FewestTokens
from fd_core.signals import EMPTY_TOKEN_ID
from fd_core.types import Delta, RequestSpec, SamplingParams, StepOutput, StepPlan

EOS: Final = 2
"""Token that ends a request. No answer contains it, but every token is compared with it."""
REJECT_EVERY: Final = 8
"""Every so many steps a request has its last draft rejected; the steps differ between requests."""
_OUTPUT_TOKENS: Final = 256
"""Enough for every request to decode until the last of them was admitted."""


class ScriptedEngine:
    """The production scheduler under the policies `fcfs` and `cheapest`, with synthetic outputs for its plans."""

    def __init__(self, limits: Limits, draw: np.random.Generator) -> None:
        """`draw` generates the tokens and the secret of the prefix keys."""
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
        """Number of running requests."""
        return self._scheduler.held().running

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests."""
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
            raise RuntimeError("nothing is left to plan: the requested steps exceed the capacity")
        return plan

    def answer(self, plan: StepPlan) -> StepOutput:
        """Return the device's output: every row that samples delivers its token and, but for an occasional rejection,
        its drafts; every slot holds new drafts."""
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
        """Commit the output; return the deltas for the clients."""
        deltas, _ = self._scheduler.commit(plan, output)
        return deltas

    def check_integrity(self) -> None:
        """Audit slots and blocks; raises `RuntimeError` if they contradict each other."""
        self._scheduler.check_integrity()


class SteadyDecode(ScriptedEngine):
    """Requests that all run from the first step on: none ends or is preempted. Prompts queued later only wait."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        steps: int,
        num_drafts: int = 0,
        waiting_tokens: int = 0,
        block_size: int = 32,
        vocab_size: int = 32000,
        draw: np.random.Generator,
    ) -> None:
        """Compute the prompts in one step, with room for `steps` more; `draw` generates the tokens.

        `waiting_tokens`: length of the prompts that `queue` takes later; 0 takes none. They fit into an empty pool and
        into a free slot, but not alongside the running requests. Raises `ValueError` if they are too short for that.
        """
        count, per_step = len(prompts), 1 + num_drafts
        # One more step than requested: the last must not be cut short by the length limit.
        self.max_tokens = (steps + 2) * per_step
        self._waiting_tokens = waiting_tokens
        longest = max(map(len, prompts)) + self.max_tokens
        blocks = count * (-(-longest // block_size) + 2)
        if waiting_tokens:
            occupied = sum(-(-len(prompt) // block_size) for prompt in prompts)
            shortest = (blocks - occupied) * block_size + 1
            if waiting_tokens < shortest:
                raise ValueError(
                    f"a prompt of {waiting_tokens:,} tokens may fit with {count:,} requests that run for "
                    f"{steps:,} steps; one of {shortest:,} does not"
                )
            blocks = occupied + -(-waiting_tokens // block_size) - 1
        super().__init__(
            Limits(
                max_num_seqs=count + (waiting_tokens > 0),
                max_num_batched_tokens=max(sum(map(len, prompts)), count * per_step) + (waiting_tokens > 0),
                max_model_len=max(longest, waiting_tokens + self.max_tokens),
                block_size=block_size,
                num_kv_blocks=blocks,
                vocab_size=vocab_size,
                max_drafts=num_drafts,
            ),
            draw,
        )
        for prompt in prompts:
            self.add(prompt, self.max_tokens)
        first = self.plan()
        self.commit(first, self.answer(first))
        if self.num_running != count:
            raise RuntimeError(f"{self.num_running} of {count} requests run after the first step")

    def queue(self, prompt: Sequence[int]) -> None:
        """Queue a prompt of `waiting_tokens` tokens, which waits for blocks."""
        if len(prompt) != self._waiting_tokens:
            raise ValueError(f"expected a prompt of {self._waiting_tokens:,} tokens, got {len(prompt):,}")
        self.add(prompt, self.max_tokens)


class PrefillBurst(ScriptedEngine):
    """Prompts of one length that differ in their last block only: the first computes the prefix, the others hit it."""

    def __init__(
        self, count: int, tokens: int, *, block_size: int = 32, vocab_size: int = 32000, draw: np.random.Generator
    ) -> None:
        """Queue nothing yet; `prompts` are `count` prompts of `tokens` tokens each."""
        each = -(-(tokens + _OUTPUT_TOKENS) // block_size) + 2
        super().__init__(
            Limits(
                max_num_seqs=count,
                max_num_batched_tokens=max(8192, count),  # a usual choice for a large device
                max_model_len=tokens + _OUTPUT_TOKENS,
                block_size=block_size,
                num_kv_blocks=count * each,
                vocab_size=vocab_size,
            ),
            draw,
        )
        own = min(block_size, tokens)
        shared = draw.integers(vocab_size // 2, vocab_size, tokens - own).tolist()
        tails = draw.integers(vocab_size // 2, vocab_size, (count, own)).tolist()
        self.prompts: Sequence[tuple[int, ...]] = [tuple(shared + tail) for tail in tails]

    def queue(self, prompt: Sequence[int]) -> None:
        """Queue one of the prompts."""
        self.add(prompt, _OUTPUT_TOKENS)
