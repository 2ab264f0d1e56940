"""Limits in which the APIs differ, each with the reference that states it.

Where a reference states none, or vLLM is more lenient, so is this server. `docs/serve/apis.md` has the same table.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class ApiLimits(NamedTuple):
    """What requests of one API may hold."""

    tool_name: int
    """Characters of a tool's name."""
    messages: int
    """Messages or items of a conversation."""


CHAT: Final = ApiLimits(tool_name=64, messages=4096)
"""OpenAI, "Create chat completion": `function.name` has at most 64 characters. No limit of messages is stated."""
RESPONSES: Final = ApiLimits(tool_name=128, messages=4096)
"""OpenAI, "Create a model response": `FunctionToolParam.name` has 1 to 128 characters. No limit of items is stated."""
MESSAGES: Final = ApiLimits(tool_name=128, messages=100_000)
"""Anthropic, "Create a Message": `Tool.name` has 1 to 128 characters, `messages` at most 100,000 entries."""

MAX_TOOL_NAME: Final = max(CHAT.tool_name, RESPONSES.tool_name, MESSAGES.tool_name)
MAX_STOP: Final = 16
"""Stop strings of every API. OpenAI states 4 for chats and completions; Anthropic and vLLM state no limit."""
