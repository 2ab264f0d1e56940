"""What parsers found in an answer, in the shape of the chat API: one message, or the deltas of a stream."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable
from typing import Final

import msgspec

from fd_core.server.schemas.responses import ChatMessage, FunctionCall, ToolCall
from fd_core.server.stream.response_format import json_text
from fd_core.text.parsing.events import ArgumentsDelta, CallBegun, Content, Event, Thought

_ALPHABET: Final = string.ascii_letters + string.digits
_BARE: Final = 9


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
    content, reasoning = [], []
    calls: dict[int, ToolCall] = {}
    for event in events:
        if isinstance(event, Content):
            content.append(event.text)
        elif isinstance(event, Thought):
            reasoning.append(event.text)
        elif isinstance(event, CallBegun):
            calls[event.index] = ToolCall(id=new_call_id(bare_ids), function=FunctionCall(event.name, ""))
        elif isinstance(event, ArgumentsDelta):
            calls[event.index].function.arguments += event.text
    thought = "".join(reasoning) or msgspec.UNSET
    return ChatMessage(
        content="".join(content) or (None if calls or reasoning else ""),
        reasoning_content=thought,
        reasoning=thought,
        tool_calls=list(calls.values()) or msgspec.UNSET,
    )
