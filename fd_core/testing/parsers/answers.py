"""Axes of an answer: its texts and calls, how it is cut into pieces, and where it ends.

A case builds an answer from a model of it, so that the result is known without a parser.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pkgutil import resolve_name
from string import digits
from typing import Any, Final

import numpy as np

from fd_core.plugins import TOOL_PARSER
from fd_core.testing.axes.covering import Axis, Case, int_of
from fd_core.testing.axes.parts import Part
from fd_core.testing.hooks.purity import another_world
from fd_core.testing.kit.law import broken, require
from fd_core.testing.parsers.target import SHOWN, Meaning, ParserTarget, Tools, arguments_text, meaning_of
from fd_core.text.parsing.builtin import fd_register_reasoning_parsers, fd_register_tool_parsers
from fd_core.text.parsing.contract import CallForm, TaggedArguments
from fd_core.text.parsing.events import CallBegun
from fd_core.text.parsing.reader import SPACE

TEXTS: Final = {
    "plain": "The quick brown fox jumps over 13 lazy dogs; then it rests",
    "unicode": "Röm 🙂 東京, e\u0301 👩‍👩‍👧 \u05e9\u05dc\u05d5\u05dd \u202babc\u202c \U0010ffff end",
    "lines": "first\n\n  second\r\n\tthird   and on",
    "code": "if 1 < 2 and [x] or {y}: `z` \\n 'q' \"r\" &lt;b&gt; &amp;amp; &#39; %41 end",
    "half-markers": "",
    "words": "null, true and 007 end",
    "wide spaces": "\u3000\u3000It has\u00a0a\u2003space\u3000",
    "drawn": "",
}
"""Texts by kind; `half-markers` is one of each format, and `drawn` has its length and its parts from a generator."""
VALUES: Final = {
    **TEXTS,
    "markers": "",
    "escapes": 'c:\\new "x" \\u0041 \\\\ \t \b\f\n / \x7f \u2028 end\\',
    "json": '{"name": "now", "arguments": {"a": [1]}}',
    "number": "0012345678901234567890.50",
    "word": "true",
    "spaces": "  both ends \n\n ",
    "breaks": "\n\n both ends \n\n",
    "empty": "",
}
"""Values of an argument that is a string; `markers` is one of each format."""
_SIZES: Final = (1, 2, 40, 300)
"""Number of repetitions of a text."""
_HUGE: Final = 2300
"""Repetitions that have more than 2^17 characters."""
_SHORT: Final = ("number", "word", "empty")
_LONG: Final = {"half-markers", "drawn"}
_CHUNKS: Final = ("whole", 1, 2, 3, 7, 64, "random", "tokens", "at-markers", "in-markers")
_COMMON: Final = (
    Axis("chunk", _CHUNKS, ("OutputParser.push.text",)),
    Axis("end", ("flush", "finish")),
    Axis("tail", ("none", "space", "half-marker")),
    Axis("cut", (False, True)),
)
_NAMES: Final = ("w", "now_and_then", "getWeather", "get.weather-2_x", "x" * 64, "name", "arguments")
"""Names of tools and of their arguments."""
_KEYWORDS: Final = ("properties", "type", "items", "enum", "required", "$ref", "anyOf", "const", "default", "format")
"""Keywords of JSON Schema, which parameters of tools are called too."""
CALL_AXES: Final = (
    Axis("shape", ("city", "none", "nested", "wide", "numbers", "words", "empty", "mixed"), ("CallForm.arguments",)),
    Axis("value", tuple(VALUES), ("TaggedArguments.ends",)),
    Axis("size", _SIZES, rare=tuple({"size": _HUGE, "chunk": chunk} for chunk in ("whole", 64))),
    Axis("calls", (1, 0, 2, 3, 12, 65), ("CallForm.between",), ({"calls": 300, "chunk": 64},)),
    Axis("groups", (1, 2, 3), ("CallForm.opening", "CallForm.closing", "CallForm.anywhere")),
    Axis("text", ("plain", "none", *list(TEXTS)[1:]), ("CallForm.trigger", "FreePart.begin", "FreePart.end")),
    Axis("after", ("none", *TEXTS), ("CallForm.end",)),
    Axis("space", ("\n", "", " \n\t ", "\r\n\r\n"), ("FreePart.behind",)),
    Axis("name", ("weather", *_NAMES), ("CallForm.begin",)),
    Axis("key", ("city", *_NAMES, *_KEYWORDS[:2], "größe 城市"), ("TaggedArguments.before_key",)),
    Axis("style", ("usual", "ascii", "compact", "indented")),
    Axis("schema", ("string", "typed", "bare"), ("ToolParser.tools",)),
    *_COMMON,
)
ANSWER_AXES: Final = (
    Axis("reasoning", (*TEXTS, "none")),
    Axis("size", _SIZES, rare=({"size": _HUGE, "text_size": _HUGE, "chunk": 64},)),
    Axis("text", (*TEXTS, "json", "none")),
    Axis("text_size", _SIZES),
    Axis("space", ("sample", "", "\n", " \n\t ", "\r\n\r\n")),
    Axis("blocks", (1, 2, 3)),
    Axis(
        "begins",
        ("text", "prompt", "bare_prompt", "later_turn", "cut_off_turn", "continued"),
        ("ReasoningParser.prompt_tail",),
    ),
    *_COMMON,
)
EXCUSED: Final[Mapping[str, str]] = {
    "TaggedArguments.before_value": "it is written as the parser declares it",
    "TaggedArguments.after_value": "it is written as the parser declares it",
}
"""Fields of the contract that no axis varies, with the reason."""
_SPACES: Final = f"[{SPACE}]*"
"""White space around markers, which belongs to them."""
_MAX_CHARACTERS: Final = 40_000
_MAX_PUSHES: Final = 20_000
_MORE_TOOLS: Final = 300
"""Tools of a request that its answer does not call, unless the schemas are the plainest."""
_MAX_CUTS: Final = 16


@dataclass(slots=True)
class AnswerModel:
    """An answer and its meaning; positions are those of its text."""

    tools: Tools = ()
    prompt: str = ""
    text: str = ""
    contents: list[tuple[int, str]] = field(default_factory=list)
    reasonings: list[tuple[int, str]] = field(default_factory=list)
    calls: list[tuple[str, Any, int]] = field(default_factory=list)
    """Name, arguments, and the end."""
    tail: str = ""
    """End of the content, which may be the beginning of a marker."""

    def add(self, text: str, into: list[tuple[int, str]] | None = None) -> None:
        if into is not None and text:
            into.append((len(self.text), text))
        self.text += text

    def end_with(self, target: ParserTarget, tail: object) -> None:
        """Add white space or half a marker to the content at the end of the answer."""
        begin, text = self.contents[-1] if self.contents else (-1, "")
        found = {"space": "  \n ", "half-marker": _half(target, "")}.get(str(tail), "")
        if begin + len(text) == len(self.text):
            self.text, self.tail = self.text + found, found

    def require_of(self, found: Meaning, *, whole: bool, finished: bool) -> None:
        """Fail unless `found` is the meaning of the text; unless `whole`, texts may be in the order of the answer.

        Unless the model `finished` the text, half a marker at the end is none.
        """
        about = f"in {shortened(self.text)}"
        for what, there, parts in (
            ("content", found.content, self.contents),
            ("reasoning", found.reasoning, self.reasonings),
        ):
            right = _SPACES.join(["", *(re.escape(text) for _, text in parts), ""])
            if what == "content" and self.tail:
                optional = "" if finished or not self.tail.strip() else "?"
                right = f"{right.removesuffix(_SPACES)}({re.escape(self.tail)}){optional}"
            if whole:
                require(re.fullmatch(right, there), "8.3", f"{what} {differing(there, parts)}, {about}")
        if not whole:
            parts = sorted([*self.reasonings, *self.contents])
            require(
                _spaceless(found.reasoning + found.content).removesuffix(self.tail)
                == _spaceless("".join(text for _, text in parts)),
                "8.3",
                f"reasoning and content {differing(found.reasoning + found.content, parts)}, {about}",
            )
        self._require_calls(found, len(self.calls), about)

    def _require_calls(self, found: Meaning, least: int, about: str) -> None:
        names, right = [name for name, _ in found.calls], [name for name, _, _ in self.calls]
        require(names == right[: len(names)], "8.3", f"expected the calls {right[:9]}, got {names[:9]}, {about}")
        require(found.ended >= least, "8.3", f"{found.ended} calls have an end, expected {least}, {about}")
        for (name, text), (_, arguments, _) in list(zip(found.calls, self.calls, strict=False))[: found.ended]:
            try:
                same = json.dumps(json.loads(text)) == json.dumps(arguments)  # 1, 1.0 and true differ
            except ValueError:
                broken("8.3", f"arguments of {name} are not JSON: {shortened(text)}, {about}")
            if not same:
                expected = shortened(json.dumps(arguments))
                broken("8.3", f"arguments of {name}: expected {expected}, got {shortened(text)}, {about}")

    def require_of_part(self, found: Meaning, cut: int, markers: Sequence[str], *, finished: bool) -> None:
        """Fail unless `found` is the meaning of the first `cut` characters.

        An incomplete marker at the end may be missing, and one character of it may be content. So may the tail.
        """
        about = f"in {shortened(self.text[:cut])}, which was truncated"
        self._require_calls(found, sum(end <= cut for _, _, end in self.calls), about)
        for what, there, parts in (
            ("content", found.content, self.contents),
            ("reasoning", found.reasoning, self.reasonings),
        ):
            right = _spaceless("".join(text[: max(0, cut - begin)] for begin, text in parts))
            got = _spaceless(there)
            if what == "content":
                got = got.removesuffix(_spaceless(self.text[len(self.text) - len(self.tail) : cut]))
            missing = right[len(got) :]
            held = any(_spaceless(marker).startswith(missing) for marker in markers) and not finished
            good = right.startswith(got) and (not missing or held)
            extra = got[:-1] == right or (finished and got.startswith(right))
            require(good or extra, "8.4", f"{what} {differing(got, [(0, right)])}, {about}")


def _spaceless(text: str) -> str:
    return re.sub(_SPACES, "", text)


def shortened(text: str) -> str:
    """Return a text in quotes, without its middle if it is long."""
    return repr(text if len(text) < 200 else f"{text[:90]}[{len(text) - 180} characters]{text[-90:]}")


def differing(found: str, parts: Sequence[tuple[int, str]]) -> str:
    """Return what was expected and found from the first difference on."""
    right = "".join(text for _, text in parts)
    shorter = min(len(found), len(right))
    at = next((at for at in range(shorter) if found[at] != right[at]), shorter)
    return f"differs at {at}: expected {shortened(right[at : at + 40])}, got {shortened(found[at : at + 40])}"


def calls_model(target: ParserTarget, case: Case) -> AnswerModel:
    """Return the answer of a case of tool calls."""
    name = str(case["name"])
    form = target.form(name)
    if form is None:
        return _sample_model(target, case)
    kind, key, arguments = str(case["schema"]), _key(case, form), _arguments(target, case, form, 0)
    # Other tools have a number where this one has a string; the first and the last one are others.
    other = _schema("typed", key, {**arguments, key: 0})
    more = () if kind == "string" else range(_MORE_TOOLS)
    tools = {"now": other, "weather": other, name: _schema(kind, key, arguments), f"{name}2": other}
    model = AnswerModel({**{f"tool{number}": other for number in more}, **tools})
    size, space = int_of(case, "size"), str(case["space"])
    text, after = (_repeated(_text(target, str(case[name])), size) for name in ("text", "after"))
    groups = int_of(case, "groups") if form.anywhere and form.between is not None else 1
    for _ in range(groups):
        if form.anywhere and text:
            add_content(target, model, text)
            model.add("" if target.cls.before_calls else space)
        if int_of(case, "calls"):
            calls = list[tuple[str, dict[str, Any]]]()
            for number in range(
                len(model.calls), len(model.calls) + (int_of(case, "calls") if form.between is not None else 1)
            ):
                arguments = _arguments(target, case, form, number)
                called = name if number % 3 != 1 else f"{name}2"
                if called != name and isinstance(arguments.get(key), str):
                    arguments[key] = number
                calls.append((called, arguments))
            add_calls(target, model, form, calls, str(case["style"]))
    if after and form.between is not None and model.calls:
        model.add(space)
        model.add(after, model.contents)
    if model.contents and not target.cls.before_calls:
        model.end_with(target, case["tail"])
    return model


def _schema(form: str, key: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema of a tool with these arguments; `string` describes only texts, and `bare` nothing if it can."""
    if form == "bare" and not any(is_json(value) for value in arguments.values() if isinstance(value, str)):
        return {}
    described = {key: "", **arguments}
    found = {
        name: _TYPES[type(value)] for name, value in described.items() if form == "typed" or isinstance(value, str)
    }
    return {"type": "object", "properties": {name: {"type": kind} for name, kind in found.items()}}


