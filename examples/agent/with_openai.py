"""An agent with two tools, with the client `openai`: send the question, run the requested calls, send their results."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from agent_tools import DESCRIPTIONS, Tool, call, make_tools
from openai import OpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": each["name"],
            "description": each["description"],
            "parameters": each["schema"],
            "strict": True,
        },
    }
    for each in DESCRIPTIONS
]
"""`strict` holds the arguments of each call to the schema."""


def run(client: OpenAI, model: str, question: str, tools: Mapping[str, Tool], turns: int = 6) -> str:
    """Return the answer; raises `RuntimeError` if the model still calls tools after so many turns."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(turns):
        reply = (
            client.chat.completions.create(model=model, messages=messages, tools=TOOLS, temperature=0)
            .choices[0]
            .message
        )
        if not reply.tool_calls:
            return reply.content or ""
        messages.append(reply)
        # One turn may have several calls: each gets a separate answer with its id.
        for wanted in reply.tool_calls:
            messages.append({"role": "tool", "tool_call_id": wanted.id, "content": _answer(tools, wanted.function)})
    raise RuntimeError(f"no answer after {turns} turns")


def _answer(tools: Mapping[str, Tool], function: Any) -> str:
    try:
        arguments = json.loads(function.arguments)
    except ValueError:
        # A call that max_tokens cut off.
        return "error: the arguments are not JSON"
    text, failed = call(tools, function.name, arguments)
    return f"error: {text}" if failed else text


def main() -> None:
    """Answer the question of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    given = parser.parse_args()
    client = OpenAI(base_url=f"{given.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    print(run(client, model, given.question, make_tools(lambda: datetime.now(UTC))))


if __name__ == "__main__":
    main()
