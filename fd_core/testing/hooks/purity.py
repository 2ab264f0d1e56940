"""Helpers of kits: clocks, random numbers and settings of the process, numbers in instances and their end."""

from __future__ import annotations

import gc
import itertools
import locale
import logging
import math
import os
import random
import re
import resource
import signal
import socket
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from functools import cache
from importlib.util import module_from_spec
from operator import attrgetter
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Final

import numpy as np
import pytest
import rich.style  # noqa: F401 - its import draws from Python's generator, and frameworks import it when first used

from fd_core.testing.kit.growth import limited_memory
from fd_core.testing.kit.law import require

_CLOCKS: Final = {"time": 1, "monotonic": 1, "perf_counter": 1, "time_ns": 10**9, "monotonic_ns": 10**9}
"""Clocks, with their units per second."""
_HOURS: Final = itertools.cycle((0, 5, -3, 8, -1, 2))
"""By which clocks are wrong, from one reading to the next, also of another call."""
_CLOCKS_BY_ID: Final = {id(getattr(time, clock)): clock for clock in _CLOCKS}


@cache
def _imported_clocks(package: str) -> list[tuple[ModuleType, str, str]]:
    """Return the globals of a package that are clocks, as after `from time import monotonic`: module, name, clock."""
    modules = [module for name, module in [*sys.modules.items()] if name.partition(".")[0] == package]
    found = ((module, name, value) for module in modules for name, value in [*vars(module).items()])
    return [(module, name, _CLOCKS_BY_ID[id(value)]) for module, name, value in found if id(value) in _CLOCKS_BY_ID]


@contextmanager
def another_world(shift: int, user: object = None) -> Iterator[None]:
    """Perturb random generators of the process, and its clocks, which go back and forth: a pure policy uses neither.

    Clocks that the package of `user`, such as a class, has imported by name are perturbed as well. Threads that overlap
    have the world of the first one, until the last one leaves it.
    """
    with _WORLD.lock:
        _WORLD.inside += 1
        if _WORLD.inside == 1:
            _WORLD.stack.enter_context(_perturbed(shift, user))
    try:
        yield
    finally:
        with _WORLD.lock:
            _WORLD.inside -= 1
            if not _WORLD.inside:
                _WORLD.stack.close()


class _World:
    """The perturbed process, of which there is one."""

    def __init__(self) -> None:
        self.lock, self.inside, self.stack = threading.Lock(), 0, ExitStack()


_WORLD: Final = _World()


@contextmanager
def _perturbed(shift: int, user: object) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for clock, unit in _CLOCKS.items():
            reading = getattr(time, clock)() + 3600 * unit * shift
            patch.setattr(time, clock, lambda reading=reading, hour=3600 * unit: reading + hour * next(_HOURS))
        _replace_imported_clocks(patch, user)
        states = random.getstate(), np.random.get_state()
        random.seed(shift)
        np.random.seed(shift)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


@contextmanager
def clocks_ahead(user: object, seconds: float, uptime: float | None = None) -> Iterator[None]:
    """Advance the clocks of the machine, monotonic ones by `uptime` if that is given; see `moving_clocks`."""
    with moving_clocks(user, "time", "time_ns") as move, moving_clocks(user, "monotonic", "monotonic_ns") as run:
        move(seconds)
        run(seconds if uptime is None else uptime)
        yield


@contextmanager
def moving_clocks(user: object, *clocks: str) -> Iterator[Callable[[float], None]]:
    """Yield a function that advances clocks by seconds, all of them unless some are named, as hours of a day do.

    Those that the package of `user` has imported by name are advanced as well.
    """
    ahead = [0.0]

    def move(seconds: float) -> None:
        ahead[0] += seconds

    with pytest.MonkeyPatch.context() as patch:
        for clock in clocks or _CLOCKS:
            now, unit = getattr(time, clock), _CLOCKS[clock]
            patch.setattr(time, clock, lambda now=now, unit=unit: now() + int(unit * ahead[0]))
        _replace_imported_clocks(patch, user)
        yield move


def _replace_imported_clocks(patch: pytest.MonkeyPatch, user: object) -> None:
    for module, name, clock in _imported_clocks(getattr(user, "__module__", "").partition(".")[0]):
        patch.setattr(module, name, getattr(time, clock))


