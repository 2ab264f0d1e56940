"""Streaming detokenization with stop strings.

Invariants, each verified by a property test:
1. The texts of all pushes and of `flush`, joined, are those of all tokens' bytes at once, however they were cut.
2. No text ends within a character, and none holds the stop string or anything after it. A stop string that the first
   `min_tokens` tokens complete ends no text.
3. Text is held back only where it may be the beginning of a stop string, or bytes of an unfinished character.

The cost of a push does not depend on earlier ones: bytes are read from a table, and at most one unfinished character
and one unfinished stop string are stored.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import NamedTuple

from fd_core.errors import BadRequest
from fd_core.text.tokenizer import Tokenizer


class TextDelta(NamedTuple):
    """Text that new tokens add.

    `stopped_by` is the stop string that ended the text, None while there is none. `consumed` is how many of the
    pushed tokens belong to the text: all of them, or those up to the token that completed the stop string.
    """

    text: str
    stopped_by: str | None = None
    consumed: int = 0


class IncrementalDetokenizer:
    """Incrementally turns the tokens of one generation into text.

    Of several stop strings the one that is complete first wins; of those complete at the same character, the longest.
    `include_stop` lets the text end with the stop string. `min_tokens` are generated before one may end the text.
    `keep` names control tokens that are kept as text. The tokens continue a prompt: unlike in `Tokenizer.decode`, a
    space before the first word stays. Raises `BadRequest` for an empty stop string.
    """

    __slots__ = ("_first", "_held", "_include_stop", "_pending", "_required", "_stops", "_table", "stopped_by")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        keep: tuple[str, ...] = (),
    ) -> None:
        if not all(stop):
            raise BadRequest("a stop string must not be empty", field="stop")
        spoken = tokenizer.table_with(keep) if keep else tokenizer.text_bytes_table
        self._table = spoken if skip_special else tokenizer.byte_table
        self._stops = tuple(dict.fromkeys(stop))
        self._first = {each[0]: tuple(s for s in self._stops if s[0] == each[0]) for each in self._stops}
        self._include_stop = include_stop
        self._required = min_tokens
        """Number of further tokens before a stop string may end the text."""
        self._pending = b""
        self._held = ""
        self.stopped_by: str | None = None
        """The stop string that ended the text, None while there is none."""

    def push(self, token_ids: Sequence[int], *, last: bool = False) -> TextDelta:
        """Take the next tokens; tokens after a stop string are ignored. After the `last` nothing is held back.

        Raises `BadRequest` for a negative id. Ids beyond the vocabulary stand for no text.
        """
        if self.stopped_by is not None:
            return TextDelta("", self.stopped_by, 0)
        table, stops = self._table, self._stops
        size, texts = len(table), []
        # With stop strings, tokens are processed one by one.
        for count, tokens in enumerate(zip(token_ids, strict=True) if stops else (token_ids,), 1):
            data = self._pending
            for token_id in tokens:
                if token_id < 0:
                    raise BadRequest(f"token id {token_id} is negative")
                if token_id < size:
                    data += table[token_id]
            text, used = utf_8_decode(data, "replace", last and not stops)
            self._pending = data[used:]
            if not stops:
                return TextDelta(text, None, len(token_ids))
            texts.append(self._released(text))
            if self.stopped_by is not None:
                return TextDelta("".join(texts), self.stopped_by, count)
            if self._required > 0:
                self._required -= 1
        if last:
            texts.append(self.flush().text)
        return TextDelta("".join(texts), None, len(token_ids))

    def flush(self) -> TextDelta:
        """Return the text that was held back until the end. Bytes of an unfinished character become U+FFFD."""
        if self.stopped_by is not None:
            return TextDelta("", self.stopped_by)
        text = utf_8_decode(self._pending, "replace", True)[0]
        self._pending = b""
        released = self._released(text)
        if self.stopped_by is None:
            released += self._held
            self._held = ""
        return TextDelta(released, self.stopped_by)

    def _released(self, text: str) -> str:
        """Add text and return the part that may be emitted; sets `stopped_by` when a stop string is complete."""
        if not text or not self._stops:
            return text
        earlier = len(self._held)
        text = self._held + text
        self._held = ""
        best = -1
        for stop in self._stops if self._required < 1 else ():
            begin = text.find(stop, max(0, earlier - len(stop) + 1))  # it ends in the new text
            if begin >= 0:
                end = begin + len(stop)
                if best < 0 or end < best or (end == best and len(stop) > len(self.stopped_by or "")):
                    best, self.stopped_by = end, stop
        if self.stopped_by is not None:
            return text[: best if self._include_stop else best - len(self.stopped_by)]
        for index, character in enumerate(text):
            if character in self._first:
                tail = text[index:]
                if any(len(tail) < len(stop) and stop.startswith(tail) for stop in self._first[character]):
                    self._held = tail
                    return text[:index]
        return text
