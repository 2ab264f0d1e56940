"""Start-up scan of a folder: existing files are counted, partial ones removed, foreign ones left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fd_core.http.errors import ApiError
from fd_core.server.batches.accounts import Account
from fd_core.server.batches.store import BatchStore, StoredBatch, StoredFile
from tests.server.batches.faulty_disk import FaultyDisk, Killed

LIMIT = 100_000


def kept(store: BatchStore, owner: str, content: bytes) -> StoredFile:
    with store.upload(owner) as upload:
        upload.reserve(len(content))
        upload.write(content)
        return upload.keep("in.jsonl", "batch")


def batch(number: int, input_file_id: str = "file-0", **fields: object) -> StoredBatch:
    return StoredBatch(
        id=f"batch_{number:024x}",
        endpoint="/v1/completions",
        input_file_id=input_file_id,
        completion_window="24h",
        created_at=number,
        expires_at=number + 1,
        **fields,  # type: ignore[arg-type]
    )


def on_disk(folder: Path) -> int:
    return sum(each.stat().st_size for each in folder.iterdir() if each.name != "lock")


def test_start_counts_files_and_removes_partial_ones(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, LIMIT)
    file = kept(store, "alice", b"x" * 1000)
    store.begin(batch(1, file.id), "alice")
    store.close()
    answers = tmp_path / f"{batch(1).id}_output.jsonl.partial"
    answers.write_bytes(b"{}\n{}\nto")
    halves = ("a.upload", f"{file.id}.new", f"file-{0:024x}.data", f"file-{1:024x}.json")
    for name in (*halves, f"{batch(2).id}_errors.jsonl.partial"):
        (tmp_path / name).write_bytes(b"half")
    for name in ("note.txt", f"{batch(3).id}.json"):
        (tmp_path / name).write_bytes(b"strange")
    again = BatchStore(tmp_path, LIMIT)
    assert again.bytes.used == on_disk(tmp_path)
    assert again.bytes.used_by("alice") == again.bytes.used - 2 * len(b"strange")
    assert {each.name for each in tmp_path.iterdir()} == {
        *("lock", "note.txt", f"{batch(3).id}.json", f"{batch(1).id}.json", answers.name),
        *(f"{file.id}.json", f"{file.id}.data"),
    }
    assert again.batches[batch(1).id].request_counts.completed == 2
    ended = again.conclude(batch(1).id)
    assert ended.status == "expired" and ended.output_file_id is not None
    assert again.content(ended.output_file_id).read_bytes() == b"{}\n{}\n"
    assert again.bytes.used == on_disk(tmp_path)


def test_batch_being_finished_is_finished_once(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, LIMIT)
    store.begin(batch(1, in_progress_at=1), "alice")
    (tmp_path / f"{batch(1).id}_output.jsonl.partial").write_bytes(b"{}\n")
    first = store.conclude(batch(1).id)
    described = tmp_path / f"{batch(1).id}.json"
    described.write_text(json.dumps(json.loads(described.read_text()) | {"status": "finalizing"}))
    store.close()
    again = BatchStore(tmp_path, LIMIT)
    assert again.conclude(batch(1).id).output_file_id == first.output_file_id
    assert list(again.files) == [first.output_file_id]


def test_folder_in_use_is_rejected_until_released(tmp_path: Path) -> None:
    first = BatchStore(tmp_path, LIMIT)
    with pytest.raises(ApiError, match="set --batch-store for each"):
        BatchStore(tmp_path, LIMIT)
    first.close()
    BatchStore(tmp_path, LIMIT).close()


def test_aborted_upload_is_fully_refunded(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, LIMIT)
    with pytest.raises(RuntimeError), store.upload("alice") as upload:
        upload.reserve(500)
        upload.write(b"x" * 500)
        assert store.bytes.used == on_disk(tmp_path) == 500
        raise RuntimeError
    assert store.bytes.used == on_disk(tmp_path) == store.bytes.used_by("alice") == 0


@pytest.mark.parametrize(("keys", "share"), [(0, 1000), (1, 1000), (2, 500), (3, 333), (4, 250), (20_000, 250)])
def test_keys_have_equal_shares_of_at_least_a_quarter(keys: int, share: int) -> None:
    account = Account("bytes", 1000, lambda: keys, "delete some")
    account.take("alice", share)
    with pytest.raises(ApiError) as refused:
        account.take("alice", 1)
    assert refused.value.status == 429 and f"{share:,}" in refused.value.message
    with pytest.raises(ApiError) as refused:
        account.require("bob", share + 1)
    assert refused.value.status == 413
    account.add("alice", -share)
    assert account.used == account.used_by("alice") == 0


def test_kill_at_the_end_of_a_batch_loses_and_duplicates_nothing(tmp_path: Path) -> None:
    finished = False
    for call in range(50):
        folder = tmp_path / str(call)
        store = BatchStore(folder, LIMIT)
        store.begin(batch(1, in_progress_at=1), "alice")
        for kind in ("output", "errors"):
            (folder / f"{batch(1).id}_{kind}.jsonl.partial").write_bytes(b"{}\n")
        try:
            with FaultyDisk(folder, call, error=None).installed():
                store.conclude(batch(1).id)
            finished = True
        except Killed:
            pass
        store.close()
        again = BatchStore(folder, LIMIT)
        left = again.batches[batch(1).id]
        assert not len(again.files) or left.status == "finalizing" or left.ended, "its requests would be repeated"
        ended = again.conclude(batch(1).id)
        assert {ended.output_file_id, ended.error_file_id} == {*again.files} and len(again.files) == 2
        assert again.bytes.used == on_disk(folder)
        again.close()
        if finished:
            break
    assert finished and call > 5
