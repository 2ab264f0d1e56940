"""Request bodies that are each large in one way: path and JSON, by name."""

from __future__ import annotations

import json
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

BODIES: Final[dict[str, tuple[str, bytes]]] = {
    "a text longer than any context": (COMPLETIONS, b'{"prompt":"%b"}' % (b"a" * (MOST - 20))),
    "escape sequences": (COMPLETIONS, b'{"prompt":"%b"}' % (b"\\u0041" * (MOST // 6 - 20))),
    "ids": (COMPLETIONS, repeated(b'{"prompt":[', b"1", b"]}")),
    "lists": (COMPLETIONS, repeated(b'{"prompt":[', b"[1]", b"]}")),
    "unknown fields": (COMPLETIONS, b'{"prompt":"x",%b}' % fields(1_300_000)),
    "fewer unknown fields": (COMPLETIONS, b'{"prompt":"x",%b}' % fields(60_000)),
    "content parts": (CHAT, repeated(MESSAGE + b"[", b'{"type":"text","text":"x"}', b"]}]}")),
    "messages": (CHAT, repeated(b'{"messages":[', b'{"role":"user","content":"x"}', b"]}")),
    "empty messages": (CHAT, repeated(b'{"messages":[', b"{}", b"]}")),
    "brackets": (CHAT, MESSAGE + b'"%b"}]}' % (b"[{,:" * MB)),
    "depth": (COMPLETIONS, b'{"prompt":' + b"[" * (8 * MB)),
    "small tools": (
        CHAT,
        repeated(MESSAGE + b'"x"}],"tools":[', b'{"type":"function","function":{"name":"f"}}', b"]}"),
    ),
    "logit bias": (COMPLETIONS, b'{"prompt":"x","logit_bias":{%b}}' % fields(1_000_000)),
    "ids as floats": (COMPLETIONS, repeated(b'{"prompt":[', b"1.0", b"]}")),
    "texts for vectors": ("/v1/embeddings", repeated(b'{"input":[', b'"x"', b"]}")),
    "ids for a text": ("/detokenize", repeated(b'{"tokens":[', b"1", b"]}")),
    "fewer ids for a text": ("/detokenize", repeated(b'{"tokens":[', b"97", b"]}", 380_000)),
    "token texts": ("/tokenize", b'{"prompt":"%b","return_token_strs":true}' % (b"a" * 1_000_000)),
    "quotes": (COMPLETIONS, b'"' * MOST),
    "tools": (CHAT, chat(tools=tools(1024))),
    "required tools": (CHAT, chat(tools=tools(1024), tool_choice="required")),
    "too many tools": (CHAT, chat(tools=tools(10_000))),
    "arguments": (CHAT, chat(tools=tools(128, 60))),
    "arguments of required tools": (CHAT, chat(tools=tools(128, 60), tool_choice="required")),
    "descriptions of tools": (CHAT, chat(tools=tools(100, description="x" * 90_000))),
    "a schema": (CHAT, chat(response_format=schema(WIDE))),
    "values of a schema": (CHAT, chat(response_format=schema({"enum": [f"value {index}" for index in range(60_000)]}))),
    "a schema of a tool": (CHAT, chat(tools=[{"type": "function", "function": {"name": "f", "parameters": WIDE}}])),
    "a strict schema of a tool": (CHAT, chat(tools=tools(1, 12_000, strict=True))),
    "a regular expression": (CHAT, chat(structured_outputs={"regex": "(a|b)" * 200_000})),
    "a grammar": (CHAT, chat(structured_outputs={"grammar": "root ::= " + '"a" ' * 200_000})),
    "choices": (CHAT, chat(structured_outputs={"choice": [f"c{index}" for index in range(60_000)]})),
    "input items": ("/v1/responses", json.dumps({"input": [{"role": "user", "content": [PART]}] * 8000}).encode()),
    "tools of responses": (
        "/v1/responses",
        json.dumps({"input": "x", "tools": [{"type": "function", **tool(index)} for index in range(5000)]}).encode(),
    ),
    "blocks": (
        "/v1/messages",
        json.dumps({**ANTHROPIC, "messages": [{"role": "user", "content": [PART] * 16_000}]}).encode(),
    ),
    "tools of messages": (
        "/v1/messages",
        json.dumps({**ANTHROPIC, "messages": [], "tools": [{"name": f"f{index}"} for index in range(10_000)]}).encode(),
    ),
    "4,096 messages": (CHAT, json.dumps({"messages": [{"role": "user", "content": [PART, PART]}] * 4096}).encode()),
    "earlier tool calls": (
        CHAT,
        json.dumps(
            {"messages": [{"role": "user", "content": "x"}] + [{"role": "assistant", "tool_calls": [CALL]}] * 2000}
        ).encode(),
    ),
    "variables of templates": (CHAT, chat(chat_template_kwargs={f"k{index}": index for index in range(30_000)})),
    "documents": (CHAT, chat(documents=[{"title": "a" * 50_000} for _ in range(200)])),
    "allowed ids": (CHAT, chat(allowed_token_ids=list(range(100_000)))),
    "bad words": (CHAT, chat(bad_words=["a" * 8] * 1000)),
    "2,048 texts": ("/v1/embeddings", json.dumps({"input": ["x" * 300] * 2048}).encode()),
    "2,048 pairs": ("/v1/rerank", json.dumps({"query": "q" * 5000, "documents": ["x" * 300] * 2048}).encode()),
    "names to abort": ("/v1/abort_requests", json.dumps({"req_ids": [f"cmpl-{at}" for at in range(100_000)]}).encode()),
}
