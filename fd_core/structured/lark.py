"""Writes a grammar in llguidance's Lark syntax out of independent parts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from fd_core.errors import BadRequest
from fd_core.structured.schemas import MAX_DEPTH, with_exact_formats, wrong

JSON_STYLE: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as most programs print it on one line. With fixed white space most tokens required by a schema are forced, and
no model can fill an answer with spaces.
"""
ANY_TEXT: Final = "/(?s:.*)/"
"""A terminal: any text without control tokens."""


def literal(text: str) -> str:
    """Return a literal that is not empty, which escapes as JSON does."""
    return re.sub("[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", json.dumps(text, ensure_ascii=False))


class LarkText:
    """A grammar that grows by rules and terminals; equal ones get one name."""

    def __init__(self, control_tokens: Mapping[str, int] | None = None) -> None:
        """`control_tokens` are written by their ids where `spelled` finds them."""
        self._control = control_tokens or {}
        longest_first = sorted(self._control, key=len, reverse=True)
        self._find = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._names: dict[str, str] = {}
        self._lines: list[str] = []
        self._inner: list[dict[str, Any]] = []

    def rule(self, body: str, options: str = "") -> str:
        """Return the name of a rule."""
        return self._named("r", options, body)

    def terminal(self, body: str) -> str:
        """Return the name of a terminal: a regular expression, of which `&` and `~` may be parts."""
        return self._named("T", "", body)

    def declare(self) -> str:
        """Return a name for a rule that `define` defines later: for rules that contain themselves."""
        name = f"r{len(self._lines)}"
        self._lines.append("")
        return name

    def define(self, name: str, body: str) -> None:
        """Define a rule of `declare`."""
        self._lines[int(name[1:])] = f"{name}: {body}"

    def either(self, options: Iterable[str]) -> str:
        """Return the name of a rule that is one of `options`."""
        return self.rule(" | ".join(dict.fromkeys(options)))

    def json(self, schema: Mapping[str, Any] | bool) -> str:
        """Return the name of a rule for the JSON values of a schema, on one line."""
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        return self.rule(f"%json {json.dumps({'x-guidance': JSON_STYLE, **with_exact_formats(schema)})}")

    def grammar(self, text: str, field: str = "grammar") -> str:
        """Return a separate grammar as a part of this one; `BadRequest` with `field` if it has parts itself."""
        name, parts = f"inner_{len(self._inner)}", [{"lark_grammar": text}]
        if text.startswith("{"):
            parts = json.loads(text)["grammars"]
        if len(parts) > 1:
            raise BadRequest(f"{field} contains nested grammars and cannot be part of another one", field=field)
        self._inner.append({**parts[0], "name": name})
        return f"@{name}"

    def spelled(self, text: str) -> str:
        """Return the expression of a text, with control tokens by id; empty for an empty text."""
        parts, location = [], 0
        for found in self._find.finditer(text):
            parts += [text[location : found.start()], found[0]]
            location = found.end()
        parts.append(text[location:])
        ids = self._control
        return " ".join(f"<[{ids[part]}]>" if part in ids else literal(part) for part in parts if part)

    def text_up_to(self, *ends: str, without: Sequence[str] = (), free: str = ANY_TEXT) -> str:
        """Return the name of a rule: text of `free` up to and including the first of `ends`.

        The text contains none of `without`. `ends` are not empty. Control tokens can only begin an end.
        """
        texts = [end for end in ends if not self._find.match(end)]
        free = self.free_text(without, free)
        options = [f"{self.terminal(free)} {self.spelled(end)}" for end in ends if end not in texts]
        if texts:
            options.append(self.rule(f"({free}) ({' | '.join(map(literal, texts))})", "[lazy]"))
        return self.either(options)

    def free_text(self, without: Sequence[str] = (), free: str = ANY_TEXT) -> str:
        """Return the terminal of texts of `free` without any of `without`."""
        return f"{free} & ~/(?s:.*)({'|'.join(map(in_regex, without))})(?s:.*)/" if without else free

    def text_before(self, end: str, free: str) -> str:
        """Return the expression of a text of `free` without the distinctive part of `end`, followed by `end`."""
        control = self._find.search(end)
        if control is None:
            return self.terminal(f"({free}) {literal(end)}")
        plain = literal(end[: control.start()]) if control.start() else ""
        return f"{self.terminal(f'({free}) {plain}')} {self.spelled(end[control.start() :])}"

    def begins_with_control(self, text: str) -> bool:
        """Return True if a text begins with a control token."""
        return bool(self._find.match(text))

    def text(self, start: str) -> str:
        """Return the grammar whose first rule is `start`, as `SamplingParams.grammar`."""
        lark = "\n".join([f"start: {start}", *self._lines])
        if not self._inner:
            return LLMatcher.grammar_from_lark(lark)
        return json.dumps({"grammars": [{"name": "whole", "lark_grammar": lark}, *self._inner]})

    def _named(self, kind: str, options: str, body: str) -> str:
        key = f"{kind}{options}: {body}"
        if key not in self._names:
            name = self._names[key] = f"{kind}{len(self._lines)}"
            self._lines.append(f"{name}{options}: {body}")
        return self._names[key]


def as_lark(text: str, field: str) -> str:
    """Return a grammar in Lark's syntax, or in GBNF, as Lark. Raises `BadRequest` that names `field`."""
    if "::=" not in text:
        return text
    if max(accumulate((character == "(") - (character == ")") for character in text)) > MAX_DEPTH:
        raise wrong(field, f"parentheses are nested deeper than {MAX_DEPTH} levels")
    try:
        return str(any_to_lark(text))
    except Exception as error:  # noqa: BLE001 - the library may raise any exception
        raise wrong(field, f"the GBNF grammar is invalid: {error or type(error).__name__}") from None


def in_regex(text: str) -> str:
    """Return a regular expression that matches a text literally, also between slashes."""
    return re.sub(r"[^\w ]", lambda found: f"\\x{{{ord(found[0]):x}}}", text)


def slashed(pattern: str) -> str:
    """Return a regular expression escaped for use between slashes."""
    return re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", r"\n")
