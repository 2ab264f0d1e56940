"""Every field with token ids, or text that becomes ids, is checked against the embedding rows: 400, never 500."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import AddedToken

from fd_core.text.tokenizer import Tokenizer, byte_tokenizer
from tests.server.fakes import FakeClient, LiveServer, live

ROWS = 257
PAD = ROWS
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
USER = [{"role": "user", "content": "a [PAD] b"}]
FINE = [{"role": "user", "content": "hi"}]
CALLED = [
    *FINE,
    {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "x", "arguments": '{"a": "[PAD]"}'}}]},
]


def extended() -> Tokenizer:
    """A tokenizer with one token more than the model has rows."""
    tokenizer = byte_tokenizer()
    tokenizer.backend.add_tokens([AddedToken("[PAD]", special=True)])
    assert tokenizer.encode("[PAD]") == [PAD]
    return tokenizer


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live(lambda: FakeClient(vocab_size=ROWS), tokenizer=extended()) as running:
        yield running


TEXTS = [
    (COMPLETIONS, {"prompt": "[PAD]"}, "prompt"),
    (COMPLETIONS, {"prompt": ["fine", "x[PAD]"]}, "prompt"),
    (COMPLETIONS, {"prompt": "x", "bad_words": ["[PAD]"]}, "bad_words"),
    (COMPLETIONS, {"prompt": [1, PAD]}, "prompt"),
    (COMPLETIONS, {"prompt": [[1], [PAD]]}, "prompt"),
    (COMPLETIONS, {"prompt_token_ids": [PAD]}, "prompt_token_ids"),
    (COMPLETIONS, {"prompt_token_ids": [[1], [2, PAD]]}, "prompt_token_ids"),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": [1, PAD]}, "stop_token_ids"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {str(PAD): 0}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "allowed_token_ids": [1, PAD]}, "allowed_token_ids"),
    (COMPLETIONS, {"prompt": "x", "bad_words_token_ids": [1, [2, PAD]]}, "bad_words_token_ids"),
    (CHAT, {"messages": USER}, "messages"),
    (CHAT, {"messages": CALLED}, "messages"),
    (CHAT, {"messages": USER, "disable_chat_template": True}, "messages"),
    (CHAT, {"messages": USER, "continue_final_message": True}, "messages"),
    (CHAT, {"messages": FINE, "chat_template_kwargs": {"speaker": "[PAD]"}}, "messages"),
    (CHAT, {"prompt_token_ids": [PAD]}, "prompt_token_ids"),
    (CHAT, {"messages": FINE, "stop_token_ids": [PAD]}, "stop_token_ids"),
    ("/v1/responses", {"input": "[PAD]"}, "input"),
    ("/v1/responses/input_tokens", {"input": "[PAD]"}, "input"),
    (MESSAGES, {"messages": USER, "max_tokens": 5, "model": "fake"}, None),
    ("/v1/messages/count_tokens", {"messages": USER, "model": "fake"}, None),
    ("/v1/embeddings", {"input": "[PAD]"}, "input"),
    ("/v1/embeddings", {"input": ["a", "[PAD]"]}, "input"),
    ("/v1/embeddings", {"input": [[1, PAD]]}, "input"),
    ("/v1/score", {"text_1": "a", "text_2": ["b", "[PAD]"]}, "text_2"),
    ("/v1/rerank", {"query": "a", "documents": ["[PAD]"]}, "documents"),
    ("/detokenize", {"tokens": [PAD]}, "tokens"),
]


@pytest.mark.parametrize(("path", "body", "field"), TEXTS)
def test_token_without_a_row_is_named(server: LiveServer, path: str, body: dict[str, Any], field: str | None) -> None:
    server.client.specs.clear()
    answer = server.post(path, body)
    assert answer.status == 400, answer.body
    message, name = answer.json["error"]["message"], answer.json["error"].get("param")
    assert f"token id {PAD} ('[PAD]') is out of range; the vocabulary has {ROWS} ids" in message
    assert field is None or (name.partition("[")[0] == field and message.startswith(f"{name}:"))
    assert not server.client.specs, "nothing must reach the engine"


@pytest.mark.parametrize("wrong", [-1, 2**31, 2**63, 2**70, True, 1.5, None, "1", [1]], ids=str)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, lambda wrong: {"prompt": [1, wrong]}),
        (COMPLETIONS, lambda wrong: {"prompt": [[1, wrong]]}),
        (COMPLETIONS, lambda wrong: {"prompt": "x", "prompt_token_ids": [[1], [[wrong]]]}),
        (COMPLETIONS, lambda wrong: {"prompt": "x", "stop_token_ids": [wrong]}),
        (COMPLETIONS, lambda wrong: {"prompt": "x", "allowed_token_ids": [1, wrong]}),
        (COMPLETIONS, lambda wrong: {"prompt": "x", "bad_words_token_ids": [[1, wrong]]}),
        (COMPLETIONS, lambda wrong: {"prompt": "x", "logit_bias": {"1" if wrong == "1" else str(wrong): 200}}),
        (CHAT, lambda wrong: {"prompt_token_ids": [1, wrong]}),
        ("/v1/embeddings", lambda wrong: {"input": [[1, wrong]]}),
        ("/detokenize", lambda wrong: {"tokens": [1, wrong]}),
    ],
)
def test_invalid_id_is_rejected(server: LiveServer, path: str, body: Any, wrong: Any) -> None:
    assert server.post(path, body(wrong)).status == 400


def test_tokens_without_rows_are_allowed_in_tokenize(server: LiveServer) -> None:
    assert server.post("/tokenize", {"prompt": "a[PAD]"}).json["tokens"][-1] == PAD
    assert server.post(COMPLETIONS, {"prompt": "x"}).status == 200
