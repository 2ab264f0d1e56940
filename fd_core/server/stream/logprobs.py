"""Log-probabilities in the shapes of both APIs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from fd_core.server.schemas.responses import ChatLogprobs, CompletionLogprobs, PromptLogprob, TokenLogprob, TopLogprob
from fd_core.text.detokenizer import IncrementalDetokenizer
from fd_core.text.tokenizer import Tokenizer
from fd_core.types import TokenLogprobs

_FLOOR: Final = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def chat_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], rows: Sequence[TokenLogprobs], top: int, as_ids: bool = False
) -> ChatLogprobs:
    """Return the chat shape for tokens and their log-probabilities, with the `top` most likely of each.

    `as_ids` names tokens by their ids.
    """
    content = []
    for token_id, row in zip(ids, rows, strict=True):
        likely = [_top(tokenizer, *pair, as_ids) for pair in zip(row.top_ids[:top], row.top[:top], strict=True)]
        own = _top(tokenizer, token_id, row.logprob, as_ids)
        content.append(TokenLogprob(own.token, own.logprob, own.bytes, likely))
    return ChatLogprobs(content)


class EncodedLists:
    """An object of lists as JSON, made of parts with the same fields, so that none of them is large."""

    def __init__(self, begun: EncodedLists | None = None) -> None:
        """Begin with the lists of another."""
        self._pieces: dict[str, list[bytes]] = {}
        self._others: dict[str, bytes] = {}
        """Fields that are no lists."""
        if begun is not None:
            self._pieces = {name: list(pieces) for name, pieces in begun._pieces.items()}
            self._others = dict(begun._others)

    def add(self, part: msgspec.Struct) -> None:
        """Put the lists of `part` behind those before."""
        for name in part.__struct_fields__:
            value = getattr(part, name)
            if not isinstance(value, list):
                self._others[name] = msgspec.json.encode(value)
                continue
            pieces = self._pieces.setdefault(name, [])
            if value:
                pieces.append(msgspec.json.encode(value)[1:-1])

    def encoded(self) -> msgspec.Raw:
        """Return the object."""
        fields = {name: b"[%b]" % b",".join(pieces) for name, pieces in self._pieces.items()} | self._others
        return msgspec.Raw(b"{%b}" % b",".join(b'"%b":%b' % (name.encode(), value) for name, value in fields.items()))


def prompt_logprobs(
    tokenizer: Tokenizer, ids: Sequence[int], rows: Sequence[TokenLogprobs], top: int
) -> list[dict[int, PromptLogprob]]:
    """Return what is told of tokens of a prompt: for each of them itself and the `top` most likely there."""
    answer: list[dict[int, PromptLogprob]] = []
    for token_id, row in zip(ids, rows, strict=True):
        ranks = dict(zip(row.top_ids[:top], range(1, top + 1), strict=False)) | {token_id: row.rank}
        likely = dict(zip(row.top_ids[:top], row.top[:top], strict=True)) | {token_id: row.logprob}
        answer.append(
            {
                each: PromptLogprob(_finite(value), ranks[each], tokenizer.token_text(each))
                for each, value in likely.items()
            }
        )
    return answer


class CompletionLogprobsBuilder:
    """Makes the completions shape for one choice, chunk by chunk; it knows where in the text each token begins."""

    def __init__(self, tokenizer: Tokenizer, top: int, offset: int, skip_special: bool, as_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._top = top
        self._offset = offset
        self._text = IncrementalDetokenizer(tokenizer, skip_special=skip_special)

    def build(self, ids: Sequence[int], rows: Sequence[TokenLogprobs | None]) -> CompletionLogprobs:
        """Return the shape for the next tokens; a token without log-probabilities, as a text's first, has null."""
        answer = CompletionLogprobs([], [], [], [])
        for token_id, row in zip(ids, rows, strict=True):
            name = self._name(token_id)
            answer.text_offset.append(self._offset)
            answer.tokens.append(name)
            answer.token_logprobs.append(None if row is None else _finite(row.logprob))
            answer.top_logprobs.append(None if row is None else self._likely(row) | {name: _finite(row.logprob)})
            self._offset += len(self._text.push((token_id,)).text)
        return answer

    def _likely(self, row: TokenLogprobs) -> dict[str, float]:
        pairs = zip(row.top_ids[: self._top], row.top[: self._top], strict=True)
        return {self._name(token_id): _finite(value) for token_id, value in pairs}

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else _name(self._tokenizer, token_id)


def _top(tokenizer: Tokenizer, token_id: int, logprob: float, as_ids: bool) -> TopLogprob:
    spoken = tokenizer.token_bytes(token_id)
    name = f"token_id:{token_id}" if as_ids else spoken.decode("utf-8", "replace")
    return TopLogprob(name, _finite(logprob), list(spoken))


def _name(tokenizer: Tokenizer, token_id: int) -> str:
    """Return a token's text; one that is no whole character is spelt in bytes, so that names stay distinct."""
    spoken = tokenizer.token_bytes(token_id)
    try:
        return spoken.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spoken)


def _finite(logprob: float) -> float:
    return logprob if logprob > _FLOOR else _FLOOR
