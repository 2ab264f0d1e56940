"""Helpers of kits: clocks, random numbers and settings of the process, and instances that are freed."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import random
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import pytest

from fd_core.testing.kit.law import require

_CLOCKS: Final = {"time": 1, "monotonic": 1, "perf_counter": 1, "time_ns": 10**9, "monotonic_ns": 10**9}
"""Clocks, with their units per second."""

_SETTINGS: Final[Mapping[str, tuple[Callable[[], Any], Callable[[Any], object]]]] = {
    "np.seterr": (np.geterr, lambda value: np.seterr(**value)),
    "os.chdir": (os.getcwd, os.chdir),
    "gc.enable": (gc.isenabled, lambda value: gc.enable() if value else gc.disable()),
    "logging.disable": (lambda: logging.root.manager.disable, logging.disable),
    "socket.setdefaulttimeout": (socket.getdefaulttimeout, socket.setdefaulttimeout),
}
"""Settings of the process, on which others depend, by the function that changes them: functions to read and restore."""


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


@contextmanager
def unchanged_process() -> Iterator[None]:
    """Restore the settings of the process, and fail if one was changed."""
    before = {name: read() for name, (read, _) in _SETTINGS.items()}
    try:
        yield
    finally:
        changed = [name for name, (read, _) in _SETTINGS.items() if read() != before[name]]
        for name in changed:
            _SETTINGS[name][1](before[name])
    require(not changed, "8", f"it changes settings of the whole process, as by {changed}")


def require_freed(make: Callable[[], object], rule: str = "3.6") -> None:
    """Fail if an instance is still referenced when its last user has dropped it."""
    left = weakref.ref(make())
    if left() is not None:
        gc.collect()
    require(left() is None, rule, "an instance is still referenced after its last use, such as by its class")
