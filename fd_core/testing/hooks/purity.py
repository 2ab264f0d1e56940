"""Helpers of the kits for policies: a process with other clocks and random numbers, and the objects that one holds."""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Final

import numpy as np
import pytest

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


def holdings(policy: object) -> int:
    """Count the objects reachable from a policy."""
    seen: set[int] = set()
    left: list[object] = [vars(policy)] if hasattr(policy, "__dict__") else [policy]
    while left:
        each = left.pop()
        if id(each) not in seen and not isinstance(each, (type, ModuleType, FunctionType, MethodType)):
            seen.add(id(each))
            left += gc.get_referents(each)
            if isinstance(each, dict):
                left += each  # keys that are strings cannot be part of a cycle, so the collector does not report them
    return len(seen)
