"""Checks that a test leaves no threads and no sockets."""

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
def no_leftovers() -> Iterator[None]:
    before, others = open_files(), set(threading.enumerate())
    yield
    until = time.monotonic() + 60
    while True:
        begun = set(threading.enumerate()) - others
        threads = [thread.name for thread in begun if thread.name.startswith("fdcore-kv-")]
        # ZeroMQ keeps a handful of files open once it was used.
        left = open_files() - before
        if not threads and left <= 6:
            return
        gc.collect()
        assert time.monotonic() < until, f"threads {threads}, {left} more open files"
        time.sleep(0.02)
