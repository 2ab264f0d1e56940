"""An ordinary day of a parser: answers of many users at a time, each with its own tools, texts and end."""

from __future__ import annotations

import json
import random
import re
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from string import digits
from typing import Any, Final

import numpy as np

from fd_core.plugins import TOOL_PARSER
from fd_core.testing.axes.covering import Case
from fd_core.testing.kit.days.account import Day
from fd_core.testing.kit.days.work import HOUR, DayTurn, talks
from fd_core.testing.kit.growth import require_no_stall
from fd_core.testing.kit.law import require
from fd_core.testing.parsers.answers import (
    ANSWER_AXES,
    CALL_AXES,
    VALUES,
    AnswerModel,
    add_calls,
    add_content,
    answer_model,
    is_json,
    pieces_of,
    shortened,
)
from fd_core.testing.parsers.target import SHOWN, ParserTarget, find_parser, meaning_of
from fd_core.text.parsing.builtin import fd_register_reasoning_parsers, fd_register_tool_parsers
from fd_core.text.parsing.contract import CallForm, TaggedArguments
from fd_core.text.parsing.events import ArgumentsDelta, CallBegun, Content, Event, ReasoningDelta, joined
from fd_core.text.parsing.reader import SPACE

PRIVATE: Final = "of one user only"
"""Words that are in most texts, and in no log."""
_TALKS: Final = 60
_HOURS: Final = 6
_SLOTS: Final = 256
"""Answers that are read at a time."""
_WORDS: Final = (
    f"{PRIVATE}| the| of| and| a|,|.|\n| to| is|\n\n| was|ing|ed| (|)| in|:|  |;|0|1|42| -|?|!|\r\n|\t|    |#| **|\n- |"
    "`|\n```python\n|\n```\n|def |()|self.|_|=| == | < | > |</|>|<|<b>|</b>|<function|<tool|tool_call|[|]|{|}|[1]|"
    '"|\'|\\|\\n|\\u0041|\\"|{"|":|, "|"}|null|true|None|NaN|1e5|007|$x^2$|%s|{0}|&lt;|&amp;|&#39;|://|@|~|\x7f|ü|ß|é|'
    " Straße| größer|e\u0301| 東京|日本語。|\u3000|\u00a0|\u2028| \u05e9\u05dc\u05d5\u05dd| 🙂|\U0010ffff|\ufeff"
).split("|")
"""Tokens of texts, of which the first are frequent."""
_NAMES: Final = (
    *("query", "path", "content", "limit", "city", "data", "name", "arguments", "w", "now_and_then", "userId", "X"),
    *("properties", "type", "items", "enum", "required", "$ref", "anyOf", "const", "default", "format", "größe 城市"),
    *("title", "description", "a-b.c_d", "x" * 64),
)
"""Names of parameters, which mean another type in each tool."""
_TOOLS: Final = ("get_weather", "getWeather", "get", "get.weather-2_x", "mcp__files__write", "name", "w", "y" * 64)
"""Beginnings of the names of tools."""
_PLAIN: Final[Mapping[str, Sequence[Any]]] = {
    "integer": (0, -1, 7, 10115, 2**53 + 1, 2**64 + 1, 12345678901234567890),
    "number": (1.5, -2.5e-07, 1e308, 0.1),
    "boolean": (True, False),
    "null": (None,),
    "array": ([], [[], {}, [{}]], ["10115", 7, None, True, "{"], [{"x": [1.5]}, "]"]),
    "object": ({}, {"a": {"b": [0, "true"]}}, {"type": "x", "properties": {"name": "null"}}),
    "string": (*VALUES.values(), "10115", "-1e5", "false", "[]", '{"a": 1}', "10115"),
}
"""Values of each type of JSON; strings are also texts."""
_FORMS: Final[Mapping[str, Callable[[str, Any], Any]]] = {
    "string": lambda kind, value: {"type": kind},
    "optional": lambda kind, value: {"type": [kind, "null"]},
    "any_of": lambda kind, value: {"anyOf": [{"type": kind}, {"type": "null"}], "default": None},
    "one_of": lambda kind, value: {"oneOf": [{"type": "null"}, {"type": kind}]},
    "all_of": lambda kind, value: {"allOf": [{"type": kind}]},
    "enum": lambda kind, value: {"enum": ["Rome", "10115", "true"] if kind == "string" else [value]},
    "const": lambda kind, value: {"const": value},
    "anything": lambda kind, value: {"type": kind} if kind == "string" and is_json(value) else True,
    "ref": lambda kind, value: {"$ref": f"#/$defs/{kind}"},
    "optional_ref": lambda kind, value: {"anyOf": [{"$ref": f"#/$defs/{kind}"}, {"type": "null"}]},
    "definition": lambda kind, value: {"$ref": f"#/definitions/{kind}"},
    "far_ref": lambda kind, value: {"$ref": f"#/$defs/a~1b~0c%20%24d/{kind}"},
}
"""Schemas of values of one type, as clients write them."""
_DEFINED: Final = {kind: {"type": kind} for kind in _PLAIN}
_DEFINITIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "$defs": {**_DEFINED, "a/b~c $d": {kind: {"$ref": f"#/definitions/{kind}"} for kind in _DEFINED}},
    "definitions": _DEFINED,
}
"""Parts of schemas that others refer to."""
_AROUND: Final[Mapping[str, Callable[[Any], Any]]] = {
    "anyOf": lambda schema: {"anyOf": [schema, {"type": "null"}], "default": None},
    "oneOf": lambda schema: {"oneOf": [schema, {"type": "null"}]},
    "allOf": lambda schema: {"allOf": [schema], "default": "7"},
    "nullable": lambda schema: {**schema, "nullable": True},
    "not": lambda schema: {**schema, "not": {"enum": ["never"]}},
}
"""Schemas around another one, which leave the type of its values, but for null; `$ref` is one as well."""
_MOST_TOOLS: Final = 300
_SHARES: Final = {"finish": 0.6, "flush": 0.1, "cut": 0.2, "leaves": 0.05, "malformed": 0.05}
"""Ends of answers: that of the model, or of its tokens, within a text, without one; some are none of the format."""