def _limits() -> dict[str, object]:
    """Return the settings that the kernel keeps for the process."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []  # os.umask would change it for other threads
    own = {"RLIMIT_NOFILE", "RLIMIT_DATA"}  # which a server raises, and which `limited_memory` sets
    names = {name for name in dir(resource) if name.startswith("RLIMIT_")} - own
    return {
        "umask": [line for line in lines if line.startswith("Umask")],
        "nice value": os.getpriority(os.PRIO_PROCESS, os.getpid()),
        "resource limits": {name: resource.getrlimit(getattr(resource, name)) for name in names},
    }


def process_state() -> dict[str, object]:
    """Return the settings of the whole process, on which its other parts depend, by name."""
    numbers = np.random.get_state(legacy=False)
    state: dict[str, object] = {
        "handling of errors in numpy": np.geterr(),
        "state of numpy's generator": hash((numbers["state"]["key"].tobytes(), numbers["state"]["pos"])),
        "state of Python's generator": hash(random.getstate()),
        "working directory": Path.cwd(),
        "CPU affinity": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
        "garbage collection": (gc.isenabled(), gc.get_threshold()),
        "logging": (logging.root.manager.disable, logging.root.level, *logging.root.handlers),
        "default timeout of sockets": socket.getdefaulttimeout(),
        "signal handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "locale": locale.setlocale(locale.LC_ALL),
        "limits of the interpreter": (sys.getrecursionlimit(), sys.getswitchinterval()),
        "exception hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "import path": sys.path.copy(),
        "environment": {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        "filters of warnings": [*warnings.filters],
        "modules": len(sys.modules),
        **_limits(),
    }
    if (torch := sys.modules.get("torch")) is not None:
        state["defaults of torch"] = (
            *(torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()),
            *(torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()),
        )
        state["state of torch's generator"] = hash(torch.get_rng_state().numpy().tobytes())
    return state


_MAX_NUMBERS: Final = 9
"""Elements of an array that may be counts; larger ones are tables."""
_OF_IMPORTS: Final = ("environment", "filters of warnings", "import path", "exception hooks")
"""Settings that an import may change."""
_AT_START: Final = {
    name: value
    for name, value in process_state().items()
    if name
    in (
        *("handling of errors in numpy", "default timeout of sockets", "locale", "limits of the interpreter"),
        *("umask", "nice value", "resource limits"),
    )
}
"""Settings that a plugin may not change when it is loaded, or when a fixture makes its object, either."""
_MAX_RISES: Final = 8
"""Consecutive checks that may each leave more descriptors or threads than any check before."""
_RISES: Final = {"open files": [0, 0], "threads": [0, 0]}
"""The most so far, and the number of checks since one that left no more."""


@contextmanager
def unchanged_process(*, holds: bool = False) -> Iterator[None]:
    """Fail if settings of the whole process change, or if each of several checks leaves open files or threads.

    What is made in the block and still used afterwards `holds` its own.
    """
    generators = random.getstate(), np.random.get_state()
    # Otherwise one that seeds the generators would leave them as the check before.
    random.random(), np.random.random(2)  # noqa: S311
    before = {**process_state(), **_AT_START}
    try:
        with limited_memory(), np.errstate():  # restores them
            yield
            found = process_state()
    finally:
        # A check within another one, as of a case by a test, leaves the generators to the outer one as they were.
        random.setstate(generators[0])
        np.random.set_state(generators[1])
    excused = _OF_IMPORTS if found["modules"] != before["modules"] else ()
    for name in sorted(before.keys() & found.keys() - {"modules", *excused}):
        require(found[name] == before[name], "8", f"it changes the {name}: {_change(before[name], found[name])}")
    for name, held in () if holds else _held().items():
        most, rises = _RISES[name]
        if held > most:
            gc.collect()
            held = _held()[name]
        _RISES[name] = [max(held, most), rises + 1 if held > most else 0]
        require(rises < _MAX_RISES, "3.6", f"each check leaves {name}, {held} by now")


@contextmanager
def unchanged_threads() -> Iterator[None]:
    """Fail if the number of threads of torch changes, which only a backend sets, also to what it was in the process."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        yield
        found = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
    require(found == before + 1, "8", f"it changes the number of threads of torch from {before + 1} to {found}")


def _change(before: object, after: object) -> str:
    if isinstance(before, Mapping) and isinstance(after, Mapping):  # values may be secret
        return ", ".join(sorted(str(key) for key in {**before, **after} if before.get(key) != after.get(key)))
    return f"{str(before)[:200]} to {str(after)[:200]}"


def _held() -> dict[str, int]:
    descriptors = Path("/proc/self/fd")
    files = sum(1 for _ in descriptors.iterdir()) if descriptors.exists() else 0
    return {"open files": files, "threads": threading.active_count()}


