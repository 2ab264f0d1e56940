"""Tool calls written as JSON objects, `{"name": ..., "arguments": {...}}`: Hermes, Llama, Mistral, DeepSeek.

The arguments are emitted as the model wrote them, character by character; only the object around them is parsed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import ClassVar, Final, NamedTuple

from fd_core.text.parsing.contract import CallForm
from fd_core.text.parsing.reader import Steps, ToolReader

_ARGUMENTS: Final = ("arguments", "parameters")
_WRAPPER: Final = "function"
"""Key of a name, or of the object that is the call."""
_KEYS: Final = ("name", _WRAPPER, *_ARGUMENTS, "type", "id")
_BETWEEN: Final = (",", ";", "[", "]", "}", "```json", "```python", "```")
"""Separates or encloses consecutive calls."""
_SCALAR: Final = re.compile(r"[A-Za-z0-9+.-]+")
_INSIDE: Final = re.compile(r'[^"{}\[\]<`]+')
"""Characters that neither begin nor end a JSON value. `<` and a backtick never occur in JSON outside of strings: they
begin a marker of the format, and the JSON was cut off."""
_IN_STRING: Final = re.compile(r'[^"\\]+')
_FENCE: Final = "```"
_OPENING: Final = ("{", "[")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


class _Value(NamedTuple):
    text: str
    whole: bool
    """False if it is incomplete."""


class JsonCallReader(ToolReader):
    """Reads objects that are calls."""

    def json_calls(self, *, known: bool = False) -> Steps[None]:
        """Read calls that follow one another, with a list or a block of code around them; the rest is content."""
        called = False
        while True:
            self.mark("" if called else self.space_before)
            yield from self.skip_all(*_BETWEEN)
            if called:
                self.mark()
            opened = (yield from self.peek()) == "{"
            if not (yield from self.json_call(known=known)):
                self.emit_read(cut=opened or not known)
                return
            called = True
            yield from self.rest_of_call()

    def json_call(self, *, known: bool = False) -> Steps[bool]:
        """Read one object; return True if it is a call. If not, the text that was read is kept for `emit_read`.

        The call begins when its name is known; with `known`, for formats without a marker, when it is the name of a
        tool and arguments are there; then its first key must be one of a call. It ends with its arguments. If they are
        incomplete it stays open, see `rest_of_call`.
        """
        name: str | None = None
        early: str | None = None
        begun, first, wrapped = False, True, False
        if not (yield from self.literal("{")):
            return False
        while True:
            yield from self.space()
            key = yield from self._key()
            if key is None or (known and first and key not in _KEYS):
                break
            first = False
            if key == _WRAPPER and not wrapped and (yield from self.literal("{")):
                wrapped = True
                continue
            if key in ("name", _WRAPPER) and name is None:
                name = yield from self._word()
                if not name or (known and name not in self.tools):
                    break
            elif key in _ARGUMENTS and early is None:
                if name is not None and not begun:
                    begun = self._begin(name)
                value = yield from self._value(self.emit_arguments if begun else self.drop, unquote=begun)
                if not value.whole:
                    break
                early = value.text
                if begun:
                    self.end_call()
            elif not (yield from self._value(self.drop)).whole:
                break
            if name is not None and not begun and (early is not None or not known):
                begun = self._begin(name)
                if early is not None:
                    self.emit_arguments(_unquoted(early))
                    self.end_call()
            yield from self.space()
            if wrapped and (yield from self.literal("}")):
                wrapped = False
                yield from self.space()
            if not (yield from self.literal(",")):
                if (yield from self.literal("}")) and self.call_open:
                    self.end_call()
                break
        return begun

    def named_call(self, name: str, *before: str, call_id: str = "") -> Steps[None]:
        """Read a call whose name is known and whose arguments are the JSON value after `before`."""
        self._begin(name, call_id)
        yield from self.skip_all(*before)
        if (yield from self.json_value()):
            self.end_call()
        yield from self.rest_of_call()

    def rest_of_call(self) -> Steps[None]:
        """Read the text after an incomplete call as its arguments, up to the next marker or the end of a block."""
        if not self.call_open:
            return
        if end := (yield from self.until(_FENCE, *self.markers, emit=self.emit_arguments, space=True)):
            self.end_call()
            self.skip(-len(end))

    def _begin(self, name: str, call_id: str = "") -> bool:
        self.forget()
        self.begin_call(name, call_id)
        return True

    def json_value(self) -> Steps[bool]:
        """Emit one JSON value as the arguments of the open call; return True if it is complete."""
        return (yield from self._value(self.emit_arguments, unquote=True)).whole

    def _key(self) -> Steps[str | None]:
        key = yield from self._word()
        if key is None:
            return None
        yield from self.space()
        if not (yield from self.literal(":")):
            return None
        yield from self.space()
        return key

    def _word(self) -> Steps[str | None]:
        """Return the next string, None if there is none or it contains a marker."""
        if not (yield from self.literal('"')):
            return None
        read: list[str] = []
        while True:
            end = yield from self.until('"', "\\", *self.markers, emit=read.append)
            if end == '"':
                return _string(f'"{"".join(read)}"')
            if end != "\\":
                self.skip(-len(end))
                return None
            read += (end, (yield from self.take()))

    def _value(self, emit: Callable[[str], None], unquote: bool = False) -> Steps[_Value]:
        """Read one value and emit it incrementally; `unquote`: emit an object within a string as the object."""
        read: list[str] = []

        def forward(text: str) -> None:
            read.append(text)
            emit(text)

        first = yield from self.peek()
        if first not in _OPENING:
            if first == '"':
                whole = bool((yield from self._read_string(read.append)))
            else:
                read.append((yield from self.match(_SCALAR)))
                whole = bool(read[0]) and bool((yield from self.peek()))
            text = "".join(read)
            emit(_unquoted(text) if unquote else text)
            return _Value(text, whole)
        depth = 0
        while True:
            yield from self._run(_INSIDE, forward)
            character = yield from self.peek()
            if character in ("", "<", "`"):
                return _Value("".join(read), False)
            if character == '"':
                if not (yield from self._read_string(forward)):
                    return _Value("".join(read), False)
                continue
            self.skip(1)
            forward(character)
            depth += 1 if character in _OPENING else -1
            if depth == 0:
                return _Value("".join(read), True)

    def _read_string(self, forward: Callable[[str], None]) -> Steps[str]:
        """Read a string with its quotes; return its last character, empty if it is incomplete."""
        forward((yield from self.take()))
        while True:
            yield from self._run(_IN_STRING, forward)
            character = yield from self.take()
            forward(character)
            if character == "\\":
                forward((yield from self.take()))
            elif character in ('"', ""):
                return character

    def _run(self, pattern: re.Pattern[str], forward: Callable[[str], None]) -> Steps[None]:
        """Emit the longest match of `pattern`."""
        while (yield from self.peek()) and (text := self.here(pattern)):
            forward(text)


def _string(text: str) -> str | None:
    """Return the value of a JSON string, None if it is invalid. Lone surrogates stay escaped."""
    try:
        value = str(json.loads(text, strict=False))
    except ValueError:
        return None
    return _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", value)


def _unquoted(text: str) -> str:
    """Return an object that was written as a string, or as null; other text as it is."""
    if text == "null":
        return "{}"
    inner = _string(text) if text.startswith('"') else None
    return inner if inner is not None and inner.lstrip().startswith("{") else text


_BEGIN: Final = "<tool_call>"
_END: Final = "</tool_call>"


class HermesTools(JsonCallReader):
    """Objects between markers: Hermes, Qwen 2.5 and 3, and SmolLM, which puts a list of calls there."""

    markers: ClassVar[tuple[str, ...]] = (_BEGIN, _END)
    begin: ClassVar[str] = _BEGIN
    around: ClassVar[tuple[str, ...]] = ()
    """Markers around content."""

    @classmethod
    def form(cls, name: str) -> CallForm:
        return CallForm(_BEGIN, f'{_BEGIN}\n{{"name": {json.dumps(name)}, "arguments": ', f"}}\n{_END}", between="\n")

    def run(self) -> Steps[None]:
        while marker := (yield from self.content_until(self.begin, *self.around)):
            if marker == self.begin:
                yield from self.json_calls()
            else:
                yield from self.space()


class ErnieTools(HermesTools):
    """ERNIE-4.5, which writes content between `<response>` and `</response>`."""

    markers = (_BEGIN, _END, "<response>", "</response>")
    around = ("<response>", "</response>")


_LIST: Final = "<TOOLCALL>"
_LIST_END: Final = "</TOOLCALL>"


class NemotronTools(HermesTools):
    """Nemotron-H and Nemotron Nano 2: one list of calls between markers."""

    markers = (_LIST, _LIST_END)
    begin = _LIST

    @classmethod
    def form(cls, name: str) -> CallForm:
        begin = f'{{"name": {json.dumps(name)}, "arguments": '
        return CallForm(_LIST, begin, "}", between=", ", opening=f"{_LIST}[", closing=f"]{_LIST_END}")


_TAG: Final = "<|python_tag|>"


class LlamaJsonTools(JsonCallReader):
    """An object with the name of a tool and its parameters is a call at any position; several follow a `;`."""

    markers = (_TAG,)

    @classmethod
    def form(cls, name: str) -> CallForm:
        return CallForm('{"name": ', f'{{"name": {json.dumps(name)}, "parameters": ', "}", between="; ")

    def run(self) -> Steps[None]:
        while marker := (yield from self.content_until(_TAG, *_OPENING, _FENCE)):
            if marker != _TAG:
                self.skip(-len(marker))
            yield from self.json_calls(known=marker != _TAG)


_TOOL_CALLS: Final = "[TOOL_CALLS]"
_ARGS: Final = "[ARGS]"
_CALL_ID: Final = "[CALL_ID]"
_NAME: Final = re.compile(r"[\w.-]+")


class MistralTools(JsonCallReader):
    """Mistral: a list of calls, or with newer tokenizers a name and `[ARGS]` before each call's arguments."""

    markers = (_TOOL_CALLS, _ARGS, _CALL_ID)
    bare_ids = True

    @classmethod
    def form(cls, name: str) -> CallForm:
        """Return the form of the newer tokenizers; older ones write lists, which are read as well."""
        return CallForm(_TOOL_CALLS, f"{_TOOL_CALLS}{name}{_ARGS}", "", between="")

    def run(self) -> Steps[None]:
        while (yield from self.content_until(_TOOL_CALLS)):
            self.mark()
            yield from self.space()
            first = yield from self.peek()
            self.go_back()
            yield from self.json_calls() if first and first in "[{`" else self._named()

    def _named(self) -> Steps[None]:
        self.mark(self.space_before)
        yield from self.space()
        name = yield from self.match(_NAME)
        yield from self.space()
        between = yield from self.literal(_CALL_ID, _ARGS, "{")
        if between == _CALL_ID:
            yield from self.match(_NAME)
            between = yield from self.literal(_ARGS)
        if not name or not between:
            self.emit_read()
            return
        if between == "{":
            self.skip(-1)
        yield from self.named_call(name, _ARGS)


