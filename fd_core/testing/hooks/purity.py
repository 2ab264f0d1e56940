"""Helpers of kits: clocks, random numbers and settings of the process, and instances that are freed."""

from __future__ import annotations

import gc
import itertools
import logging
import random
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
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


def _settings() -> tuple[object, ...]:
    return np.geterr(), Path.cwd(), gc.isenabled(), logging.root.manager.disable, socket.getdefaulttimeout()


@contextmanager
def unchanged_process() -> Iterator[None]:
    """Fail if settings of the whole process change, on which its other parts depend."""
    before = _settings()
    with np.errstate():  # restores them
        yield
        found = _settings()
    require(found == before, "8", f"it changes settings of the whole process: {before} to {found}")


def require_freed(make: Callable[[], object], rule: str = "3.6") -> None:
    """Fail if an instance is still referenced when its last user has dropped it."""
    left = weakref.ref(make())
    if left() is not None:
        gc.collect()
    require(left() is None, rule, "an instance is still referenced after its last use, such as by its class")
