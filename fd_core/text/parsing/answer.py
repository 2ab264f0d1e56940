"""The parser of one answer: reasoning first, then tool calls in the content."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fd_core.text.parsing.contract import OutputParser, ReasoningParser, ToolParser
from fd_core.text.parsing.events import Content, Event

__all__ = ["AnswerParser"]


class AnswerParser(OutputParser):
    """Puts a tool parser behind a reasoning parser; at least one of the two is there."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        if tools is not None and tools.reads_reasoning:
            reasoning = None
        self._first: OutputParser | None = tools if reasoning is None else reasoning
        self._second = None if reasoning is None else tools

    def push(self, text: str) -> Sequence[Event]:
        """Take more text and return what it adds."""
        events = self._first.push(text) if self._first else [Content(text)]
        return events if self._second is None else self._read(events, self._second)

    def flush(self) -> Sequence[Event]:
        """Return what was held back."""
        events = self._first.flush() if self._first else ()
        return events if self._second is None else [*self._read(events, self._second), *self._second.flush()]

    @staticmethod
    def _read(events: Iterable[Event], tools: ToolParser) -> list[Event]:
        read: list[Event] = []
        for event in events:
            if isinstance(event, Content):
                read += tools.push(event.text)
            else:
                read.append(event)
        return read
