"""Files, batches and stored responses belong to the key that created them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fd_core.ops.polled_timeout import PolledTimeout
from tests.server.fakes import Answer, FakeClient, LiveServer, live

KEYS = ("one", "two")
FORM = "multipart/form-data; boundary=xyz"
RESPONSES = "/v1/responses"


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {"batch_api": True, "batch_store": str(folder), "api_keys": KEYS, "response_store": 4} | changes


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    with live(**settings(tmp_path)) as running:
        yield running


def upload(server: LiveServer, key: str, url: str = "/v1/completions", **body: Any) -> str:
    line = {"custom_id": "c", "method": "POST", "url": url, "body": body or {"prompt": "a"}}
    fields = [b'name="purpose"\r\n\r\nbatch', b'name="file"; filename="in"\r\n\r\n' + json.dumps(line).encode()]
    form = b"".join(b"--xyz\r\ncontent-disposition: form-data; " + each + b"\r\n" for each in fields) + b"--xyz--\r\n"
    answer = server.request("POST", "/v1/files", form, content_type=FORM, x_api_key=key)
    assert answer.status == 200, answer.body
    assert "owner" not in answer.json
    return answer.json["id"]


def begin(server: LiveServer, key: str, file_id: str, endpoint: str = "/v1/completions") -> Answer:
    body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"}
    return server.post("/v1/batches", body, x_api_key=key)


def ended(server: LiveServer, key: str, batch_id: str) -> dict[str, Any]:
    limit = PolledTimeout(60)
    while (batch := server.get(f"/v1/batches/{batch_id}", x_api_key=key).json)["status"] != "completed":
        assert not limit.expired(), batch
        time.sleep(0.01)
    assert "owner" not in batch
    return batch


def listed(server: LiveServer, key: str, what: str) -> list[str]:
    return [each["id"] for each in server.get(f"/v1/{what}", x_api_key=key).json["data"]]


def test_files_and_batches_are_private_to_their_key(server: LiveServer, tmp_path: Path) -> None:
    mine = upload(server, "one")
    batch_id = begin(server, "one", mine).json["id"]
    output = ended(server, "one", batch_id)["output_file_id"]

    def check(running: LiveServer) -> None:
        assert (set(listed(running, "one", "files")), listed(running, "one", "batches")) == ({mine, output}, [batch_id])
        assert listed(running, "two", "files") == listed(running, "two", "batches") == []
        for path in (f"files/{mine}", f"files/{output}", f"files/{output}/content", f"batches/{batch_id}"):
            assert running.get(f"/v1/{path}", x_api_key="one").status == 200
            refused = running.get(f"/v1/{path}", x_api_key="two")
            unknown = running.get(
                "/v1/" + path.replace(mine, "file-0").replace(output, "file-0").replace(batch_id, "batch_0"),
                x_api_key="two",
            )
            assert refused.status == unknown.status == 404
            assert refused.error["code"] == unknown.error["code"]
        assert running.request("DELETE", f"/v1/files/{mine}", x_api_key="two").status == 404
        assert running.post(f"/v1/batches/{batch_id}/cancel", {}, x_api_key="two").status == 404
        assert begin(running, "two", mine).error["code"] == "file_not_found"
        assert running.get(f"/v1/files?after={mine}", x_api_key="two").status == 400

    check(server)
    server.stop()
    server.join()
    with live(**settings(tmp_path, api_keys=("two", "one"))) as again:
        check(again)
        assert again.request("DELETE", f"/v1/files/{mine}", x_api_key="one").status == 200
    stored = "".join(each.read_text() for each in tmp_path.glob("*.json"))
    assert '"owner":"' in stored and '"one"' not in stored, "a key was written to disk"


def test_stored_responses_are_private_to_their_key(server: LiveServer) -> None:
    ask = {"model": "fake", "input": "hi"}
    ids = {key: server.post(RESPONSES, ask, x_api_key=key, x_request_id="same").json["id"] for key in KEYS}
    assert len(set(ids.values())) == 1, "an id chosen by a client must not expose another key's response"
    assert server.request("DELETE", f"{RESPONSES}/{ids['two']}", x_api_key="two").status == 200
    for key, status in (("one", 200), ("two", 404)):
        assert server.get(f"{RESPONSES}/{ids['one']}", x_api_key=key).status == status
        goes_on = server.post(RESPONSES, ask | {"previous_response_id": ids["one"]}, x_api_key=key)
        assert goes_on.status == status
    assert server.request("DELETE", f"{RESPONSES}/{ids['one']}", x_api_key="two").status == 404


def test_results_of_a_batch_belong_to_its_owner(server: LiveServer) -> None:
    file_id = upload(server, "one", RESPONSES, model="fake", input="hi", store=True)
    batch = ended(server, "one", begin(server, "one", file_id, RESPONSES).json["id"])
    content = server.get(f"/v1/files/{batch['output_file_id']}/content", x_api_key="one")
    kept = json.loads(content.body)["response"]["body"]["id"]
    assert [server.get(f"{RESPONSES}/{kept}", x_api_key=key).status for key in KEYS] == [200, 404]


def test_keys_added_later_do_not_see_files_created_without_keys(tmp_path: Path) -> None:
    with live(**settings(tmp_path, api_keys=())) as server:
        mine = upload(server, "one")
        assert listed(server, "two", "files") == [mine]
    with live(lambda: FakeClient(), **settings(tmp_path)) as server:
        assert listed(server, "one", "files") == []


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("share", [False, True])
def test_prefixes_are_shared_only_within_a_key_by_default(share: bool) -> None:
    with live(api_keys=KEYS, share_prefix_cache=share) as server:
        bodies = [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", CHAT)]
        bodies += [("/v1/responses", {"input": "a"}), ("/v1/messages", CHAT | {"model": "fake", "max_tokens": 5})]
        bodies += [("/v1/embeddings", {"input": "a"})]
        for path, body in bodies:
            for salt in (None, "s"):
                server.client.specs.clear()
                for key in (*KEYS, KEYS[0]):
                    assert server.post(path, body | {"cache_salt": salt}, x_api_key=key).status == 200
                one, two, again = (each.tenant for each in server.client.specs)
                assert one == again != two, "fair shares are per key and user field"
                one, two, again = (each.cache_salt for each in server.client.specs)
                assert (one == again, one == two) == (True, share), path
                assert one.endswith(salt or "")
    with live() as server:
        server.post("/v1/completions", {"prompt": "a", "cache_salt": "s"})
        assert server.client.specs[0].cache_salt == "s", "without keys prefixes need no separation"
