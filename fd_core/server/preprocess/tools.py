"""From the tools of a request to what its prompt shows and how its answers are read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from fd_core.http.errors import invalid
from fd_core.server.preprocess.api_limits import MAX_TOOL_NAME
from fd_core.server.preprocess.tool_fields import Tool, ToolChoice
from fd_core.server.state.state import ServerState
from fd_core.text.chat_template import shown_tool
from fd_core.text.parsing.answer import AnswerReading

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")


class _Asks(Protocol):
    """A request that may offer tools."""

    tools: list[Tool] | None
    tool_choice: ToolChoice | None


class OfferedTools(NamedTuple):
    """The tools that a model may call."""

    shown: Sequence[Mapping[str, Any]]
    """For the chat template."""
    schemas: Mapping[str, Mapping[str, Any]]
    """JSON schemas of the arguments, by name."""
    forced: Sequence[str]
    """Names of which one has to be called; empty if the model may choose."""
    strict: frozenset[str]
    """Names of tools whose arguments keep their schema in any case."""


def offered_tools(body: _Asks, longest_name: int = MAX_TOOL_NAME) -> OfferedTools | None:
    """Return the tools of a request, None if none may be called.

    Raises `ApiError` (400) for tools without a usable name, two of one name, and a choice that is none of them.
    """
    choice, schemas = body.tool_choice, {}
    for index, tool in enumerate(body.tools or ()):
        place, name = f"tools[{index}]", tool.function.name
        if tool.type != "function":
            raise invalid(f"{place}.type is {tool.type[:40]!r}; served are functions", f"{place}.type", "invalid_value")
        if len(name) > longest_name or not _NAME.fullmatch(name):
            raise invalid(
                f"{place}.function.name has to be 1 to {longest_name} letters, digits, '_', '-' or '.'",
                f"{place}.function.name",
            )
        if name in schemas:
            raise invalid(f"{place}.function.name is {name!r}, as that of another tool", f"{place}.function.name")
        schemas[name] = tool.function.parameters or {"type": "object", "properties": {}}
    forced = _forced(choice, schemas)
    if choice == "none" or not schemas:
        return None
    shown = [shown_tool({"function": msgspec.structs.asdict(tool.function)}) for tool in body.tools or ()]
    strict = frozenset(tool.function.name for tool in body.tools or () if tool.function.strict)
    return OfferedTools(shown, schemas, forced, strict)


def answer_reading(
    state: ServerState, tools: OfferedTools | None, *, parallel: bool, show_reasoning: bool
) -> AnswerReading | None:
    """Return how answers are read, None if they are plain text.

    Raises `ApiError` (400) for tools where the server has no parser of calls, or none that can force one.
    """
    parsers = state.parsers
    if tools is None:
        if parsers.reasoning is None:
            return None
        return AnswerReading(parsers.reasoning, None, {}, parallel, show_reasoning)
    if parsers.tools is None:
        raise invalid(
            "tools cannot be called: it is not known how this model writes calls; start the server with "
            "--tool-call-parser, or leave tools out",
            "tools",
            "unsupported_parameter",
        )
    return AnswerReading(parsers.reasoning, parsers.tools, tools.schemas, parallel, show_reasoning)


def _forced(choice: ToolChoice | None, schemas: Mapping[str, Any]) -> Sequence[str]:
    if isinstance(choice, str) or choice is None:
        if choice not in (None, "none", "auto", "required"):
            raise invalid(f"tool_choice is {choice[:40]!r}; served are none, auto, required and a tool", "tool_choice")
        if choice == "required" and not schemas:
            raise invalid("tool_choice demands a call, but there are no tools", "tool_choice")
        return list(schemas) if choice == "required" else ()
    name = choice.function.name
    if choice.type != "function" or name not in schemas:
        raise invalid(f"tool_choice names {name[:64]!r}, which is none of the tools", "tool_choice.function.name")
    return [name]
