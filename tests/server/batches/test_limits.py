"""Quotas, fairness and failing disks at a live server: one key leaves room and time for the others."""

from __future__ import annotations

import errno
import gc
import http.client
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fd_core.ops.polled_timeout import PolledTimeout
from fd_core.server.batches import store
from tests.server.batches.faulty_disk import FaultyDisk
from tests.server.batches.test_routes import END, FORM, form, lines
from tests.server.fakes import Answer, LiveServer, live, samples
from tests.server.test_key_limits import guarded

LIMIT = 200_000


def upload(server: LiveServer, key: str, content: bytes, name: str = "in.jsonl") -> Answer:
    body = form(("purpose", None, b"batch"), ("file", name, content))
    return server.request("POST", "/v1/files", body, content_type=FORM, x_api_key=key)


def begin(server: LiveServer, key: str, content: bytes) -> str:
    body = {"input_file_id": upload(server, key, content).json["id"], "endpoint": END, "completion_window": "24h"}
    answer = server.post("/v1/batches", body, x_api_key=key)
    assert answer.status == 200, answer.body
    return answer.json["id"]


def until(server: LiveServer, key: str, batch_id: str, *statuses: str) -> dict[str, Any]:
    limit = PolledTimeout(60)
    while (batch := server.get(f"/v1/batches/{batch_id}", x_api_key=key).json)["status"] not in statuses:
        assert not limit.expired(), batch
        time.sleep(0.01)
    return batch


def on_disk(folder: Path) -> int:
    return sum(each.stat().st_size for each in folder.iterdir() if each.name != "lock")


def used(server: LiveServer) -> int:
    """Return the bytes counted by the server; a test has one server, whose store is the only open one."""
    [found] = [each for each in gc.get_objects() if type(each) is store.BatchStore and not each._lock.closed]
    return server.call(lambda: found.bytes.used)


def at_once(work: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)


def test_parallel_uploads_share_the_remaining_space(tmp_path: Path) -> None:
    with live(batch_api=True, batch_store=str(tmp_path), batch_store_limit=LIMIT) as server:
        answers: list[Answer] = []
        at_once(lambda _: answers.append(upload(server, "", b"x" * 90_000)), 8)
        assert sum(each.status == 200 for each in answers) <= 2
        assert {each.status for each in answers} == {200, 429}
        assert used(server) == on_disk(tmp_path) <= LIMIT


def test_client_file_names_are_not_used_on_disk(tmp_path: Path) -> None:
    texts = "../../etc/passwd", "a" * 5000, "a\0b\n", "🦀" * 255, "C:\\x"
    with live(batch_api=True, batch_store=str(tmp_path / "store"), batch_store_limit=LIMIT) as server:
        for name in (b"\xff\xed\xa0\x80", *map(str.encode, texts)):
            body = form(("purpose", None, b"batch"), ("file", "NAME", b"x" * 1000)).replace(b"NAME", name)
            answer = server.request("POST", "/v1/files", body, content_type=FORM)
            assert answer.status in (200, 400), answer.body
            assert used(server) == on_disk(tmp_path / "store")
            assert {each.name for each in tmp_path.iterdir()} == {"store"}
            for each in server.get("/v1/files").json["data"]:
                assert len(each["filename"]) <= 255
                assert server.request("DELETE", f"/v1/files/{each['id']}").status == 200
            assert used(server) == on_disk(tmp_path / "store") == 0


def test_full_key_leaves_room_for_others(tmp_path: Path) -> None:
    settings = {"batch_api": True, "batch_store": str(tmp_path), "batch_store_limit": LIMIT}
    with live(**settings, api_keys=("one", "two")) as server:
        for _ in range(2):
            assert upload(server, "one", b"x" * 45_000).status == 200
        refused = upload(server, "one", b"x" * 45_000)
        assert (refused.status, refused.error["code"], refused.error["type"]) == (
            429,
            "store_full",
            "insufficient_quota",
        )
        for part in ("limit per key (100,000)", "bytes are in use", "delete files", "--batch-store-key-limit"):
            assert part in refused.error["message"]
        assert upload(server, "one", b"x" * 110_000).status == 413
        assert upload(server, "two", b"x" * 90_000).status == 200
    with live(**settings, api_keys=("one", "two"), batch_store_key_limit=150_000) as server:
        assert upload(server, "one", b"x" * 5_000).status == 200, "stored bytes were counted again"


def test_file_and_batch_counts_are_quotas_per_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_MOST_FILES", 20)
    monkeypatch.setattr(store, "_MOST_BATCHES", 4)
    with live(batch_api=True, batch_store=str(tmp_path), api_keys=("one", "two")) as server:
        server.client.held = True
        mine = [begin(server, "one", lines(1)) for _ in range(2)]
        assert "files" in [upload(server, "one", b"x") for _ in range(5)][-1].error["message"]
        file_id = server.get("/v1/files", x_api_key="one").json["data"][0]["id"]
        body = {"input_file_id": file_id, "endpoint": END, "completion_window": "24h"}
        refused = server.post("/v1/batches", body, x_api_key="one")
        assert (refused.status, refused.error["code"]) == (429, "store_full")
        assert begin(server, "two", lines(1))
        server.client.held = False
        for each in mine:
            until(server, "one", each, "completed")
        files = [each["id"] for each in server.get("/v1/files", x_api_key="one").json["data"]]
        for each in files:
            server.request("DELETE", f"/v1/files/{each}", x_api_key="one")
        newest = begin(server, "one", lines(1))
        kept = [each["id"] for each in server.get("/v1/batches", x_api_key="one").json["data"]]
        assert kept == [newest, mine[1]], "the key's oldest batch is evicted"