def is_json(text: object) -> bool:
    """Return True if a text may be taken for a value of JSON, in any case."""
    try:
        json.loads(str(text).lower())
    except ValueError:
        return False
    return True


_TYPES: Final[Mapping[type, str]] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    list: "array",
    dict: "object",
}


def add_calls(
    target: ParserTarget, model: AnswerModel, form: CallForm, calls: Sequence[tuple[str, dict[str, Any]]], style: str
) -> None:
    """Add calls, as a group, to an answer; `form` is that of one of them."""
    model.add(form.opening)
    for index, (name, arguments) in enumerate(calls):
        own = target.form(name) or form
        model.add(form.between or "" if index else "")
        model.add(own.begin + written(own, arguments, style) + own.end)
        model.calls.append((name, arguments, len(model.text)))
    model.add(form.closing)


def add_content(target: ParserTarget, model: AnswerModel, text: str) -> None:
    """Add content before calls to an answer."""
    if target.cls.before_calls:
        part = target.cls.before_calls[-1]
        model.add(part.begin)
        model.add(text, model.contents)
        model.add(part.end + part.behind)
    else:
        model.add(text, model.contents)


def _sample_model(target: ParserTarget, case: Case) -> AnswerModel:
    """Return the parser's own sample with another value and another name."""
    name, value = str(case["name"]), TEXTS["plain"] * int_of(case, "size")
    model = AnswerModel((name, "now"))
    before, _, rest = target.cls.sample.partition(SHOWN.content)
    between, _, after = rest.partition(SHOWN.city)
    model.add(before)
    model.add(TEXTS["plain"], model.contents)
    model.add(between.replace(SHOWN.tool, name) + value)
    model.add(after)
    model.calls = [(name, {"city": value}, len(model.text)), ("now", {}, len(model.text))]
    return model


