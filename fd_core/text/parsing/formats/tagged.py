"""Calls whose arguments are written one by one between markers: GLM-4.5, Qwen3-Coder, MiniMax-M2."""

from __future__ import annotations

import abc
import json
import re
from typing import ClassVar, Final

from fd_core.text.parsing.argument_types import json_of, kinds_of, parameter_schema
from fd_core.text.parsing.contract import CallForm, TaggedArguments
from fd_core.text.parsing.reader import Steps, ToolReader, escaped

_BEGIN: Final = "<tool_call>"
_END: Final = "</tool_call>"
_NAME: Final = re.compile(r"[\w.-]+")
_NESTED_KINDS: Final = {"[": ("array",), "{": ("object",), '"': ("array", "object")}
"""Types of JSON that may have strings within a value, by its first character."""


class TaggedCallReader(ToolReader):
    """Values of arguments that can only be strings are emitted incrementally, others when they are complete."""

    tagged: ClassVar[TaggedArguments]
    ends: ClassVar[tuple[str, ...]]
    """Markers that end the arguments of a call."""

    @abc.abstractmethod
    def key(self) -> Steps[str | None]:
        """Return the key after `before_key`, up to its value; None if the argument is incomplete."""

    def arguments_of(self, tool: str) -> Steps[None]:
        """Emit the arguments of a call that has begun."""
        prefix, before = "{", self.tagged.before_key
        while (marker := (yield from self.until(before, *self.ends, emit=self.drop))) == before:
            key = yield from self.key()
            if key is None:
                continue
            self.emit_arguments(f"{prefix}{json.dumps(key, ensure_ascii=False)}: ")
            if not (yield from self._value(tool, key)):
                return
            prefix = ", "
        if marker:
            self.emit_arguments("}" if prefix == ", " else "{}")
            self.end_call()
            self.skip(-len(marker))

    def _value(self, tool: str, key: str) -> Steps[bool]:
        """Emit the next value; return False if the text ended before it did."""
        schema, ends = self.tools.get(tool, {}), self.tagged.ends
        kinds = kinds_of(parameter_schema(schema, key), schema)
        if kinds == {"string"}:
            self.emit_arguments('"')
            closed = yield from self.until(*ends, emit=lambda text: self.emit_arguments(escaped(text)))
            self.emit_arguments('"' if closed else "")
            return bool(closed)
        value, closed = yield from self.text_until(*ends)
        nested = not kinds.isdisjoint(_NESTED_KINDS.get(value.lstrip()[:1], ()))
        quotes = _Quotes() if nested else None
        while closed and quotes is not None and quotes.open_after(value[quotes.seen :]):
            more, again = yield from self.text_until(*ends)  # the marker was part of a string
            value += closed + more
            closed = again
        if closed:  # an incomplete value of another type is ambiguous
            self.emit_arguments(json_of(value, kinds))
        return bool(closed)


class _Quotes:
    """Tracks if streamed JSON is within a string."""

    def __init__(self) -> None:
        self.seen = 0
        self._inside = self._escaped = False

    def open_after(self, more: str) -> bool:
        self.seen += len(more)
        for character in more:
            if self._escaped:
                self._escaped = False
            elif character == '"':
                self._inside = not self._inside
            else:
                self._escaped = self._inside and character == "\\"
        return self._inside


_GLM_KEY: Final = ("<arg_key>", "</arg_key>")
_GLM_VALUE: Final = ("<arg_value>", "</arg_value>")


