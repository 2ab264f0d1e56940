"""Memory that stays, too much of it, and stalls of a call are noticed; what pytest and other threads do is not."""

from __future__ import annotations

import gc
import logging
import mmap
import random
import resource
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

from fd_core.backends.memory import available_memory
from fd_core.testing.hooks.purity import another_world, unchanged_process
from fd_core.testing.kit.growth import limited_memory, require_bounded, require_no_stall
from fd_core.testing.kit.law import InvariantViolated

LOGGER = logging.getLogger(__name__)


def test_records_of_a_log_are_no_memory_of_a_plugin() -> None:
    handlers = list(logging.getLogger().handlers)
    require_bounded(lambda number: LOGGER.warning("value %d is gone", number), 64, "failures")
    assert logging.getLogger().handlers == handlers


def test_each_call_that_leaves_a_record_is_noticed() -> None:
    kept: list[str] = []
    with pytest.raises(InvariantViolated, match="bytes more than after half of them"):
        require_bounded(lambda number: kept.append(f"value {number} is gone"), 64, "failures")


def test_a_check_cannot_take_all_memory_of_the_machine() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with limited_memory():
        reserved = mmap.mmap(-1, 2 * available_memory(), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
        reserved.close()
    with pytest.raises(AssertionError, match=r"it takes more than [\d,]+ MiB of memory: "), unchanged_process():
        np.empty(available_memory(), np.uint8)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_failure_within_a_check_of_the_process_leaves_the_generators() -> None:
    with unchanged_process(), suppress(ValueError), unchanged_process():
        raise ValueError


def test_only_the_thread_of_a_call_stalls_it() -> None:
    stop = threading.Event()

    def sleep() -> None:
        while not stop.is_set():
            time.sleep(0.001)

    other = threading.Thread(target=sleep)
    other.start()
    try:
        with require_no_stall("a step", "1"):
            stop.wait(0.05)
    finally:
        stop.set()
        other.join()
    with pytest.raises(InvariantViolated, match=r"a step calls time\.sleep"), require_no_stall("a step", "1"):
        time.sleep(0.001)


def test_a_stall_of_each_thousandth_call_is_noticed() -> None:
    def use(number: int) -> None:
        if number % 1000 == 999:
            gc.collect()

    with pytest.raises(InvariantViolated, match=r"one of the requests calls gc\.collect"):
        require_bounded(use, 50, "requests")


def test_threads_that_overlap_leave_clocks_and_generators_as_they_were() -> None:
    first, second, before = another_world(1), another_world(2), (random.getstate(), time.time)
    for call in (first.__enter__, second.__enter__):
        call()
        assert time.time is not before[1]
    for each in (first, second):
        assert time.time is not before[1]
        each.__exit__(None, None, None)
    assert (random.getstate(), time.time) == before
