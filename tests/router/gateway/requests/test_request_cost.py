"""Server and router reserve the same cost for any request body."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fd_core.http.access.control import ROUTES, AccessControl
from fd_core.http.access.record import RequestRecord
from fd_core.router.gateway.requests.route_requests import COMPUTES_NOTHING, FORMATS, CostReader
from fd_core.text.prompt_reader import ModelText
from tests.router.gateway.fakes import gateway
from tests.router.gateway.test_tenants import Service
from tests.server.fakes import byte_tokenizer, chat_template, key_file, live

LIMIT = 5000
TEXT = st.text("ab é", min_size=1, max_size=12)
IDS = st.lists(st.integers(0, 255), min_size=1, max_size=6)
COUNT = st.one_of(st.integers(1, 40), st.sampled_from([None, 0, -1, 7.0, 7.5, 10.0, "7", True, [7], 4000.0, 10**6]))
PROMPT = st.one_of(TEXT, IDS, st.lists(TEXT, max_size=4), st.lists(IDS, max_size=4), st.just(["a", [1]]), st.none())
CONTENT = st.one_of(TEXT, st.lists(TEXT, max_size=3).map(lambda t: [{"type": "text", "text": each} for each in t]))
TURN = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": CONTENT})
TURNS = st.one_of(st.lists(TURN, max_size=3), st.just("text"), st.just([{"role": "user"}]))
SHORT = st.sampled_from([None, 3, -1, 0, 2.0, "3"])

MODEL = st.sampled_from(["fake", "fake:latest"])
SPOKEN = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": TEXT})
OPTIONS = st.fixed_dictionaries({}, optional={"num_predict": COUNT})


def body(required: dict[str, Any], **optional: Any) -> Any:
    return st.fixed_dictionaries(required, optional=optional)


BODIES = {
    "/v1/completions": body(
        {"prompt": PROMPT},
        max_tokens=COUNT,
        max_completion_tokens=COUNT,
        n=COUNT,
        best_of=COUNT,
        echo=st.booleans(),
        prompt_token_ids=st.one_of(IDS, st.lists(IDS, max_size=3)),
        truncate_prompt_tokens=SHORT,
        min_tokens=COUNT,
        add_special_tokens=st.booleans(),
    ),
    "/v1/chat/completions": body(
        {"messages": TURNS},
        max_tokens=COUNT,
        max_completion_tokens=COUNT,
        n=COUNT,
        prompt_token_ids=IDS,
        truncate_prompt_tokens=SHORT,
        continue_final_message=st.booleans(),
        disable_chat_template=st.booleans(),
        reasoning_effort=st.sampled_from(["none", "high", 3]),
    ),
    "/v1/messages": body({"model": st.just("fake"), "messages": TURNS, "max_tokens": COUNT}, system=CONTENT),
    "/v1/responses": body({"input": st.one_of(TEXT, TURNS)}, max_output_tokens=COUNT, instructions=TEXT),
    "/v1/embeddings": body({"input": PROMPT}, add_special_tokens=st.booleans()),
    "/v1/score": body({"text_1": st.one_of(TEXT, st.lists(TEXT, max_size=3))}, text_2=st.lists(TEXT, max_size=3)),
    "/v1/rerank": body({"query": TEXT, "documents": st.lists(TEXT, max_size=4)}, top_n=COUNT),
    "/api/chat": body(
        {"model": MODEL, "messages": st.lists(SPOKEN, min_size=1, max_size=3)},
        options=OPTIONS,
        think=st.sampled_from([False, "none"]),
    ),
    "/api/generate": body({"model": MODEL, "prompt": TEXT}, system=TEXT, raw=st.booleans(), options=OPTIONS),
    "/api/embed": body({"model": MODEL, "input": PROMPT}),
    "/tokenize": body({"prompt": TEXT}, n=COUNT),
    "/v1/messages/count_tokens": body({"model": st.just("fake"), "messages": TURNS}, max_tokens=COUNT),
}


class Pair:
    """A server and a router with the same key, and the tokens each reserved for its last request."""

    def __init__(self, direct: Service, routed: Service) -> None:
        self.services = {"server": direct, "router": routed}
        self.taken: list[tuple[int, int]] = []

    def costs(self, path: str, body: Any) -> dict[str, tuple[int, list[int]]]:
        found = {}
        for name, service in self.services.items():
            self.taken.clear()
            status, _ = service.ask("alice", "POST", path, body)
            # A worker served by the router has no account of the key.
            found[name] = status, [tokens for tokens, account in self.taken if account]
        return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    file = key_file(tmp_path_factory.mktemp("costs"), {"name": "alice", "tokens_per_minute": LIMIT})
    text = ModelText("bytes", byte_tokenizer(), chat_template())
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        alone = stack.enter_context(live(api_key_file=file))
        worker = stack.enter_context(live(api_keys=("worker",)))
        for server in (alone, worker):
            server.client.reply = lambda _: b""
        url = stack.enter_context(gateway([worker], file, text=text))
        made = Pair(Service(alone.url, [alone]), Service(url, [worker]))

        def reserve(_: AccessControl, record: RequestRecord, tokens: int) -> None:
            made.taken.append((tokens, record.account is not None))

        patch.setattr(AccessControl, "reserve", reserve)
        yield made


def test_every_forwarded_request_has_a_cost() -> None:
    computed = {
        path for path, route in ROUTES.items() if route.forwarded and "POST" in route.methods
    } - COMPUTES_NOTHING
    assert computed == FORMATS.keys()


def test_every_format_of_the_server_is_forwarded() -> None:
    kept = {
        path
        for path, route in ROUTES.items()
        if route.right == "key" and "POST" in route.methods and not route.forwarded
    }
    assert kept == {"/v1/abort_requests", "/v1/files", "/v1/batches", "/v1/batches/{batch_id}/cancel"}


@pytest.mark.parametrize("path", BODIES)
def test_server_and_router_reserve_the_same_cost(pair: Pair, path: str) -> None:
    @settings(max_examples=40, deadline=None, derandomize=True)
    @given(body=BODIES[path])
    def check(body: Any) -> None:
        costs = pair.costs(path, body)
        assert costs["server"] == costs["router"], json.dumps(body)

    check()


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        ("/v1/completions", {"prompt": ["a", "bb"], "n": 3, "max_tokens": 10}, 3 + 60),
        ("/v1/completions", {"prompt": [[1], [2, 3]], "n": 3.0, "max_tokens": 10.0}, 3 + 60),
        ("/v1/completions", {"prompt": "a"}, 1 + 16),
        ("/v1/chat/completions", {"prompt_token_ids": [1, 2], "n": 10.0, "max_completion_tokens": 20.0}, 202),
        ("/v1/chat/completions", {"prompt_token_ids": [1, 2], "n": 2}, 2 + 2 * 398),
        ("/v1/embeddings", {"input": ["ab", "c"]}, 3),
        ("/v1/rerank", {"query": "ab", "documents": ["c", "c", "def"]}, 6),
        ("/tokenize", {"prompt": "abc"}, 0),
        ("/api/chat", {"model": "fake"}, 0),
        ("/api/generate", {"model": "fake", "prompt": "abc", "raw": True, "options": {"num_predict": 10}}, 3 + 10),
        ("/api/embed", {"model": "fake:latest", "input": ["ab", "c"]}, 3),
    ],
)
def test_cost_covers_every_prompt_and_every_choice(pair: Pair, path: str, body: Any, tokens: int) -> None:
    for status, taken in pair.costs(path, body).values():
        assert (status, sum(taken)) == (200, tokens)


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": "3"},
        {"n": 1.5},
        {"max_tokens": -4},
        {"max_tokens": "9"},
        {"best_of": 2},
        {"n": 129},
        {"min_tokens": 17},
        {"min_tokens": 5, "max_tokens": 4},
        {"min_tokens": 5, "min_new_tokens": 6},
    ],
)
def test_rejected_body_reserves_nothing(pair: Pair, wrong: dict[str, Any]) -> None:
    for status, taken in pair.costs("/v1/completions", {"prompt": "a"} | wrong).values():
        assert (status, taken) == (400, [])


@pytest.mark.parametrize(
    ("path", "body", "cost"),
    [
        ("/v1/completions", {"prompt": ["x" * 40] * 3, "n": 2, "max_tokens": 20}, 30 + 120),
        ("/v1/completions", {"prompt": [[70_000, 2]], "max_tokens": 4.0}, 2 + 4),
        ("/v1/completions", {"prompt": "x" * 40}, 10 + 16),
        ("/v1/classify", {"input": ["x" * 40, "x" * 20]}, 10 + 5),
        ("/v1/messages", {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x" * 400}]}, 100),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "reasoning_effort": "high"}, 1000),
    ],
)
def test_bytes_are_counted_without_a_tokenizer(path: str, body: Any, cost: int) -> None:
    reader = CostReader(None)
    found = asyncio.run(reader.cost(path, "application/json", json.dumps(body).encode(), 1000))
    reader.close()
    assert cost <= found.most <= cost + 20
