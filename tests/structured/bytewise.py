"""Matchers over a byte vocabulary and a word vocabulary, for tests."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from llguidance import LLParserLimits
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from fd_core.structured.compiler import LIMITS, GrammarCompiler, grammar_vocabulary
from fd_core.structured.matcher import TokenMatcher, mask_words
from fd_core.text.tokenizer import END_ID, Decoding, Tokenizer, byte_level, byte_tokenizer
from fd_core.types import Reasoning

__all__ = ["BYTES", "END_ID", "VOCABULARY", "allowed", "bytes_compiler", "ids", "matcher", "text_of", "wordy_tokenizer"]

BYTES = byte_tokenizer()
VOCABULARY = 300
"""Number of ids of the model: more than the tokenizer has."""


def bytes_compiler(limits: LLParserLimits = LIMITS) -> GrammarCompiler:
    return GrammarCompiler(lambda: grammar_vocabulary(BYTES, VOCABULARY, (END_ID,)), limits)


_COMPILER = bytes_compiler()


def ids(text: str) -> list[int]:
    return BYTES.encode(text, add_special=False)


def text_of(tokens: Iterable[int]) -> str:
    return BYTES.decode(list(tokens))


def matcher(grammar: str | None, ends: tuple[int, ...] = (END_ID,), reasoning: Reasoning | None = None) -> TokenMatcher:
    return TokenMatcher(None if grammar is None else _COMPILER.compiled(grammar), ends, VOCABULARY, reasoning)


def allowed(matched: TokenMatcher, drafts: list[int] | None = None) -> list[set[int] | None]:
    """Return the ids that a matcher allows after each number of drafts; None where it allows all."""
    drafts = drafts or []
    masks = np.zeros((len(drafts) + 1, mask_words(VOCABULARY)), np.int32)
    masked = matched.write_masks(drafts, masks)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, :VOCABULARY]
    return [set(np.flatnonzero(row).tolist()) if has else None for row, has in zip(bits, masked, strict=True)]


def wordy_tokenizer(*words: str) -> Tokenizer:
    """A byte-level tokenizer with merges for `words`, built from pairs, left to right, then two control tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    merges = []
    for word in words:
        whole = word[0]
        for letter in word[1:]:
            merges.append((whole, letter))
            whole += letter
            vocabulary.setdefault(whole, len(vocabulary))
    backend = Backend(models.BPE(vocab=vocabulary, merges=list(dict.fromkeys(merges))))
    split = pre_tokenizers.Split(Regex(r"[a-zA-Z]+|[^a-zA-Z]"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|think|>", special=True)])
    return Tokenizer(backend=backend, decoding=Decoding(byte_level), eos_id=backend.token_to_id("<|end|>"))
