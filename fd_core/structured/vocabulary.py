"""The vocabulary of a model as llguidance wants it: the bytes of every token, and a way to write a text in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from llguidance import LLTokenizer

from fd_core.text.tokenizer import Tokenizer

_MAX_IDS: Final = 2**22
"""Far beyond any model's; memory for as many is taken."""


class VocabularyTable(msgspec.Struct, frozen=True):
    """The tokens of a model as data, for a process without its tokenizer."""

    tokens: list[bytes]
    """By id."""
    special: list[int]
    """Sorted ids of control tokens, which match no text."""
    ends: list[int]

    def vocabulary(self, tokenizer: Tokenizer | None = None) -> LLTokenizer:
        """Return the vocabulary. Without a tokenizer, texts are written in the longest tokens that match."""
        read: Any = _Vocabulary(self, tokenizer)  # all that is read of a `TokenizerWrapper`
        return LLTokenizer(read, n_vocab=len(self.tokens), eos_token=self.ends)


def vocabulary_table(tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> VocabularyTable:
    """Return the tokens of a model with `vocab_size` ids, which may be more or fewer than the tokenizer has.

    `ends` are the ids that end a text, at least one. Ids without text, control tokens among them, match nothing.
    Raises `ValueError` if no id can end a text, or if there are too many ids.
    """
    if vocab_size > _MAX_IDS:
        raise ValueError(f"the model has {vocab_size:,} token ids; texts of a given form take at most {_MAX_IDS:,}")
    if not ends:
        raise ValueError("the model has no end-of-sequence token, so no text of a given form could end")
    tokens = (tokenizer.byte_table + [b""] * vocab_size)[:vocab_size]
    special = sorted({each for each in (*tokenizer.special_ids, *ends) if each < vocab_size})
    return VocabularyTable(tokens, special, list(ends))


def grammar_vocabulary(tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> LLTokenizer:
    """Return the vocabulary of a model, see `vocabulary_table`, which writes texts as the tokenizer does."""
    return vocabulary_table(tokenizer, vocab_size, ends).vocabulary(tokenizer)


class _Vocabulary:
    """What `LLTokenizer` reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, table: VocabularyTable, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = table.ends[0]
        self.tokens = table.tokens
        self.special_token_ids = table.special
        special = set(self.special_token_ids)
        self._ids = {token: each for each, token in enumerate(self.tokens) if token and each not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        """Return ordinary tokens whose bytes are exactly those of `text`; what has no token is left out.

        The tokenizer's own way of writing is taken unless it changes the text: by a blank in front, by normalizing it,
        or by taking what looks like a control token for one.
        """
        wanted = text.encode("utf-8", "replace")
        if self._tokenizer is None:
            return self._greedily(wanted)
        ids = self._tokenizer.encode(text, add_special=False)
        written = [self.tokens[each] if each < len(self.tokens) else b"" for each in ids]
        if not all(written) or any(self._ids.get(each) is None for each in written):
            return self._greedily(wanted)
        joined = b"".join(written)
        if joined == wanted:
            return ids
        if written[0] == b" " and joined == b" " + wanted:
            return ids[1:]
        return self._greedily(wanted)

    def _greedily(self, text: bytes) -> list[int]:
        ids: list[int] = []
        place = 0
        while place < len(text):
            for length in range(min(self._longest, len(text) - place), 0, -1):
                found = self._ids.get(text[place : place + length])
                if found is not None:
                    ids.append(found)
                    place += length
                    break
            else:
                return ids
        return ids
