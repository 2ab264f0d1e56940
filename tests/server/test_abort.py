"""POST /v1/abort_requests."""

from __future__ import annotations

import threading

import openai
import pytest

from tests.server.fakes import Answer, LiveServer, live, samples
from tests.server.stream.test_disconnect import eventually

PATH = "/v1/completions"


class Background(threading.Thread):
    """A request that runs in the background of the test."""

    def __init__(self, server: LiveServer, request_id: str, path: str = PATH, key: str = "", **fields: object) -> None:
        super().__init__(daemon=True)
        self._server, self._path = server, path
        self._headers = {"X_Request_Id": request_id} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._fields = {"prompt": "a", **fields} if path == PATH else {"model": "fake", **fields}
        self.start()

    def run(self) -> None:
        self._answer = self._server.post(self._path, self._fields, **self._headers)

    @property
    def answer(self) -> Answer:
        self.join(60)
        return self._answer


def ended(choice: dict[str, object]) -> tuple[object, object]:
    return choice["finish_reason"], choice["stop_reason"]


ABORTED = ("length", "abort")
"""Clients with validation accept only OpenAI's finish reasons."""


def waiting(server: LiveServer, count: int) -> None:
    eventually(lambda: len(server.client.live) == count)


@pytest.mark.parametrize("given", ["one", "cmpl-one"])
def test_request_is_aborted_by_its_id_or_its_response_id(server: LiveServer, given: str) -> None:
    server.client.held = True
    one, two = Background(server, "one", n=2), Background(server, "two")
    waiting(server, 3)
    answer = server.post("/v1/abort_requests", {"req_ids": [given, "unknown", given]})
    assert answer.json == {"aborted": [given], "not_found": ["unknown"]}
    assert [ended(choice) for choice in one.answer.json["choices"]] == [ABORTED, ABORTED]
    assert two.is_alive()
    assert server.post("/v1/abort_requests", {"req_ids": [given]}).json == {"aborted": [], "not_found": [given]}
    server.client.held = False
    assert two.answer.json["choices"][0]["finish_reason"] == "stop"


def test_all_are_aborted(server: LiveServer) -> None:
    server.client.held = True
    running = [Background(server, name, stream=name == "b") for name in "abc"]
    waiting(server, 3)
    answer = server.post("/v1/abort_requests", {"abort_all": True})
    assert sorted(answer.json["aborted"]) == ["a", "b", "c"]
    assert ended(running[1].answer.events[-2]["choices"][0]) == ABORTED
    assert ended(running[0].answer.json["choices"][0]) == ABORTED
    assert server.post("/v1/abort_requests", {"abort_all": True}).json == {"aborted": [], "not_found": []}


def test_requests_that_share_an_id_are_aborted_together(server: LiveServer) -> None:
    server.client.held = True
    running = [Background(server, "trace") for _ in range(3)]
    waiting(server, 3)
    assert server.post("/v1/abort_requests", {"req_ids": ["trace"]}).json["aborted"] == ["trace"]
    assert [ended(each.answer.json["choices"][0]) for each in running] == [ABORTED] * 3


def test_abort_is_counted_as_aborted_and_stop_string_abort_is_not(server: LiveServer) -> None:
    before = samples(server)
    server.client.reply = lambda _: b"we abort here"
    choice = server.post(PATH, {"prompt": "a", "stop": "abort"}).json["choices"][0]
    assert ended(choice) == ("stop", "abort")
    waiting(server, 0)
    server.client.held = True
    running = Background(server, "one")
    waiting(server, 1)
    server.post("/v1/abort_requests", {"abort_all": True})
    assert ended(running.answer.json["choices"][0]) == ABORTED
    after = samples(server)
    for outcome, more in (("stop", 1), ("abort", 1), ("length", 0)):
        name = f"fdcore_generations_total[{outcome}]"
        assert after[name] - before[name] == more


MESSAGE = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 300}


def abort_midway(server: LiveServer, name: str, path: str, **fields: object) -> Answer:
    """Return the answer to a request that is aborted by its response id after half of its text."""
    server.client.reply = lambda _: b"Hello"
    server.client.per_step, server.client.step_seconds = 5, 0.0
    server.client.pause_after = 5
    running = Background(server, "one", path, **fields)
    eventually(lambda: any(done == 5 for _, done in server.client.live.values()))
    assert server.post("/v1/abort_requests", {"req_ids": [name]}).json["aborted"] == [name]
    return running.answer


@pytest.mark.parametrize("stream", [False, True])
def test_aborted_response_is_cancelled(server: LiveServer, stream: bool) -> None:
    answer = abort_midway(server, "resp_one", "/v1/responses", input="hi", stream=stream)
    assert answer.status == 200
    response = answer.events[-1]["response"] if stream else answer.json
    assert (response["status"], response["incomplete_details"], response["error"]) == ("cancelled", None, None)
    [item] = response["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "Hello")
    openai.types.responses.Response.model_validate(response, strict=True)
    if stream:
        assert [each["type"] for each in answer.events[-2:]] == ["response.output_item.done", "response.incomplete"]
        assert answer.events[-2]["item"] == item
        openai.types.responses.ResponseIncompleteEvent.model_validate(answer.events[-1], strict=True)


def test_aborted_message_ends_with_an_error(server: LiveServer) -> None:
    answer = abort_midway(server, "msg_one", "/v1/messages", stream=True, **MESSAGE)
    assert (answer.status, answer.events[-1]["type"]) == (200, "error")
    assert answer.events[-1]["error"] == {
        "type": "api_error",
        "message": "the request was aborted; its text is incomplete",
    }
    assert not [each for each in answer.events if each["type"] in ("message_delta", "message_stop")]
    assert "".join(each["delta"]["text"] for each in answer.events if "delta" in each) == "Hello"


def test_aborted_whole_message_is_an_error_clients_do_not_retry(server: LiveServer) -> None:
    answer = abort_midway(server, "msg_one", "/v1/messages", **MESSAGE)
    assert (answer.status, answer.json["error"]["type"]) == (499, "api_error")


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_stream_fails_if_its_engine_dies(path: str) -> None:
    fields = {"input": "hi"} if path == "/v1/responses" else MESSAGE
    with live() as server:
        server.client.pause_after = 5
        running = Background(server, "one", path, stream=True, **fields)
        eventually(lambda: any(done == 5 for _, done in server.client.live.values()))
        server.call(server.client.die)
        last = running.answer.events[-1]
        refused = server.post(path, {"model": "fake", **fields})
    if path == "/v1/responses":
        failed = openai.types.responses.ResponseFailedEvent.model_validate(last, strict=True)
        assert (failed.type, failed.response.status) == ("response.failed", "failed")
        assert "engine" in failed.response.error.message
        assert [item["content"][0]["text"] for item in last["response"]["output"]] == ["Hello"]
        assert last["response"]["output"][0]["status"] == "incomplete"
    else:
        assert (last["type"], last["error"]["type"]) == ("error", "overloaded_error")
    assert refused.status == 503
    assert refused.json["error"]["type"] == ("overloaded_error" if path == "/v1/messages" else "server_error")
