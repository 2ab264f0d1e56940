"""A drafter that knows the golden texts."""

from __future__ import annotations

import numpy as np

from fd_core.runner.drafting import PerSlotDrafter
from fd_core.types import IntArray, RequestSpec
from tests.engine.helpers import golden


class KnowingDrafter(PerSlotDrafter):
    """Guesses from the golden texts, wrong in a share of its tokens."""

    name = "knowing"

    def __init__(self, num_slots: int, specs: list[RequestSpec], wrong: float, seed: int) -> None:
        texts = golden(specs)
        self._whole = [list(spec.prompt) + texts[spec.request_id] for spec in specs]
        self._known: list[list[int]] = [[] for _ in range(num_slots)]
        self._rng = np.random.default_rng(seed)
        self._wrong = wrong

    def admit(self, slot: int, tokens: IntArray) -> None:
        self._known[slot] = tokens.tolist()

    def grow(self, slot: int, tokens: IntArray) -> None:
        self._known[slot] += tokens.tolist()

    def guess(self, slot: int, limit: int) -> IntArray:
        known = self._known[slot]
        for text in self._whole:
            if text[: len(known)] == known:
                guess = np.array(text[len(known) : len(known) + limit], np.int32)
                wrong = self._rng.random(len(guess)) < self._wrong
                return np.where(wrong, (guess + 1) % 256, guess).astype(np.int32)
        return np.empty(0, np.int32)