def answer_model(target: ParserTarget, case: Case, texts: tuple[str, str] | None = None) -> AnswerModel:
    """Return the answer of a case of reasoning: the parser's sample with other texts, and several blocks.

    Its reasoning and its content are those of the case, unless there are other `texts`.
    """
    head, _, rest = target.cls.sample.partition(SHOWN.reasoning)
    middle, _, tail = rest.partition(SHOWN.content)
    if case["space"] != "sample":
        head, middle, tail = (_spaced(target, each, str(case["space"])) for each in (head, middle, tail))
    model = AnswerModel()
    reasoning, content = texts or (
        _repeated(_text(target, str(case[name])), int_of(case, size))
        for name, size in (("reasoning", "size"), ("text", "text_size"))
    )
    # Only a marker can begin another block.
    for block in range(int_of(case, "blocks") if head.strip() else 1):
        if block == 0 and case["begins"] != "text" and head.strip() in target.markers and target.cls.end:
            earlier = f"{SHOWN.reasoning}{middle}{SHOWN.content}{tail}<|user|>Why?<|assistant|>"
            before = {"later_turn": f"<|user|>Hi<|assistant|>{head}{earlier}", "cut_off_turn": earlier}
            model.prompt = before.get(str(case["begins"]), "<|user|>Hi<|assistant|>") + head
            model.prompt += f"{SHOWN.reasoning} {TEXTS['lines'] * 6} It" if case["begins"] == "continued" else ""
            model.prompt = model.prompt.rstrip() if case["begins"] == "bare_prompt" else model.prompt
        else:
            model.add(head)
        half = _half(target, middle.lstrip()) if case["tail"] == "half-marker" else ""
        model.add(f"{reasoning} {block}{half}" if reasoning else "", model.reasonings)
        model.add(middle.lstrip() if half else middle)
    model.add(content, model.contents)
    model.add(tail)
    model.end_with(target, case["tail"])
    return model


