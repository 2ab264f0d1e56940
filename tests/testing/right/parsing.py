"""Right parsers that differ from the core's in what the contract leaves open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fd_core.text.parsing.events import ArgumentsDelta, Content, Event, ReasoningDelta
from fd_core.text.parsing.formats.tagged import QwenCoderTools


class EmitsCharacters(QwenCoderTools):
    """Each character is an event of its own."""

    def push(self, text: str) -> list[Event]:
        return [*_divided(super().push(text))]

    def flush(self) -> list[Event]:
        return [*_divided(super().flush())]

    def finish(self) -> list[Event]:
        return [*_divided(super().finish())]


def _divided(events: Sequence[Event]) -> Iterator[Event]:
    for event in events:
        if isinstance(event, Content | ReasoningDelta | ArgumentsDelta):
            yield from (replace(event, text=character) for character in event.text)
        else:
            yield event
