"""Log-probabilities of prompts over HTTP, as requested by evaluation harnesses."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from fd_core.runner.sampling.prompt_scores import PromptScorer
from tests.engine.faults import Faults
from tests.engine.test_prompt_logprobs import right
from tests.server.fakes import LiveServer, live
from tests.server.stream.test_disconnect import eventually
from tests.server.test_abort import Background
from tests.server.test_null_engine import null_client

PATH = "/v1/completions"
PROMPT = [72, 228, 97, 98, 99, 256, 100]
CONTEXT, CONTINUATION = [5, 6, 7, 8], [9, 10, 11]


@pytest.fixture(scope="module")
def null() -> Iterator[LiveServer]:
    with live(null_client) as server:
        yield server


def exact(ids: list[int]) -> list[float]:
    """Log-probabilities after each token, straight from the model."""
    table = right(tuple(ids))
    return [float(table[index, token]) for index, token in enumerate(ids[1:])]


def greedy(ids: list[int]) -> int:
    return int(right(tuple(ids))[-1].argmax())


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_harness_gets_the_log_likelihood_of_a_continuation(null: LiveServer, max_tokens: int) -> None:
    """The request of lm-evaluation-harness and the values it reads; sent twice, so that the prefix is cached."""
    ids = CONTEXT + CONTINUATION
    body = {"prompt": [ids, PROMPT], "max_tokens": max_tokens, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1}
    for _ in range(2):
        answer = null.post(PATH, body).json
        for choice, given in zip(answer["choices"], (ids, PROMPT), strict=True):
            scores = choice["logprobs"]
            scored = scores["token_logprobs"]
            assert scored[0] is None
            assert scores["top_logprobs"][0] is None
            assert scored[1 : len(given)] == pytest.approx(exact(given), abs=1e-4)
            assert {len(column) for column in scores.values()} == {len(given) + max_tokens}
            assert choice["finish_reason"] == "length" or greedy(given) == 256
        assert answer["usage"]["completion_tokens"] == 2 * max_tokens
        assert answer["usage"]["prompt_tokens"] == len(ids) + len(PROMPT)
        # The harness drops the last one, which belongs to the generated token.
        first = answer["choices"][0]["logprobs"]
        end = None if max_tokens == 0 else -1
        assert sum(first["token_logprobs"][len(CONTEXT) : end]) == pytest.approx(sum(exact(ids)[3:]), abs=1e-3)


def test_greedy_continuation_is_recognized(null: LiveServer) -> None:
    ids = list(CONTEXT)
    for _ in range(3):
        ids.append(greedy(ids))
    body = {"max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
    for given, is_greedy in ((ids, True), ([*ids[:-1], (ids[-1] + 1) % 256], False)):
        scores = null.post(PATH, {**body, "prompt": [given]}).json["choices"][0]["logprobs"]
        pairs = zip(scores["token_logprobs"][4:-1], scores["top_logprobs"][4:-1], strict=True)
        assert all(own == max(top.values()) for own, top in pairs) is is_greedy


def test_offsets_count_characters_from_the_start_of_the_echo(null: LiveServer) -> None:
    body = {
        "prompt": "naïve",
        "max_tokens": 3,
        "temperature": 0,
        "logprobs": 0,
        "echo": True,
        "logit_bias": {"97": 100},
    }
    choice = null.post(PATH, body).json["choices"][0]
    assert choice["text"] == "naïveaaa"
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 2, 3, 4, 5, 6, 7]
    assert choice["logprobs"]["tokens"][2:4] == ["bytes:\\xc3", "bytes:\\xaf"]


def test_prompt_alone_returns_no_generated_text(null: LiveServer) -> None:
    choice = null.post(PATH, {"prompt": "ab", "max_tokens": 0, "echo": True}).json["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == ("ab", "length", None)


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_joined_stream_equals_the_whole_answer(null: LiveServer, max_tokens: int) -> None:
    body = {
        "prompt": "abc",
        "max_tokens": max_tokens,
        "temperature": 0,
        "logprobs": 2,
        "echo": True,
        "ignore_eos": True,
    }
    whole = null.post(PATH, body).json["choices"][0]
    choices = [event["choices"][0] for event in null.post(PATH, {**body, "stream": True}).events[:-1]]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for name, column in whole["logprobs"].items():
        assert [each for choice in choices for each in choice["logprobs"][name]] == column
    assert choices[-1]["finish_reason"] == "length"


def test_completions_use_vllm_format(null: LiveServer) -> None:
    choice = null.post(PATH, {"prompt": PROMPT, "prompt_logprobs": 2, "max_tokens": 1}).json["choices"][0]
    first, *others = choice["prompt_logprobs"]
    assert (first, len(others)) == (None, len(PROMPT) - 1)
    table = right(tuple(PROMPT))
    for index, row in enumerate(others):
        order = np.argsort(-table[index], kind="stable").tolist()
        own = PROMPT[index + 1]
        assert set(row) == {str(each) for each in {*order[:2], own}}
        assert row[str(order[0])]["rank"] == 1
        assert {each: score["rank"] for each, score in row.items()} == {
            each: order.index(int(each)) + 1 for each in row
        }
        for token_id, score in row.items():
            assert score["logprob"] == pytest.approx(table[index, int(token_id)], abs=1e-4)
    assert others[1]["97"]["decoded_token"] == "a"


def test_chat_returns_prompt_logprobs_outside_choices(null: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "n": 2}
    assert "prompt_logprobs" not in null.post("/v1/chat/completions", body).json
    answer = null.post("/v1/chat/completions", {**body, "prompt_logprobs": 0}).json
    rendered = list(b"user: hi\nassistant: ")
    assert [next(iter(row)) for row in answer["prompt_logprobs"][1:]] == [str(each) for each in rendered[1:]]
    found = [row[str(own)]["logprob"] for own, row in zip(rendered[1:], answer["prompt_logprobs"][1:], strict=True)]
    assert found == pytest.approx(exact(rendered), abs=1e-4)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_tokens": 0}, "max_tokens", "requires echo"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not supported with stream"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "0"),
        ({"prompt": [[1] * 399] * 126, "prompt_logprobs": 20}, "prompt_logprobs", "1048576"),
        ({"prompt": [[1] * 399] * 126, "echo": True, "logprobs": 20}, "logprobs", "1048576"),
    ],
)
def test_unsupported_request_is_rejected_by_name(null: LiveServer, fields: dict, param: str, words: str) -> None:
    answer = null.post(PATH, {"prompt": "a", "max_tokens": 1, **fields})
    assert (answer.status, answer.json["error"]["param"]) == (400, param)
    assert words in answer.json["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_a_prompt_share_its_scores(null: LiveServer, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    score = PromptScorer.score
    monkeypatch.setattr(PromptScorer, "score", lambda *given: (computed.append(len(given[3][0])), score(*given))[1])
    body = {"prompt": [PROMPT, CONTEXT], "n": 3, "echo": True, "logprobs": 2, "max_tokens": 3, "ignore_eos": True}
    answer = null.post(PATH, {**body, "seed": 5, "stream": stream})
    assert answer.status == 200
    assert sum(computed) == len(PROMPT) + len(CONTEXT) - 2
    found: dict[int, list[float | None]] = {index: [] for index in range(6)}
    for event in answer.events[:-1] if stream else [answer.json]:
        for choice in event["choices"]:
            found[choice["index"]] += choice["logprobs"]["token_logprobs"]
    for index, row in found.items():
        given = PROMPT if index < 3 else CONTEXT
        assert len(row) == len(given) + 3
        assert row[1 : len(given)] == pytest.approx(exact(given), abs=1e-4)


def test_aborted_prompt_leaves_no_choice_waiting(faults: Faults) -> None:
    faults.arm("hold", position=100)
    slow = {"prompt": [[1] * 300], "n": 4, "echo": True, "logprobs": 0, "max_tokens": 90, "stream": True}
    with live(partial(null_client, backend="faulty")) as server:
        running = Background(server, "slow", **slow)
        eventually(lambda: faults.count == 1)
        assert server.post("/v1/abort_requests", {"req_ids": ["slow"]}).json["aborted"] == ["slow"]
        faults.release()
        assert running.answer.status == 200
        eventually(lambda: not server.call(lambda: server.client.active_requests))
