"""From the tools of a request to what its prompt shows and how its answers are read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from fd_core.http.errors import invalid, unsupported
from fd_core.server.schemas.requests import MAX_TOOL_NAME, ChatRequest, TokenizeRequest, ToolChoice
from fd_core.server.state.state import ServerState
from fd_core.structured.calls import CallAsked
from fd_core.structured.grammar import CallsForm, FormAsked
from fd_core.text.parsing.answer import AnswerReading
from fd_core.text.parsing.contract import ReasoningParser, ToolParser
from fd_core.text.tool_prompt import shown_tool
from fd_core.types import Reasoning, SamplingParams
from fd_core.types.checks import check_ids

_NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")


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


_TAIL_TOKENS: Final = 64


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
        wanted = given.grammar is not None or budget is not None
        reasoning = _reasoning(state, parser, tail, budget) if wanted else None
        held.append(msgspec.structs.replace(given, reasoning=reasoning or given.reasoning))
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
