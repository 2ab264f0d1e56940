"""Events that parsers yield: frozen pieces of an answer, in the order in which the model generated them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader of the answer; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Reasoning of the model before the answer; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool call whose name is known."""

    index: int
    """Calls of an answer count from 0."""
    name: str
    call_id: str = ""
    """Id that the format has for the call; empty if the server chooses one."""


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the JSON text of a call's arguments; never empty."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The arguments of a call are complete. A call that is truncated by the end of the text has no such event."""

    index: int


_TEXTS = Content | ReasoningDelta | ArgumentsDelta
Event = Content | ReasoningDelta | CallBegun | ArgumentsDelta | CallEnded


def joined(events: Iterable[Event]) -> list[Event]:
    """Return the events with adjacent pieces of one text merged, independent of how the text was split."""
    whole: list[Event] = []
    for _, group in groupby(events, lambda event: (type(event), isinstance(event, ArgumentsDelta) and event.index)):
        first, *more = group
        texts = [event.text for event in more if isinstance(event, _TEXTS)]
        if texts and isinstance(first, _TEXTS):
            whole.append(replace(first, text=first.text + "".join(texts)))
        else:
            whole += [first, *more]
    return whole
