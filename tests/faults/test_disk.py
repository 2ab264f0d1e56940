"""Every fault of a store folder while the engine is short of blocks: golden texts, bounded waits, an error counter, and
a store that recovers afterwards."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from fd_core.kv.stores.contract import FailureReason
from fd_core.kv.stores.disk import DiskStore
from fd_core.kv.stores.location import parse_location
from tests.faults.pressed import Pressed, no_leaks, until
from tests.faults.raw_stores import in_folder
from tests.kv.stores.test_disk import mounted

pytestmark = pytest.mark.slow

Fault = Callable[[Path], AbstractContextManager[object]]


@contextmanager
def full(folder: Path) -> Iterator[None]:
    """A disk whose free space another process uses up: deleting values makes no room."""

    def takes_nothing(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "writev", takes_nothing)
        yield


@contextmanager
def replaced_by_a_file(folder: Path) -> Iterator[None]:
    aside = folder.rename(folder.with_name("aside"))
    folder.write_bytes(b"not a folder")
    try:
        yield
    finally:
        folder.unlink()
        aside.rename(folder)


@contextmanager
def shards_replaced_by_links(folder: Path) -> Iterator[None]:
    """Links to a foreign folder in place of the store's own folders."""
    precious = folder.with_name("precious")
    precious.mkdir()
    shutil.rmtree(folder)
    folder.mkdir(mode=0o700)
    for name in ("partial", *(f"{number:02x}" for number in range(256))):
        (folder / name).symlink_to(precious)
    try:
        yield
    finally:
        assert list(precious.iterdir()) == [], "the store wrote through a planted link"
        for link in folder.iterdir():
            if link.is_symlink():
                link.unlink()


@pytest.mark.parametrize(
    ("fault", "reason", "still_loads"),
    [
        (full, FailureReason.FULL, True),
        (lambda folder: mounted(folder, "ro"), FailureReason.READ_ONLY, True),
        (replaced_by_a_file, FailureReason.UNREACHABLE, False),
        (shards_replaced_by_links, FailureReason.MALFORMED, False),
    ],
    ids=["full", "read-only", "a file instead", "planted links"],
)
def test_engine_survives_folder_faults(
    tmp_path: Path, secret: Path, fault: Fault, reason: FailureReason, still_loads: bool
) -> None:
    folder = tmp_path / "kv"
    location = f"disk:{folder}?max_bytes=1000000"
    with no_leaks():
        earlier = Pressed(location, secret)
        earlier.warm()
        earlier.close()
        engine = Pressed(location, secret)
        engine.round()
        assert engine.calm().loaded_blocks_store > 0
        assert not engine.tiers.store_errors
        with ExitStack() as stack:
            ends = time.monotonic() + 60
            number = 0
            while number < 2 or reason not in engine.tiers.store_errors:
                assert time.monotonic() < ends, f"no error was counted: {engine.tiers}"
                before = engine.tiers.loaded_blocks_store
                engine.round("fault", busy=None if number else lambda: stack.enter_context(fault(folder)))
                engine.round()
                assert not still_loads or engine.tiers.loaded_blocks_store > before
                engine.calm()
                number += 1
            assert set(engine.tiers.store_errors) == {reason}
            assert engine.tiers.dropped_blocks > 0
            newcomer = Pressed(location, secret)
            newcomer.round("newcomer")
            newcomer.close()
            assert newcomer.tiers.dropped_blocks > 0
        engine.recover()
        engine.close()


def test_folder_deleted_while_requests_run_is_recreated(tmp_path: Path, secret: Path) -> None:
    folder = tmp_path / "kv"
    with no_leaks():
        engine = Pressed(f"disk:{folder}", secret)
        engine.warm()
        for number in range(2):
            engine.round(f"{number}", busy=lambda: shutil.rmtree(folder, ignore_errors=True))
        engine.recover()
        assert set(engine.calm().store_errors) <= {
            FailureReason.UNREACHABLE,
            FailureReason.MALFORMED,
            FailureReason.OTHER,
        }
        engine.close()


def test_engine_survives_concurrent_eviction_by_another_engine(tmp_path: Path, secret: Path) -> None:
    """A value may be deleted between lookup and load; the folder holds a third of what is written."""
    folder = tmp_path / "kv"
    location = f"disk:{folder}?max_bytes=10000"
    other = DiskStore(parse_location(location))
    ended = threading.Event()

    def evict() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            other.put([(number.to_bytes(16, "big"), [bytes(300)])], 5)
            other.delete(in_folder(folder).keys()[:3], 5)
            time.sleep(0.002)

    with no_leaks():
        engine = Pressed(location, secret)
        thread = threading.Thread(target=evict)
        thread.start()
        try:
            for number in range(4):
                engine.round(f"{number // 2}")
        finally:
            ended.set()
            thread.join()
        assert not engine.calm().damaged
        assert sum(path.stat().st_size for path in folder.glob("??/*.kv")) <= 10000
        engine.close()
    roomy = Pressed(f"disk:{folder}", secret)
    roomy.recover()
    roomy.close()


WRITING = """
import itertools, sys
from pathlib import Path
from tests.faults.pressed import Pressed
engine = Pressed(sys.argv[1], Path(sys.argv[2]), host_kv_memory=0)
for number in itertools.count():
    engine.round(f"killed {number}")
    print(number, flush=True)
"""


@pytest.mark.parametrize("moments", [(0.031,), pytest.param((0.0, 0.031), marks=pytest.mark.soak)], ids=["one", "two"])
def test_folder_of_an_engine_killed_while_writing_stays_usable(
    tmp_path: Path, secret: Path, moments: tuple[float, ...]
) -> None:
    folder = tmp_path / "kv"
    location = f"disk:{folder}?max_bytes=1000000"
    for moment in moments:
        process = subprocess.Popen([sys.executable, "-c", WRITING, location, str(secret)], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline()
        time.sleep(moment)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        until(lambda: in_folder(folder).keys(), 1.0)
        engine = Pressed(location, secret)
        engine.round("killed 0")
        tiers = engine.calm()
        assert tiers.loaded_blocks_store > 0
        assert not tiers.damaged and not tiers.store_errors
        engine.recover()
        engine.close()
