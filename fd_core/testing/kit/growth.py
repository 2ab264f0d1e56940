"""Costs of calls, and memory that a plugin holds after ever more of them: it is never freed if it grows with each."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import resource
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final

import pytest

from fd_core.backends.memory import available_memory
from fd_core.testing.kit.law import broken
from fd_core.testing.kit.privacy import audited

_MAX_BYTES: Final = 4
"""Bytes that may remain of each call on average; a list of small numbers takes 8."""
ROUNDS: Final = (1, 2, 4, 8)
"""Calls of each round, as multiples of those before the first."""
_SLEEPS: Final = {time.sleep: "time.sleep", os.fsync: "os.fsync", os.fdatasync: "os.fdatasync", os.sync: "os.sync"}
_STALLS: Final = ("gc.collect", "open", "socket.connect", "sqlite3.connect", "subprocess.Popen")
"""Events of a process that take long, whatever they are for."""
_CALLS: Final = 1100
_SECONDS: Final = 1.0
"""Calls of which none may stall, such as each thousandth: so many, or those that fit into so much CPU time."""
_IDLE_SECONDS: Final = 0.25
_IDLE_SHARE: Final = 0.1
"""Part of a processor that a plugin may take while nothing is to be done."""
MAX_SHARE: Final = 0.75
"""Part of the available memory that a check may take."""
_clear_names: Final[Callable[[], None]] = next(
    getattr(sys, name) for name in ("_clear_internal_caches", "_clear_type_cache") if hasattr(sys, name)
)
"""Clears the interpreter's cache of attributes, which fills at random."""


def require_bounded(
    use: Callable[[int], object], count: int, what: str, rule: str = "3.6", *, may_wait: bool = False
) -> None:
    """Fail if each of `ROUNDS` of calls of `use` with ever other numbers leaves memory; the first has `count`.

    Unless the plugin `may_wait`, such as for a medium, no later call may stall; see `require_no_stall`.

    Each round doubles the number of calls: a table grows in each of them, a cache with a limit is full before the last
    one, and other threads allocate seldom. Counts what Python and numpy allocate, also for classes and modules.
    """
    numbers = itertools.count()

    def held_after(calls: int) -> int:
        for number in itertools.islice(numbers, calls):
            use(number)
        gc.collect()
        _clear_names()
        return tracemalloc.get_traced_memory()[0]

    with traced():
        held = held_after(count)
        for calls in (each * count for each in ROUNDS):
            before, held = held, held_after(calls)
            if held - before <= calls * _MAX_BYTES:
                break
        else:
            calls = (1 + sum(ROUNDS)) * count
            more = f"{held - before:,} bytes more than after half of them"
            broken(rule, f"after {calls:,} {what} the process holds {more}")
    if not may_wait:
        end = time.process_time() + _SECONDS
        with require_no_stall(f"one of the {what}", rule):
            for done, number in enumerate(itertools.islice(numbers, max(count, _CALLS))):
                use(number)
                if done >= count and time.process_time() > end:
                    break


@contextmanager
def limited_memory() -> Iterator[None]:
    """Raise `AssertionError` instead of taking more memory than most of what is available, which is not for one plugin.

    Counts private memory that can be written, as drivers reserve more address space than there is memory.
    """
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    held = [int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:")]
    before, share = resource.getrlimit(resource.RLIMIT_DATA), int(MAX_SHARE * available_memory())
    if not held or resource.RLIM_INFINITY != before[0] < held[0] + share:
        yield  # an outer limit holds
        return
    resource.setrlimit(resource.RLIMIT_DATA, (held[0] + share, before[1]))
    try:
        yield
    except MemoryError as error:
        raise AssertionError(f"it takes more than {share >> 20:,} MiB of memory: {error}") from error
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def count_bytecodes(call: Callable[[], object]) -> int:
    """Return how many bytecode instructions a call executes."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def count_bytes(call: Callable[[], object]) -> int:
    """Return the most memory that a call held beyond that before it, in bytes."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def count_elements(call: Callable[[], object]) -> int:
    """Return how many elements of new memory, or in place, the operations of torch in a call write; 0 without torch."""
    if "torch" not in sys.modules:
        return 0
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            if not func.is_view:
                self.count += sum(each.numel() for each in tree_leaves(found) if isinstance(each, torch.Tensor))
            return found

    with Counting() as counting:
        call()
    return counting.count


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let torch compute on one thread: several are no faster on small models, and wait for those of other processes."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cpu_seconds(call: Callable[[], object]) -> float:
    """Return the shortest CPU time of several calls, of all threads: also of code that no counter sees."""
    return min(seconds_of(call, time.process_time) for _ in range(7))


def seconds_of(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the time of one call."""
    start = clock()
    call()
    return clock() - start


@contextmanager
def require_no_stall(what: str, rule: str) -> Iterator[None]:
    """Fail if a call of a step collects garbage, sleeps, or uses a file or a process, which takes as long in any step.

    What other threads do meanwhile is not counted.
    """
    stalls: list[str] = []
    own = threading.get_ident()

    def note(name: str, _: object = None) -> None:
        if threading.get_ident() == own and name in _STALLS:
            stalls.append(name)

    def noted(name: str, function: Any) -> Callable[..., None]:
        def call(*given: Any) -> None:
            if threading.get_ident() == own:
                stalls.append(name)
            else:
                function(*given)

        return call

    def collected(phase: str, _: object) -> None:
        note("gc.collect" if phase == "start" else "")

    was_enabled = gc.isenabled()
    gc.disable()  # so that collections are those of the call
    gc.callbacks.append(collected)
    try:
        with pytest.MonkeyPatch.context() as patch, audited(note):
            for function, name in _SLEEPS.items():
                for module, attribute in _imported(function):
                    patch.setattr(module, attribute, noted(name, function))
            yield
    finally:
        gc.callbacks.remove(collected)
        if was_enabled:
            gc.enable()
    if stalls:
        broken(rule, f"{what} calls {', '.join(dict.fromkeys(stalls))}")


def require_idle(what: str) -> None:
    """Fail if a thread of this process works while nothing is to be done, such as one that polls without a pause.

    It would take the interpreter's lock from the engine. Tests that call it are `timing` and `fd_alone`.
    """
    shares = []
    for _ in range(3):  # the end of earlier work
        began, start = time.process_time(), time.monotonic()
        time.sleep(_IDLE_SECONDS)
        shares.append((time.process_time() - began) / (time.monotonic() - start))
        if shares[-1] < _IDLE_SHARE:
            return
    broken(
        "8",
        f"{what} takes {100 * min(shares):.0f} % of a processor while nothing is to be done, of "
        f"{100 * _IDLE_SHARE:.0f} allowed: let its threads block, with a timeout, instead of polling",
    )


def _imported(function: object) -> list[tuple[ModuleType, str]]:
    """Return the globals of all modules that are a function, as after `from time import sleep`."""
    modules = [module for module in [*sys.modules.values()] if isinstance(module, ModuleType)]
    return [(module, name) for module in modules for name, value in [*vars(module).items()] if value is function]


@contextmanager
def traced() -> Iterator[None]:
    """Trace allocations; collections of garbage leave out older objects, of which a process may have millions.

    They stay left out if some were before. pytest keeps no log records meanwhile, as it would keep those of each call.
    """
    frozen, root = gc.get_freeze_count(), logging.getLogger()
    capturing = [each for each in root.handlers if type(each).__module__.startswith("_pytest.")]
    for handler in capturing:
        root.removeHandler(handler)
    gc.freeze()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        for handler in capturing:
            root.addHandler(handler)
        if not frozen:
            gc.unfreeze()
