"""Prompts of requests to token ids: texts, lists of ids, conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from fd_core.server.errors import ApiError, invalid
from fd_core.server.request_schemas import MAX_CHOICES, Message
from fd_core.server.state import ServerState

__all__ = ["PromptText", "chat_prompt", "completion_prompts", "encode"]

_INLINE_CHARS: Final = 8192
"""Longer texts are encoded on a thread: the event loop feeds every stream."""

_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_SET_HERE: Final = frozenset({"self", "messages", "tools", "add_generation_prompt"})
"""What the server itself hands to the template."""

T = TypeVar("T")


class PromptText(NamedTuple):
    """A prompt as ids, and as the text that the client gave, if it gave text."""

    ids: tuple[int, ...]
    text: str | None


async def completion_prompts(state: ServerState, prompt: Any, add_special: bool) -> list[PromptText]:
    """Return the prompts of a completions request: a text, texts, ids, or lists of ids.

    Raises `ApiError` (400) for empty prompts, mixed kinds, too many prompts, and ids out of the vocabulary.
    """
    given: Sequence[Any] = [prompt] if isinstance(prompt, str) else prompt
    if given and all(isinstance(each, int) for each in given):
        given = [given]
    if not given:
        raise _empty("prompt")
    if len(given) > MAX_CHOICES:
        raise invalid(f"prompt holds {len(given)} prompts; one request may hold {MAX_CHOICES}", "prompt")
    if all(isinstance(each, str) for each in given):
        prompts = [PromptText(tuple(await encode(state, text, add_special, "prompt")), text) for text in given]
    elif all(isinstance(each, list) for each in given):
        prompts = [PromptText(_checked_ids(state, each), None) for each in given]
    else:
        raise invalid("prompt mixes texts and ids; give a text, texts, ids, or lists of ids", "prompt")
    if not all(each.ids for each in prompts):
        raise _empty("prompt")
    return prompts


async def chat_prompt(
    state: ServerState, messages: list[Message], add_generation_prompt: bool, template_kwargs: dict[str, Any]
) -> tuple[int, ...]:
    """Return the ids of a conversation, rendered by the model's template.

    Raises `ApiError` (400) for roles and contents that are not served, `BadRequest` where the template refuses.
    """
    template = state.template
    if template is None:
        raise invalid(
            "this model has no chat template; use /v1/completions, or start the server with --chat-template", "messages"
        )
    taken = sorted(_SET_HERE & template_kwargs.keys())
    if taken:
        raise invalid(f"chat_template_kwargs may not set {', '.join(taken)}", "chat_template_kwargs")
    turns = [_turn(index, message) for index, message in enumerate(messages)]

    def render() -> list[int]:
        text = template.render(turns, add_generation_prompt=add_generation_prompt, **template_kwargs)
        return state.tokenizer.encode(text, add_special=False)

    size = sum(len(str(turn["content"])) for turn in turns) + 64 * len(turns)
    ids = tuple(await _run(state, size, render))
    if not ids:
        raise _empty("messages")
    return ids


async def encode(state: ServerState, text: str, add_special: bool, field: str) -> list[int]:
    """Return the ids of a text; raises `ApiError` (400) for an empty one."""
    if not text:
        raise _empty(field)
    return await _run(state, len(text), lambda: state.tokenizer.encode(text, add_special=add_special))


async def _run(state: ServerState, size: int, work: Callable[[], T]) -> T:
    if size <= _INLINE_CHARS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(state.text_worker, work)


def _checked_ids(state: ServerState, ids: list[int]) -> tuple[int, ...]:
    size = state.client.info.vocab_size
    bounded = ids and (min(ids), max(ids))
    if bounded and not 0 <= bounded[0] <= bounded[1] < size:
        wrong = bounded[0] if bounded[0] < 0 else bounded[1]
        raise invalid(f"prompt holds the token id {wrong}, but the vocabulary has {size} ids, from 0 on", "prompt")
    return tuple(ids)


def _turn(index: int, message: Message) -> dict[str, Any]:
    place = f"messages[{index}]"
    role = _ROLES.get(message.role)
    if role is None:
        raise invalid(
            f"{place}.role is {message.role[:40]!r}; served are {', '.join(_ROLES)}", f"{place}.role", "invalid_value"
        )
    for field in ("tool_calls", "function_call"):
        if getattr(message, field):
            raise invalid(f"{place}.{field}: tools are not served", f"{place}.{field}", "unsupported_parameter")
    content: Any = message.content
    if content is None:
        raise invalid(f"{place}.content is required", f"{place}.content", "missing_required_parameter")
    if isinstance(content, list):
        content = [msgspec.structs.asdict(part) for part in content]
    turn = {"role": role, "content": content}
    return turn if message.name is None else {**turn, "name": message.name}


def _empty(field: str) -> ApiError:
    return invalid(f"{field} is empty; at least one token is needed", field, "empty_prompt")