_CALLS: Final = "<｜tool▁calls▁begin｜>"
_CALLS_END: Final = "<｜tool▁calls▁end｜>"
_CALL: Final = "<｜tool▁call▁begin｜>"
_CALL_END: Final = "<｜tool▁call▁end｜>"
_SEP: Final = "<｜tool▁sep｜>"
_FENCES: Final = (f"{_FENCE}json", _FENCE)


class DeepSeekTools(JsonCallReader):
    """DeepSeek: arguments between control tokens, in a block of code (V3, R1) or bare (V3.1); reads both forms."""

    markers = (_CALLS, _CALLS_END, _CALL, _CALL_END, _SEP)

    @classmethod
    def form(cls, name: str) -> CallForm:
        begin = f"{_CALL}function{_SEP}{name}\n{_FENCE}json\n"
        return CallForm(_CALLS, begin, f"\n{_FENCE}{_CALL_END}", between="\n", opening=_CALLS, closing=_CALLS_END)

    def run(self) -> Steps[None]:
        while (yield from self.content_until(_CALL)):
            yield from self._call()

    def _call(self) -> Steps[None]:
        self.mark(self.space_before)
        name, marker = yield from self.text_until(*self.markers)
        if marker == _SEP:  # V3 writes the type of the tool first, V3.1 has its arguments here
            yield from self.skip_all(_SEP)
            name_line, marker = yield from self.text_until("\n", "{", _FENCE, *self.markers)
            name = name_line if name_line.strip() else name
        self.skip(-len(marker))
        if not name.strip() or not marker:
            self.emit_read()
            return
        yield from self.named_call(name.strip(), *_FENCES)
        yield from self.skip_all(*_FENCES)