@dataclass(slots=True)
class DayAnswer:
    """An answer of the day."""

    model: AnswerModel
    begin: float
    """Seconds of the day."""
    pieces: Sequence[str]
    end: str
    """One of `_SHARES`."""
    tools: str
    """Schemas of its tools by name, as a client sends them."""
    case: Case
    """Values of the axes of answers."""

    @property
    def text(self) -> str:
        """Text that a parser reads of it."""
        return "".join(self.pieces)


class _User:
    """Writes what a model and the clients of one conversation do."""

    def __init__(self, target: ParserTarget, number: int) -> None:
        self.target, self.number = target, number
        self.rng = random.Random(number)  # noqa: S311
        form = target.form(SHOWN.tool)
        self.form = form
        tagged = None if form is None else form.arguments
        self.ends = tagged.ends if isinstance(tagged, TaggedArguments) else ()
        starts = () if form is None else (form.trigger, (form.opening + form.begin).strip())
        self.marked = form is None or any(marker in form.opening + form.begin for marker in target.markers)
        self.markup = sorted({*target.markers, *starts} - {""}, key=len, reverse=True)
        self.around = random.Random(f"around {number}")  # noqa: S311
        self.defined: dict[str, Any] = {}
        """Definitions of the schema of a tool."""
        self.tools: dict[str, Any] = {}
        self.kinds: dict[str, dict[str, tuple[str, str]]] = {}
        """Type and form of each parameter of each tool."""

    def text(self, tokens: Sequence[int], without: Sequence[str] | None = None) -> str:
        """Return the text of tokens, without the markup of the format."""
        words = (*_WORDS, *_foreign(), *self.target.half_markers)
        found = "".join(words[token % len(words)] for token in tokens)
        for mark in self.markup if without is None else without:
            while mark in found:
                found = found.replace(mark, " ")
        if without is None and not self.marked:
            found = re.sub(r"[^\w\s,]", " ", found)  # any bracket or quote may begin a call
        return f"{found}." if without is None and found.endswith(tuple(self.target.half_markers)) else found

    def offer_tools(self) -> None:
        """Choose the tools of a client, most of which are never called, with schemas as libraries write them."""
        for index in range(round(_MOST_TOOLS ** self.rng.random())):
            name = f"{self.rng.choice(_TOOLS)[:60]}{self.number}_{index}" if index else self.rng.choice(_TOOLS)
            own = {key: self._parameter() for key in self._keys(self.rng.choice((0, 1, 2, 4, 12)))}
            more = None if self.rng.random() < 0.9 else self._parameter()
            found = {key: self._schema(kind, form) for key, (kind, form) in own.items() if (kind, form) != more}
            self.kinds[name] = {**own, "more": more} if more else own
            schema: dict[str, Any] = {"type": "object", "properties": found, "title": f"Arguments of {name}"}
            if more:
                schema["additionalProperties"] = self._schema(*more)
            elif self.rng.random() < 0.2:
                schema = {"$ref": "#/definitions/A%20B", "definitions": {"A B": schema}}
            for words, defined in _DEFINITIONS.items():
                schema[words] = {**schema.get(words, {}), **defined, **self.defined}
            self.defined = {}
            self.tools[name] = schema if self.kinds[name] else self.rng.choice(({}, {"type": "object"}, schema))

    def _keys(self, count: int) -> list[str]:
        names = self.rng.sample(_NAMES, count)
        python = self.form is not None and self.form.arguments == "python"
        return [re.sub(r"\W", "_", name) for name in names] if python else names

    def _parameter(self) -> tuple[str, str]:
        return self.rng.choice([*_PLAIN, "string", "string"]), self.rng.choice([*_FORMS])

    def _schema(self, kind: str, form: str) -> Any:
        value = self.rng.choice(_PLAIN[kind]) if kind != "string" else "it"
        found = _FORMS[form](kind, value)
        for word in self.around.choices([*_AROUND, "$ref"], k=self.around.choice((0, 1, 2, 3, 4))):
            if isinstance(found, dict) and word == "$ref":
                self.defined[f"Of {len(self.defined)}"] = found
                found = {"$ref": f"#/{self.around.choice([*_DEFINITIONS])}/Of%20{len(self.defined) - 1}"}
            elif isinstance(found, dict):
                found = _AROUND[word](found)
        noise = {"description": f"The {kind}, as {self.number}", "examples": ["7", 7], "title": "type"}
        return {**found, **noise} if isinstance(found, dict) and self.rng.random() < 0.5 else found

    def arguments(self, tool: str, tokens: Sequence[int]) -> dict[str, Any]:
        """Return arguments of a call."""
        return {key: self._value(kind, form, tokens) for key, (kind, form) in self.kinds[tool].items()}

    def _value(self, kind: str, form: str, tokens: Sequence[int]) -> Any:
        if kind != "string":
            return self.rng.choice(_PLAIN[kind])
        begin = self.rng.randrange(len(tokens))
        text = self.rng.choice((self.rng.choice(_PLAIN[kind]), self.text(tokens[begin:], self.ends)))
        if self.rng.random() < 0.1:
            text += "".join(marker for marker in self.target.markers if not any(end in marker for end in self.ends))
        for mark in self.ends:
            text = text.replace(mark, " ")
        if form == "anything" or text.strip() in ("null", "None"):
            return f"It {text}"  # without a type it would be ambiguous
        return text

    def calls(self, turn: DayTurn, form: CallForm | None, case: Case) -> AnswerModel:
        """Return an answer with texts and calls."""
        model, tokens = AnswerModel(self.tools), turn.answer
        if form is None:  # its samples are in other tests
            model.add(f"So{self.text(tokens)}", model.contents)
            return model
        many = form.anywhere and form.between is not None
        groups = self.rng.choice((0, 1, 1, 2, 3)) if self.tools else 0
        for group in range(min(groups, 3 if many else 1)):
            text = self.text(tokens[group * len(tokens) // 4 : (group + 1) * len(tokens) // 4]).strip(SPACE)
            text = f"So{text}" if group else text  # brackets and half markers after a call may be its own
            if form.anywhere and text:
                add_content(self.target, model, text)
                model.add("" if self.target.cls.before_calls else str(case["space"]))
            count = self.rng.choice((1, 1, 1, 2, 3, 12)) if form.between is not None else 1
            called = [self.rng.choice([*self.tools]) for _ in range(count)]
            short = tokens[: 1 + len(tokens) // count]
            calls = [(name, self.arguments(name, short)) for name in called]
            add_calls(self.target, model, self.target.form(called[0]) or form, calls, str(case["style"]))
        text = self.text(tokens[3 * len(tokens) // 4 :] if groups else tokens)
        if groups or not form.anywhere:
            text = f"So{text}"
        text = text if case["tail"] == "none" else text.rstrip(SPACE)
        if not groups or (form.between is not None and text.strip()):
            model.add(str(case["space"]) if groups else "")
            model.add(text, model.contents)
        if model.contents and not self.target.cls.before_calls:
            model.end_with(self.target, case["tail"])
        return model

    def reasoned(self, turn: DayTurn, case: Case) -> AnswerModel:
        """Return an answer with reasoning."""
        count = int(len(turn.answer) * self.rng.choice((0, 0.2, 0.8, 1)))
        parts = (f"It{self.text(turn.answer[:count])}", f"So{self.text(turn.answer[count:])}")
        some = (count, len(turn.answer) - count)  # an answer may have no reasoning, or nothing else
        texts = [part.rstrip(SPACE) if tokens else "" for part, tokens in zip(parts, some, strict=True)]
        return answer_model(self.target, case, (texts[0], texts[1]))

    def answer(self, turn: DayTurn, begin: float) -> DayAnswer:
        """Return the answer to one request of the conversation."""
        form, tools = self.form, self.target.kind is TOOL_PARSER
        case = {axis.name: self.rng.choice(axis.values) for axis in (CALL_AXES if tools else ANSWER_AXES)}
        model = self.reasoned(turn, case) if not tools else self.calls(turn, form, case)
        end = self.rng.choices([*_SHARES], [*_SHARES.values()])[0]
        text, at = model.text, self.rng.randrange(1 + len(model.text))
        if end == "cut":
            text = text[:at]
        elif end == "malformed":
            again, to = sorted(self.rng.choices(range(1 + len(text)), k=2))
            text = text[:at] + text[again : min(to, again + 80)] + text[at + self.rng.choice((0, 1, 9)) :]
        pieces = pieces_of(self.target, text, case["chunk"], np.random.default_rng(self.number))
        if end == "leaves":
            pieces = pieces[: len(pieces) // 2]
        return DayAnswer(model, begin, pieces, end, json.dumps(self.tools), case)


@cache
def _foreign() -> tuple[str, ...]:
    """Return the markers of the core's formats, which are text in others."""
    entries = [*fd_register_tool_parsers(), *fd_register_reasoning_parsers()]
    return tuple(sorted({marker for entry in entries for marker in resolve_name(entry.target).markers}))


def answers_of(target: ParserTarget) -> list[DayAnswer]:
    """Return the answers of a day, in the order of their begin."""
    found = list[DayAnswer]()
    for number, talk in enumerate(talks(_TALKS, hours=_HOURS)):
        user, at = _User(target, number), 0.0
        if target.kind is TOOL_PARSER:
            user.offer_tools()
        for turn in talk.turns:
            at += turn.pause
            found.append(user.answer(turn, at))
    return sorted(found, key=lambda answer: answer.begin)


def core_of(target: ParserTarget) -> ParserTarget:
    """Return the core's parser whose answers are most like those of a parser."""
    if target.kind is not TOOL_PARSER:
        return find_parser("qwen3", target.kind)
    form = target.form(SHOWN.tool)
    syntax = "json" if form is None else form.arguments
    name = "qwen3_coder" if isinstance(syntax, TaggedArguments) else {"json": "hermes", "python": "lfm2"}[syntax]
    return find_parser(name, target.kind)


def day_of(target: ParserTarget, answers: Sequence[DayAnswer]) -> Day:
    """Return a day of a parser, of which each answer is checked."""

    def live() -> Generator[None, None, Mapping[str, float]]:
        alone = target.alone()
        for hour in range(_HOURS):
            due = deque(each for each in answers if min(int(each.begin / HOUR), _HOURS - 1) == hour)
            running = deque[Iterator[None]]()
            with require_no_stall("a call", "8.6"):
                while due or running:
                    while due and len(running) < _SLOTS:
                        running.append(_read(alone, due.popleft()))
                    reading = running.popleft()
                    with suppress(StopIteration):
                        next(reading)
                        running.append(reading)
            re.purge()  # of the patterns of texts
            yield
        return {}

    return live


def _read(target: ParserTarget, answer: DayAnswer) -> Iterator[None]:
    """Read an answer piece by piece, and check what its client gets, in any number of events."""
    tools, finished = json.loads(answer.tools), answer.end == "finish"
    events, last, model = list[Event](), list[Event](), answer.model
    for name in tools:
        target.form(name)
    for switched in (True, False) if target.kind is not TOOL_PARSER else ():
        begun = target.cls.begins_reasoning(model.prompt, switched) or not model.prompt
        require(begun, "8.3", f"it does not begin with reasoning after the prompt {model.prompt!r}")
    pieces = target.listen(*answer.pieces, tools=tools, prompt=model.prompt, finish=finished)
    for number, last in enumerate(pieces):
        if answer.end == "leaves" and number >= len(answer.pieces) - 1:
            return
        events += last
        yield
    meaning, text = meaning_of(joined(events)), answer.text
    require(
        json.dumps(tools) == answer.tools, "8", f"it changed the schemas of the request's tools, {answer.tools:.200}"
    )
    held = sum(len(each.text.strip()) for each in last if isinstance(each, Content | ReasoningDelta | ArgumentsDelta))
    if answer.end == "malformed":
        whole = target.read(text, tools=tools, prompt=model.prompt, finish=finished)
        require(joined(events) == whole, "8.1", f"pieces of {shortened(text)} yield other events than the whole text")
        return
    number = re.findall(r"[-+.\deE]*\Z", text)[0]  # is written anew once it is complete
    limit = max(target.patience, len(model.tail.strip()), len(number))
    require(held <= limit, "8.2", f"{held} characters were held back until the end of {shortened(text)}")
    for event in events:
        if isinstance(event, CallBegun):
            written = event.call_id.rstrip(digits) or event.call_id
            require(written in text, "8.3", f"the id {event.call_id!r} of a call is not in the text")
    if answer.end == "cut":
        form = target.form(SHOWN.tool)
        markers = [*target.markers, *([] if form is None else [form.opening + form.begin])]
        model.require_of_part(meaning, len(text), markers, finished=finished)
    else:
        model.require_of(meaning, whole=True, finished=finished)
