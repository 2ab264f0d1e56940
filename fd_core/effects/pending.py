"""Pending operations: each is completed exactly once, in time, and none of its device blocks is touched afterwards."""

from __future__ import annotations

import heapq
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class _Numbered(Protocol):
    @property
    def operation(self) -> int: ...


_Answer = TypeVar("_Answer", bound=_Numbered)


@dataclass(slots=True, eq=False)
class _Pending(Generic[_Answer]):
    answer: _Answer
    """The completion, if the operation were to end here."""
    copying: bool = False
    """A device block is being read or written."""
    ending: bool = False
    """No request waits for it; completed as soon as no copy is in progress."""
    settled: bool = False
    """The copy in progress does not change the completion."""


class PendingOperations(Generic[_Answer]):
    """The operations that one port performs, by number, and the completion that each would get now.

    Any thread may use it. One lock, held for a few assignments and never during a copy, a call of a store or a message,
    decides every race: a device block is touched between `begin_copy` and `end_copy`, and an operation that ends
    meanwhile is completed by `end_copy`. So no caller waits for a copy, and no copy outlives its operation.
    """

    def __init__(self, complete: Callable[[_Answer], None]) -> None:
        """`complete` receives each completion, on any thread and with the lock held, such as `CompletionQueue.put`."""
        self._complete = complete
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending[_Answer]] = {}
        self._deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        """Return how many operations were not completed."""
        return len(self._pending)

    def __contains__(self, number: int) -> bool:
        """Return True if a request still waits for an operation."""
        return self._awaited(number) is not None

    def numbers(self, *kinds: type[_Answer]) -> list[int]:
        """Return the numbers of operations that requests wait for, ascending; of completions of `kinds` if given."""
        with self._lock:
            return sorted(
                number
                for number, pending in self._pending.items()
                if not pending.ending and (not kinds or isinstance(pending.answer, kinds))
            )

    def begin(self, answer: _Answer, deadline: float = math.inf) -> None:
        """Open the operation that `answer` completes by `deadline`. Raises `ValueError` if its number is pending."""
        number = answer.operation
        with self._lock:
            if number in self._pending:
                raise ValueError(f"operation {number} is pending")
            self._pending[number] = _Pending(answer)
            if deadline < math.inf:
                heapq.heappush(self._deadlines, (deadline, number))

    def advance(self, answer: _Answer) -> bool:
        """Replace the completion that an operation would get now; return True if a request still waits for it."""
        with self._lock:
            pending = self._awaited(answer.operation)
            if pending is None:
                return False
            pending.answer = answer
            return True

    def finish(self, answer: _Answer) -> bool:
        """Complete an operation with `answer`, after the copy in progress; False if it has ended before."""
        with self._lock:
            pending = self._awaited(answer.operation)
            if pending is None:
                return False
            pending.answer = answer
            pending.settled = True
            self._end(pending)
            return True

    def end(self, number: int) -> bool:
        """Complete an operation with its progress so far, after the copy in progress; False if it has ended before."""
        with self._lock:
            pending = self._awaited(number)
            if pending is None:
                return False
            self._end(pending)
            return True

    def expire(self, now: float) -> list[_Answer]:
        """End the operations that are past their deadline; return the completion of each of them."""
        if not self._deadlines or self._deadlines[0][0] > now:
            return []
        expired = []
        with self._lock:
            while self._deadlines and self._deadlines[0][0] <= now:
                pending = self._awaited(heapq.heappop(self._deadlines)[1])
                if pending is not None:
                    expired.append(pending.answer)
                    self._end(pending)
        return expired

    def begin_copy(self, number: int) -> bool:
        """Return True if a device block of an operation may be touched; if so, `end_copy` must follow."""
        with self._lock:
            pending = self._awaited(number)
            if pending is None:
                return False
            pending.copying = True
            return True

    def end_copy(self, number: int, answer: _Answer | None = None) -> None:
        """Record the end of the access to a block, and the completion that the operation would get now."""
        with self._lock:
            pending = self._pending[number]
            pending.copying = False
            if answer is not None and not pending.settled:
                pending.answer = answer
            if pending.ending:
                self._end(pending)

    def _awaited(self, number: int) -> _Pending[_Answer] | None:
        pending = self._pending.get(number)
        return None if pending is None or pending.ending else pending

    def _end(self, pending: _Pending[_Answer]) -> None:
        pending.ending = True
        if not pending.copying:
            del self._pending[pending.answer.operation]
            self._complete(pending.answer)
