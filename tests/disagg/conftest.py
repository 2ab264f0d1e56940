"""Whatever a test did: its threads are gone, and so are its sockets."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


def open_files() -> int:
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before, others = open_files(), set(threading.enumerate())
    yield
    until = time.monotonic() + 5
    while True:
        begun = set(threading.enumerate()) - others
        threads = [thread.name for thread in begun if thread.name.startswith("fdcore-kv-")]
        # What ZeroMQ keeps for itself once it was used at all is a handful.
        left = open_files() - before
        if not threads and left <= 6:
            return
        gc.collect()
        assert time.monotonic() < until, f"threads {threads}, {left} more open files"
        time.sleep(0.02)