class DeepSeekV31Tools(DeepSeekTools):
    """DeepSeek V3.1; reads both forms."""

    @classmethod
    def form(cls, name: str) -> CallForm:
        return CallForm(_CALLS, f"{_CALL}{name}{_SEP}", _CALL_END, between="", opening=_CALLS, closing=_CALLS_END)


_SECTION: Final = "<|tool_calls_section_begin|>"
_SECTION_END: Final = "<|tool_calls_section_end|>"
_KIMI_CALL: Final = "<|tool_call_begin|>"
_KIMI_END: Final = "<|tool_call_end|>"
_ARGUMENT: Final = "<|tool_call_argument_begin|>"
_KIMI_ID: Final = re.compile(r"\s*(?:functions\.)?([\w.-]+?)(?::([0-9]{1,9}))?\s*")


class KimiTools(JsonCallReader):
    """Kimi K2: calls have ids such as `functions.weather:3`, which templates write again instead of names."""

    markers = (_SECTION, _SECTION_END, _KIMI_CALL, _KIMI_END, _ARGUMENT)
    _first = 0
    """Number of the first call; those of a conversation are counted."""

    @classmethod
    def form(cls, name: str) -> CallForm:
        begin = f"{_KIMI_CALL}functions.{name}:0{_ARGUMENT}"
        return CallForm(_SECTION, begin, _KIMI_END, between="", opening=_SECTION, closing=_SECTION_END)

    def run(self) -> Steps[None]:
        while (yield from self.content_until(_KIMI_CALL)):
            self.mark(self.space_before)
            text, marker = yield from self.text_until(*self.markers)
            found = _KIMI_ID.fullmatch(text)
            if found is None or marker != _ARGUMENT:
                self.skip(-len(marker))
                self.emit_read()
                continue
            name, count = found.groups()
            if not self._calls:
                self._first = int(count or 0)
            yield from self.named_call(name, call_id=f"functions.{name}:{self._first + self._calls}")
