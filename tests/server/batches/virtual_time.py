"""An event loop whose clock jumps to the next timer, so that waits take no time; threads run inline."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from unittest import mock

T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now


class _Selector(selectors.SelectSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("every task waits, and nothing would wake one")
        self._loop.now += timeout
        return super().select(0)


async def _in_place(work: Callable[[], T]) -> T:
    await asyncio.sleep(0)
    return work()


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time."""
    with mock.patch("asyncio.to_thread", _in_place), asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)
