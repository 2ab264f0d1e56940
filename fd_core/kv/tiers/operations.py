"""Operations in progress: each is answered exactly once, in time, and touches no device block afterwards."""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fd_core.kv.effects import Completion, Found, Load, Loaded, Lookup, Save, Saved
from fd_core.kv.tiers.host import HostArray

__all__ = ["Operation", "Operations"]


@dataclass(slots=True, eq=False)
class Operation:
    """One effect on its way to its completion. The first group is `Operations`' own."""

    effect: Lookup | Load | Save
    began: float
    deadline: float
    blocks: int = 0
    """Leading blocks copied from or to the device."""
    from_host: int = 0
    last_copy: float = 0.0
    copying: bool = False
    """A device block is being read or written."""
    ending: bool = False
    """Nobody waits any more; answered as soon as no copy is under way."""
    done: bool = False

    host: int = 0
    """Of a lookup: leading keys in the host tier."""
    total: int = 0
    """Of a lookup: leading keys in host tier and store."""
    arrays: list[HostArray | None] = field(default_factory=list)
    """Of a load: the values at hand that are still to be copied, by index of their key."""
    missing: deque[int] = field(default_factory=deque)
    """Of a load: indices of keys that are still to be fetched."""
    fetched: set[int] = field(default_factory=set)
    """Of a load: indices that came from the store."""
    end: int = 0
    """Of a load: how far the prefix may still come."""

    def completion(self) -> Completion:
        """Return the answer as far as the operation came."""
        number = self.effect.operation
        if isinstance(self.effect, Lookup):
            return Found(number, self.host, max(self.host, self.total))
        if isinstance(self.effect, Load):
            return Loaded(number, self.blocks, self.from_host, max(0.0, self.last_copy - self.began))
        return Saved(number, self.blocks)


class Operations:
    """All operations in progress, and the completions that were not collected.

    One lock, held for a few assignments and never during a copy or a call of a store, decides every race: a copy of a
    device block happens between `begin_copy` and `end_copy`, and an operation that ends meanwhile is answered by
    `end_copy`. So nobody waits for a copy, and no copy outlives its operation.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self.open_saves = 0
        """How many of the operations in progress are saves."""
        self._open: dict[int, Operation] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._completions: deque[Completion] = deque()
        self._something = threading.Event()

    def __len__(self) -> int:
        return len(self._open)

    # The engine's thread ----------------------------------------------------------------------------------

    def begin(self, effect: Lookup | Load | Save, seconds: float) -> Operation:
        """Open an operation that is answered within `seconds`."""
        now = self._clock()
        operation = Operation(effect, now, now + seconds, last_copy=now)
        with self._lock:
            self._open[effect.operation] = operation
            self.open_saves += isinstance(effect, Save)
            heapq.heappush(self._deadlines, (operation.deadline, effect.operation))
        return operation

    def answer(self, completion: Completion) -> None:
        """Answer an effect that needs no operation."""
        self._completions.append(completion)
        self._something.set()

    def cancel(self, number: int) -> None:
        """End an operation early; unknown and answered ones are ignored."""
        with self._lock:
            operation = self._open.get(number)
            if operation is not None:
                self._end(operation)

    def expire(self) -> list[Operation]:
        """End the operations that are past their deadline and return them."""
        if not self._deadlines or self._deadlines[0][0] > (now := self._clock()):
            return []
        expired = []
        with self._lock:
            while self._deadlines and self._deadlines[0][0] <= now:
                operation = self._open.get(heapq.heappop(self._deadlines)[1])
                if operation is not None and not operation.ending:
                    self._end(operation)
                    expired.append(operation)
        return expired

    def end_all(self, *, saves: bool) -> None:
        """End every operation, or all but saves."""
        with self._lock:
            for operation in list(self._open.values()):
                if saves or not isinstance(operation.effect, Save):
                    self._end(operation)

    def collect(self) -> list[Completion]:
        """Return the completions since the last call."""
        if not self._completions:
            return []
        self._something.clear()
        collected = []
        while self._completions:
            collected.append(self._completions.popleft())
        return collected

    def wait(self, seconds: float) -> None:
        """Wait until there is something to collect or to expire, at most `seconds`."""
        if self._completions:
            return
        with self._lock:
            if self._deadlines:
                seconds = min(seconds, self._deadlines[0][0] - self._clock())
        self._something.wait(max(0.0, seconds))

    # Any thread -------------------------------------------------------------------------------------------

    def begin_copy(self, operation: Operation) -> bool:
        """Ask whether the operation's next device block may be touched; if so, `end_copy` must follow."""
        with self._lock:
            operation.copying = not operation.ending and not operation.done
            return operation.copying

    def end_copy(self, operation: Operation, *, whole: bool, from_host: bool = False) -> None:
        """Report that the block is not touched any more, and whether it was copied wholly."""
        with self._lock:
            operation.copying = False
            if whole:
                operation.blocks += 1
                operation.from_host += from_host
                operation.last_copy = self._clock()
            if operation.ending:
                self._finish(operation)

    def skip_copy(self, operation: Operation) -> bool:
        """Count a block that needs no copy; return whether the operation goes on."""
        with self._lock:
            if operation.ending or operation.done:
                return False
            operation.blocks += 1
            return True

    def finish(self, operation: Operation) -> bool:
        """Answer a complete operation; return False if it was answered before."""
        with self._lock:
            return self._finish(operation)

    def _end(self, operation: Operation) -> None:
        operation.ending = True
        if not operation.copying:
            self._finish(operation)

    def _finish(self, operation: Operation) -> bool:
        if operation.done:
            return False
        operation.done = True
        del self._open[operation.effect.operation]
        self.open_saves -= isinstance(operation.effect, Save)
        self.answer(operation.completion())
        return True
