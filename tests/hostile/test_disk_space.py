"""A disk store on volumes that are smaller than its limit, or filled by others, uses only the space that is free."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fd_core.kv.stores.contract import FailureReason, StoreError
from fd_core.kv.stores.disk import DiskStore
from fd_core.kv.stores.location import parse_location
from tests.hostile.limits import at_length
from tests.kv.stores.test_disk import mounted

MEGABYTE = 1 << 20
VALUES = at_length(600, 4000)


def key_of(number: int) -> bytes:
    return number.to_bytes(2, "big") * 8


def store_in(folder: Path, limit: int) -> DiskStore:
    return DiskStore(parse_location(f"disk:{folder}?max_bytes={limit}"))


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*"))


@pytest.mark.parametrize("limit", [MEGABYTE, 10 * MEGABYTE])
@pytest.mark.parametrize("size", [1, 100, 5000])
def test_store_never_fills_a_small_volume(tmp_path: Path, limit: int, size: int) -> None:
    folder = tmp_path / "kv"
    with mounted(folder, "size=1m"):
        store = store_in(folder, limit)
        for number in range(VALUES):
            assert store.put([(key_of(number), [bytes(size)])], 5) == 1
            assert store.get([key_of(number)], size, 5) == [bytes(size)]
        full = store.stats(5)
        assert 50 < (full.values or 0) < 256
        assert os.statvfs(folder).f_bavail > 0


def test_store_works_on_a_volume_that_runs_out_of_inodes(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with mounted(folder, "size=8m,nr_inodes=200"):
        store = store_in(folder, 8 * MEGABYTE)
        for number in range(VALUES):
            # Keys of few folders: a folder is never freed and uses an inode, too.
            assert store.put([(bytes([number % 8]) + key_of(number), [b"value"])], 5) == 1
        assert (store.stats(5).values or 0) > 50


def test_limit_applies_to_allocated_disk_space(tmp_path: Path) -> None:
    store = store_in(tmp_path / "kv", MEGABYTE)
    for number in range(VALUES):
        assert store.put([(key_of(number % 7000), [b"value"])], 5) == 1
    # Folders are added to that.
    values = sum(path.stat().st_blocks * 512 for path in (tmp_path / "kv").glob("??/*.kv"))
    assert MEGABYTE // 2 < values <= MEGABYTE
    assert on_disk(tmp_path / "kv") <= 2 * MEGABYTE + 16384
    assert (store.stats(5).bytes or 0) >= values


def test_store_evicts_for_other_users_but_not_for_an_oversized_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated volume of 100 blocks: what others use is subtracted."""
    folder, others = tmp_path / "kv", 0
    real = os.fstatvfs

    def pretended(descriptor: int) -> os.statvfs_result:
        fields = list(real(descriptor))
        taken = sum(-(-path.stat().st_size // 4096) for path in folder.glob("??/*.kv")) + others
        fields[:5] = [4096, 4096, 100, 100 - taken, max(0, 100 - taken)]
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "fstatvfs", pretended)
    store = store_in(folder, 100 * MEGABYTE)
    for number in range(200):
        assert store.put([(key_of(number), [b"value"])], 5) == 1
    before = store.stats(5).values or 0
    assert 60 < before <= 98
    with pytest.raises(StoreError, match="No space left") as caught:
        store.put([(key_of(300), [bytes(120 * 4096)])], 5)
    assert caught.value.reason is FailureReason.FULL
    assert store.stats(5).values == before, "values were deleted for one that cannot fit"
    for number in range(100):
        # Others take up to 60 free blocks; the store continues to write.
        others = min(60, 100 - len(list(folder.glob("??/*.kv"))))
        assert store.put([(key_of(400 + number), [b"value"])], 5) == 1
    assert others == 60
    assert 20 < (store.stats(5).values or 0) <= 40
