"""The blocks of an answer: runs of reasoning, of content, or one tool call, each opened, filled and closed in turn.

The Responses and the Messages API show answers so; both spell these steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from fd_core.text.parsing.events import ArgumentsDelta, CallBegun, CallEnded, Event, Thought


@dataclass(slots=True)
class AnswerBlock:
    """One block, as far as it came."""

    index: int
    kind: Literal["reasoning", "content", "call"]
    name: str = ""
    """Of the tool that a call is for."""
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Content, reasoning, or the JSON of a call's arguments."""
        return "".join(self.texts)


@dataclass(frozen=True, slots=True)
class Opened:
    """A block begins."""

    block: AnswerBlock


@dataclass(frozen=True, slots=True)
class Added:
    """A block grows."""

    block: AnswerBlock
    text: str


@dataclass(frozen=True, slots=True)
class Closed:
    """A block is complete, or as complete as it gets."""

    block: AnswerBlock


BlockStep = Opened | Added | Closed


class BlockWriter:
    """Turns events into steps."""

    def __init__(self) -> None:
        self.blocks: list[AnswerBlock] = []
        self._open: AnswerBlock | None = None

    def write(self, events: Iterable[Event]) -> Iterator[BlockStep]:
        """Yield what the next events do."""
        for event in events:
            if isinstance(event, CallBegun):
                yield from self._begin("call", event.name)
            elif isinstance(event, CallEnded):
                yield from self.close()
            else:
                kind: Literal["reasoning", "content", "call"] = "reasoning" if isinstance(event, Thought) else "content"
                kind = "call" if isinstance(event, ArgumentsDelta) else kind
                if self._open is None or self._open.kind != kind:
                    yield from self._begin(kind)
                if self._open is not None:
                    self._open.texts.append(event.text)
                    yield Added(self._open, event.text)

    def close(self) -> Iterator[BlockStep]:
        """Close the block that is open, if one is."""
        if self._open is not None:
            yield Closed(self._open)
            self._open = None

    def _begin(self, kind: Literal["reasoning", "content", "call"], name: str = "") -> Iterator[BlockStep]:
        yield from self.close()
        self._open = AnswerBlock(len(self.blocks), kind, name)
        self.blocks.append(self._open)
        yield Opened(self._open)


def blocks_of(events: Iterable[Event]) -> list[AnswerBlock]:
    """Return the blocks of a whole answer."""
    writer = BlockWriter()
    for _ in writer.write(events):
        pass
    return writer.blocks
