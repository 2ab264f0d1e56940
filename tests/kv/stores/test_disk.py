import contextlib
import errno
import fcntl
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from fd_core.errors import ConfigError
from fd_core.kv.stores import disk
from fd_core.kv.stores.contract import FailureReason, StoreError
from fd_core.kv.stores.disk import DiskStore
from fd_core.kv.stores.location import parse_location
from fd_core.testing.stores import BackDoor, StoreSuite, lacks

KEY = b"k" * 16
OTHER = b"o" * 16


class DiskDoor(BackDoor):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, key: bytes) -> Path:
        return self._folder / key.hex()[:2] / f"{key.hex()}.kv"

    def read(self, key):
        return self.path(key).read_bytes() if self.path(key).is_file() else None

    def write(self, key, value):
        self.path(key).parent.mkdir(parents=True, exist_ok=True)
        self.path(key).write_bytes(value)

    def delete(self, key):
        self.path(key).unlink(missing_ok=True)

    def write_zeros(self, key, length):
        self.write(key, b"")
        os.truncate(self.path(key), length)

    def spoil(self, key):
        self.path(key).mkdir(parents=True)

    def size(self):
        return bytes_in(self._folder)

    @contextlib.contextmanager
    def fault(self, trouble):
        if trouble is FailureReason.FULL:
            with mounted(self._folder, "size=512k"):
                yield
        elif trouble is FailureReason.READ_ONLY:
            with mounted(self._folder, "ro"):
                yield
        elif trouble is FailureReason.DENIED:
            with not_root(self._folder):
                yield
        elif trouble is FailureReason.UNREACHABLE:
            with replaced_by_a_file(self._folder):
                yield
        else:
            lacks("a call that hangs in the kernel cannot be interrupted")


@contextlib.contextmanager
def mounted(folder: Path, options: str):
    """Mount a small file system with the same files over the folder, with `options`."""
    copy = folder.with_name("copy")
    if folder.exists():
        shutil.copytree(folder, copy)
    folder.mkdir(exist_ok=True)
    size = "" if "size" in options else ",size=64m"
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"mode=700{size},{options.replace('ro', 'rw')}", "tmpfs", folder],
        capture_output=True,
        check=False,
    )
    if made.returncode != 0:
        lacks(f"this user may not mount a file system: {made.stderr.decode().strip()}")
    try:
        if copy.exists():
            shutil.copytree(copy, folder, dirs_exist_ok=True)
        if options == "ro":
            subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextlib.contextmanager
def replaced_by_a_file(folder: Path):
    kept = folder.rename(folder.with_name("kept"))
    folder.touch()
    yield
    folder.unlink()
    kept.rename(folder)


@contextlib.contextmanager
def not_root(folder: Path):
    """Remove the folder's permissions and this process's capability to bypass them."""
    folder.chmod(0)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)
        yield
    finally:
        os.seteuid(user)
        folder.chmod(0o700)


@pytest.mark.in_turn(3)
class TestDiskStore(StoreSuite):
    @pytest.fixture
    def location(self, tmp_path):
        return f"disk:{tmp_path / 'kv'}"

    @pytest.fixture
    def back_door(self, tmp_path):
        return DiskDoor(tmp_path / "kv")


def store_in(folder: Path, **parameters) -> DiskStore:
    text = "&".join(f"{name}={value}" for name, value in parameters.items())
    return DiskStore(parse_location(f"disk:{folder}" + (f"?{text}" if text else "")))


@pytest.fixture
def bytes_alone(monkeypatch):
    """A file system on which a file uses exactly its bytes, so that small limits are meaningful."""
    monkeypatch.setattr(disk, "_MAX_BLOCK", 1)
    monkeypatch.setattr(disk, "_FILE_BYTES", 0)
    monkeypatch.setattr(disk, "_SECTOR", 0)


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != "usage"]


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in files(folder))


@pytest.mark.parametrize("text", ["disk:", "disk:a\0b"])
def test_disk_store_requires_a_folder(text):
    with pytest.raises(ConfigError, match="has no folder"):
        DiskStore(parse_location(text))


def test_folder_is_private_to_its_owner(tmp_path):
    store_in(tmp_path / "a" / "kv").put([(KEY, [b"value"])], 5)
    for path in (tmp_path / "a" / "kv").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    assert (tmp_path / "a" / "kv").stat().st_mode & 0o777 == 0o700


def test_opening_and_reading_create_no_files(tmp_path):
    store = store_in(tmp_path / "kv")
    store.get([KEY], 10, 5), store.longest_prefix([KEY], 10, 5), store.delete([KEY], 5), store.stats(5)
    assert not (tmp_path / "kv").exists()


