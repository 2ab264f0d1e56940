"""Tool calls written as JSON objects: `{"name": ..., "arguments": {...}}`.

The arguments go out as the model wrote them, character by character; only the object around them is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final, NamedTuple

from fd_core.text.parsing.contract import ToolParser, ToolSchemas
from fd_core.text.parsing.reader import Steps, TextReader

__all__ = ["JsonCallReader"]

_ARGUMENTS: Final = ("arguments", "parameters")
_KEYS: Final = ("name", *_ARGUMENTS, "type", "id")
_SCALAR: Final = re.compile(r"[A-Za-z0-9+.-]")
_INSIDE: Final = re.compile(r'[^"{}\[\]<`]+')
"""What neither begins nor ends anything in JSON. `<` and a backtick stand outside of strings in no JSON: a marker of
the format begins there, and the JSON has broken off."""
_IN_STRING: Final = re.compile(r'[^"\\]+')


class _Value(NamedTuple):
    text: str
    whole: bool
    """False if it broke off."""


class JsonCallReader(TextReader, ToolParser):
    """Reads objects that are calls."""

    def __init__(self, tools: ToolSchemas) -> None:
        ToolParser.__init__(self, tools)
        TextReader.__init__(self)

    def json_call(self, *, known: bool = False) -> Steps[bool]:
        """Read one object; return whether it is a call. If not, nothing was read and nothing said.

        The call begins when its name is known; with `known`, for formats without a marker, when it is the name of a
        tool and arguments are there; then its first key has to be one of a call. It ends with its arguments. If they
        break off it stays open, see `rest_of_call`. Without `known`, a call that the end of the text cuts off before
        its name is known is read as one and says nothing.
        """
        self.mark()
        name: str | None = None
        early: str | None = None
        begun, first = False, True
        if not (yield from self.literal("{")):
            self.forget()
            return False
        while True:
            yield from self.space()
            key = yield from self._key()
            if key is None or (known and first and key not in _KEYS):
                break
            first = False
            if key == "name" and name is None:
                name = _string((yield from self._value(self.drop)).text)
                if name is None or (known and name not in self.tools):
                    break
            elif key in _ARGUMENTS and early is None:
                if name is not None and not begun:
                    begun = self._begin(name)
                value = yield from self._value(self.say_arguments if begun else self.drop, unquote=begun)
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
                    self.say_arguments(_unquoted(early))
                    self.end_call()
            yield from self.space()
            if not (yield from self.literal(",")):
                if (yield from self.literal("}")) and self.call_open:
                    self.end_call()
                break
        if begun or (self.at_end and not known):
            self.forget()
            return True
        self.go_back()
        return False

    def rest_of_call(self, *ends: str) -> Steps[str]:
        """Where a call broke off, take what follows for its arguments, up to one of `ends`, which is returned."""
        if not self.call_open:
            return ""
        end = yield from self.until(*ends, say=self.say_arguments, space=True)
        if end:
            self.end_call()
        return end

    def _begin(self, name: str) -> bool:
        self.forget()
        self.begin_call(name)
        return True

    def json_value(self) -> Steps[bool]:
        """Say one JSON value as the arguments of the open call; return whether it is whole."""
        return (yield from self._value(self.say_arguments, unquote=True)).whole

    def _key(self) -> Steps[str | None]:
        if (yield from self.peek()) != '"':
            return None
        key = yield from self._value(self.drop)
        yield from self.space()
        if not key.whole or not (yield from self.literal(":")):
            return None
        yield from self.space()
        return _string(key.text)

    def _value(self, say: Callable[[str], None], unquote: bool = False) -> Steps[_Value]:
        """Read one value, saying it as it comes; with `unquote`, an object within a string is said as the object."""
        read: list[str] = []

        def tell(text: str) -> None:
            read.append(text)
            say(text)

        first = yield from self.peek()
        if first == '"' or first not in ("{", "["):
            text = yield from (self._read_string(read.append) if first == '"' else self.match(_SCALAR))
            whole = bool(text) and bool((yield from self.peek())) if first != '"' else bool(text)
            value = "".join(read) if first == '"' else text
            say(_unquoted(value) if unquote else value)
            return _Value(value, whole)
        depth = 0
        while True:
            yield from self._run(_INSIDE, tell)
            character = yield from self.peek()
            if character in ("", "<", "`"):
                return _Value("".join(read), False)
            if character == '"':
                if not (yield from self._read_string(tell)):
                    return _Value("".join(read), False)
                continue
            self.skip(1)
            tell(character)
            depth += 1 if character in "{[" else -1
            if depth == 0:
                return _Value("".join(read), True)

    def _read_string(self, tell: Callable[[str], None]) -> Steps[str]:
        """Read a string with its quotes; return its last character, empty if it broke off."""
        tell((yield from self.take()))
        while True:
            yield from self._run(_IN_STRING, tell)
            character = yield from self.take()
            tell(character)
            if character == "\\":
                tell((yield from self.take()))
            elif character in ('"', ""):
                return character

    def _run(self, pattern: re.Pattern[str], tell: Callable[[str], None]) -> Steps[None]:
        """Say what `pattern` matches, as much as there is."""
        while (yield from self.peek()) and (text := self.here(pattern)):
            tell(text)


def _string(text: str) -> str | None:
    """Return the value of a JSON string, None if it is none."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _unquoted(text: str) -> str:
    """Return an object that was written as a string, or as null; other text as it is."""
    if text == "null":
        return "{}"
    inner = _string(text) if text.startswith('"') else None
    return inner if inner is not None and inner.lstrip().startswith("{") else text
