"""Grammars that hold a model to the calls that a request demands, and where they begin behind reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from fd_core.http.errors import invalid
from fd_core.server.preprocess.tools import OfferedTools
from fd_core.server.state.state import ServerState
from fd_core.structured.grammar import CallAsked, CallsForm, FormAsked
from fd_core.text.parsing.answer import AnswerReading
from fd_core.text.parsing.contract import ReasoningParser, ToolParser
from fd_core.types import Reasoning, SamplingParams
from fd_core.types.checks import check_ids

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
            raise invalid(
                "reasoning_max_tokens cannot be kept beside calls that are demanded or strict: as this model writes "
                "them, its reasoning belongs to their grammar; leave out one of them",
                "reasoning_max_tokens",
                "unsupported_parameter",
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
        raise invalid(
            "reasoning_max_tokens cannot be kept: it is not known how this model ends its reasoning; see "
            "--reasoning-parser",
            "reasoning_max_tokens",
            "unsupported_parameter",
        )
    if not parser.begins_reasoning(tail, state.prompt_reader.switches_reasoning):
        return None
    end = tuple(state.tokenizer.encode(parser.end, add_special=False))
    check_ids(end, state.client.info.vocab_size, "the end of reasoning", state.tokenizer.token_text)
    return Reasoning(end=end, max_tokens=budget)


def _asked(parser: type[ToolParser], tools: OfferedTools, name: str, index: int, field: str) -> CallAsked:
    form = parser.form(name)
    if form is None:
        raise invalid(
            f"{field} demands calls of a fixed form, which a grammar cannot hold as this model writes them; "
            "leave the model the choice, without strict and without another form",
            field,
            "unsupported_parameter",
        )
    keeps = name in tools.strict or name in tools.forced
    schema = dict(tools.schemas[name]) if keeps else {"type": "object"}
    return CallAsked(form, schema, f"tools[{index}].function.parameters", name, name in tools.strict)
