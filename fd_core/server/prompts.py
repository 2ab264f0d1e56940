"""Prompts that this server serves; `fd_core.text.prompt_reader` makes them token ids."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from fd_core.server.errors import invalid
from fd_core.server.request_schemas import MAX_CHOICES, Message
from fd_core.server.state import ServerState
from fd_core.text.prompt_reader import PromptText

__all__ = ["chat_prompt", "completion_prompts"]

_ROLES: Final = ("system", "developer", "user", "assistant")
_TURN_CHARS: Final = 64
"""What a template writes around a message, about."""


async def completion_prompts(state: ServerState, prompt: Any, add_special: bool) -> list[PromptText]:
    """Return the prompts of a completions request: a text, texts, ids, or lists of ids.

    Raises `ApiError` (400) for too many prompts, `BadRequest` for those that cannot be read.
    """
    texts = [prompt] if isinstance(prompt, str) else [each for each in prompt if not isinstance(each, int)]
    if len(texts) > MAX_CHOICES:
        raise invalid(f"prompt holds {len(texts)} prompts; one request may hold {MAX_CHOICES}", "prompt")
    reader = state.prompt_reader
    size = sum(len(each) for each in texts if isinstance(each, str))
    return await reader.run(size, lambda: reader.completion(prompt, add_special))


async def chat_prompt(
    state: ServerState, messages: list[Message], add_generation_prompt: bool, template_kwargs: dict[str, Any]
) -> tuple[int, ...]:
    """Return the ids of a conversation, rendered by the model's template.

    Raises `ApiError` (400) for roles and contents that are not served, `BadRequest` where the template refuses.
    """
    for index, message in enumerate(messages):
        _check(f"messages[{index}]", message)
    turns = [msgspec.to_builtins(message) for message in messages]
    reader = state.prompt_reader
    size = sum(len(str(turn["content"])) + _TURN_CHARS for turn in turns)
    return await reader.run(size, lambda: reader.chat(turns, add_generation_prompt, template_kwargs))


def _check(place: str, message: Message) -> None:
    if message.role not in _ROLES:
        raise invalid(
            f"{place}.role is {message.role[:40]!r}; served are {', '.join(_ROLES)}", f"{place}.role", "invalid_value"
        )
    for field in ("tool_calls", "function_call"):
        if getattr(message, field):
            raise invalid(f"{place}.{field}: tools are not served", f"{place}.{field}", "unsupported_parameter")
    if message.content is None:
        raise invalid(f"{place}.content is required", f"{place}.content", "missing_required_parameter")
