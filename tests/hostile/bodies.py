"""Request bodies that are each large in one way: path and JSON, by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final

MB: Final = 2**20
MOST: Final = 16 * MB
CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
MESSAGE: Final = b'{"messages":[{"role":"user","content":'


def repeated(head: bytes, piece: bytes, tail: bytes, size: int = MOST) -> bytes:
    """Return as many comma-separated copies of `piece` as fit into `size` bytes."""
    count = (size - len(head) - len(tail)) // (len(piece) + 1)
    return head + b",".join([piece] * count) + tail


def fields(count: int) -> bytes:
    """Return fields of an object with distinct names."""
    return b",".join(b'"a%d":0' % index for index in range(count))


def chat(**more: Any) -> bytes:
    """Return a short chat request with additional fields."""
    return json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, **more}).encode()


def tool(number: int, properties: int = 1, **more: Any) -> dict[str, Any]:
    """Return a tool with that many arguments."""
    described = {f"p{index}": {"type": "string", "description": "y" * 20} for index in range(properties)}
    return {"name": f"f{number}", "parameters": {"type": "object", "properties": described}, **more}


def tools(count: int, properties: int = 1, **more: Any) -> list[dict[str, Any]]:
    """Return tools in the format of chat completions."""
    return [{"type": "function", "function": tool(index, properties, **more)} for index in range(count)]


def schema(described: dict[str, Any]) -> dict[str, Any]:
    """Return a response format."""
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": described}}


WIDE: Final = tool(0, 12_000)["parameters"]
SMALL_TOOL: Final = b'{"type":"function","function":{"name":"f"}}'
PART: Final = {"type": "text", "text": "x"}
ANTHROPIC: Final = {"model": "fake", "max_tokens": 3}
CALL: Final = {"type": "function", "function": {"name": "f", "arguments": '{"a":' * 200 + "1" + "}" * 200}}

BODIES: Final[dict[str, tuple[str, Callable[[], bytes]]]] = {
    "a text longer than any context": (COMPLETIONS, lambda: b'{"prompt":"%b"}' % (b"a" * (MOST - 20))),
    "escape sequences": (COMPLETIONS, lambda: b'{"prompt":"%b"}' % (b"\\u0041" * (MOST // 6 - 20))),
    "ids": (COMPLETIONS, lambda: repeated(b'{"prompt":[', b"1", b"]}")),
    "lists": (COMPLETIONS, lambda: repeated(b'{"prompt":[', b"[1]", b"]}")),
    "unknown fields": (COMPLETIONS, lambda: b'{"prompt":"x",%b}' % fields(1_300_000)),
    "fewer unknown fields": (COMPLETIONS, lambda: b'{"prompt":"x",%b}' % fields(60_000)),
    "content parts": (CHAT, lambda: repeated(MESSAGE + b"[", b'{"type":"text","text":"x"}', b"]}]}")),
    "messages": (CHAT, lambda: repeated(b'{"messages":[', b'{"role":"user","content":"x"}', b"]}")),
    "empty messages": (CHAT, lambda: repeated(b'{"messages":[', b"{}", b"]}")),
    "brackets": (CHAT, lambda: MESSAGE + b'"%b"}]}' % (b"[{,:" * MB)),
    "depth": (COMPLETIONS, lambda: b'{"prompt":' + b"[" * (8 * MB)),
    "small tools": (
        CHAT,
        lambda: repeated(MESSAGE + b'"x"}],"tools":[', b'{"type":"function","function":{"name":"f"}}', b"]}"),
    ),
    "logit bias": (COMPLETIONS, lambda: b'{"prompt":"x","logit_bias":{%b}}' % fields(1_000_000)),
    "ids as floats": (COMPLETIONS, lambda: repeated(b'{"prompt":[', b"1.0", b"]}")),
    "texts for vectors": ("/v1/embeddings", lambda: repeated(b'{"input":[', b'"x"', b"]}")),
    "ids for a text": ("/detokenize", lambda: repeated(b'{"tokens":[', b"1", b"]}")),
    "fewer ids for a text": ("/detokenize", lambda: repeated(b'{"tokens":[', b"97", b"]}", 380_000)),
    "token texts": ("/tokenize", lambda: b'{"prompt":"%b","return_token_strs":true}' % (b"a" * 1_000_000)),
    "quotes": (COMPLETIONS, lambda: b'"' * MOST),
    "tools": (CHAT, lambda: chat(tools=tools(1024))),
    "required tools": (CHAT, lambda: chat(tools=tools(1024), tool_choice="required")),
    "too many tools": (CHAT, lambda: chat(tools=tools(10_000))),
    "arguments": (CHAT, lambda: chat(tools=tools(128, 60))),
    "arguments of required tools": (CHAT, lambda: chat(tools=tools(128, 60), tool_choice="required")),
    "descriptions of tools": (CHAT, lambda: chat(tools=tools(100, description="x" * 90_000))),
    "a schema": (CHAT, lambda: chat(response_format=schema(WIDE))),
    "values of a schema": (
        CHAT,
        lambda: chat(response_format=schema({"enum": [f"value {index}" for index in range(60_000)]})),
    ),
    "a schema of a tool": (
        CHAT,
        lambda: chat(tools=[{"type": "function", "function": {"name": "f", "parameters": WIDE}}]),
    ),
    "a strict schema of a tool": (CHAT, lambda: chat(tools=tools(1, 12_000, strict=True))),
    "a regular expression": (CHAT, lambda: chat(structured_outputs={"regex": "(a|b)" * 200_000})),
    "a grammar": (CHAT, lambda: chat(structured_outputs={"grammar": "root ::= " + '"a" ' * 200_000})),
    "choices": (CHAT, lambda: chat(structured_outputs={"choice": [f"c{index}" for index in range(60_000)]})),
    "input items": (
        "/v1/responses",
        lambda: json.dumps({"input": [{"role": "user", "content": [PART]}] * 8000}).encode(),
    ),
    "tools of responses": (
        "/v1/responses",
        lambda: json.dumps(
            {"input": "x", "tools": [{"type": "function", **tool(index)} for index in range(5000)]}
        ).encode(),
    ),
    "blocks": (
        "/v1/messages",
        lambda: json.dumps({**ANTHROPIC, "messages": [{"role": "user", "content": [PART] * 16_000}]}).encode(),
    ),
    "tools of messages": (
        "/v1/messages",
        lambda: json.dumps(
            {**ANTHROPIC, "messages": [], "tools": [{"name": f"f{index}"} for index in range(10_000)]}
        ).encode(),
    ),
    "4,096 messages": (
        CHAT,
        lambda: json.dumps({"messages": [{"role": "user", "content": [PART, PART]}] * 4096}).encode(),
    ),
    "earlier tool calls": (
        CHAT,
        lambda: json.dumps(
            {"messages": [{"role": "user", "content": "x"}] + [{"role": "assistant", "tool_calls": [CALL]}] * 2000}
        ).encode(),
    ),
    "variables of templates": (
        CHAT,
        lambda: chat(chat_template_kwargs={f"k{index}": index for index in range(30_000)}),
    ),
    "documents": (CHAT, lambda: chat(documents=[{"title": "a" * 50_000} for _ in range(200)])),
    "allowed ids": (CHAT, lambda: chat(allowed_token_ids=list(range(100_000)))),
    "bad words": (CHAT, lambda: chat(bad_words=["a" * 8] * 1000)),
    "2,048 texts": ("/v1/embeddings", lambda: json.dumps({"input": ["x" * 300] * 2048}).encode()),
    "2,048 pairs": ("/v1/rerank", lambda: json.dumps({"query": "q" * 5000, "documents": ["x" * 300] * 2048}).encode()),
    "names to abort": (
        "/v1/abort_requests",
        lambda: json.dumps({"req_ids": [f"cmpl-{at}" for at in range(100_000)]}).encode(),
    ),
}
"""Made when they are sent: all of them take seconds, and hundreds of megabytes."""


@lru_cache(maxsize=1)
def body_of(name: str) -> bytes:
    """Make a body; the last one is kept."""
    return BODIES[name][1]()
