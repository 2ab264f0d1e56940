"""Calls written as a Python list of function calls: `[f(a=1), g(b='x')]`, translated to JSON incrementally."""

from __future__ import annotations

import json
import re
from typing import Final

from fd_core.text.parsing.contract import CallForm
from fd_core.text.parsing.reader import Steps, ToolReader, escaped

_FENCES: Final = ("```python", "```")
_NAME: Final = re.compile(r"[\w.-]+")
_KEY: Final = re.compile(r"\w+")
_WORD: Final = re.compile(r"[\w.+-]+")
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WHOLE: Final = re.compile(r"[+-]?[0-9][0-9A-Fa-fxXobOB_]{0,64}")
_WORDS: Final = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_CODES: Final = {"x": 2, "u": 4, "U": 8}
_MAX_DEPTH: Final = 64
_BRACKETS: Final = {"[": "]", "(": ")", "{": "}"}


class PythonicTools(ToolReader):
    """Llama 4, Llama 3.2 and others. An answer is a list of calls from its first character on, or it has none."""

    markers = ("<|python_start|>", "<|python_end|>")
    """Around a list; the first makes any name that of a call."""
    bare = True
    """True if a list needs no markers."""
    _half_a_call = True

    @classmethod
    def form(cls, name: str) -> CallForm:
        return CallForm("[", f"{name}(", ")", ", ", opening="[", closing="]", arguments="python", anywhere=False)

    def run(self) -> Steps[None]:
        """Read calls, if the answer begins with them, then content."""
        if self.bare:
            yield from self._lists(explicit=False)
        while (yield from self.content_until(self.markers[0])):
            yield from self._lists(explicit=True)

    def _lists(self, *, explicit: bool) -> Steps[None]:
        """Read lists of calls that follow one another; after a marker a call may have any name."""
        self.mark(self.space_before if explicit else "")
        called, around = False, ""
        start, stop = self.markers
        while True:
            while (yield from self.space()) or (around := (yield from self.literal(start, *_FENCES))):
                explicit = explicit or around == start
                if called and around:
                    self.mark()
            opened = yield from self.literal("[")
            while opened and (yield from self._call(explicit)):
                called = True
                self.mark()
                yield from self.space()
                comma = yield from self.literal(",")
                yield from self.space()
                if (yield from self.literal("]", stop)):
                    self.mark()
                    break
                if not comma:
                    break
            else:
                break
        if called and not opened:
            self.go_back()
        else:
            self.emit_read(cut=explicit or self._half_a_call)

    def _call(self, explicit: bool) -> Steps[bool]:
        """Read one call; False, with the position still marked, if there is none."""
        yield from self.space()
        name = yield from self.match(_NAME)
        self._half_a_call = any(tool.startswith(name) for tool in self.tools)
        if not name or not (explicit or name in self.tools) or not (yield from self.literal("(")):
            return False
        self.forget()
        self.begin_call(name)
        prefix = "{"
        while True:
            yield from self.space()
            if (yield from self.literal(")", "]")):
                self.emit_arguments("}" if prefix == ", " else "{}")
                self.end_call()
                return True
            key = yield from self.match(_KEY)
            yield from self.space()
            if not key or not (yield from self.literal("=")):
                break
            yield from self.space()
            self.emit_arguments(f"{prefix}{json.dumps(key, ensure_ascii=False)}: ")
            prefix = ", "
            if not (yield from self._value(0)):
                break
            yield from self.space()
            yield from self.literal(",")
        # It is incomplete: the following text is treated as its arguments.
        if end := (yield from self.until(")]", *self.markers, emit=self.emit_arguments)):
            self.end_call()
            self.skip(-len(end) if end in self.markers else 0)
        return False

    def _value(self, depth: int, *, quoted: bool = False) -> Steps[bool]:
        """Translate one value, a bare word as a string; return True if it is complete. `quoted`: quotes are around."""
        first = yield from self.peek()
        if first and first in "'\"":
            return (yield from self._string())
        if first in _BRACKETS:
            return depth < _MAX_DEPTH and (yield from self._collection(depth))
        word = yield from self.match(_WORD)
        if self.at_end:  # the digits so far are certain, but a word may still continue
            self.emit_arguments(word if word[:1] in "-0123456789" else "")
            return False
        bare = word if quoted or not word else json.dumps(word, ensure_ascii=False)
        self.emit_arguments(_WORDS.get(word) or _number(word) or bare)
        return bool(word)

    def _collection(self, depth: int) -> Steps[bool]:
        opened = yield from self.take()
        closing = _BRACKETS[opened]
        self.emit_arguments("{" if opened == "{" else "[")
        between = ""
        while True:
            yield from self.space()
            if (yield from self.literal(closing)):
                self.emit_arguments("}" if opened == "{" else "]")
                return True
            first = yield from self.peek()
            if not first:
                return False
            bare = opened == "{" and first not in ("'", '"')  # JSON's keys are strings, Python's may be numbers
            self.emit_arguments(between + '"' * bare)
            between = ", "
            if not (yield from self._value(depth + 1, quoted=bare)):
                return False
            self.emit_arguments('"' * bare)
            yield from self.space()
            if opened == "{":
                if not (yield from self.literal(":")):
                    return False
                yield from self.space()
                self.emit_arguments(": ")
                if not (yield from self._value(depth + 1)):
                    return False
                yield from self.space()
            if not (yield from self.literal(",")) and (yield from self.peek()) != closing:
                return False

    def _string(self) -> Steps[bool]:
        quote = yield from self.take()
        plain = re.compile(rf"[^\\{quote}]+")
        self.emit_arguments('"')
        while True:
            if text := self.here(plain):
                self.emit_arguments(escaped(text))
            character = yield from self.take()
            if character == "\\":
                self.emit_arguments(escaped((yield from self._escape())))
            elif character == quote:
                yield from self.space()
                if (following := (yield from self.peek())) not in ("'", '"'):
                    self.emit_arguments('"')
                    return True
                quote, plain = following, re.compile(rf"[^\\{following}]+")  # Python joins adjacent strings
                self.skip(1)
            elif not character:
                return False
            else:
                self.emit_arguments(escaped(character))

    def _escape(self) -> Steps[str]:
        """Return the text that the escape after a backslash stands for."""
        letter = yield from self.take()
        if letter not in _CODES:
            return _ESCAPES.get(letter, letter if letter in ("\\", "'", '"', "") else f"\\{letter}")
        digits = ""
        while len(digits) < _CODES[letter] and (digit := (yield from self.peek())) in tuple("0123456789abcdefABCDEF"):
            digits += digit
            self.skip(1)
        if self.at_end:
            return ""
        code = int(digits or "110000", 16)
        return chr(code) if code < 0xD800 or 0xDFFF < code < 0x110000 else f"\\{letter}{digits}"


class LfmTools(PythonicTools):
    """LFM2: a list of calls between markers, before or after text."""

    markers = ("<|tool_call_start|>", "<|tool_call_end|>")
    bare = False

    @classmethod
    def form(cls, name: str) -> CallForm:
        start, stop = cls.markers
        return CallForm(start, f"{name}(", ")", ", ", opening=f"{start}[", closing=f"]{stop}", arguments="python")


def _number(word: str) -> str | None:
    if _NUMBER.fullmatch(word):
        return word
    try:
        value = int(word, 0) if _WHOLE.fullmatch(word) else float(word)
    except ValueError:
        return None
    return json.dumps(value) if abs(value) < float("inf") else None
