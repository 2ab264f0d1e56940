"""Requests and responses of the Messages API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from fd_core.server.schemas.requests import MAX_STOP, MAX_TOOLS, MESSAGES, CacheSalt, Effort, Priority, StopString
from fd_core.server.schemas.unsupported import Refusal, beside_chats
from fd_core.structured.workers.messages import Unenforced
from fd_core.types import TokenCount, TopP


class TextBlock(msgspec.Struct, kw_only=True):
    """A block of text; blocks of other types are rejected."""

    type: str
    text: str | None = None
    cache_control: dict[str, Any] | None = None
    citations: list[Any] | None = None


class ImageSource(msgspec.Struct, kw_only=True):
    """Data or URL of an image."""

    type: str | None = None
    """`base64` or `url`."""
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class ResultBlock(TextBlock, kw_only=True):
    """A block of the result of a tool: text or an image."""

    source: ImageSource | None = None


class InputBlock(msgspec.Struct, kw_only=True):
    """A block of a message; which fields matter depends on its type."""

    type: str
    text: str | None = None
    source: ImageSource | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    """Arguments of a call, as the model wrote them; an object unless the call was cut off."""
    tool_use_id: str | None = None
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None
    cache_control: dict[str, Any] | None = None
    citations: list[Any] | None = None


class Turn(msgspec.Struct, kw_only=True):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock]


class OfferedTool(msgspec.Struct, kw_only=True):
    """A tool that the model may call."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None


class CallChoice(msgspec.Struct, kw_only=True):
    """Tool choice: if the model may, must or must not call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Reasoning of the model before its answer."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: TokenCount | None = None
    display: Literal["summarized", "omitted"] | None = None
    """`omitted` leaves the reasoning out of the answer."""


class OutputFormat(msgspec.Struct, kw_only=True):
    """The JSON schema of the answer."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """Output format and effort."""

    format: OutputFormat | None = None
    effort: Effort | None = None


class Metadata(msgspec.Struct, kw_only=True):
    """Metadata of the caller."""

    user_id: str | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """The body of /v1/messages/count_tokens: the parts of a prompt."""

    model: str
    messages: Annotated[list[Turn], Meta(min_length=1, max_length=MESSAGES.messages)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[OfferedTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: CallChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """Older name of `output_config.format`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """As in chats."""


class MessagesRequest(CountRequest, kw_only=True):
    """The body of /v1/messages."""

    max_tokens: TokenCount
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOP)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    metadata: Metadata | None = None
    cache_salt: CacheSalt | None = None
    """As in chats, and so is the next."""
    priority: Priority | None = None


REFUSED = {
    "mcp_servers": Refusal("the server calls no tools", ([],)),
    "container": Refusal("the server runs no code"),
    "context_management": Refusal("the client manages the context through messages", ({}, {"edits": []})),
    "inference_geo": Refusal("regions are not supported"),
    "speed": Refusal("only the standard speed is supported", ("standard",)),
}
REFUSED_IN_MESSAGES = beside_chats(
    {
        **REFUSED,
        "stop": Refusal("use stop_sequences", ("", [])),
        "max_completion_tokens": Refusal("use max_tokens"),
        "response_format": Refusal("use output_config.format", ({"type": "text"},)),
        "reasoning_effort": Refusal("use output_config.effort"),
        **dict.fromkeys(("enable_thinking", "reasoning_max_tokens", "thinking_token_budget"), Refusal("use thinking")),
    }
)


class MessagesUsage(msgspec.Struct, kw_only=True):
    """Tokens read, without cached ones, and written."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class MessagesAnswer(msgspec.Struct, kw_only=True):
    """The answer of /v1/messages."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None = None
    usage: MessagesUsage
    warnings: list[Unenforced] | msgspec.UnsetType = msgspec.UNSET
    """Parts of schemas without `strict` that could not be enforced; absent if there are none."""


class TokenCountAnswer(msgspec.Struct):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int
