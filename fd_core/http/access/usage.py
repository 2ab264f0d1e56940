"""How a router learns what an answer took: from its `usage`, or from a comment that workers put into a stream."""

from __future__ import annotations

import re
from typing import Final

import msgspec

USAGE_HEADER: Final = "X-FD-Usage"
"""Header with which a router asks a worker for the comment."""
_COMMENT: Final = re.compile(rb"^: usage (\d{1,12}) (\d{1,12})\n\n", re.MULTILINE)
_MARK: Final = b": usage "
_EVENT: Final = b"\ndata: "


class _Usage(msgspec.Struct):
    """What OpenAI's and Anthropic's answers say."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int = 0


class _Metered(msgspec.Struct):
    usage: _Usage | None = None


_decoder: Final = msgspec.json.Decoder(_Metered)


def usage_comment(tokens_in: int, tokens_out: int) -> bytes:
    """Return the comment that tells what a stream took; clients of server-sent events pass over it."""
    return b"%b%d %d\n\n" % (_MARK, tokens_in, tokens_out)


class UsageMeter:
    """Reads what one answer took while it passes."""

    __slots__ = ("_events", "_told")

    def __init__(self) -> None:
        self._told: tuple[int, int] | None = None
        self._events = 0

    def whole(self, body: bytes) -> None:
        """Read the usage of a whole answer; one that tells none, such as an error, took nothing."""
        self._told = 0, 0
        try:
            usage = _decoder.decode(body).usage
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return
        if usage is not None:
            read = usage.prompt_tokens or usage.input_tokens + usage.cache_read_input_tokens
            self._told = read, usage.completion_tokens or usage.output_tokens

    def piece(self, events: bytes) -> bytes:
        """Take whole events of a stream; return them without the comment, which is not meant for clients."""
        self._events += events.count(_EVENT) + events.startswith(_EVENT[1:])
        if _MARK in events and (found := _COMMENT.search(events)) is not None:
            self._told = int(found[1]), int(found[2])
            return events[: found.start()] + events[found.end() :]
        return events

    def tokens(self, prompt: int) -> tuple[int, int] | None:
        """Return the tokens read and written, None if not told; of a stream that does not tell, events count."""
        if self._told is None and self._events:
            return prompt, self._events
        return self._told
