"""Token masks of one text: the reasoning before the grammar, the grammar, and the end tokens after it.

    reasoning --end sequence--> grammar --an end token, exactly where the grammar accepts--> ended

Everything here is a function of the tokens so far: the same tokens give the same masks, however they are split into
steps, and after a restart too. Where the grammar leaves one continuation, the mask allows one token, the one with which
the tokenizer itself would encode it; such tokens are forced, and drafts of them are always accepted.

Texts of one grammar share a lexer, which any of them may exhaust. So a query of the grammar is repeated with a private
lexer if the shared one turns out to be exhausted; a text fails if its private lexer is exhausted as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from fd_core.structured.compiler import CompiledGrammar, GrammarError, for_people
from fd_core.types import IntArray, Reasoning

_ALL = np.uint32(0xFFFFFFFF)
_EXHAUSTED = "a regular expression in the grammar became too large"
P = ParamSpec("P")
T = TypeVar("T")


def mask_words(vocab_size: int) -> int:
    """Return how many int32 words a mask over a vocabulary has."""
    return -(-vocab_size // 32)


@dataclass(frozen=True, slots=True)
class _Position:
    """Position of a text, except for the state inside the grammar."""

    reasoning: bool
    matched: int = 0
    """Number of ids of the end sequence that the text ends with, while it reasons."""
    spent: int = 0
    """Reasoning tokens so far."""
    in_grammar: int = 0
    """Tokens that the grammar consumed."""
    ended: bool = False


class TokenMatcher:
    """Follows one text. Used by one thread at a time."""

    def __init__(
        self, grammar: CompiledGrammar | None, ends: Sequence[int], vocab_size: int, reasoning: Reasoning | None = None
    ) -> None:
        """`ends` are the ids that end the text. Raises `GrammarError` if no id can end a text of a grammar."""
        self._compiled = grammar
        self._grammar = None if grammar is None else grammar.matcher()
        self._tokens: list[int] = []
        """Tokens that the grammar consumed."""
        self.error: str | None = None
        """Reason of an empty mask, if the grammar could not compute it."""
        self._lost: str | None = None
        """Reason why there is no new lexer in place of an exhausted one."""
        self._ends = frozenset(ends)
        self._end_ids = np.array(sorted(end for end in self._ends if end < vocab_size), np.int64)
        if grammar is not None and not len(self._end_ids):
            raise GrammarError("the request has no end-of-sequence token, so no text of a given form could end")
        self._first_end = next((end for end in ends if end < vocab_size), -1)
        self._vocab_size = vocab_size
        self._reasoning = reasoning
        self._fallback = () if reasoning is None else _fallback(reasoning.end)
        self._position = _Position(reasoning is not None)

    def consume(self, tokens: Sequence[int]) -> None:
        """Append `tokens` to the text. Raises `GrammarError` if they are not allowed."""
        for token in tokens:
            if not self._query(self._push, token):
                if self._is_broken():
                    raise GrammarError(self._reason_broken())
                raise GrammarError(f"token {token} was sampled, but the grammar does not allow it")

    def allowed(self, drafts: Sequence[int]) -> int:
        """Return how many of the leading `drafts` the text may continue with; none after one that ends the text."""
        location, count = self._position, 0
        for draft in drafts:
            only = self._query(self._only)
            if self._position.ended or (only and draft != only[0]) or not self._query(self._push, draft):
                break
            count += 1
        self._return_to(location)
        return count

    def forced(self, limit: int) -> list[int]:
        """Return up to `limit` tokens that the text must continue with."""
        location = self._position
        tokens: list[int] = []
        while len(tokens) < limit and not self._position.ended:
            only = self._query(self._only)[: limit - len(tokens)]
            if not only:
                break
            for token in only:
                if not self._query(self._push, token):
                    break
                tokens.append(token)
        self._return_to(location)
        return tokens

    def write_masks(self, drafts: Sequence[int], masks: IntArray) -> npt.NDArray[np.bool_]:
        """Write a mask for the position after each of the first 0 to len(drafts) `drafts`, which are allowed ones.

        `masks` is int32[1 + len(drafts), words], rows in C order. Returns bool[1 + len(drafts)]: True if a position has
        a mask; elsewhere everything is allowed, and its row is undefined. A mask of zeros allows no token.
        """
        location = self._position
        masked = np.zeros(len(drafts) + 1, np.bool_)
        for index in range(len(drafts) + 1):
            masked[index] = self._query(self._write_mask, masks[index])
            if self._is_broken():  # no continuation, or finding it takes too much work
                self.error = self._reason_broken()
                masks[index] = 0
                break
            if index < len(drafts) and not self._query(self._push, drafts[index]):
                break
        self._return_to(location)
        return masked

    # Inside -----------------------------------------------------------------------------------------------

    def _query(self, question: Callable[P, T], *about: P.args, **named: P.kwargs) -> T:
        """Return the result of a query at this position, from a lexer that can compute it if there is one."""
        location, answer = self._position, question(*about, **named)
        if not self._is_broken():
            return answer
        self._position = location
        del self._tokens[location.in_grammar :]
        self._renew()
        return question(*about, **named)

    def _is_broken(self) -> bool:
        """Return True if the grammar's results are no longer valid."""
        grammar, compiled = self._grammar, self._compiled
        return grammar is not None and compiled is not None and (grammar.is_error() or compiled.exhausted)

    def _reason_broken(self) -> str:
        grammar = self._grammar
        error = for_people(grammar.get_error()) if grammar is not None and grammar.is_error() else _EXHAUSTED
        return self._lost or error

    def _renew(self) -> None:
        """Follow the text with a new matcher, and with a separate lexer where the one it had is exhausted."""
        compiled = self._compiled
        if compiled is None:
            return
        if compiled.exhausted:
            try:
                self._compiled = compiled = compiled.anew()
            except GrammarError as error:
                self._lost = str(error)
                return
        self._grammar = compiled.matcher()
        self._grammar.consume_tokens(self._tokens)

    def _write_mask(self, row: IntArray) -> bool:
        """Write the mask of this position into int32[words]; False if everything is allowed."""
        location = self._position
        if location.ended:
            return False
        words: npt.NDArray[np.uint32] = row.view(np.uint32)
        only = self._only()
        if only:
            words[:] = 0
            words[only[0] // 32] = 1 << only[0] % 32
            return True
        if self._grammar is None:
            return False
        if location.reasoning:
            words[:] = _ALL
        else:
            self._grammar.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        bits = np.uint32(1) << (self._end_ids % 32).astype(np.uint32)
        if not location.reasoning and self._grammar.is_accepting():
            np.bitwise_or.at(words, self._end_ids // 32, bits)
        else:
            np.bitwise_and.at(words, self._end_ids // 32, ~bits)
        return True

    def _only(self) -> list[int]:
        """Return the tokens that must follow, if the next one is forced; the text may be freer after them."""
        location = self._position
        if location.ended:
            return []
        if location.reasoning:
            reasoning = self._reasoning
            if reasoning is None or reasoning.max_tokens is None or location.spent < reasoning.max_tokens:
                return []
            return list(reasoning.end[location.matched :])
        grammar = self._grammar
        if grammar is None:
            return []
        if grammar.is_stopped():
            return [self._first_end] if grammar.is_accepting() else []
        tokens: list[int] = grammar.compute_ff_tokens()
        return tokens[: grammar.validate_tokens(tokens)] if tokens else []

    def _push(self, token: int) -> bool:
        """Advance by one token; False, and no change, if the grammar does not allow it."""
        location = self._position
        if location.ended:
            return True
        if location.reasoning:
            if token in self._ends and self._grammar is not None:
                return False
            self._position = self._reason(token)
            return True
        if token in self._ends:
            if self._grammar is not None and not self._grammar.is_accepting():
                return False
            self._position = _Position(False, in_grammar=location.in_grammar, ended=True)
            return True
        if self._grammar is None:
            return True
        if self._grammar.try_consume_tokens([token]) != 1:
            return False
        self._tokens.append(token)
        self._position = _Position(False, in_grammar=location.in_grammar + 1)
        return True

    def _reason(self, token: int) -> _Position:
        """Return the position after a reasoning token: the end sequence is searched by Knuth-Morris-Pratt."""
        location, end = self._position, self._reasoning.end if self._reasoning is not None else ()
        if token in self._ends:
            return _Position(False, ended=True)
        matched = location.matched
        while matched and end[matched] != token:
            matched = self._fallback[matched - 1]
        matched += end[matched] == token
        if matched == len(end):
            return _Position(False)
        return _Position(True, matched, location.spent + 1)

    def _return_to(self, location: _Position) -> None:
        """Undo the tokens pushed since the text was at `location`."""
        num_excess = len(self._tokens) - location.in_grammar
        self._position = location
        del self._tokens[location.in_grammar :]
        if self._grammar is not None and num_excess and not self._grammar.is_error():
            self._grammar.rollback(num_excess)


def _fallback(pattern: Sequence[int]) -> tuple[int, ...]:
    """Return, for each prefix of a pattern, the length of its longest proper suffix that is a prefix as well."""
    lengths = [0] * len(pattern)
    for index in range(1, len(pattern)):
        length = lengths[index - 1]
        while length and pattern[length] != pattern[index]:
            length = lengths[length - 1]
        lengths[index] = length + (pattern[length] == pattern[index])
    return tuple(lengths)
