"""From what people ask for to the text of a grammar, `SamplingParams.grammar`, with bounds on size and nesting.

Nothing is compiled here: `fd_core.structured.compiler` says whether a grammar makes sense.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher

from fd_core.errors import BadRequest
from fd_core.structured.bounds import MAX_CHOICES, require_few_repeats, require_schema, require_small
from fd_core.structured.lark import JSON_STYLE, as_lark, literal
from fd_core.structured.tags import structural_tag

__all__ = ["choice", "context_free", "json_object", "json_schema", "regex", "structural_tag"]


def json_object() -> str:
    """Return the grammar of any JSON object."""
    return json_schema({"type": "object"})


def json_schema(
    schema: Mapping[str, Any] | bool, *, whitespace_pattern: str | None = None, field: str = "json_schema"
) -> str:
    """Return the grammar of the JSON values that fit a schema, whose property order is that of the answer.

    JSON is written on one line with one blank behind commas and colons, or with what matches `whitespace_pattern`
    wherever white space is allowed. Raises `BadRequest` that names `field`.
    """
    if schema is False:
        raise BadRequest(f"{field}: no value fits the schema false", field=field)
    text = json.dumps(require_schema(schema, field))
    style: Any = JSON_STYLE if whitespace_pattern is None else {"whitespace_pattern": whitespace_pattern}
    try:
        return LLMatcher.grammar_from_json_schema(text, defaults=style)
    except ValueError as error:
        raise BadRequest(f"{field}: the schema cannot be used: {error}", field=field) from None


def regex(pattern: str, *, field: str = "regex") -> str:
    """Return the grammar of the texts that a regular expression matches as a whole. Raises `BadRequest`."""
    require_small(pattern, "the regular expression", field)
    require_few_repeats(pattern, field)
    return LLMatcher.grammar_from_regex(pattern)


def choice(texts: Sequence[str], *, field: str = "choice") -> str:
    """Return the grammar of a few given texts. Raises `BadRequest` if there are none, too many or too long ones."""
    if not 1 <= len(texts) <= MAX_CHOICES:
        raise BadRequest(f"{field}: there are {len(texts)} choices; allowed are 1 to {MAX_CHOICES}", field=field)
    require_small("".join(texts), "all choices together", field)
    return LLMatcher.grammar_from_lark("start: " + " | ".join(literal(text) for text in dict.fromkeys(texts)))


def context_free(text: str, *, field: str = "grammar") -> str:
    """Return the grammar written in Lark's syntax (rule `start`), or in GBNF (rule `root`). Raises `BadRequest`."""
    require_small(text, "the grammar", field)
    require_few_repeats(text, field)
    return LLMatcher.grammar_from_lark(as_lark(text, field))
