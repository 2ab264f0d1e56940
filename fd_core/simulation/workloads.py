"""Workloads for the scheduler alone: requests that decode steadily, and a burst of long prompts that begin alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from fd_core.config import Limits
from fd_core.simulation.scripted import ScriptedEngine

__all__ = ["PrefillBurst", "SteadyDecode"]

_BUDGET: Final = 8192
"""Tokens in a step, a usual choice for a large device."""
_OUTPUT_TOKENS: Final = 256
"""Enough for every request to decode until the last of them was admitted."""


class SteadyDecode(ScriptedEngine):
    """Requests that all run from the first step on; none ends, and none is preempted, because they have blocks.

    Prompts that are queued later wait for blocks throughout.
    """

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
        """Compute the prompts in one step, with room for `steps` more; `draw` makes up the tokens.

        `waiting_tokens`: length of the prompts that `queue` takes later; 0 takes none. They fit into an empty pool and
        into a free slot, but not beside the running requests. Raises `ValueError` if they are too short for that.
        """
        count, per_step = len(prompts), 1 + num_drafts
        # One more step than asked for: the last may not be cut short by the length limit.
        self.max_tokens = (steps + 2) * per_step
        """Tokens that each request may generate."""
        self._waiting_tokens = waiting_tokens
        longest = max(map(len, prompts)) + self.max_tokens
        blocks = count * (-(-longest // block_size) + 2)
        if waiting_tokens:
            occupied = sum(-(-len(prompt) // block_size) for prompt in prompts)
            shortest = (blocks - occupied) * block_size + 1
            if waiting_tokens < shortest:
                raise ValueError(
                    f"a prompt of {waiting_tokens:,} tokens may fit beside {count:,} requests that run for "
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
            raise ValueError(f"the prompt has {len(prompt):,} tokens instead of {self._waiting_tokens:,}")
        self.add(prompt, self.max_tokens)


class PrefillBurst(ScriptedEngine):
    """Prompts of one length that differ in their last block only: the first computes the prefix, the others use it."""

    def __init__(
        self,
        count: int,
        tokens: int,
        *,
        block_size: int = 32,
        vocab_size: int = 32000,
        draw: np.random.Generator,
    ) -> None:
        """Queue nothing yet; `prompts` are `count` prompts of `tokens` tokens each."""
        each = -(-(tokens + _OUTPUT_TOKENS) // block_size) + 2
        super().__init__(
            Limits(
                max_num_seqs=count,
                max_num_batched_tokens=max(_BUDGET, count),
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