def test_deleted_folder_is_recreated(tmp_path):
    store = store_in(tmp_path / "kv")
    store.put([(KEY, [b"value"])], 5)
    shutil.rmtree(tmp_path / "kv")
    assert store.get([KEY], 10, 5) == [None]
    assert store.put([(KEY, [b"value"])], 5) == 1
    assert store.get([KEY], 10, 5) == [b"value"]


@pytest.mark.parametrize("link", ["value", "shard", "partial", "usage"])
def test_symlinks_out_of_the_folder_are_not_followed(tmp_path, link):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / f"{KEY.hex()}.kv").write_bytes(b"secret")
    folder = tmp_path / "kv"
    folder.mkdir()
    shard = folder / KEY.hex()[:2]
    if link == "value":
        shard.mkdir()
        (shard / f"{KEY.hex()}.kv").symlink_to(outside / f"{KEY.hex()}.kv")
    elif link == "shard":
        shard.symlink_to(outside)
    else:
        (folder / link).symlink_to(outside / "made", target_is_directory=link == "partial")
    store = store_in(folder, max_bytes=100)
    calls = [
        lambda: store.get([KEY], 100, 5),
        lambda: store.put([(KEY, [b"mine"])], 5),
        lambda: store.put([(bytes([number]) * 4, [b"x" * 40]) for number in range(9)], 5),
        lambda: store.delete([KEY], 5),
    ]
    for call in calls:
        try:
            assert call() != [b"secret"]
        except StoreError as error:
            assert error.reason is FailureReason.MALFORMED
    assert store.longest_prefix([KEY], 100, 5) == 0
    assert [path.name for path in outside.iterdir()] == [f"{KEY.hex()}.kv"]
    assert (outside / f"{KEY.hex()}.kv").read_bytes() == b"secret"


def test_fifo_in_place_of_value_does_not_block(tmp_path):
    folder = tmp_path / "kv" / KEY.hex()[:2]
    folder.mkdir(parents=True)
    os.mkfifo(folder / f"{KEY.hex()}.kv")
    with pytest.raises(StoreError, match="not a file"):
        store_in(tmp_path / "kv").get([KEY], 10, 5)


@pytest.mark.usefixtures("bytes_alone")
def test_foreign_files_in_the_folder_are_kept(tmp_path):
    folder = tmp_path / "kv"
    for name in ("notes.txt", "ab/notes.txt", "ab/abcd", "objects/ab/abcd.kv", "partial/keep.txt", "AB/ab.kv"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x" * 500)
    store = store_in(folder, max_bytes=100)
    for number in range(20):
        assert store.put([(bytes([number]) * 16, [b"x" * 30])], 5) == 1
    assert sum(path.stat().st_size == 500 for path in files(folder)) == 6
    assert store.stats(5).bytes <= 100


@pytest.mark.usefixtures("bytes_alone")
def test_default_limit_is_half_of_free_space(tmp_path, monkeypatch):
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    store = store_in(tmp_path / "kv")
    assert store.put([(KEY, [b"x" * 501])], 5) == 0
    assert store.put([(KEY, [b"x" * 500])], 5) == 1
    assert store_in(tmp_path / "kv").stats(5).limit_bytes == 750  # the store's own files count as free
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free._replace(free=1 << 50))
    assert "of at most 10.0 GiB in 1 values" in store_in(tmp_path / "kv").open(5)


@pytest.mark.usefixtures("bytes_alone")
@pytest.mark.parametrize("usage", [b"", b"nonsense", b"99999999999999999999", b"-5", b"00000000000000000000"])
def test_wrong_byte_count_is_corrected(tmp_path, usage):
    first = store_in(tmp_path / "kv", max_bytes=1000)
    first.put([(bytes([number]) * 4, [b"x" * 90]) for number in range(10)], 5)
    (tmp_path / "kv" / "usage").write_bytes(usage)
    store = store_in(tmp_path / "kv", max_bytes=1000)
    assert store.put([(KEY, [b"y" * 90])], 5) == 1
    assert 900 <= bytes_in(tmp_path / "kv") <= 1000
    assert store.get([KEY], 100, 5) == [b"y" * 90]


def test_files_of_dead_writers_are_removed_by_age(tmp_path):
    partial = tmp_path / "kv" / "partial"
    partial.mkdir(parents=True)
    for name, age in (("50-" + "a" * 32, 3600), ("50-" + "b" * 32, 1)):
        (partial / name).write_bytes(b"torn")
        os.utime(partial / name, (time.time() - age, time.time() - age))
    assert store_in(tmp_path / "kv").put([(KEY, [b"value"])], 5) == 1
    assert [path.name for path in partial.iterdir()] == ["50-" + "b" * 32]