def _spaced(target: ParserTarget, text: str, space: str) -> str:
    """Return text of the format with other white space around its markers."""
    parts = re.split(f"({'|'.join(map(re.escape, sorted(target.markers, key=len, reverse=True))) or '(?!)'})", text)
    return "".join(part if part.strip() or len(parts) == 1 else space for part in parts)


def _half(target: ParserTarget, marker: str) -> str:
    """Return the longest half marker, without those that begin `marker` before it begins itself."""
    halves = [half for half in target.half_markers if half == half.strip()]
    return max(
        (half for half in halves if not marker or (half + marker).find(marker) == len(half)), key=len, default=""
    )


def _repeated(text: str, times: int) -> str:
    """Return a text several times, numbered, so that no part of it equals another."""
    return "\n".join([text, *(f"{text} {number}" for number in range(1, times) if text)])


def _text(target: ParserTarget, kind: str) -> str:
    if kind == "half-markers":
        halves = [half for half in target.half_markers if half.strip() == half]
        return f"It {' ~'.join(halves[: 2 * len(target.markers) + 1])} ~ end"
    return _drawn(target) if kind == "drawn" else VALUES.get(kind, "")


@cache
def _drawn(target: ParserTarget) -> str:
    """Return a text of words, characters of all planes, and tags, among them markers of other formats."""
    rng = np.random.default_rng(zlib.crc32(target.name.encode()))
    entries = [*fd_register_tool_parsers(), *fd_register_reasoning_parsers()]
    others = {marker for entry in entries for marker in resolve_name(entry.target).markers}
    foreign = sorted(each for each in others if not any(each in own or own in each for own in target.markers))
    words = [f"w{number}" for number in range(60)] + rng.permutation(foreign).tolist()
    characters = map(chr, (2 ** rng.uniform(5, 20, len(words))).astype(int).tolist())
    drawn = (f"{each if each.isprintable() else ''}{word}" for each, word in zip(characters, words, strict=True))
    return f"It {' '.join(drawn)} end"


