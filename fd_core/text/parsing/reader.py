"""A parser as a generator: straight-line code that yields where it needs more text."""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Generator, Sequence
from functools import cache
from typing import Final, TypeVar

from fd_core.text.parsing.events import ArgumentsDelta, CallBegun, CallEnded, Content, Event, Thought, joined

__all__ = ["SPACE", "Steps", "TextReader"]

SPACE: Final = " \t\r\n"
"""White space that formats put beside their markers."""

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Reads on: yields where it needs more text, returns what it found."""


class TextReader(abc.ABC):
    """Text that comes in pieces, read by `run`.

    `run` is resumed for each piece and once more when the text has ended. What it reads goes out through `say_...`.
    A place that may have to be read again is kept by `mark` until `go_back` or `forget`.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._kept: int | None = None
        self._ended = False
        self._events: list[Event] = []
        self._calls = 0
        self._open = self._arguments = self._after_call = False
        self.space_before = ""
        """White space that `until` took for part of the last marker."""
        self._steps = self.run()

    @abc.abstractmethod
    def run(self) -> Steps[None]:
        """Read the whole text."""

    def push(self, text: str) -> Sequence[Event]:
        """Take more text and return what it adds."""
        done = self._at if self._kept is None else self._kept
        self._text = self._text[done:] + text
        self._at -= done
        if self._kept is not None:
            self._kept = 0
        return self._advance()

    def flush(self) -> Sequence[Event]:
        """Return what was held back."""
        self._ended = True
        return self._advance()

    def _advance(self) -> Sequence[Event]:
        next(self._steps, None)
        events, self._events = self._events, []
        return joined(events) if len(events) > 1 else events

    # What was read goes out.

    def say_content(self, text: str) -> None:
        """Yield content."""
        if text:
            self._after_call = False
            self._events.append(Content(text))

    def say_reasoning(self, text: str) -> None:
        """Yield reasoning."""
        if text:
            self._events.append(Thought(text))

    def begin_call(self, name: str) -> None:
        """Yield the beginning of a call."""
        self._events.append(CallBegun(self._calls, name))
        self._open, self._arguments = True, False

    def say_arguments(self, text: str) -> None:
        """Yield more of the arguments of the call that is open."""
        if text:
            self._arguments = True
            self._events.append(ArgumentsDelta(self._calls, text))

    def end_call(self) -> None:
        """Yield the end of the open call; one without arguments gets an empty object."""
        if not self._arguments:
            self.say_arguments("{}")
        self._events.append(CallEnded(self._calls))
        self._calls += 1
        self._open, self._after_call = False, True

    @property
    def call_open(self) -> bool:
        """Whether a call has begun and not ended."""
        return self._open

    def drop(self, text: str) -> None:
        """Say nothing of text that belongs to the format."""
        del text

    # Reading.

    @property
    def at_end(self) -> bool:
        """Whether everything was read and nothing will come."""
        return self._ended and self._at >= len(self._text)

    def rest(self) -> str:
        """Return all text that is here, and read it."""
        rest = self._text[self._at :]
        self._at = len(self._text)
        return rest

    def mark(self) -> None:
        """Keep this place."""
        self._kept = self._at

    def forget(self) -> None:
        """Keep no place any more."""
        self._kept = None

    def go_back(self) -> None:
        """Return to the place that was kept."""
        if self._kept is not None:
            self._at, self._kept = self._kept, None

    def peek(self) -> Steps[str]:
        """Return the next character without reading it, empty at the end."""
        while self._at >= len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def take(self) -> Steps[str]:
        """Return the next character, empty at the end."""
        character = yield from self.peek()
        self._at += 1 if character else 0
        return character

    def skip(self, count: int) -> None:
        """Read characters that were seen."""
        self._at += count

    def here(self, pattern: re.Pattern[str]) -> str:
        """Return what `pattern` matches of the text that is here, and read it."""
        found = pattern.match(self._text, self._at)
        if found is None:
            return ""
        self._at = found.end()
        return found[0]

    def space(self) -> Steps[str]:
        """Return white space, up to the first other character."""
        read = ""
        while (character := (yield from self.peek())) and character in SPACE:
            read += character
            self._at += 1
        return read

    def literal(self, *words: str) -> Steps[str]:
        """Return the longest of `words` that comes next, and read it; empty, and nothing read, if none does."""
        longest = max(map(len, words))
        while True:
            ahead = self._text[self._at : self._at + longest]
            open_ones = [word for word in words if len(word) > len(ahead) and word.startswith(ahead)]
            if self._ended or not open_ones:
                found = max((word for word in words if ahead.startswith(word)), key=len, default="")
                self._at += len(found)
                return found
            yield

    def match(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Return the characters that `pattern`, a class of single characters, matches."""
        read = ""
        while (character := (yield from self.peek())) and pattern.match(character):
            read += character
            self._at += 1
        return read

    def until(self, *markers: str, say: Callable[[str], None], space: bool = False) -> Steps[str]:
        """Say text until one of `markers` comes; return the marker, which is read, or nothing at the end.

        Of markers that begin at one place the longest is found. With `space`, white space before a marker belongs
        to it.
        """
        pattern, beginning, longest = _patterns(markers)
        while True:
            found = pattern.search(self._text, self._at)
            begun = None if self._ended else beginning.search(self._text, max(self._at, len(self._text) - longest))
            if begun is not None and found is not None and begun.start() <= found.start():
                found = None  # what has begun at the end of the text may become a longer marker
            first = found or begun
            begin = first.start() if first else len(self._text)
            held = self._at + len(self._text[self._at : begin].rstrip(SPACE)) if space else begin
            if held > self._at:
                say(self._text[self._at : held])
                self._at = held
            if found is not None:
                self.space_before = self._text[held:begin]
                self._at = found.end()
                return found[0]
            if self._ended:
                say(self._text[self._at :])
                self._at = len(self._text)
                return ""
            yield

    def content_until(self, *markers: str) -> Steps[str]:
        """Say content until one of `markers` comes, see `until`; white space alone behind a call is no content."""
        return (yield from self.until(*markers, say=self._say_outside, space=True))

    def text_until(self, *markers: str) -> Steps[tuple[str, str]]:
        """Return the text up to one of `markers`, and the marker; that is empty if the text ends before."""
        read: list[str] = []
        marker = yield from self.until(*markers, say=read.append)
        return "".join(read), marker

    def _say_outside(self, text: str) -> None:
        if not (self._after_call and not text.strip(SPACE)):
            self.say_content(text)


@cache
def _patterns(markers: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str], int]:
    """Return what finds a marker, what finds the beginning of one at the end of a text, and the longest's length."""
    beginnings = {marker[:size] for marker in markers for size in range(1, len(marker))}
    either, begun = ("|".join(map(re.escape, sorted(each, key=len, reverse=True))) for each in (markers, beginnings))
    return re.compile(either), re.compile(rf"(?:{begun or '(?!)'})\Z"), max(map(len, markers))
