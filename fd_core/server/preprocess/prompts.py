"""Tools and prompts of requests; `fd_core.text.prompt_reader` makes prompts token ids.

Tools are what a prompt shows, how its answer is read, and grammars that hold a model to the calls that are demanded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from fd_core.http.errors import invalid, required, unsupported
from fd_core.server.preprocess.sampling import asked_tokens
from fd_core.server.schemas.requests import (
    MAX_TOOL_NAME,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Message,
    TokenizeRequest,
    ToolChoice,
)
from fd_core.server.state.state import ServerState
from fd_core.structured.grammar import CallAsked, CallsForm, FormAsked
from fd_core.text.chat_template import shown_tool
from fd_core.text.parsing.answer import AnswerReading, Parsers
from fd_core.text.parsing.contract import ReasoningParser, ToolParser
from fd_core.text.prompt_reader import PromptReader, PromptText, template_kwargs
from fd_core.types import Reasoning, SamplingParams
from fd_core.types.checks import check_ids

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")
_TAIL_TOKENS: Final = 64
_ROLES: Final = ("system", "developer", "user", "assistant", "tool")


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


def offered_tools(body: ChatRequest | TokenizeRequest, longest_name: int = MAX_TOOL_NAME) -> OfferedTools | None:
    """Return the tools that may be called, None if none; `ApiError` (400) for unusable names and choices."""
    choice, schemas = body.tool_choice, {}
    for index, tool in enumerate(body.tools or ()):
        place, name = f"tools[{index}]", tool.function.name
        if tool.type != "function":
            raise invalid(f"{place}.type is {tool.type[:40]!r}; served are functions", f"{place}.type", "invalid_value")
        if len(name) > longest_name or not _NAME.fullmatch(name):
            message = f"{place}.function.name has to be 1 to {longest_name} letters, digits, '_', '-' or '.'"
            raise invalid(message, f"{place}.function.name")
        if name in schemas:
            raise invalid(f"{place}.function.name is {name!r}, as that of another tool", f"{place}.function.name")
        schemas[name] = tool.function.parameters or {"type": "object", "properties": {}}
    forced = _forced(choice, schemas)
    if choice == "none" or not schemas:
        return None
    shown = [shown_tool({"function": msgspec.structs.asdict(tool.function)}) for tool in body.tools or ()]
    strict = frozenset(tool.function.name for tool in body.tools or () if tool.function.strict)
    return OfferedTools(shown, schemas, forced, strict)


def answer_reading(state: ServerState, body: ChatRequest, tools: OfferedTools | None) -> AnswerReading:
    """Return how answers are read. Raises `ApiError` (400) for tools where the server has no parser of calls."""
    parsers = state.parsers
    if tools is not None and parsers.tools is None:
        raise unsupported(
            "tools cannot be called: it is not known how this model writes calls; start the server with "
            "--tool-call-parser, or leave tools out",
            "tools",
        )
    parallel, shows_reasoning = body.parallel_tool_calls is not False, body.include_reasoning is not False
    if tools is None:
        return AnswerReading(parsers.reasoning, None, {}, parallel, shows_reasoning)
    return AnswerReading(parsers.reasoning, parsers.tools, tools.schemas, parallel, shows_reasoning)


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


def demanded_form(
    state: ServerState, tools: OfferedTools | None, reading: AnswerReading | None, form: FormAsked | None
) -> FormAsked | None:
    """Return the form of calls that have to be made, or whose arguments have to keep a schema; None if there are none.

    An answer that may be calls is those, or what has the `form` that the request asks for. Raises `ApiError` (400),
    naming the field, where the model's format cannot be held by a grammar, or calls leave no place for the form.
    """
    if tools is None or reading is None or reading.tools is None or not (tools.forced or tools.strict or form):
        return None
    parser, field = reading.tools, "tool_choice" if tools.forced else "tools[].function.strict"
    if form is not None and tools.forced:
        raise invalid(f"{form.field}: tools that have to be called leave no place for another form", form.field)
    if form is not None and not tools.strict:
        field = form.field
    calls = [
        _asked(parser, tools, name, index, field)
        for index, name in enumerate(tools.schemas)
        if not tools.forced or name in tools.forced
    ]
    calls_form = CallsForm(
        calls=calls,
        control_tokens=state.tokenizer.control_tokens,
        is_demanded=bool(tools.forced) or form is not None,
        before=parser.before_calls,
        markers=parser.markers,
        answer_begin=parser.answer_begin,
        several=(form is not None or len(tools.forced) > 1) and reading.parallel,
        space=reading.reasoning is not None and not parser.reads_reasoning,
        instead=form,
    )
    return FormAsked("tools", calls_form)


def constrained(
    state: ServerState,
    prompts: Sequence[tuple[int, ...]],
    params: Sequence[SamplingParams],
    *,
    reading: AnswerReading | None,
    budget: int | None,
    called: bool,
) -> list[SamplingParams]:
    """Return parameters with reasoning before any grammar and within `budget` tokens.

    `called` says that the grammar is one of calls. Raises `ApiError` (400), naming the field, for a budget of a model
    whose reasoning has no known end, or is a part of that grammar.
    """
    parser = None if reading is None else reading.reasoning
    if called and reading is not None and reading.tools is not None and reading.tools.reads_reasoning:
        if budget is not None:
            raise unsupported(
                "reasoning_max_tokens cannot be kept beside calls that are demanded or strict: as this model writes "
                "them, its reasoning belongs to their grammar; leave out one of them",
                "reasoning_max_tokens",
            )
        parser = None  # its grammar begins with the reasoning
    held = []
    for prompt, given in zip(prompts, params, strict=True):
        tail = state.tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special=False)
        held.append(msgspec.structs.replace(given, reasoning=_reasoning(state, parser, tail, budget)))
    return held


def _reasoning(
    state: ServerState, parser: type[ReasoningParser] | None, tail: str, budget: int | None
) -> Reasoning | None:
    if parser is None or not parser.end:
        if budget is None:
            return None
        raise unsupported(
            "reasoning_max_tokens cannot be kept: it is not known how this model ends its reasoning; see "
            "--reasoning-parser",
            "reasoning_max_tokens",
        )
    if not parser.begins_reasoning(tail, state.prompt_reader.switches_reasoning):
        return None
    end = tuple(state.tokenizer.encode(parser.end, add_special=False))
    check_ids(end, state.client.info.vocab_size, "the end of reasoning", state.tokenizer.token_text)
    return Reasoning(end=end, max_tokens=budget)


def _asked(parser: type[ToolParser], tools: OfferedTools, name: str, index: int, field: str) -> CallAsked:
    form = parser.form(name)
    if form is None:
        raise unsupported(
            f"{field} demands calls of a fixed form, which a grammar cannot hold as this model writes them; "
            "leave the model the choice, without strict and without another form",
            field,
        )
    keeps = name in tools.strict or name in tools.forced
    schema = dict(tools.schemas[name]) if keeps else {"type": "object"}
    return CallAsked(form, schema, f"tools[{index}].function.parameters", name, name in tools.strict)


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
        reason = "continue_final_message goes on with the last message, add_generation_prompt begins another; give one"
        raise invalid(reason, "continue_final_message")
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
    is_plain = tools is None and variables is None and template is None and body.documents is None
    ids = await reader.render(size, read, is_plain=is_plain)
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
