"""What parsers found in an answer: as the deltas and the message of a chat, or as blocks.

Blocks are runs of reasoning, of content, or one tool call, each opened, filled and closed in turn. The Responses and
the Messages API show answers so; both spell these steps.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import msgspec

from fd_core.server.schemas.responses import ChatMessage, FunctionCall, ToolCall
from fd_core.server.stream.response_format import json_text
from fd_core.text.parsing.events import ArgumentsDelta, CallBegun, CallEnded, Content, Event, Thought

BlockKind = Literal["reasoning", "content", "call"]
_ALPHABET: Final = string.ascii_letters + string.digits
_BARE: Final = 9


@dataclass(slots=True)
class AnswerBlock:
    """One block, as far as it came."""

    index: int
    kind: BlockKind
    name: str = ""
    """Of the tool that a call is for."""
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Content, reasoning, or the JSON of a call's arguments."""
        return "".join(self.texts)


class BlockStep(NamedTuple):
    """A block begins, grows by a text, or is as complete as it gets."""

    kind: Literal["opened", "added", "closed"]
    block: AnswerBlock
    text: str = ""


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
                kind: BlockKind = "reasoning" if isinstance(event, Thought) else "content"
                kind = "call" if isinstance(event, ArgumentsDelta) else kind
                if self._open is None or self._open.kind != kind:
                    yield from self._begin(kind)
                block = self.blocks[-1]
                block.texts.append(event.text)
                yield BlockStep("added", block, event.text)

    def close(self) -> Iterator[BlockStep]:
        """Close the block that is open, if one is."""
        if self._open is not None:
            yield BlockStep("closed", self._open)
            self._open = None

    def _begin(self, kind: BlockKind, name: str = "") -> Iterator[BlockStep]:
        yield from self.close()
        self._open = AnswerBlock(len(self.blocks), kind, name)
        self.blocks.append(self._open)
        yield BlockStep("opened", self._open)


def blocks_of(events: Iterable[Event]) -> list[AnswerBlock]:
    """Return the blocks of a whole answer."""
    writer = BlockWriter()
    for _ in writer.write(events):
        pass
    return writer.blocks


def new_call_id(bare: bool) -> str:
    """Return an id for a call; a bare one has nine letters and digits, which some templates demand."""
    if bare:
        return "".join(secrets.choice(_ALPHABET) for _ in range(_BARE))
    return f"call_{secrets.token_hex(12)}"


def deltas(events: Iterable[Event], bare_ids: bool) -> list[bytes]:
    """Return the JSON of the deltas that the events are; those that end a call are none."""
    said = []
    for event in events:
        if isinstance(event, Content):
            said.append(b'{"content":%b}' % json_text(event.text))
        elif isinstance(event, Thought):
            text = json_text(event.text)
            said.append(b'{"reasoning_content":%b,"reasoning":%b}' % (text, text))
        elif isinstance(event, CallBegun):
            begun = b'{"tool_calls":[{"index":%d,"id":%b,"type":"function","function":{"name":%b,"arguments":""}}]}'
            said.append(begun % (event.index, json_text(new_call_id(bare_ids)), json_text(event.name)))
        elif isinstance(event, ArgumentsDelta):
            more = b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}'
            said.append(more % (event.index, json_text(event.text)))
    return said


def message_of(events: Iterable[Event], bare_ids: bool) -> ChatMessage:
    """Return the message that the events of an answer are."""
    blocks = blocks_of(events)
    content = "".join(block.text for block in blocks if block.kind == "content")
    thought = "".join(block.text for block in blocks if block.kind == "reasoning") or msgspec.UNSET
    calls = [
        ToolCall(id=new_call_id(bare_ids), function=FunctionCall(block.name, block.text))
        for block in blocks
        if block.kind == "call"
    ]
    return ChatMessage(
        content=content or (None if any(block.kind != "content" for block in blocks) else ""),
        reasoning_content=thought,
        reasoning=thought,
        tool_calls=calls or msgspec.UNSET,
    )
