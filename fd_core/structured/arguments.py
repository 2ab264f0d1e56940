"""Grammars of arguments that are not written as one JSON object, from the schema of a tool.

Schemas that such a format cannot express or enforce are rejected with their location. Properties are in the
order of the schema; an object has no others unless `additionalProperties` allows it or it names none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from fd_core.structured.lark import LarkText, in_regex, literal, slashed
from fd_core.structured.patterns import FORMATS
from fd_core.structured.schemas import wrong
from fd_core.text.parsing.argument_types import KINDS, json_of, kind_of, kinds_of, referred
from fd_core.text.parsing.contract import TaggedArguments

_NOTES: Final = frozenset({"$schema", "$id", "$comment", "title", "description", "default", "examples", "deprecated"})
_DEFINITIONS: Final = ("$defs", "definitions")
_OBJECT: Final = frozenset({"type", "properties", "required", "additionalProperties", "strict", *_DEFINITIONS}) | _NOTES
_OF_STRINGS: Final = ("pattern", "format", "minLength", "maxLength")
_ARRAY: Final = frozenset({"type", "items", *_DEFINITIONS}) | _NOTES
_REFERENCE: Final = frozenset({"$ref"}) | _NOTES
_LIST_OF_ONE: Final = frozenset({"allOf"}) | _NOTES
_UNION: Final = frozenset({"anyOf", *_DEFINITIONS}) | _NOTES
_COMBINED: Final = frozenset({"allOf", "not", "if", "oneOf"})
"""Keywords that combine schemas; a `oneOf` whose options are known to be disjoint has become an `anyOf`."""
_MAX_PARTS: Final = 20_000
"""Limit of parts of a schema, referenced ones counted each time."""
_MAX_LEVELS: Final = 64
_LIKE: Final = {
    "null": r"/\s*(null|None)\s*/",
    "boolean": r"/\s*([tT]rue|[fF]alse)\s*/",
    "number": r"/\s*(-?[0-9][0-9.eE+-]*|-?Infinity|NaN)\s*/",
    "array": r"/\s*\[(?s:.*)/",
    "object": r"/\s*\{(?s:.*)/",
}
"""Texts that may be parsed as JSON of a type."""
_NUMBER: Final = r"-?(0|[1-9][0-9]{0,14})"
"""At most the digits that every reader of JSON holds exactly."""
_SCALARS: Final = {
    "null": '"null"',
    "boolean": '"true" | "false"',
    "integer": f"/{_NUMBER}/",
    "number": rf"/{_NUMBER}(\.[0-9]{{1,17}})?([eE][+-]?[0-9]{{1,2}})?/",
}
_BOUNDS: Final = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_QUOTED: Final = r"""/"([^"\\\x00-\x1f\x7f]|\\["'\\ntr])*"|'([^'\\\x00-\x1f\x7f]|\\["'\\ntr])*'/"""
_KEY: Final = r'/"[^"\\\x00-\x1f\x7f]*"/'
_JSON_STRING: Final = ("type", *_OF_STRINGS)
_PYTHON_WORDS: Final = {"boolean": '"True" | "False"', "null": '"None"'}
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLAIN_PATTERN: Final = re.compile(r"(?:[^\\^$]|\\.|\[\^?(?:[^\\\]]|\\.)+\])*", re.DOTALL)


class _Fields(NamedTuple):
    known: Mapping[str, Any]
    required: frozenset[str]
    more: Any
    """Schema of additional properties; None if there are none."""


class _Values:
    """Reads the schema of one tool. Methods raise `BadRequest` that names a location."""

    def __init__(self, lark: LarkText, schema: Mapping[str, Any], location: str) -> None:
        self.lark = lark
        self.root = schema
        self.location = location
        self._parts = 0

    def fields(self, schema: Any, location: str) -> _Fields | None:
        """Return the properties that an object may have; None if its schema has further constraints."""
        if not isinstance(schema, Mapping) or not _OBJECT.issuperset(_keywords_of(schema)):
            return None
        known, more = schema.get("properties"), schema.get("additionalProperties")
        if more is None:
            more = known is None
        known = dict(known) if isinstance(known, Mapping) else {}
        required = schema.get("required") or ()
        if not isinstance(required, list | tuple) or not all(isinstance(each, str) for each in required):
            raise wrong(f"{location}.required", "expected a list of names")
        for name in required:
            if name not in known:
                known[name] = more
        return _Fields(known, frozenset(required), None if more is False else more)

    def argument_fields(self) -> _Fields:
        """Return the arguments that the tool accepts."""
        schema = referred(self.root, self.root)
        found = self.fields(schema, self.location) if schema.get("type", "object") == "object" else None
        if found is None:
            other = next((word for word in _keywords_of(schema) if word not in _OBJECT), "type")
            raise wrong(f"{self.location}.{other}", "it cannot be enforced in the call format of this model")
        return found

    def follow(self, schema: Any, location: str) -> Any:
        """Return the schema that a reference, or a list of one, stands for."""
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise wrong(self.location, f"the schema has more than {_MAX_PARTS:,} parts")
        if not isinstance(schema, Mapping | bool):
            raise wrong(location, "expected a schema as a JSON object")
        found = referred(schema, self.root)
        if found is False or (found == {} and schema not in ({}, True)):
            raise wrong(location, "no value matches it, or its $ref is dangling")
        if isinstance(schema, Mapping) and found is not schema and not _REFERENCE.issuperset(_keywords_of(schema)):
            raise wrong(location, "$ref cannot be combined with other keywords in the call format of this model")
        found = {} if found is True else found
        inner = found.get("allOf")
        if isinstance(inner, list) and len(inner) == 1 and _LIST_OF_ONE.issuperset(_keywords_of(found)):
            return self.follow(inner[0], f"{location}.allOf[0]")
        return found

    def split(self, schema: Any, location: str, level: int = 0) -> tuple[list[Mapping[str, Any]], list[Any]]:
        """Return the schemas of the strings that a schema allows, and those of its other values."""
        schema = self.follow(schema, location)
        if level > _MAX_LEVELS:
            raise wrong(location, "the schema refers to itself infinitely")
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        options = schema.get("anyOf")
        if isinstance(values, list) and _COMBINED.isdisjoint(schema) and options is None:
            kinds = kinds_of({"type": schema["type"]}, None) if "type" in schema else KINDS
            texts = [each for each in values if isinstance(each, str) and "string" in kinds]
            rest = [each for each in values if not isinstance(each, str) and kind_of(each) in kinds]
            return [{**schema, "enum": texts}] * bool(texts), [{**schema, "enum": rest}] * bool(rest)
        if isinstance(options, list):
            if not _UNION.issuperset(_keywords_of(schema)):
                return self._whole(schema, location)
            strings: list[Mapping[str, Any]] = []
            others: list[Any] = []
            for index, part in enumerate(options):
                more = self.split(part, f"{location}.anyOf[{index}]", level + 1)
                strings += more[0]
                others += more[1]
            return strings, others
        if not _COMBINED.isdisjoint(schema):
            return self._whole(schema, location)
        named = schema.get("type")
        names = [named] if isinstance(named, str) else named
        if not isinstance(names, list):
            names = ["string", *sorted(KINDS - {"string"})]
        if (unknown := next((name for name in names if name not in (*KINDS, "integer")), None)) is not None:
            raise wrong(f"{location}.type", f"{str(unknown)[:40]!r} is not a type")
        rest = [name for name in names if name != "string"]
        only = {word: value for word, value in schema.items() if word not in _OF_STRINGS}
        return (
            [{**schema, "type": "string"}] if "string" in names else [],
            [{**only, "type": rest[0] if len(rest) == 1 else rest}] if rest else [],
        )

    def _whole(self, schema: Mapping[str, Any], location: str) -> tuple[list[Mapping[str, Any]], list[Any]]:
        named = schema.get("type")
        names = [named] if isinstance(named, str) else named
        if not isinstance(names, list) or "string" in names:
            raise wrong(
                location, "it has constraints on strings that cannot be enforced in the call format of this model"
            )
        return [], [schema]

    def texts(self, schema: Mapping[str, Any]) -> list[str] | None:
        """Return the strings of a schema, if it lists them."""
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        return values if isinstance(values, list) else None

    def terminals(self, schema: Mapping[str, Any], location: str) -> list[str]:
        """Return the terminals that a string has to match, all of them."""
        found = []
        shortest, longest = schema.get("minLength", 0), schema.get("maxLength", "")
        if shortest or longest != "":
            found.append(f"/(?s:.{{{int(shortest)},{longest if longest == '' else int(longest)}}})/")
        if isinstance(pattern := schema.get("pattern"), str):
            found.append(self._pattern(pattern, f"{location}.pattern"))
        if (kind := schema.get("format")) is not None:
            if kind not in FORMATS:
                raise wrong(
                    f"{location}.format", f"{str(kind)[:40]!r} cannot be enforced in the call format of this model"
                )
            found += [f"/{each}/" for each in FORMATS[kind]]
        return found

    def json(self, schema: Any) -> str:
        """Return the rule for the JSON of a schema, with the definitions that it may refer to."""
        shared = {word: self.root[word] for word in _DEFINITIONS if word in self.root}
        return self.lark.json({**shared, **schema} if isinstance(schema, Mapping) else schema)

    def _pattern(self, pattern: str, location: str) -> str:
        """Return the terminal of texts that contain a match of a JSON Schema pattern."""
        begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
        inner = pattern[begins : len(pattern) - ends]
        if not _PLAIN_PATTERN.fullmatch(inner) or ((begins or ends) and "|" in inner):
            raise wrong(location, "'^' and '$' are only supported at its beginning and end, around all of it")
        return f"/{'' if begins else '(?s:.*)'}({slashed(inner)}){'' if ends else '(?s:.*)'}/"


def _keywords_of(schema: Mapping[str, Any]) -> set[str]:
    return {word for word in schema if not word.startswith("x-")}


class TaggedGrammar(_Values):
    """Arguments one by one between markers."""

    def __init__(self, lark: LarkText, schema: Mapping[str, Any], location: str, form: TaggedArguments) -> None:
        super().__init__(lark, schema, location)
        self.form = form

    def arguments(self) -> str:
        """Return the expression for all arguments. Raises `BadRequest`."""
        lark, form, location = self.lark, self.form, self.location
        known, required, more = self.argument_fields()
        parts = []
        for name, inner in known.items():
            where = f"{location}.properties.{name}"
            if not name or any(mark in name for mark in (form.before_value[0], form.before_value, *form.ends)):
                raise wrong(where, "this name is not supported in the call format of this model")
            key = f"{lark.spelled(form.before_key)} {literal(name)} {lark.spelled(form.before_value)}"
            argument = lark.rule(f"{key} {self._value(inner, where)}")
            parts.append(argument if name in required else f"{argument}?")
        if more is not None:
            others = "".join(f" & ~{literal(name)}" for name in known)
            key = f"{lark.spelled(form.before_key)} {lark.terminal(f'/[A-Za-z0-9_-]+/{others}')}"
            value = self._value(more, f"{location}.additionalProperties")
            parts.append(f"{lark.rule(f'{key} {lark.spelled(form.before_value)} {value}')}*")
        return " ".join(parts)

    def _value(self, schema: Any, location: str) -> str:
        """Return the rule for a value and the text after it."""
        strings, others = self.split(schema, location)
        kinds = kinds_of(schema, self.root) - {"string"}
        options: list[str] = []
        if strings:
            # Lexemes are matched greedily. So if text may be a string or another value, each is one lexeme with the
            # text after it, or they differ in their first character.
            unlike = dict(_LIKE)
            for other in others:
                options += self._non_strings(other, unlike)
            apart = "".join(f" & ~{unlike[kind]}" for kind in sorted(kinds)) + r' & ~/\s*"(?s:.*)/' * bool(kinds)
            for string in strings:
                options += self._strings(string, apart, kinds, location=location)
        elif others:
            merged = others[0] if len(others) == 1 else {"anyOf": others}
            options.append(f"{self.json(merged)} {self.lark.spelled(self.form.after_value)}")
        if not options:
            raise wrong(location, "no value matches it")
        return self.lark.either(options)

    def _non_strings(self, schema: Mapping[str, Any], unlike: dict[str, str]) -> Iterator[str]:
        """Yield expressions for values other than strings, and add to `unlike` how strings must differ from them."""
        end, kind, listed = self.form.after_value, schema.get("type"), self.texts(schema)
        if listed is None and isinstance(kind, list):
            for each in kind:
                yield from self._non_strings({**schema, "type": each}, unlike)
        elif listed is not None and not any(isinstance(each, list | dict) for each in listed):
            yield from (self.lark.text_before(end, literal(json.dumps(each))) for each in listed)
        elif listed is None and kind in _SCALARS and not _BOUNDS.intersection(schema):
            yield self.lark.text_before(end, _SCALARS[kind])
        else:
            if kind in ("integer", "number"):
                unlike["number"] = r"/\s*[-0-9](?s:.*)/"
            yield f"{self.json(schema)} {self.lark.spelled(end)}"

    def _strings(self, schema: Mapping[str, Any], apart: str, kinds: frozenset[str], location: str) -> Iterator[str]:
        lark, form = self.lark, self.form
        texts = self.texts(schema)
        if texts is None:
            terminals = self.terminals(schema, location)
            # The end marker of a value is excluded as a whole, but in combination with another regular expression that
            # exceeds the states of the lexer: then only its first character is excluded.
            begin = in_regex(form.ends[-1][0])
            free = " & ".join([*terminals, f"/[^{begin}]*/"]) if terminals else lark.free_text(form.ends)
            yield lark.text_before(form.after_value, free + apart)
            return
        for text in texts:
            if any(end in text for end in form.ends):
                raise wrong(location, f"the value {text[:40]!r} is not supported in the call format of this model")
            if not kinds or json_of(text, kinds | {"string"}) == json.dumps(text, ensure_ascii=False):
                yield lark.text_before(form.after_value, literal(text))


class KeywordGrammar(_Values):
    """Arguments as keyword arguments in Python. Values with constraints that need JSON Schema are JSON."""

    def __init__(self, lark: LarkText, schema: Mapping[str, Any], location: str) -> None:
        super().__init__(lark, schema, location)
        self._referred: dict[str, str] = {}
        """Rules of referenced schemas, so that a schema may contain itself."""

    def arguments(self) -> str:
        """Return the expression for all arguments. Raises `BadRequest`."""
        lark, location = self.lark, self.location
        known, required, more = self.argument_fields()
        parts = []
        for name, inner in known.items():
            where = f"{location}.properties.{name}"
            if not _NAME.fullmatch(name):
                raise wrong(where, "this name is not supported in the call format of this model")
            parts.append((lark.rule(f'{literal(name)} "=" {self.value(inner, where)}'), name in required))
        another = None
        if more is not None:
            others = "".join(f" & ~{literal(name)}" for name in known)
            value = self.value(more, f"{location}.additionalProperties")
            another = lark.rule(f'{lark.terminal(f"/{_NAME.pattern}/{others}")} "=" {value}')
        return _with_commas(lark, parts, another)

    def value(self, schema: Any, location: str, level: int = 0) -> str:
        """Return the rule of a value."""
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if schema in ({}, True):
            reference = ""  # any value, which contains itself as well
        if not isinstance(reference, str):
            return self._value(schema, location, level)
        if reference not in self._referred:
            name = self._referred[reference] = self.lark.declare()
            self.lark.define(name, self._value(schema, location, level + 1))
        return self._referred[reference]

    def _value(self, schema: Any, location: str, level: int) -> str:
        strings, others = self.split(schema, location)
        options: list[str] = []
        for string in strings:
            texts = self.texts(string)
            if texts is not None:
                options += [literal(json.dumps(text, ensure_ascii=False)) for text in texts]
            elif any(word in string for word in _OF_STRINGS):
                options.append(self.json({word: string[word] for word in _JSON_STRING if word in string}))
            else:
                options.append(self.lark.terminal(_QUOTED))
        for other in others:
            options += self._other(other, location, level)
        if not options:
            raise wrong(location, "no value matches it")
        return self.lark.either(options)

    def _other(self, schema: Mapping[str, Any], location: str, level: int) -> Iterator[str]:
        """Yield expressions for values other than strings."""
        listed, kind = self.texts(schema), schema.get("type")
        if listed is not None and not any(isinstance(each, list | dict) for each in listed):
            yield from (literal(repr(each)) for each in listed)
        elif listed is None and isinstance(kind, list):
            for each in kind:
                yield from self._other({**schema, "type": each}, location, level)
        elif listed is None and kind in _PYTHON_WORDS:
            yield _PYTHON_WORDS[kind]
        elif kind == "array" and _ARRAY.issuperset(_keywords_of(schema)) and level < _MAX_LEVELS:
            item = self.value(schema.get("items", {}), f"{location}.items", level + 1)
            yield f'"[" ({item} (", " {item})*)? "]"'
        elif kind == "object" and level < _MAX_LEVELS and (fields := self.fields(schema, location)):
            yield f'"{{" {self._fields(fields, location, level)} "}}"'
        else:
            yield self.json(schema)

    def _fields(self, fields: _Fields, location: str, level: int) -> str:
        lark = self.lark
        parts = []
        for name, inner in fields.known.items():
            value = self.value(inner, f"{location}.properties.{name}", level + 1)
            key = literal(json.dumps(name, ensure_ascii=False) + ": ")
            parts.append((lark.rule(f"{key} {value}"), name in fields.required))
        if fields.more is None:
            return _with_commas(lark, parts, None)
        value = self.value(fields.more, f"{location}.additionalProperties", level + 1)
        key = " & ".join([_KEY, *(f"~{literal(json.dumps(name, ensure_ascii=False))}" for name in fields.known)])
        return _with_commas(lark, parts, lark.rule(f'{lark.terminal(key)} ": " {value}'))


def _with_commas(lark: LarkText, parts: Sequence[tuple[str, bool]], another: str | None) -> str:
    """Return the expression of `parts` in order, some of them required, then of more of `another`, with commas."""
    following = f'(", " {another})*' if another else ""
    first = f"({another} {following})?" if another else ""  # no part before it
    for rule, needed in reversed(parts):
        after = lark.rule(following) if following else ""
        alone = f"{rule} {after}"
        first = alone if needed else lark.rule(f"{alone} | {first}" if first else f"({alone})?")
        following = f'", " {rule} {after}' if needed else f'(", " {rule})? {after}'
    return first