class GlmTools(TaggedCallReader):
    """GLM-4.5 and later: a name, then keys and values between markers."""

    markers = (_BEGIN, _END, *_GLM_KEY, *_GLM_VALUE)
    tagged = TaggedArguments(_GLM_KEY[0], f"{_GLM_KEY[1]}\n{_GLM_VALUE[0]}", f"{_GLM_VALUE[1]}\n", (_GLM_VALUE[1],))
    ends = (_BEGIN, _END)

    @classmethod
    def form(cls, name: str) -> CallForm:
        return CallForm(_BEGIN, f"{_BEGIN}{name}\n", _END, between="\n", arguments=cls.tagged)

    def run(self) -> Steps[None]:
        while (yield from self.content_until(_BEGIN)):
            self.mark(self.space_before)
            yield from self.space()
            name = yield from self.match(_NAME)
            space = yield from self.space()
            marker = yield from self.literal(*self.markers)
            self.skip(-len(marker))
            if name and (marker or "\n" in space):
                self.forget()
                self.begin_call(name)
                yield from self.arguments_of(name)
            else:
                self.emit_read()

    def key(self) -> Steps[str | None]:
        """Return the key, and read the beginning of its value."""
        yield from self.skip_all(_GLM_KEY[0])
        key, closed = yield from self.text_until(*self.markers)
        if closed in self.ends:
            self.skip(-len(closed))
            return None
        yield from self.skip_all(_GLM_KEY[1])
        begun = closed == _GLM_VALUE[0] or (yield from self.literal(_GLM_VALUE[0]))
        return key if begun else None


_CALL: Final = "<function="
_CALL_END: Final = "</function>"
_KEY: Final = "<parameter="
_VALUE_END: Final = "</parameter>"


class QwenCoderTools(TaggedCallReader):
    """Qwen3-Coder: parameters between tags with names. Models sometimes omit the markers around a call."""

    markers = (_BEGIN, _END, _CALL, _CALL_END, _KEY, _VALUE_END)
    tagged = TaggedArguments(_KEY, ">\n", f"\n{_VALUE_END}\n", ends=(f"\n{_VALUE_END}", _VALUE_END))
    ends = (_CALL_END, _END, _BEGIN, _CALL)
    call: ClassVar[str] = _CALL
    """Precedes the name of a tool."""
    named: ClassVar[str] = ">"
    """Follows a name."""

    @classmethod
    def form(cls, name: str) -> CallForm:
        begin = f"{_BEGIN}\n{_CALL}{name}>\n"
        return CallForm(_BEGIN, begin, f"{_CALL_END}\n{_END}", between="\n", arguments=cls.tagged)

    def run(self) -> Steps[None]:
        while (yield from self.content_until(self.call)):
            self.mark(self.space_before)
            name = yield from self.match(_NAME)
            if name and (yield from self.literal(self.named)):
                self.forget()
                self.begin_call(name)
                yield from self.arguments_of(name)
            else:
                self.emit_read()

    def key(self) -> Steps[str | None]:
        """Return the key, and read the line break that may precede its value."""
        key, closed = yield from self.text_until(self.named, *self.markers)
        if closed != self.named:
            self.skip(-len(closed))
            return None
        if after := self.tagged.before_value.removeprefix(self.named):
            yield from self.literal(after)
        return key


_BLOCK: Final = "<minimax:tool_call>"
_BLOCK_END: Final = "</minimax:tool_call>"
_INVOKE: Final = '<invoke name="'
_INVOKE_END: Final = "</invoke>"
_PARAMETER: Final = '<parameter name="'


class MiniMaxTools(QwenCoderTools):
    """MiniMax-M2: all calls in one block, names within quotes, and values without line breaks around them."""

    markers = (_BLOCK, _BLOCK_END, _INVOKE, _INVOKE_END, _PARAMETER, _VALUE_END)
    tagged = TaggedArguments(_PARAMETER, '">', f"{_VALUE_END}\n", ends=(_VALUE_END,))
    ends = (_INVOKE_END, _BLOCK_END, _BLOCK, _INVOKE)
    call = _INVOKE
    named = '">'

    @classmethod
    def form(cls, name: str) -> CallForm:
        return CallForm(
            _BLOCK,
            f'{_INVOKE}{name}">\n',
            _INVOKE_END,
            between="\n",
            opening=f"{_BLOCK}\n",
            closing=f"\n{_BLOCK_END}",
            arguments=cls.tagged,
        )