def test_batch_without_room_keeps_its_finished_answers(tmp_path: Path) -> None:
    with live(batch_api=True, batch_store=str(tmp_path), batch_store_limit=16_000) as server:
        batch = until(server, "", begin(server, "", lines(60)), "failed", "completed")
        assert batch["status"] == "failed" and batch["errors"]["data"][0]["code"] == "store_full"
        assert "--batch-store-limit" in batch["errors"]["data"][0]["message"]
        kept = server.get(f"/v1/files/{batch['output_file_id']}/content").body.splitlines()
        assert 0 < len(kept) == batch["request_counts"]["completed"] < 60
        assert len({json.loads(each)["custom_id"] for each in kept}) == len(kept)
        assert used(server) == on_disk(tmp_path)


@pytest.mark.timing
def test_rate_limited_batch_does_not_delay_others(tmp_path: Path) -> None:
    keys = {"name": "alice", "requests_per_minute": 9}, {"name": "bob"}
    with guarded(tmp_path, *keys, batch_api=True, batch_store=str(tmp_path / "store")) as server:
        server.client.held = True  # four lines are in flight, and the limit has room for the uploads
        limited, queued = begin(server, "alice", lines(50)), begin(server, "alice", lines(1))
        until(server, "alice", limited, "in_progress")
        server.client.held = False
        assert until(server, "bob", begin(server, "bob", lines(20)), "completed")["request_counts"]["completed"] == 20
        begun = time.monotonic()
        while not (refusals := samples(server).get("fdcore_key_refusals_total[alice][requests]", 0)):
            assert time.monotonic() - begun < 10
        time.sleep(0.3)
        assert samples(server)["fdcore_key_refusals_total[alice][requests]"] == refusals, "it waits, and sends nothing"
        for each in (queued, limited):
            assert server.post(f"/v1/batches/{each}/cancel", {}, x_api_key="alice").status == 200
            assert until(server, "alice", each, "cancelled")
        assert server.get(f"/v1/batches/{limited}", x_api_key="alice").json["request_counts"]["completed"] <= 5


@pytest.mark.timing
def test_full_disk_shows_in_health_and_batches_resume(tmp_path: Path) -> None:
    with live(batch_api=True, batch_store=str(tmp_path)) as server:
        server.client.held = True
        batch_id = begin(server, "", lines(5))
        until(server, "", batch_id, "in_progress")
        with FaultyDisk(tmp_path, 0, 10**9, errno.ENOSPC).installed():
            server.client.held = False
            begun = time.monotonic()
            while "reason" not in (health := server.get("/health").json) or health["reason"] is None:
                assert time.monotonic() - begun < 10
                time.sleep(0.01)
            assert "background task batches: no space left on device" in health["reason"]
            assert server.get("/ready").status == 200
            assert samples(server)["fdcore_background_failures_total[batches]"] >= 1
            assert upload(server, "", b"x").error["code"] == "batch_store_failed"
        batch = until(server, "", batch_id, "completed")
        assert batch["request_counts"] == {"total": 5, "completed": 5, "failed": 0}
        assert used(server) >= on_disk(tmp_path)


def test_concurrent_lists_uploads_and_deletes_have_no_500(tmp_path: Path) -> None:
    with live(batch_api=True, batch_store=str(tmp_path)) as server:
        statuses: set[int] = set()

        def client(number: int) -> None:
            for _ in range(12):
                kept = upload(server, "", b"x" * 2000)
                listed = server.get("/v1/files?limit=5")
                name = listed.json["data"][0]["id"]
                deleted = server.request("DELETE", f"/v1/files/{name}")
                read = server.get(f"/v1/files/{kept.json['id']}/content")
                assert deleted.status in (200, 404) and read.status in (200, 404)
                statuses.update((kept.status, listed.status))

        at_once(client, 4)
        assert statuses == {200}
        assert used(server) == on_disk(tmp_path)


@pytest.mark.timing
def test_file_deleted_while_being_read_is_read_to_its_end(tmp_path: Path) -> None:
    content = b"0123456789" * 2_000_000
    with live(batch_api=True, batch_store=str(tmp_path)) as server:
        name = upload(server, "", content).json["id"]
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("GET", f"/v1/files/{name}/content")
        answer = connection.getresponse()
        first = answer.read(1000)
        assert server.request("DELETE", f"/v1/files/{name}").status == 200
        assert server.request("DELETE", f"/v1/files/{name}").status == 404
        assert used(server) >= len(content), "its bytes are on disk until then"
        assert first + answer.read() == content
        connection.close()
        begun = time.monotonic()
        while used(server):
            assert time.monotonic() - begun < 5
            time.sleep(0.01)
