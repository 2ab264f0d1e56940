"""The same agent with the client `anthropic`: fd_core serves every model through both APIs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from agent_tools import DESCRIPTIONS, Tool, call, make_tools
from anthropic import Anthropic

TOOLS = [
    {"name": each["name"], "description": each["description"], "input_schema": each["schema"]} for each in DESCRIPTIONS
]


def run(client: Anthropic, model: str, question: str, tools: Mapping[str, Tool], turns: int = 6) -> str:
    """Return the answer; raises `RuntimeError` if the model still calls tools after so many turns."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(turns):
        reply = client.messages.create(model=model, max_tokens=1000, messages=messages, tools=TOOLS)
        wanted = [block for block in reply.content if block.type == "tool_use"]
        if not wanted:
            return "".join(block.text for block in reply.content if block.type == "text")
        messages.append({"role": "assistant", "content": reply.content})
        # The answers to all calls of a turn are one message.
        messages.append({"role": "user", "content": [_answer(tools, block) for block in wanted]})
    raise RuntimeError(f"no answer after {turns} turns")


def _answer(tools: Mapping[str, Tool], block: Any) -> dict[str, Any]:
    text, failed = call(tools, block.name, block.input)
    return {"type": "tool_result", "tool_use_id": block.id, "content": text, "is_error": failed}


def main() -> None:
    """Answer the question of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    given = parser.parse_args()
    client = Anthropic(base_url=given.url, api_key="none")
    model = client.models.list().data[0].id
    print(run(client, model, given.question, make_tools(lambda: datetime.now(UTC))))


if __name__ == "__main__":
    main()