def _key(case: Case, form: CallForm) -> str:
    """Return the name of an argument; in Python it is an identifier."""
    return re.sub(r"\W", "_", str(case["key"])) if form.arguments == "python" else str(case["key"])


def _arguments(target: ParserTarget, case: Case, form: CallForm, number: int) -> dict[str, Any]:
    """Return the arguments of a call; `number` is in each of them."""
    key, value = _key(case, form), _value(target, case, form)
    deep: Any = [value]
    for level in range(40):
        deep = {key: deep, "b": level} if level % 2 else [deep, {}, []]
    names = [*(_key({"key": word}, form) for word in _KEYWORDS), *(f"key{index}" for index in range(50))]
    shapes: dict[str, dict[str, Any]] = {
        "city": {key: value},
        "none": {},
        "nested": {"where": deep},
        "wide": {name: index * 7 if index % 2 else "10115" for index, name in enumerate(names)},
        "numbers": {
            "where": [0, -1, 2**53 + 1, 2**63, 2**64 + 1, -(2**31), 1.5, -2.5e-07, 1e308, number],
            "n": number,
            "x": -2.5e-07,
        },
        "words": {"a": True, "b": False, "c": None, "d": [True, False, None], key: "null"},
        "empty": {key: "", "where": [], "what": {}},
        "mixed": {"where": {"x": [value, number]}, key: value, "n": 12345678901234567890},
    }
    return shapes[str(case["shape"])]


def _value(target: ParserTarget, case: Case, form: CallForm) -> str:
    kind, size = str(case["value"]), int_of(case, "size")
    ends = form.arguments.ends if isinstance(form.arguments, TaggedArguments) else ()
    text = VALUES[kind]
    if kind == "half-markers":
        text = _text(target, kind)
    elif kind == "markers":
        text = f"so {' and '.join(marker for marker in target.markers if not any(end in marker for end in ends))} end"
    return text if size == 1 or kind in _SHORT else _repeated(text, size)


def written(form: CallForm, arguments: dict[str, Any], style: str) -> str:
    """Return the arguments of a call as models write them."""
    if form.arguments == "json" and style == "compact":
        return json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    if form.arguments == "json" and style == "indented" and not form.end.isspace():  # else its first line ends the call
        return json.dumps(arguments, ensure_ascii=False, indent=2)
    return arguments_text(form.arguments, arguments, ascii_only=style == "ascii")


def pieces_of(target: ParserTarget, text: str, chunk: object, rng: np.random.Generator) -> list[str]:
    """Return a text in pieces."""
    if chunk == "whole":
        return [text]
    if chunk == "random":
        sizes = rng.choice([0, 1, 2, 3, 5, 17, 170], size=1 + len(text) // 2)
        places = np.minimum(np.cumsum(sizes), len(text)).tolist()
    elif isinstance(chunk, int):
        places = list(range(chunk, len(text), chunk))
    else:
        found = [at for marker in target.markers for at in _places(text, marker)]
        words = [] if chunk == "at-markers" else [place.end() for place in re.finditer(r"\s?\w+|\s+|\W", text)]
        inside = [begin + 1 + index % max(1, end - begin - 1) for index, (begin, end) in enumerate(found)]
        ends = {at for pair in found for at in pair}
        outside = {*words} - {at for begin, end in found for at in range(begin + 1, end)}
        places = sorted(inside if chunk == "in-markers" else ends | outside)
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]


