"""The policy gets the prompt as the workers tokenize it, and never an empty one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from fd_core.router.gateway.requests.route_requests import CostReader, RouteRequestReader
from fd_core.router.selection import RouteRequest
from fd_core.text.chat_template import shown_tool
from fd_core.text.prompt_reader import PromptReader, find_text
from tests.router.gateway.fakes import COMPLETIONS, FakeWorker, eventually, in_loop, routed
from tests.router.helpers import chosen, router_of

TEXT = find_text("bytes", offline=True)


def read(body: Any, *, tokenizer: bool = True, session: str | None = None, path: str = "") -> RouteRequest:
    reader = RouteRequestReader(TEXT if tokenizer else None)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        return asyncio.run(reader.read(data, session, path))
    finally:
        reader.close()


def test_prompts_are_tokenized_as_the_server_does() -> None:
    assert TEXT.tokenizer.decode(read({"prompt": "some text"}).tokens.tolist()) == "some text"
    messages = [{"role": "developer", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    parsed = read({"messages": messages})
    assert TEXT.tokenizer.decode(parsed.tokens.tolist()) == "system: be\nuser: hi\nassistant: "
    assert parsed.length == len(parsed.tokens)
    assert read({"prompt": [5, 6, 7]}).tokens.tolist() == [5, 6, 7]
    several = read({"prompt": [[1, 2], [3]]})
    assert (several.tokens.tolist(), several.length) == ([1, 2], 3)
    assert read({"input": ["ab", "cd"]}).length == 4
    assert read({"messages": messages, "prompt_token_ids": [5, 6]}).tokens.tolist() == [5, 6]
    goes_on = read({"messages": [*messages, {"role": "assistant", "content": "I"}], "continue_final_message": True})
    assert TEXT.tokenizer.decode(goes_on.tokens.tolist()) == "system: be\nuser: hi\nassistant: I"
    long = "word " * 5000
    assert len(read({"prompt": long}).tokens) == len(long)


def image_of(data: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


@pytest.mark.parametrize("tokenizer", [True, False])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "",
            lambda data: {
                "messages": [{"role": "user", "content": [{"type": "text", "text": "hi" * 9}, image_of(data)]}]
            },
        ),
        (
            "",
            lambda data: {
                "system": "be",
                "messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": data}}]}],
            },
        ),
        ("/api/chat", lambda data: {"model": "m", "messages": [{"role": "user", "content": "hi", "images": [data]}]}),
        ("/api/generate", lambda data: {"model": "m", "prompt": "hi", "images": [data]}),
    ],
)
def test_images_distinguish_prompts_and_are_never_loaded(tokenizer: bool, path: str, body: Any) -> None:
    one, same, other = (
        read(body(data), path=path, tokenizer=tokenizer) for data in ("AAAA" * 999, "AAAA" * 999, "BBBB")
    )
    assert one.tokens.tolist() == same.tokens.tolist() != other.tokens.tolist()
    assert not one.tokenized and 30 < one.length < 400


def test_images_are_estimated_for_the_limits_of_keys() -> None:
    parts = [{"type": "text", "text": "hi"}, image_of("AAAA" * 9999)]
    body = json.dumps({"messages": [{"role": "user", "content": parts}], "max_tokens": 5}).encode()
    for text in (TEXT, None):
        costs = CostReader(text, context=4096)
        try:
            assert 30 < asyncio.run(costs.cost("/v1/chat/completions", "application/json", body, None)).prompt < 400
        finally:
            costs.close()


def test_prompts_of_ollama_are_chats_unless_raw() -> None:
    body = {"model": "m:latest", "prompt": "hi", "system": "be", "options": {"num_predict": 5}}
    asked = read(body, path="/api/generate")
    assert TEXT.tokenizer.decode(asked.tokens.tolist()) == "system: be\nuser: hi\nassistant: "
    assert (asked.model, asked.output_tokens) == ("m", 5)
    raw = read(body | {"raw": True}, path="/api/generate")
    assert TEXT.tokenizer.decode(raw.tokens.tolist()) == "hi"


def test_tools_count_as_the_server_counts_them() -> None:
    messages = [{"role": "user", "content": "hi"}]
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}, "strict": True}}
    reader = PromptReader(TEXT.tokenizer, TEXT.template)
    expected = reader.chat(messages, tools=[shown_tool(tool)]).ids
    reader.close()
    assert read({"messages": messages, "tools": [tool]}).tokens.tolist() == list(expected)
    plain = read({"messages": messages}).tokens.tolist()
    assert read({"messages": messages, "tools": [tool], "tool_choice": "none"}).tokens.tolist() == plain
    assert not read({"messages": messages, "tools": ["x"]}).tokenized


def test_system_of_the_messages_api_is_rendered_first() -> None:
    body = {"system": [{"type": "text", "text": "be"}], "messages": [{"role": "user", "content": "hi"}]}
    assert TEXT.tokenizer.decode(read(body).tokens.tolist()) == "system: be\nuser: hi\nassistant: "
    assert read(body, tokenizer=False).tokens.tolist() != read({**body, "system": "x"}, tokenizer=False).tokens.tolist()


@pytest.mark.parametrize("tokenizer", [True, False])
@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": ' + b"[" * 5000),
        *({}, {"prompt": ""}, {"prompt": []}, {"prompt": None}, {"prompt": [[]]}, {"prompt": 3}, {"prompt": ["a", 1]}),
        *({"messages": []}, {"messages": ["x"]}, {"messages": [{"role": 1}]}, {"messages": "x"}),
        *({"prompt": [2**40]}, {"prompt": [-1]}, {"prompt": [True]}, {"prompt": "\ud800"}),
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {"messages": [{"role": "user", "content": [{"type": ["image"]}]}]},
        {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": 1}},
        {"messages": [{"role": "user", "content": "x"}], "documents": [{"text": "x"}], "prompt_token_ids": None},
        {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages_": 1, "self": 2}},
    ],
)
def test_any_body_gives_a_nonempty_prompt(body: Any, tokenizer: bool) -> None:
    parsed = read(body, tokenizer=tokenizer)
    assert len(parsed.tokens) >= 1 and parsed.tokens.dtype == np.int32 and parsed.length >= 1


def test_without_a_tokenizer_equal_prefixes_match() -> None:
    turns = [{"role": "user", "content": "a long question " * 20}]
    short = read({"model": "m", "messages": turns, "stream": True}, tokenizer=False)
    longer = read({"messages": [*turns, {"role": "assistant", "content": "yes"}], "seed": 1}, tokenizer=False)
    shared = len(short.tokens)
    assert longer.tokens[:shared].tolist() == short.tokens.tolist()
    assert short.length == shared


def test_without_a_tokenizer_hits_are_subtracted_in_tokens() -> None:
    router, prompt = router_of(mixed=1, policy="cache_aware"), "".join(f"{number:08}" for number in range(1000))
    with chosen(router.select(read({"prompt": prompt}, tokenizer=False), 0.0, 0.0)) as first:
        router.served(first, 0.0)
    with chosen(router.select(read({"prompt": prompt[:4096] + "x" * 4000}, tokenizer=False), 0.0, 0.0)) as second:
        assert (first.hits, second.hits) == (0, 16)
        assert second.held[second.prefill].prefill_tokens == 1000


def test_sessions_and_salts() -> None:
    assert read({"prompt": "a", "user": "u"}).session == "u"
    assert read({"prompt": "a", "user": "u", "session_id": "s"}).session == "s"
    assert read({"prompt": "a", "user": "u"}, session="h").session == "h"
    assert read({"prompt": "a", "cache_salt": "tenant"}).salt == "tenant"
    assert read({"prompt": "a", "cache_salt": 3, "user": ["x"]}).session is None


@in_loop
async def test_requests_with_a_common_prefix_share_a_worker() -> None:
    async with (
        FakeWorker("a") as a,
        FakeWorker("b") as b,
        routed(a, b, router={"policy": "cache_aware", "cache_block_size": 16}, text=TEXT) as live,
    ):
        for name in ("first", "second", "third", "fourth"):
            beginning = f"{name} conversation " * 10
            before = {worker.name: len(worker.seen) for worker in (a, b)}
            for turn in range(4):
                await live.post(COMPLETIONS, {"prompt": beginning + f"turn {turn} " * turn})
            went = [len(worker.seen) - before[worker.name] for worker in (a, b)]
            assert sorted(went) == [0, 4], "a conversation changed its worker"
        assert live.router.snapshot().tally.hit_blocks > 0


@pytest.mark.parametrize(("word", "path"), [("400", COMPLETIONS), ("after:1", COMPLETIONS), ("json", "/tokenize")])
@in_loop
async def test_prefix_of_a_failed_request_is_not_recorded(word: str, path: str) -> None:
    settings = {"policy": "cache_aware", "cache_block_size": 16}
    async with FakeWorker(usual=word) as worker, routed(worker, router=settings, text=TEXT) as live:
        for _ in range(2):
            await live.post(path, {"prompt": "a long prompt " * 10})
        assert live.router.snapshot().workers[0].index_blocks == 0
        worker.usual = "stream"
        await live.post(COMPLETIONS, {"prompt": "a long prompt " * 10})
        assert live.router.snapshot().workers[0].index_blocks == 140 // 16


@in_loop
async def test_tokenizer_is_learned_from_a_worker(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeWorker(models=("no/such-model-anywhere",)) as worker, routed(worker, learns=True) as live:
        await eventually(lambda: "is not on this machine" in caplog.text)
        assert "bytes" in (await live.status())["prompts"]
    caplog.clear()
    async with FakeWorker(models=("bytes",)) as worker, routed(worker, learns=True) as live:
        async with asyncio.timeout(60):
            while "tokens of bytes" not in (await live.status())["prompts"]:
                await asyncio.sleep(0.01)
        assert (await live.post(COMPLETIONS, {"prompt": "x"}))[0] == 200
