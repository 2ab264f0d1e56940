"""A burst of long prompts that begin alike: all come at once, and all fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from fd_core.config import Limits
from fd_core.simulation.scripted import ScriptedEngine

__all__ = ["PrefillBurst"]

_BUDGET: Final = 8192
"""Tokens in a step, a usual choice for a large device."""
_OUTPUT_TOKENS: Final = 256
"""Enough for every request to decode until the last of them was admitted."""


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
