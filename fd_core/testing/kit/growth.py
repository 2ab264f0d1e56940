"""Memory that a plugin holds after ever more calls; it is never freed if it grows with each of them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Final

_ROUNDS: Final = 8
"""Rounds that all have to grow: a cache with a limit stops before the last one, and other threads allocate seldom."""


def assert_bounded(use: Callable[[int], None], count: int, what: str) -> None:
    """Call `use` with the numbers of rounds, of `count` things each, until one leaves less than an object for each two.

    Counts the objects of the whole process, also those of classes and modules. Raises `AssertionError` if every round
    leaves more.
    """
    use(0)
    for number in range(1, _ROUNDS + 1):
        before = _objects()
        use(number)
        grown = _objects() - before
        if grown < count // 2:
            return
    raise AssertionError(
        f"after {count * _ROUNDS:,} {what} the process still holds {grown:,} objects more each {count}"
    )


def _objects() -> int:
    gc.collect()
    return sys.getallocatedblocks()