@pytest.mark.usefixtures("bytes_alone")
def test_space_is_reserved_for_concurrent_writers(tmp_path):
    partial = tmp_path / "kv" / "partial"
    partial.mkdir(parents=True)
    (partial / ("80-" + "a" * 32)).write_bytes(b"")
    store = store_in(tmp_path / "kv", max_bytes=100)
    with pytest.raises(StoreError) as caught:
        store.put([(KEY, [b"x" * 40])], 5)
    assert caught.value.reason is FailureReason.FULL
    assert store.put([(KEY, [b"x" * 20])], 5) == 1


def test_failed_write_leaves_no_file_and_correct_count(tmp_path, monkeypatch):
    store = store_in(tmp_path / "kv")
    store.put([(KEY, [b"value"])], 5)
    used = int((tmp_path / "kv" / "usage").read_bytes())

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "writev", full)
        for _ in range(3):
            with pytest.raises(StoreError, match="No space left"):
                store.put([(OTHER, [bytes(800_000)])], 5)
    assert list((tmp_path / "kv" / "partial").iterdir()) == []
    assert int((tmp_path / "kv" / "usage").read_bytes()) == used
    assert store.put([(OTHER, [bytes(1000)])], 5) == 1


@pytest.mark.timing
def test_suspended_lock_holder_delays_others_up_to_deadline(tmp_path):
    store = store_in(tmp_path / "kv")
    store.put([(KEY, [b"value"])], 5)
    with (tmp_path / "kv" / "usage").open("rb") as usage:
        fcntl.flock(usage, fcntl.LOCK_EX)
        start = time.monotonic()
        with pytest.raises(StoreError) as caught:
            store.put([(OTHER, [b"value"])], 0.2)
        assert caught.value.reason is FailureReason.TIMEOUT
        assert time.monotonic() - start < 1.5
        assert store.get([KEY], 10, 1) == [b"value"]
    assert store.put([(OTHER, [b"value"])], 5) == 1


@pytest.mark.usefixtures("bytes_alone")
def test_limit_holds_on_file_system_without_locks(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    store = store_in(tmp_path / "kv", max_bytes=1000)
    for number in range(30):
        assert store.put([(bytes([number]) * 4, [b"x" * 90])], 5) == 1
        assert bytes_in(tmp_path / "kv") <= 1000


WRITER = textwrap.dedent(
    """
    import itertools, os, sys
    from fd_core.kv.stores.disk import DiskStore
    from fd_core.kv.stores.location import parse_location
    name, location = sys.argv[1:]
    store, parent = DiskStore(parse_location(location)), os.getppid()
    print("ready", flush=True)
    for number in itertools.takewhile(lambda _: os.getppid() == parent, itertools.count()):
        key = f"{name}{number % 40}".encode().ljust(16, b".")
        store.put([(key, [key * 500] * 8)], 30)
        found = store.get([key], 1 << 20, 30)[0]
        assert found in (None, key * 4000), number
        if number == 40:
            print("busy", flush=True)
    """
)


def writer(name: str, location: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", WRITER, name, location], stdout=subprocess.PIPE, text=True)


def wait_for(process: subprocess.Popen, word: str) -> None:
    for line in process.stdout:
        if line.strip() == word:
            return
    raise AssertionError(f"the writer exited before it was {word}")


def test_limit_holds_with_concurrent_writers(tmp_path):
    location = f"disk:{tmp_path / 'kv'}?max_bytes=1000000"
    processes = [writer(name, location) for name in "abc"]
    try:
        for process in processes:
            wait_for(process, "busy")
        most = 0
        for _ in range(150):
            most = max(most, on_disk(tmp_path / "kv"))
            time.sleep(0.005)
        assert all(process.poll() is None for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()
    assert 500_000 < most <= 1_000_000


def on_disk(folder: Path) -> int:
    """Bytes in values. The lock prevents reservations and deletions meanwhile."""
    with (folder / "usage").open("rb") as usage:
        fcntl.flock(usage, fcntl.LOCK_EX)
        return sum(path.stat().st_size for path in folder.glob("??/*.kv"))


def test_short_writes_are_continued(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "writev", lambda file, parts: os.write(file, parts[0][:3]))
    store = store_in(tmp_path / "kv")
    store.put([(KEY, [b"abcdefgh", b"", b"ij"])], 5)
    assert store.get([KEY], 100, 5) == [b"abcdefghij"]