class _Closure(dict[str, Any]):
    """Variables of enclosing functions that a function uses, by name; an assignment changes the variable."""

    def __init__(self, function: FunctionType) -> None:
        self._cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for name, cell in self._cells.items():
            with suppress(ValueError):  # not assigned yet
                super().__setitem__(name, cell.cell_contents)

    def __setitem__(self, name: str, value: Any) -> None:
        self._cells[name].cell_contents = value
        super().__setitem__(name, value)


def contents_of(thing: object) -> Any:
    """Return the attributes of an instance, or the variables of a closure, by name; None if there are none."""
    return _Closure(thing) if isinstance(thing, FunctionType) else getattr(thing, "__dict__", None)


def numbers_in(thing: object, path: str = "") -> dict[str, tuple[Any, Any, float]]:
    """Return the numbers in the attributes of an instance, or in a dictionary, by path, with their owners and keys.

    Also those of small arrays of any framework, the next one of an `itertools.count`, and variables of closures.
    """
    if isinstance(thing, ModuleType | type):
        return {}
    found: dict[str, tuple[Any, Any, float]] = {}
    shape: Any = getattr(thing, "shape", None)
    if isinstance(shape, tuple | list) and hasattr(thing, "tolist") and hasattr(thing, "__setitem__"):
        if math.prod(shape) < _MAX_NUMBERS and re.search("int|float", str(getattr(thing, "dtype", ""))):
            numbers = np.ndenumerate(np.array(thing.tolist()))
            found = {f"{path}{at}": (thing, at, value.item()) for at, value in numbers}
        return found
    owner = thing if isinstance(thing, dict | list) else contents_of(thing)
    if not isinstance(owner, dict | list) or path.count(".") > 3:
        return found
    for name, value in list(owner.items() if isinstance(owner, dict) else enumerate(owner)):
        if isinstance(value, int | float | np.integer | np.floating | itertools.count) and not isinstance(value, bool):
            number: Any = value.item() if isinstance(value, np.generic) else value
            found[f"{path}.{name}"] = owner, name, next(copy(number)) if isinstance(value, itertools.count) else number
        else:
            found |= numbers_in(value, f"{path}.{name}")
    return found


def counts_of(thing: object) -> dict[str, tuple[Any, Any, float]]:
    """Return the numbers in an instance, in the lists and arrays of its class, and in the module of the class."""
    module = vars(sys.modules[type(thing).__module__])
    return numbers_in(thing) | numbers_in({**vars(type(thing))}, "class") | numbers_in(module, "module")


def count_from(thing: object, before: Mapping[str, float], start: int) -> None:
    """Set each number of an instance that has grown since `before`, a count of calls, to just below `start`.

    Numbers up to 3, as after two calls, keep their distances. A number that its type cannot hold is left.
    """
    for path, (owner, name, value) in counts_of(thing).items():
        if value > before.get(path, value):
            new = start - 4 + min(int(value), 3)
            of = type(value) if hasattr(owner, "shape") else type(owner[name])
            with suppress(OverflowError, RuntimeError, ValueError):
                owner[name] = of(new)
            if counts_of(thing).get(path, (owner, name, new))[2] != new:
                owner[name] = of(value)


def imported_again(cls: Any) -> Any:
    """Return a class from new instances of its modules, as another process has them.

    Returns the class itself if its modules cannot be imported again, and of fd_core only the one of the class.
    """
    name = cls.__module__
    package = name if name.startswith("fd_core.") else name.rpartition(".")[0] or name
    own = {each: found for each, found in sys.modules.items() if f"{each}.".startswith(f"{package}.")}
    try:
        spec = sys.modules[name].__spec__
        assert spec is not None and spec.loader is not None
        for each in own:
            del sys.modules[each]
        sys.modules[name] = module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return attrgetter(cls.__qualname__)(module)
    except Exception:  # noqa: BLE001 -- a plugin may raise anything
        return cls
    finally:
        for each in [each for each in sys.modules if f"{each}.".startswith(f"{package}.")]:
            del sys.modules[each]
        sys.modules.update(own)


def require_freed(make: Callable[[], object], rule: str = "3.6") -> None:
    """Fail if an instance, or another one of a tuple with what it was given, is referenced after its last use."""
    made = make()
    left = [weakref.ref(each) for each in (made if isinstance(made, tuple) else (made,))]
    del made
    if any(each() is not None for each in left):
        gc.collect()
    held = ", ".join(type(each()).__name__ for each in left if each() is not None)
    require(not held, rule, f"an instance ({held}) is still referenced after its last use, such as by its class")
