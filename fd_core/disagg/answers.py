"""Operations in progress: each is answered exactly once, and no block of one is touched after its answer."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Answers"]

_Answer = TypeVar("_Answer")


class Answers(Generic[_Answer]):
    """Operations by number, and the answers that were not collected.

    Two threads use it: the engine's and the one that copies. One lock, held for a few assignments and never during a
    copy, decides every race: a block is touched between `begin_copy` and `end_copy`, and an answer that is given
    meanwhile is kept back until `end_copy`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[int] = set()
        self._copying: int | None = None
        self._kept_back: _Answer | None = None
        self._given: deque[_Answer] = deque()
        self._something = threading.Event()

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, number: int) -> bool:
        return number in self._open

    def begin(self, number: int) -> None:
        """Open an operation. Raises `ValueError` if one of that number is open."""
        with self._lock:
            if number in self._open:
                raise ValueError(f"operation {number} is in progress already")
            self._open.add(number)

    def give(self, number: int, answer: _Answer) -> bool:
        """Answer an operation, at the end of the copy that is under way for it; return False if it was answered."""
        with self._lock:
            if number not in self._open:
                return False
            self._open.remove(number)
            if self._copying == number:
                self._kept_back = answer
            else:
                self._hand_out(answer)
            return True

    def give_rest(self, answer: Callable[[int], _Answer]) -> list[_Answer]:
        """Answer every open operation; return the answers."""
        given = []
        for number in sorted(self._open):
            one = answer(number)
            if self.give(number, one):
                given.append(one)
        return given

    def begin_copy(self, number: int) -> bool:
        """Ask whether a block of the operation may be touched; if so, `end_copy` must follow."""
        with self._lock:
            if number not in self._open:
                return False
            self._copying = number
            return True

    def end_copy(self) -> None:
        """Report that the block is not touched any more."""
        with self._lock:
            self._copying = None
            answer, self._kept_back = self._kept_back, None
            if answer is not None:
                self._hand_out(answer)

    def collect(self) -> list[_Answer]:
        """Return the answers since the last call."""
        self._something.clear()
        return [self._given.popleft() for _ in range(len(self._given))]

    def wait(self, seconds: float) -> None:
        """Wait until there may be something to collect, at most `seconds`."""
        if not self._given:
            self._something.wait(max(0.0, seconds))

    def wake(self) -> None:
        """End a `wait`, for something that is no answer."""
        self._something.set()

    def _hand_out(self, answer: _Answer) -> None:
        self._given.append(answer)
        self._something.set()
