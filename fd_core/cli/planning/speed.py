"""How fast an answer came, for people who watch it."""

from __future__ import annotations

import time
from collections.abc import Callable


class AnswerSpeed:
    """Counts the tokens of one answer from when it is made, as they come or all at the end."""

    def __init__(self, seconds: Callable[[], float] = time.perf_counter) -> None:
        self._seconds = seconds
        self._asked = seconds()
        self._first = self._last = 0.0
        self._tokens = 0

    def count(self, tokens: int) -> None:
        """Note that so many tokens came just now; 0 if it is not known yet how many."""
        self._last = self._seconds()
        self._first = self._first or self._last
        self._tokens += tokens

    def told(self) -> str | None:
        """Return tokens, tokens a second after the first one and seconds until then; None if there were none."""
        if not self._tokens:
            return None
        between = self._last - self._first
        rate = f", {(self._tokens - 1) / between:,.1f} tokens/s" if between > 0 and self._tokens > 1 else ""
        return f"[{self._tokens:,} tokens{rate}, the first after {self._first - self._asked:.2f} s]"
