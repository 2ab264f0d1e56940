"""Helpers of the kits of hooks: a process with other clocks and random numbers, and the memory of an instance."""

from __future__ import annotations

import gc
import itertools
import random
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Final

import numpy as np
import pytest

from fd_core.testing.kit.law import require

_CLOCKS: Final = {"time": 1, "monotonic": 1, "perf_counter": 1, "time_ns": 10**9, "monotonic_ns": 10**9}
"""Clocks, with their units per second."""


@contextmanager
def another_world(shift: int) -> Iterator[None]:
    """Perturb random generators of the process, and its clocks, which go back and forth: a pure policy uses neither."""
    hours = itertools.cycle((0, 5, -3, 8, -1, 2))
    with pytest.MonkeyPatch.context() as patch:
        for clock, unit in _CLOCKS.items():
            reading = getattr(time, clock)() + 3600 * unit * shift
            patch.setattr(time, clock, lambda reading=reading, hour=3600 * unit: reading + hour * next(hours))
        states = random.getstate(), np.random.get_state()
        random.seed(shift)
        np.random.seed(shift)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def require_bounded(instance: object, use: Callable[[int], object], count: int, most: int = 2000) -> None:
    """Fail if calls of `use` with the numbers up to twice `count` leave more than `most` bytes in the second half."""
    for number in range(count):
        use(number)
    before = sum(map(sys.getsizeof, _reachable(instance)))
    for number in range(count, 2 * count):
        use(number)
    grown = sum(map(sys.getsizeof, _reachable(instance))) - before
    require(grown <= most, "3.6", f"it holds {grown:,} bytes more after {2 * count} calls than after {count}")


def require_freed(make: Callable[[], object], rule: str = "3.6") -> None:
    """Fail if an instance is still referenced when its last user has dropped it."""
    left = weakref.ref(make())
    gc.collect()
    require(left() is None, rule, "an instance is still referenced after its last use, such as by its class")


def holdings(instance: object) -> int:
    """Count the objects reachable from an instance."""
    return sum(1 for _ in _reachable(instance))


def _reachable(instance: object) -> Iterator[object]:
    seen: set[int] = set()
    left: list[object] = [vars(instance)] if hasattr(instance, "__dict__") else [instance]
    while left:
        each = left.pop()
        if id(each) not in seen and not isinstance(each, (type, ModuleType, FunctionType, MethodType)):
            seen.add(id(each))
            yield each
            left += gc.get_referents(each)
            if isinstance(each, dict):
                left += each  # keys that are strings cannot be part of a cycle, so the collector does not report them
            if isinstance(each, np.ndarray):
                left.append(each.base)
