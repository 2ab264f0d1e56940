"""Fields of requests that concern tools and reasoning."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

MAX_TOOLS: Final = 1024


class ToolFunction(msgspec.Struct, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments; any object if left out."""
    strict: bool | None = None
    """Whether a call keeps the schema in any case."""


class Tool(msgspec.Struct, kw_only=True):
    """A tool; functions are the only kind."""

    type: str = "function"
    function: ToolFunction


class ChosenFunction(msgspec.Struct, kw_only=True):
    """The name of a tool."""

    name: str


class NamedChoice(msgspec.Struct, kw_only=True):
    """The tool that has to be called."""

    type: str = "function"
    function: ChosenFunction


Tools = Annotated[list[Tool], Meta(max_length=MAX_TOOLS)]
ToolChoice = str | NamedChoice
"""`none`, `auto`, `required`, or a tool."""
