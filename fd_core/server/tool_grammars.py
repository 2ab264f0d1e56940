"""Grammars that hold a model to the calls that a request demands, and where they begin behind reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec

from fd_core.server.errors import invalid
from fd_core.server.generation import Job
from fd_core.server.state import ServerState
from fd_core.server.structured_fields import FormAsked
from fd_core.server.tools import OfferedTools
from fd_core.structured import grammar
from fd_core.text.parsing.answer import AnswerReading
from fd_core.text.parsing.contract import CallForm, ReasoningParser, ToolParser
from fd_core.text.tokenizer import Tokenizer
from fd_core.types import Reasoning

__all__ = ["constrained", "demanded_schemas"]

_STYLE: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_TAIL_TOKENS: Final = 64


def constrained(
    state: ServerState, job: Job, tools: OfferedTools | None, budget: int | None, form: FormAsked | None
) -> Job:
    """Return the job with the grammar that `tools` demand, and with reasoning before any grammar and within `budget`.

    Raises `ApiError` (400), naming the field, where the model's format cannot be held by a grammar, where there is
    a `form` as well, and for a budget of a model whose reasoning has no known end.
    """
    demanded = None if tools is None or job.reading is None else _demanded(tools, job.reading, state.tokenizer)
    params = []
    for prompt, given in zip(job.prompts, job.params, strict=True):
        text = given.grammar
        if demanded is not None:
            if form is not None:
                raise invalid(f"{form.field}: tools that have to be called leave no place for another form", form.field)
            text = demanded
        tail = state.tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special=False)
        reasoning = _reasoning(state, job, tail, budget) if text is not None or budget is not None else None
        params.append(msgspec.structs.replace(given, grammar=text, reasoning=reasoning or given.reasoning))
    return replace(job, params=params)


def demanded_schemas(tools: OfferedTools) -> Iterator[FormAsked]:
    """Yield the schemas that arguments have to keep, with their places in the request."""
    for index, (name, schema) in enumerate(tools.schemas.items()):
        if name in tools.strict or name in tools.forced:
            place = f"tools[{index}].function.parameters"
            yield FormAsked(place, partial(grammar.json_schema, schema, field=place), dict(schema))


def _reasoning(state: ServerState, job: Job, tail: str, budget: int | None) -> Reasoning | None:
    parser: type[ReasoningParser] | None = None if job.reading is None else job.reading.reasoning
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
    return Reasoning(end=tuple(state.tokenizer.encode(parser.end, add_special=False)), max_tokens=budget)


def _demanded(tools: OfferedTools, reading: AnswerReading, tokenizer: Tokenizer) -> str | None:
    """Return the grammar for calls that have to be made, or whose arguments have to keep a schema."""
    parser = reading.tools
    if parser is None or not (tools.forced or tools.strict):
        return None
    if tools.forced:
        return _forced(parser, tools, reading, tokenizer)
    field = "tools[].function.strict"
    structures = []
    for name in tools.schemas:
        form = _form(parser, name, field)
        if _specials(form.begin + form.end, tokenizer):
            raise invalid(
                "tools[].function.strict is not supported: this model begins calls with control tokens; "
                "tool_choice 'required' holds them to their schemas",
                field,
                "unsupported_parameter",
            )
        structures.append({"begin": form.begin, "schema": _arguments(tools, name), "end": form.end})
    triggers = sorted({_form(parser, name, field).trigger for name in tools.schemas})
    return grammar.structural_tag({"structures": structures, "triggers": triggers}, field="tools")


def _forced(parser: type[ToolParser], tools: OfferedTools, reading: AnswerReading, tokenizer: Tokenizer) -> str:
    """Return the grammar of one call, or of several where any tool may be called and calls may be parallel."""
    reasoned = reading.reasoning is not None
    forms = [_form(parser, name, "tool_choice") for name in tools.forced]
    calls = [
        f"call_{index}: {_literal(form.begin, tokenizer)} arguments_{index} {_literal(form.end, tokenizer)}\n"
        f"arguments_{index}: %json {json.dumps(_arguments(tools, name) | {'x-guidance': _STYLE})}"
        for index, (form, name) in enumerate(zip(forms, tools.forced, strict=True))
    ]
    between = _literal(forms[0].between, tokenizer)
    space = "SPACE? " if reasoned else ""
    again = f" ({between} call)*" if len(tools.forced) > 1 and reading.parallel else ""
    lines = [f"start: {space}call{again}", "call: " + " | ".join(f"call_{index}" for index in range(len(forms)))]
    if reasoned:
        lines.append("SPACE: /[ \\n]{1,2}/")
    return grammar.context_free("\n".join([*lines, *calls]), field="tools")


def _form(parser: type[ToolParser], name: str, field: str) -> CallForm:
    form = parser.form(name)
    if form is None:
        raise invalid(
            f"{field} demands calls of a fixed form, which a grammar cannot hold as this model writes them; "
            "leave the model the choice, without strict",
            field,
            "unsupported_parameter",
        )
    return form


def _arguments(tools: OfferedTools, name: str) -> dict[str, Any]:
    """Return the schema of the arguments; those of a tool that is not strict may be any object."""
    keeps = name in tools.strict or name in tools.forced
    return {"type": "object", **tools.schemas[name]} if keeps else {"type": "object"}


def _specials(text: str, tokenizer: Tokenizer) -> list[str]:
    """Return the control tokens within a text."""
    tokens = (tokenizer.backend.id_to_token(token_id) for token_id in tokenizer.special_ids)
    return [token for token in tokens if token and token in text]


def _literal(text: str, tokenizer: Tokenizer) -> str:
    """Return a text in Lark's syntax, its control tokens by their ids."""
    if not text:
        return ""
    specials = _specials(text, tokenizer)
    parts = re.split("(" + "|".join(map(re.escape, specials)) + ")", text) if specials else [text]
    spelled = [
        f"<[{tokenizer.backend.token_to_id(part)}]>" if part in specials else json.dumps(part) for part in parts if part
    ]
    return " ".join(spelled)
