"""A parser as a generator: straight-line code that yields where it needs more text."""

from __future__ import annotations

import abc
import json
import re
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import cache
from typing import ClassVar, Final, TypeVar

from fd_core.deprecations import accept_old_names
from fd_core.text.parsing.contract import ToolParser, ToolSchemas
from fd_core.text.parsing.events import ArgumentsDelta, CallBegun, CallEnded, Content, Event, ReasoningDelta, joined

SPACE: Final = " \t\r\n"
"""White space that formats put around their markers."""

_SPACES: Final = re.compile(f"[{SPACE}]+")
_SURE: Final = 3
"""Characters of a marker after a call that are taken for half of one."""

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Parsing steps: yield where more text is needed, return the result."""


@accept_old_names
class TextReader(abc.ABC):
    """Streamed text, read by `run`.

    `run` is resumed for each piece and once more when the text has ended. It emits events through `emit_...`.
    A position that may have to be read again is stored by `mark` until `go_back` or `forget`.
    """

    markers: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._kept: int | None = None
        self._kept_before: list[str] = []
        self._ended = self._cut_off = False
        self._events: list[Event] = []
        self._calls = 0
        self.call_open = self._arguments = self._after_call = False
        self._trailing_space = ""
        """White space after a marker, which is content if content follows."""
        self.space_before = ""
        """White space that `until` treated as part of the last marker."""
        self._steps = self.run()

    @abc.abstractmethod
    def run(self) -> Steps[None]:
        """Read the whole text."""

    def push(self, text: str) -> Sequence[Event]:
        """Process more text and return its events."""
        if self._kept is not None:
            self._kept_before.append(self._text[self._kept : self._at])
            self._kept = 0
        self._text = self._text[self._at :] + text
        self._at = 0
        return self._advance()

    def flush(self) -> Sequence[Event]:
        """Return the text that was held back, without an incomplete marker at the end."""
        self._ended = self._cut_off = True
        return self._advance()

    def finish(self) -> Sequence[Event]:
        """Return the text that was held back; the model ended the text, so an incomplete marker is text."""
        self._ended = True
        return self._advance()

    def _advance(self) -> Sequence[Event]:
        next(self._steps, None)
        events, self._events = self._events, []
        return joined(events) if len(events) > 1 else events

    # Output.

    def emit_content(self, text: str) -> None:
        """Yield content."""
        if text:
            self._after_call = False
            self._events.append(Content(text))

    def emit_reasoning(self, text: str) -> None:
        """Yield reasoning."""
        if text:
            self._events.append(ReasoningDelta(text))

    def begin_call(self, name: str, call_id: str = "") -> None:
        """Yield the beginning of a call."""
        self._events.append(CallBegun(self._calls, name, call_id))
        self.call_open, self._arguments = True, False

    def emit_arguments(self, text: str) -> None:
        """Yield more of the arguments of the call that is open."""
        if text:
            self._arguments = True
            self._events.append(ArgumentsDelta(self._calls, text))

    def end_call(self) -> None:
        """Yield the end of the open call; one without arguments gets an empty object."""
        if not self._arguments:
            self.emit_arguments("{}")
        self._events.append(CallEnded(self._calls))
        self._calls += 1
        self.call_open, self._after_call = False, True

    def drop(self, text: str) -> None:
        """Emit nothing for text that belongs to the format."""
        del text

    # Reading.

    @property
    def at_end(self) -> bool:
        """Return True if everything was read and no more text will arrive."""
        return self._ended and self._at >= len(self._text)

    def rest(self) -> str:
        """Return all text received so far, and read it."""
        rest = self._text[self._at :]
        self._at = len(self._text)
        return rest

    def mark(self, before: str = "") -> None:
        """Mark this position; `before` is text before it that `emit_read` emits as well."""
        self._kept, self._kept_before = self._at, [before]

    def forget(self) -> None:
        """Discard the mark."""
        self._kept, self._kept_before = None, []

    def go_back(self) -> None:
        """Return to the mark."""
        if self._kept is not None:
            before = "".join(self._kept_before)
            self._text = before + self._text[self._kept :] if before else self._text
            self._at = 0 if before else self._kept
            self.forget()

    def emit_read(self, *, cut: bool = True) -> None:
        """Emit the text read since `mark`, without markers; with `cut`, not if it ends in incomplete markup."""
        if self._kept is not None and not (cut and self.at_end and self._cut_off):
            read = "".join(self._kept_before) + self._text[self._kept : self._at]
            if read.strip(SPACE):
                self.emit_content(_patterns(self.markers)[0].sub("", read) if self.markers else read)
            else:
                self._trailing_space = read
        self.forget()

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
        """Read characters that were peeked."""
        self._at += count

    def here(self, pattern: re.Pattern[str]) -> str:
        """Return the match of `pattern` in the available text, and read it."""
        found = pattern.match(self._text, self._at)
        if found is None:
            return ""
        self._at = found.end()
        return found[0]

    def space(self) -> Steps[str]:
        """Return white space, up to the first other character."""
        return (yield from self.match(_SPACES))

    def skip_all(self, *words: str) -> Steps[None]:
        """Read white space and `words`, up to another marker or other text."""
        while (yield from self.space()) or (word := (yield from self.literal(*words, *self.markers))) in words:
            pass
        self.skip(-len(word))

    def literal(self, *words: str) -> Steps[str]:
        """Return the longest of `words` that follows, and read it; empty, and nothing read, if none does."""
        longest = max(map(len, words))
        while True:
            ahead = self._text[self._at : self._at + longest]
            open_ones = [word for word in words if len(word) > len(ahead) and word.startswith(ahead)]
            if self._ended or not open_ones:
                found = max((word for word in words if ahead.startswith(word)), key=len, default="")
                self._at += len(ahead) if ahead and open_ones and self._cut_off else len(found)
                return found
            yield

    def match(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Return the longest run of characters that `pattern`, which repeats a class of them, matches."""
        read: list[str] = []
        while (yield from self.peek()) and (found := self.here(pattern)):
            read.append(found)
        return "".join(read)

    def until(self, *markers: str, emit: Callable[[str], None], space: bool = False, before: str = "") -> Steps[str]:
        """Emit text until one of `markers` follows; return the marker, which is read, or nothing at the end.

        Of markers that begin at the same position the longest is found. With `space`, white space before a marker
        belongs to it; `before` is white space that was read already. An incomplete marker at the end is not emitted.
        """
        pattern, beginning, longest = _patterns(markers)
        spaces = [before]
        while True:
            found = pattern.search(self._text, self._at)
            begun = beginning.search(self._text, max(self._at, len(self._text) - longest))
            if begun is not None and found is not None and (self._ended or begun.start() > found.start()):
                begun = None
            first = begun or found  # an incomplete marker at the end of the text may become a longer one
            begin = first.start() if first else len(self._text)
            text, self._at = self._text[self._at : begin], begin
            words = text.rstrip(SPACE) if space else text
            if words:
                emit("".join(spaces) + words)
                spaces = []
            spaces.append(text[len(words) :])
            if found is not None and begun is None:
                self.space_before = "".join(spaces)
                self._at = found.end()
                return found[0]
            if self._ended:
                cut = begun is not None and (self._after_call or (self._cut_off and self._drops(begun[0], emit)))
                rest = "" if cut else "".join(spaces) + self.rest()
                self._at = len(self._text)
                if rest:
                    emit(rest)
                return ""
            yield

    def _drops(self, begun: str, emit: Callable[[str], None]) -> bool:
        """Return True if the end of a truncated text is an incomplete marker, not content such as one backtick."""
        return emit != self._emit_outside or any(marker.startswith(begun) for marker in self.markers)

    def content_until(self, *begins: str) -> Steps[str]:
        """Emit content until one of `begins` follows, see `until`.

        Other markers of the format are dropped. So is, after a call, the rest of its end: white space alone,
        closing brackets and half a marker.
        """
        before, self._trailing_space = self._trailing_space, ""
        while True:
            marker = yield from self.until(*begins, *self.markers, emit=self._emit_outside, space=True, before=before)
            if not marker or marker in begins:
                return marker
            before = "" if self._after_call else self.space_before

    def text_until(self, *markers: str) -> Steps[tuple[str, str]]:
        """Return the text up to one of `markers`, and the marker; that is empty if the text ends before."""
        read: list[str] = []
        marker = yield from self.until(*markers, emit=read.append)
        return "".join(read), marker

    def _emit_outside(self, text: str) -> None:
        if self._after_call:
            text = _remains(self.markers).sub("", text, count=1)
            if not text.strip(SPACE):
                return
        self.emit_content(text)


class ToolReader(TextReader, ToolParser):
    """Text with tool calls."""

    def __init__(self, tools: ToolSchemas) -> None:
        ToolParser.__init__(self, tools)
        TextReader.__init__(self)


def escaped(text: str) -> str:
    """Return a text escaped for a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


@cache
def _patterns(markers: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str], int]:
    """Return patterns of a marker and of an incomplete marker at the end of a text, and the longest marker's length."""
    either, begun = _either(markers), _either(_beginnings(markers))
    return re.compile(either), re.compile(rf"(?:{begun or '(?!)'})\Z"), max(map(len, markers))


@cache
def _remains(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of the remains of a call's end at the beginning of a text: brackets and half markers."""
    half = _either([each for each in _beginnings(markers) if len(each) >= _SURE])
    return re.compile(rf"\A(?:[{SPACE}]*(?:[)\]}}]|{half or '(?!)'}))+")


def _beginnings(markers: Iterable[str]) -> set[str]:
    return {marker[:size] for marker in markers for size in range(1, len(marker))}


def _either(texts: Iterable[str]) -> str:
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
