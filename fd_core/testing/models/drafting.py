"""Oracle drafter, which has the complete texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fd_core.config import SpeculativeConfig
from fd_core.runner.drafting import PerSlotDrafter
from fd_core.types import IntArray


def speculation(k: int, model: Path | None = None) -> SpeculativeConfig | None:
    """Return settings for up to `k` drafts per step: of a draft model, or for a drafter that a test installs."""
    if k == 0:
        return None
    method, name = ("ngram", None) if model is None else ("draft_model", str(model))
    return SpeculativeConfig(method=method, model=name, num_speculative_tokens=k, cheap_tokens=1000)


class OracleDrafter(PerSlotDrafter):
    """Drafts from complete texts (prompt and output), wrong in a share of the tokens."""

    name = "knowing"

    def __init__(self, num_slots: int, whole: Sequence[Sequence[int]], wrong: float, seed: int) -> None:
        self._whole = [list(text) for text in whole]
        self._known: list[list[int]] = [[] for _ in range(num_slots)]
        self._rng = np.random.default_rng(seed)
        self._wrong = wrong

    def admit(self, slot: int, tokens: IntArray) -> None:
        self._known[slot] = tokens.tolist()

    def grow(self, slot: int, tokens: IntArray) -> None:
        self._known[slot] += tokens.tolist()

    def guess(self, slot: int, limit: int) -> IntArray:
        """Return the continuation of the text with this prefix; a wrong token is an adjacent id."""
        known = self._known[slot]
        for text in self._whole:
            if text[: len(known)] == known:
                guess = np.array(text[len(known) : len(known) + limit], np.int32)
                wrong = self._rng.random(len(guess)) < self._wrong
                return np.where(wrong, np.where(guess > 0, guess - 1, 1), guess).astype(np.int32)
        return np.empty(0, np.int32)
