"""Prompts that this server serves; `fd_core.text.prompt_reader` makes them token ids."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final, Protocol

import msgspec

from fd_core.http.errors import invalid, required, unsupported
from fd_core.server.preprocess.sampling import asked_tokens
from fd_core.server.preprocess.tools import OfferedTools, offered_tools
from fd_core.server.schemas.requests import ChatRequest, CompletionRequest, GenerationRequest, Message, TokenizeRequest
from fd_core.text.parsing.answer import Parsers
from fd_core.text.prompt_reader import LONG_CHARS, PromptReader, PromptText, template_kwargs

_ROLES: Final = ("system", "developer", "user", "assistant", "tool")


class PromptState(Protocol):
    """What prompts are read with, at a server and at a router that counts what its workers will read."""

    prompt_reader: PromptReader
    parsers: Parsers

    @property
    def context(self) -> int | None:
        """Most tokens of prompt and text together; None where a router does not know it."""

    @property
    def max_n(self) -> int:
        """Texts that one request may ask for."""

    @property
    def trusts_templates(self) -> bool:
        """Whether requests may bring a template."""


async def completion_prompts(state: PromptState, body: CompletionRequest) -> list[PromptText]:
    """Return prompts: texts or ids; `ApiError` (400) for too many, `BadRequest` for unreadable ones."""
    by_ids = bool(body.prompt_token_ids) or body.prompt is None  # an empty list asks for nothing
    reader, field = state.prompt_reader, "prompt_token_ids" if by_ids else "prompt"
    given = required(body.prompt_token_ids if by_ids else body.prompt, "prompt")
    texts = [given] if isinstance(given, str) else [each for each in given if not isinstance(each, int)]
    if len(texts) > (most := state.max_n):
        raise invalid(f"{field} holds {len(texts)} prompts; one request may hold {most}", field)
    size = sum(len(each) for each in texts if isinstance(each, str))
    read = await reader.run(size, lambda: reader.completion(given, body.add_special_tokens is not False, field))
    return [_shortened(state, body, each) for each in read]


async def chat_prompt(
    state: PromptState,
    body: ChatRequest | TokenizeRequest,
    tools: OfferedTools | msgspec.UnsetType | None = msgspec.UNSET,
) -> tuple[int, ...]:
    """Return the ids of what a request wants answered: its conversation, its only message, or ids that it gives.

    `tools` are those of the request, where they have been read. Raises `ApiError` (400) for roles, contents and
    templates that are not served, `BadRequest` for what cannot be read, or where the template refuses.
    """
    reader = state.prompt_reader
    if isinstance(body, ChatRequest) and (body.prompt_token_ids or body.disable_chat_template):
        if body.prompt_token_ids:
            ids = reader.given(body.prompt_token_ids, "prompt_token_ids")
        else:
            messages, special = body.messages or [], body.add_special_tokens is not False
            if len(messages) != 1 or not isinstance(text := messages[0].content, str):
                raise invalid(
                    "disable_chat_template needs exactly one message, whose content is text; "
                    f"messages has {len(messages)}",
                    "messages",
                )
            ids = await reader.run(len(text), lambda: reader.text(text, special, "messages"))
        return _shortened(state, body, PromptText(ids, None)).ids
    if body.messages is None:
        raise invalid("messages is required", "messages", "missing_required_parameter")
    turns: list[dict[str, Any]] = []
    for index, message in enumerate(body.messages):
        if message.role != "user" or message.content is None or message.tool_calls or message.function_call:
            _check(f"messages[{index}]", message)
        turn = msgspec.to_builtins(message)
        turn["reasoning_content"] = message.reasoning_content or message.reasoning
        turns.append(turn)
    goes_on = bool(body.continue_final_message)
    if goes_on and body.add_generation_prompt:
        raise invalid(
            "continue_final_message goes on with the last message, add_generation_prompt begins another; give one",
            "continue_final_message",
        )
    template = body.chat_template or None
    own = template is not None and state.prompt_reader.own_template(template) is not None
    if template is not None and not own and not state.trusts_templates:
        raise unsupported(
            "chat_template is not supported: templates from requests are run only where the server was started with "
            "--trust-request-chat-template",
            "chat_template",
        )
    effort = body.reasoning_effort
    if template is None and effort is not None:
        require_effort(reader, effort, "reasoning_effort")
    if tools is msgspec.UNSET:
        tools = offered_tools(body)
    variables: Mapping[str, Any] | None = body.chat_template_kwargs
    if body.enable_thinking is not None or effort is not None:
        variables = template_kwargs(variables, body.enable_thinking, effort)
    size = sum([len(str(turn["content"])) for turn in turns])
    read = partial(
        reader.chat,
        turns,
        body.add_generation_prompt is not False and not goes_on,
        variables,
        continue_final_message=goes_on,
        documents=body.documents,
        template=template,
        add_special=bool(body.add_special_tokens),
        tools=None if tools is None else tools.shown,
    )
    if tools is not None:
        size += len(msgspec.json.encode(tools.shown))
    # On a thread in any case: a template may take long over a short text.
    ids = await (reader.thread if size <= LONG_CHARS else reader.long_thread).run(read)
    if isinstance(body, TokenizeRequest) or body.truncate_prompt_tokens is None:
        return ids
    return _shortened(state, body, PromptText(ids, None)).ids


def require_role(role: str, field: str) -> None:
    """Raise `ApiError` (400) that names `field` for a role that is not served."""
    if role not in _ROLES:
        raise invalid(f"{field} is {role[:40]!r}; served are {', '.join(_ROLES)}", field, "invalid_value")


def require_effort(reader: PromptReader, effort: str | None, field: str) -> None:
    """Raise `ApiError` (400) for an effort that the model cannot be told; `none` and `medium` ask for nothing."""
    if effort not in (None, "none", "medium") and not reader.takes_effort:
        raise unsupported(
            f"{field} is not supported: the chat template of this model has no place for an effort of reasoning", field
        )


def _shortened(state: PromptState, body: GenerationRequest, prompt: PromptText) -> PromptText:
    """Return a prompt without what `truncate_prompt_tokens` cuts off."""
    most = body.truncate_prompt_tokens
    if most is None:
        return prompt
    if most == 0:
        raise invalid("truncate_prompt_tokens is 0; give -1 or at least 1", "truncate_prompt_tokens")
    if most < 0:
        if state.context is None:
            return prompt
        most = max(1, state.context - (asked_tokens(body)[0] or 1))
    if len(prompt.ids) <= most:
        return prompt
    return PromptText(prompt.ids[:most] if body.truncation_side == "right" else prompt.ids[-most:], None)


def _check(place: str, message: Message) -> None:
    require_role(message.role, f"{place}.role")
    if message.function_call:
        raise unsupported(f"{place}.function_call: use tool_calls", f"{place}.function_call")
    if message.tool_calls and message.role != "assistant":
        raise invalid(f"{place}.tool_calls: only an assistant calls tools", f"{place}.tool_calls", "invalid_value")
    if message.role != "assistant":
        required(message.content, f"{place}.content")
