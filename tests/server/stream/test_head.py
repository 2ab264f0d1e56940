"""The head of a stream is sent once, before the events of every choice."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fd_core.config import ServerConfig
from fd_core.server.app import create_app
from tests.server.fakes import FakeClient, byte_tokenizer


async def sent(body: dict[str, Any], turns: int) -> list[dict[str, Any]]:
    """Return the messages of the application; sending one takes this many turns of the event loop."""
    messages: list[dict[str, Any]] = []
    received = iter([{"type": "http.request", "body": json.dumps(body).encode()}])

    async def receive() -> dict[str, Any]:
        for message in received:
            return message
        return await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        messages.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    client = FakeClient()
    try:
        await create_app(ServerConfig(), client, byte_tokenizer(), None)(scope, receive, send)
    finally:
        await client.close()
    return messages


def test_choices_share_a_head_that_is_sent_slowly() -> None:
    messages = asyncio.run(sent({"prompt": "a", "max_tokens": 5, "stream": True, "n": 3}, turns=50))
    assert [message["type"] for message in messages[:2]] == ["http.response.start", "http.response.body"]
    assert all(message["type"] == "http.response.body" for message in messages[1:])
    assert [message["more_body"] for message in messages[1:]] == [True] * (len(messages) - 2) + [False]
