"""Fields under the names that clients sent: other APIs, and other names of a field, are read as fields of a chat."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from fd_core.errors import BadRequest
from fd_core.http.errors import ApiError, to_api_error
from fd_core.server.schemas.requests import GenerationRequest

_ALIASES: Final = {
    "min_new_tokens": "min_tokens",
    "thinking_token_budget": "reasoning_max_tokens",
    "prompt_token_ids": "(prompt|messages)",
}
_OF_TOOLS: Final = {r"(tools\[\d*\]|tool_choice)\.function": r"\1"}

RESPONSES_NAMES: Final = {"max_completion_tokens": "max_output_tokens", "messages": "input", **_OF_TOOLS}
"""What the Responses API calls fields of a chat, by patterns that match their beginnings."""
MESSAGES_NAMES: Final = {r"(tools\[\d*\])\.function\.parameters": r"\1.input_schema", **_OF_TOOLS}
"""The same for the Messages API."""


def other_names(body: GenerationRequest) -> Mapping[str, str]:
    """Return the names that a request uses instead of the usual ones, by patterns of those."""
    return {usual: name for name, usual in _ALIASES.items() if getattr(body, name, None) is not None}


def named_as_sent(error: ApiError | BadRequest, names: Mapping[str, str]) -> ApiError:
    """Return an error that names its field as the client did."""
    told = to_api_error(error)
    if told.param:
        told.param, told.message = as_sent(told.param, told.message, names)
    return told


def as_sent(param: str, message: str, names: Mapping[str, str]) -> tuple[str, str]:
    """Return a field as the client named it, and a message with that name; messages may name what stands around it."""
    for usual, name in names.items():
        if found := re.match(rf"{usual}\b", param):
            begin = found.expand(name)
            sent = begin + param[found.end() :]
            return sent, message.replace(param, sent) if param in message else message.replace(found[0], begin)
    return param, message
