"""Requests of the Responses API; its responses are plain objects, because they repeat the request."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from fd_core.server.schemas.requests import MAX_TOOLS, RESPONSES, CacheSalt, Effort, Priority
from fd_core.server.schemas.unsupported import Refusal, beside_chats
from fd_core.structured.workers.messages import Unenforced
from fd_core.types import TokenCount, TopP


class InputPart(msgspec.Struct, kw_only=True):
    """Content part of an item: text or an image."""

    type: str
    text: str | None = None
    image_url: str | None = None
    """Of an `input_image`, as in chats."""
    detail: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputItem(msgspec.Struct, kw_only=True):
    """One item of a conversation; which fields matter depends on its type, `message` if it has none."""

    type: str | None = None
    id: str | None = None
    status: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    phase: str | None = None


class FlatTool(msgspec.Struct, kw_only=True):
    """A function that the model may call."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FlatChoice(msgspec.Struct, kw_only=True):
    """The tool that must be called."""

    type: str
    name: str | None = None


class TextFormat(msgspec.Struct, kw_only=True):
    """Format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True):
    """Format and verbosity of the answer's text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(msgspec.Struct, kw_only=True):
    """Reasoning of the model."""

    effort: Effort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """The body of /v1/responses."""

    model: str | None = None
    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=RESPONSES.messages)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: TopP | None = None
    tools: Annotated[list[FlatTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: str | None = None
    user: Annotated[str, Meta(max_length=256)] | None = None
    metadata: dict[str, Any] | None = None
    include: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """As in chats, and so are the next two."""
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None


REFUSED = beside_chats(
    {
        "background": Refusal("responses are synchronous; use /v1/batches", (False,)),
        "conversation": Refusal("use previous_response_id, or send the whole input"),
        "prompt": Refusal("stored prompts are not supported; send the input"),
        "max_tool_calls": Refusal("the server calls no tools"),
        "top_logprobs": Refusal("log-probabilities are available at /v1/chat/completions", (0,)),
        "context_management": Refusal("the client manages the context through input", ([],)),
        "stream_options": Refusal(
            "a stream always ends with the usage", ({}, {"include_obfuscation": False}, {"include_obfuscation": True})
        ),
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), Refusal("use max_output_tokens")),
        "messages": Refusal("use input", ([],)),
        "response_format": Refusal("use text.format", ({"type": "text"},)),
        "reasoning_effort": Refusal("use reasoning.effort"),
    }
)


class InputTokensAnswer(msgspec.Struct, kw_only=True):
    """The answer of /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ResponseAnswer(msgspec.Struct, kw_only=True):
    """The answer of /v1/responses."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    """Unix time, seconds."""
    status: str
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    reasoning: dict[str, Any]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_p: float
    truncation: str = "disabled"
    usage: dict[str, Any] | None = None
    user: str | None = None
    metadata: dict[str, Any]
    background: bool = False
    service_tier: str = "default"
    warnings: list[Unenforced] | msgspec.UnsetType = msgspec.UNSET
    """Parts of schemas without `strict` that could not be enforced; absent if there are none."""


class DeletedResponse(msgspec.Struct, kw_only=True):
    """The answer to a DELETE."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True
