"""Requests with grammars for the null engine, whose tokens are bytes."""

from __future__ import annotations

from fd_core.structured import grammar
from fd_core.types import Reasoning, RequestSpec, SamplingParams
from tests.engine.helpers import EOS

__all__ = ["GRAMMARS", "THINK", "matches", "structured_specs"]

import json
import re

import jsonschema

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["cat", "car", "dog"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "maxItems": 3},
    },
    "required": ["name", "kind", "ages"],
    "additionalProperties": False,
}
PATTERN = r"[a-f]{2,6}(-[0-9]{3}){1,2}!"
CHOICES = ["yes", "yes, certainly", "no"]
GRAMMARS = {
    "schema": grammar.json_schema(SCHEMA),
    "regex": grammar.regex(PATTERN),
    "choice": grammar.choice(CHOICES),
    "lark": grammar.context_free('start: "<" start ">" | "x"'),
}
THINK = (7, 9, 7)
"""Token ids that end reasoning."""


def matches(kind: str, text: str) -> bool:
    """Return True if a whole text satisfies its output constraint."""
    if kind == "schema":
        jsonschema.validate(json.loads(text), SCHEMA)
        return True
    if kind == "regex":
        return re.fullmatch(PATTERN, text) is not None
    if kind == "choice":
        return text in CHOICES
    return re.fullmatch(r"(<*)x(>*)", text) is not None and text.count("<") == text.count(">")


def structured_specs(count: int, max_tokens: int = 70) -> list[RequestSpec]:
    """Return requests of every kind in turn: every fifth unconstrained, some with reasoning, penalties, filters and
    logprobs.
    """
    specs = []
    for index in range(count):
        kind = list(GRAMMARS)[index % len(GRAMMARS)]
        reasoning = Reasoning(end=THINK, max_tokens=index % 9) if index % 3 == 1 else None
        specs.append(
            RequestSpec(
                request_id=f"{kind}-{index}" if index % 5 != 4 else f"free-{index}",
                prompt=tuple((index * 37 + position * 11) % 256 for position in range(3 + index * 7 % 90)),
                params=SamplingParams(
                    max_tokens=max_tokens,
                    temperature=float(index % 2),
                    seed=index,
                    logprobs=2 if index % 4 == 0 else None,
                    top_k=40 if index % 6 == 5 else 0,
                    presence_penalty=0.5 if index % 7 == 3 else 0.0,
                    grammar=None if index % 5 == 4 else GRAMMARS[kind],
                    reasoning=None if index % 5 == 4 else reasoning,
                ),
                eos_token_ids=EOS,
            )
        )
    return specs