def _places(text: str, marker: str) -> Iterator[tuple[int, int]]:
    return ((found.start(), found.end()) for found in re.finditer(re.escape(marker), text))


def _check(target: ParserTarget, case: Case, model: AnswerModel, *, whole: bool = True) -> None:
    rng = np.random.default_rng(zlib.crc32(str(sorted(case.items())).encode()))
    target, finished = target.alone(), case["end"] == "finish"
    pieces = pieces_of(target, model.text, case["chunk"], rng)
    schemas = json.dumps(model.tools)
    once = target.read(model.text, tools=model.tools, prompt=model.prompt, finish=finished)
    require(json.dumps(model.tools) == schemas, "8", f"it changed the schemas of the request's tools, {schemas:.200}")
    model.require_of(meaning_of(once), whole=whole, finished=finished)
    for call_id in [event.call_id for event in once if isinstance(event, CallBegun)]:
        written = call_id.rstrip(digits) or call_id  # a format may count the calls of a conversation
        fault = "is not in the text, so that another answer may have it; leave it empty, and the server chooses one"
        require(written in model.text, "8.3", f"the id {call_id!r} of a call {fault}")
    with another_world(shift=1):  # it has no clock
        found = target.read(*pieces, tools=model.tools, prompt=model.prompt, finish=finished)
    if found != once:
        broken("8.1", f"the pieces {shortened(str(pieces))} yield other events than the whole text")
    if case["cut"] and whole and model.text:
        ends = {at for marker in target.markers for pair in _places(model.text, marker) for at in pair}
        near = [at + shift for at in sorted(ends) for shift in (-1, 0, 1) if 0 <= at + shift < len(model.text)]
        places = rng.permutation([*near, *rng.integers(0, len(model.text), _MAX_CUTS).tolist()])[:_MAX_CUTS]
        form = target.form(str(case["name"])) if "name" in case else None
        markers = [*target.markers, *([] if form is None else [form.opening + form.begin])]
        for cut in places.tolist():
            parts = pieces_of(target, model.text[:cut], case["chunk"], rng)
            there = target.read(*parts, tools=model.tools, prompt=model.prompt, finish=finished)
            model.require_of_part(meaning_of(there), cut, markers, finished=finished)


def check_calls(target: ParserTarget, case: Case) -> None:
    """Parse an answer with tool calls. Raises `InvariantViolated`."""
    _check(target, case, calls_model(target, case))


def check_answer(target: ParserTarget, case: Case) -> None:
    """Parse an answer with reasoning. Raises `InvariantViolated`."""
    _check(target, case, answer_model(target, case), whole=case["blocks"] == 1)


def _allowed_calls(case: Case) -> bool:
    each = 600 if _LONG & {case["value"], case["text"], case["after"]} else 60
    texts = int_of(case, "groups") * (case["text"] != "none") + (case["after"] != "none")
    texts += max(1, int_of(case, "calls")) * int_of(case, "groups")
    characters = each * (1 + int_of(case, "size")) * texts
    characters *= 3 if case["shape"] in ("nested", "mixed") else 1
    characters += 900 * int_of(case, "calls") * int_of(case, "groups") if case["shape"] == "wide" else 0
    return _fits(case, characters)


def _allowed_answers(case: Case) -> bool:
    if "none" in (case["reasoning"] if case["size"] != 1 else "", case["text"] if case["text_size"] != 1 else ""):
        return False  # there is nothing to repeat
    each = 600 if _LONG & {case["reasoning"], case["text"]} else 60
    return _fits(case, each * (int_of(case, "size") * int_of(case, "blocks") + int_of(case, "text_size")))


def _fits(case: Case, characters: int) -> bool:
    """Return True if a case takes less than a second."""
    chunk = case["chunk"]
    pushes = characters // (chunk if isinstance(chunk, int) else 10)
    if case["cut"]:
        pushes, characters = pushes * _MAX_CUTS, characters * _MAX_CUTS
    return characters <= _MAX_CHARACTERS and (chunk == "whole" or pushes <= _MAX_PUSHES)


CALLS: Final[Part[ParserTarget]] = Part("calls", CALL_AXES, check_calls, _allowed_calls, mixed=True)
ANSWERS: Final[Part[ParserTarget]] = Part("answer", ANSWER_AXES, check_answer, _allowed_answers, mixed=True)


def part_of(target: ParserTarget) -> Part[ParserTarget]:
    """Return the part for a parser of this kind."""
    return CALLS if target.kind is TOOL_PARSER else ANSWERS
