"""/v1/files and /v1/batches through a live server and OpenAI's own client."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from fd_core.ops.polled_timeout import PolledTimeout
from fd_core.server.batches import store
from tests.server.fakes import FakeClient, LiveServer, live

FORM = "multipart/form-data; boundary=xyz"
END = "/v1/completions"


def line(number: int, url: str = END, **body: Any) -> bytes:
    return json.dumps(
        {"custom_id": f"c{number}", "method": "POST", "url": url, "body": {"prompt": f"{number}", **body}}
    ).encode()


def lines(count: int) -> bytes:
    return b"\n".join(line(number) for number in range(count))


def form(*fields: tuple[str, str | None, bytes]) -> bytes:
    parts = []
    for name, filename, content in fields:
        named = "" if filename is None else f'; filename="{filename}"'
        parts.append(b'--xyz\r\ncontent-disposition: form-data; name="%s"%s\r\n\r\n' % (name.encode(), named.encode()))
        parts.append(content + b"\r\n")
    return b"".join(parts) + b"--xyz--\r\n"


def upload(server: LiveServer, content: bytes) -> str:
    body = form(("purpose", None, b"batch"), ("file", "in.jsonl", content))
    answer = server.request("POST", "/v1/files", body, content_type=FORM)
    assert answer.status == 200, answer.body
    return answer.json["id"]


def begin(server: LiveServer, file_id: str, endpoint: str = END) -> str:
    answer = server.post("/v1/batches", {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"})
    assert answer.status == 200, answer.body
    return answer.json["id"]


def until(server: LiveServer, batch_id: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    limit = PolledTimeout(60)
    while not holds(batch := server.get(f"/v1/batches/{batch_id}").json):
        assert not limit.expired(), batch
        time.sleep(0.01)
    return batch


def ended(batch: dict[str, Any]) -> bool:
    return batch["status"] in ("completed", "failed", "cancelled", "expired")


def content(server: LiveServer, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(each) for each in server.get(f"/v1/files/{file_id}/content").body.splitlines()]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    with live(batch_api=True, batch_store=str(tmp_path / "store"), batch_store_limit=200_000) as running:
        yield running


def test_official_client_runs_a_batch(server: LiveServer) -> None:
    data = b"\n".join((line(0, temperature=9), line(1), line(2)))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        kept = client.files.create(file=("in.jsonl", data), purpose="batch")
        assert (kept.bytes, kept.filename, kept.purpose) == (len(data), "in.jsonl", "batch")
        batch = client.batches.create(
            input_file_id=kept.id, endpoint=END, completion_window="24h", metadata={"who": "me"}
        )
        until(server, batch.id, ended)
        batch = client.batches.retrieve(batch.id)
        assert (batch.status, batch.metadata) == ("completed", {"who": "me"})
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (3, 2, 1)
        good = [json.loads(each) for each in client.files.content(batch.output_file_id).text.splitlines()]
        bad = [json.loads(each) for each in client.files.content(batch.error_file_id).text.splitlines()]
        assert {each["custom_id"] for each in good} == {"c1", "c2"}
        assert good[0]["response"]["body"]["choices"][0]["text"] == "Hello, world!"
        assert bad[0]["response"]["body"]["error"]["param"] == "temperature"
        assert {each.id for each in client.files.list()} == {kept.id, batch.output_file_id, batch.error_file_id}
        newest = [each.id for each in client.files.list(limit=1)]
        assert [each.id for each in client.files.list(limit=1, order="asc")] == newest[::-1]
        assert [each.id for each in client.batches.list(limit=1)] == [batch.id]
        assert client.files.delete(kept.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(kept.id)


@pytest.mark.parametrize(
    ("body", "kind", "status", "param"),
    [
        (form(("purpose", None, b"assistants"), ("file", "a", b"x")), FORM, 400, "purpose"),
        (form(("file", "a", b"x")), FORM, 400, "purpose"),
        (form(("purpose", None, b"batch")), FORM, 400, "file"),
        (form(("purpose", None, b"batch"), ("file", None, b"x")), FORM, 400, "file"),
        (form(("purpose", None, b"batch"), ("file", "a", b"x"))[:-20], FORM, 400, None),
        (b"", FORM, 400, None),
        (b"{}", "application/json", 415, None),
        (b"x", "multipart/form-data", 415, None),
        (form(("purpose", None, b"batch"), ("file", "a", b"x" * 300_000)), FORM, 413, "file"),
    ],
)
def test_invalid_upload_is_rejected_and_leaves_nothing(
    server: LiveServer, tmp_path: Path, body: bytes, kind: str, status: int, param: str | None
) -> None:
    answer = server.request("POST", "/v1/files", body, content_type=kind)
    assert (answer.status, answer.error["param"]) == (status, param)
    assert {each.name for each in (tmp_path / "store").iterdir()} == {"lock"}


def test_store_is_bounded(server: LiveServer) -> None:
    for _ in range(2):
        upload(server, b"x" * 90_000)
    body = form(("purpose", None, b"batch"), ("file", "a", b"x" * 90_000))
    answer = server.request("POST", "/v1/files", body, content_type=FORM)
    assert (answer.status, answer.error["code"]) == (429, "store_full")
    assert "exceed the limit of the store (200,000)" in answer.error["message"]


def test_cross_origin_upload_is_rejected(server: LiveServer) -> None:
    body = form(("purpose", None, b"batch"), ("file", "a", b"x"))
    answer = server.request("POST", "/v1/files", body, content_type=FORM, origin="http://elsewhere")
    assert (answer.status, answer.error["code"]) == (403, "foreign_origin")
    own = server.request("POST", "/v1/files", body, content_type=FORM, origin=server.url)
    assert own.status == 200


def test_malformed_lines_fail_the_batch_with_line_numbers(server: LiveServer) -> None:
    file_id = upload(server, b"\n".join((line(0), b"{", line(1, url="/v1/chat/completions"), line(0))))
    batch = until(server, begin(server, file_id), ended)
    assert batch["status"] == "failed"
    assert [(each["line"], each["code"]) for each in batch["errors"]["data"]] == [
        (2, "invalid_line"),
        (3, "invalid_url"),
        (4, "duplicate_custom_id"),
    ]
    assert until(server, begin(server, upload(server, b"\n")), ended)["errors"]["data"][0]["code"] == "empty_file"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input_file_id": "file-0", "endpoint": END}, "input_file_id"),
        ({"input_file_id": "../../etc/passwd", "endpoint": END}, "input_file_id"),
        ({"input_file_id": "file-0", "endpoint": "/metrics"}, "endpoint"),
        ({"input_file_id": "file-0", "endpoint": END, "completion_window": "1h"}, "completion_window"),
        ({"endpoint": END}, "input_file_id"),
        ({"input_file_id": "file-0", "endpoint": END, "output_expires_after": {}}, "output_expires_after"),
    ],
)
def test_invalid_batch_is_rejected_by_name(server: LiveServer, body: dict[str, Any], param: str) -> None:
    answer = server.post("/v1/batches", body)
    assert (answer.status, answer.error["param"]) == (400, param)


@pytest.mark.parametrize("path", ["/v1/files/file-1", "/v1/files/..%2f..%2fetc", "/v1/batches/batch_1"])
def test_missing_objects_are_404(server: LiveServer, path: str) -> None:
    assert server.get(path).status == 404
    assert server.get("/v1/files?order=up").error["param"] == "order"
    assert server.get("/v1/files?limit=0").status == server.get("/v1/batches?after=x").status == 400


def test_cancelled_batch_keeps_its_finished_answers(server: LiveServer) -> None:
    server.client.step_seconds = 0.02
    batch_id = begin(server, file_id := upload(server, lines(200)))
    until(server, batch_id, lambda batch: batch["request_counts"]["completed"] > 2)
    assert server.request("DELETE", f"/v1/files/{file_id}").error["code"] == "file_in_use"
    assert server.post(f"/v1/batches/{batch_id}/cancel", {}).json["status"] == "cancelling"
    batch = until(server, batch_id, ended)
    assert batch["status"] == "cancelled"
    answers = content(server, batch["output_file_id"])
    assert 2 < len(answers) == batch["request_counts"]["completed"] < 200
    assert all(each["response"]["status_code"] == 200 for each in answers)
    assert server.call(lambda: server.client.active_requests) == 0


@pytest.mark.timing
def test_batch_leaves_slots_for_others(server: LiveServer) -> None:
    server.client.held = True
    begin(server, upload(server, lines(50)))
    begun = time.monotonic()
    while len(server.client.live) < 4:
        assert time.monotonic() - begun < 5
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(server.client.live) == 4, "half of eight slots"
    server.client.held = False


def test_batch_resumes_after_a_server_restart(tmp_path: Path) -> None:
    settings = {"batch_api": True, "batch_store": str(tmp_path)}
    with live(lambda: FakeClient(step_seconds=0.02), **settings) as first:
        batch_id = begin(first, upload(first, lines(60)))
        until(first, batch_id, lambda batch: batch["request_counts"]["completed"] > 3)
    partial = (tmp_path / f"{batch_id}_output.jsonl.partial").read_bytes()
    before = [json.loads(each) for each in partial.splitlines()]
    assert 3 < len(before) < 60
    with live(lambda: FakeClient("Goodbye"), **settings) as second:
        batch = until(second, batch_id, ended)
        after = {each["custom_id"]: each for each in content(second, batch["output_file_id"])}
        assert (batch["status"], len(after)) == ("completed", 60)
        assert all(after[each["custom_id"]] == each for each in before)
        submitted = {spec.request_id.split(".")[1] for spec in second.client.specs}
        assert len(submitted) == 60 - len(before)


def test_folder_is_locked_by_one_server(server: LiveServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert server.get("/v1/files").status == 200
    with live(batch_api=True, batch_store=str(tmp_path / "store")) as other:
        answer = other.get("/v1/files")
        assert (answer.status, answer.error["code"]) == (503, "batch_store_in_use")
        assert other.post(END, {"prompt": "a"}).status == 200
    (logged,) = (message for message in caplog.messages if "files and batches are disabled" in message)
    assert "all other endpoints work" in logged and "set --batch-store for each" in logged
    assert logged.endswith(f"({tmp_path / 'store'})")


def test_unwritable_folder_disables_only_batches(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with live(batch_api=True, batch_store=str(tmp_path / "file" / "store")) as server:
        answer = server.get("/v1/files")
        assert (answer.status, answer.error["code"]) == (503, "batch_store_failed")
        assert "--batch-store" in answer.error["message"]
        assert server.post(END, {"prompt": "a"}).status == 200


def test_disk_error_is_reported_and_leaves_nothing(
    server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "_write", full)
    body = form(("purpose", None, b"batch"), ("file", "a", b"x"))
    answer = server.request("POST", "/v1/files", body, content_type=FORM)
    assert (answer.status, answer.error["code"]) == (503, "batch_store_failed")
    assert "no space left" in answer.error["message"]
    assert server.get("/v1/files").json["data"] == []
    assert {each.name for each in (tmp_path / "store").iterdir()} == {"lock"}


def test_partial_files_are_removed_at_start(tmp_path: Path) -> None:
    half = tmp_path / f"file-{'0' * 24}.data"
    half.write_bytes(b"x")
    (tmp_path / "abc.upload").write_bytes(b"x")
    (tmp_path / f"batch_{'0' * 24}.json").write_bytes(b"{")
    with live(batch_api=True, batch_store=str(tmp_path)) as server:
        assert server.get("/v1/files").json["data"] == server.get("/v1/batches").json["data"] == []
        assert not half.exists() and not (tmp_path / "abc.upload").exists()


@pytest.mark.timing
def test_files_require_a_key_and_batches_run_with_it(tmp_path: Path) -> None:
    with live(batch_api=True, batch_store=str(tmp_path), api_keys=("k",)) as server:
        assert server.get("/v1/files").status == 401
        body = form(("purpose", None, b"batch"), ("file", "in", lines(2)))
        kept = server.request("POST", "/v1/files", body, content_type=FORM, x_api_key="k").json["id"]
        request = {"input_file_id": kept, "endpoint": END, "completion_window": "24h"}
        batch_id = server.post("/v1/batches", request, x_api_key="k").json["id"]
        begun = time.monotonic()
        while (batch := server.get(f"/v1/batches/{batch_id}", x_api_key="k").json)["status"] != "completed":
            assert time.monotonic() - begun < 10
        assert batch["request_counts"]["completed"] == 2


def test_without_the_flag_routes_are_404() -> None:
    with live(batch_api=False) as server:
        assert server.get("/v1/files").status == server.post("/v1/batches", {}).status == 404
