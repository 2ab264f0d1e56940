"""Compiles grammars within limits, and caches compiled ones.

Time is bounded by llguidance's fuel, which counts work, so that a grammar that compiles on one machine compiles on all.
Compiling releases the GIL; callers that must not block compile on a thread (`fd_core.structured.workers.port`).
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from fd_core.types.metrics import counter, gauge

if TYPE_CHECKING:
    from fd_core.text.tokenizer import Tokenizer

LARGE_GRAMMAR: Final = 16 * 1024
"""Size in characters above which a compilation has low priority, so that it does not compete with steps for CPUs."""


def lower_priority(*, is_large: bool) -> None:
    """Lower the CPU priority of the calling thread, to the lowest for a large grammar."""
    # No effect on systems without priorities per thread.
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19 if is_large else 5)


LIMITS: Final = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""About 20 ms for the regexes of a grammar, 10 ms for the worst mask, and 100 MB for the worst lexer."""
_MAX_CACHED: Final = 512
_MAX_CACHED_BYTES: Final = 16 * 2**20
"""Limit of the total size of the texts of cached grammars, since compiled grammars grow with it."""
_MAX_ANEW_SECONDS: Final = 0.05
"""A grammar that takes longer to compile is not recompiled within a step."""
_MAX_WORDS: Final = 400
"""Characters of a reason that is displayed."""
_LISTING: Final = re.compile(r"\s*(\d+ *\|.*|\^)\s*$")
"""Lines of the grammar that the library shows with an error, and the mark below them: the error contains the location
before.
"""
_IN_WORDS: Final = {
    "NoExtensionBias": "the grammar allows no further token",
    "ParserTooComplex": "the grammar is too ambiguous here to compute a mask",
    "LexerTooComplex": "a regular expression in the grammar is too large",
}


class GrammarError(ValueError):
    """A grammar cannot be used; the text is a human-readable reason."""


class CompilerStats(msgspec.Struct, kw_only=True):
    """Statistics of one compiler since its start."""

    compiled: Annotated[int, counter("grammars_compiled", "Grammars compiled, including failed ones.")] = 0
    refused: Annotated[int, counter("grammars_refused", "Grammars that failed to compile.")] = 0
    cache_hits: Annotated[int, counter("grammar_cache_hits", "Grammars found in the cache.")] = 0
    compile_seconds: Annotated[float, counter("grammar_compile_seconds", "Time spent compiling grammars.")] = 0.0
    cached: Annotated[int, gauge("grammars_cached", "Compiled grammars in the cache.")] = 0


class CompiledGrammar:
    """Makes matchers of one grammar, which share a lexer.

    The lexer grows with all texts, up to a limit. Beyond it, it allows no continuation for any of them, and only their
    next masks would give the reason.
    """

    def __init__(
        self, matcher: LLMatcher, first: int | None, seconds: float, anew: Callable[[], CompiledGrammar]
    ) -> None:
        """`first` is a token that a text may begin with; `seconds` is the time that compiling took."""
        self._matcher = matcher
        self._first = first
        self._seconds = seconds
        self._anew = anew

    def matcher(self) -> LLMatcher:
        """Return a matcher at the beginning of a text."""
        return self._matcher.deep_copy()

    @property
    def exhausted(self) -> bool:
        """Return True if the lexer has reached its limit. Takes microseconds."""
        return self._first is not None and not self._matcher.validate_tokens([self._first])

    def anew(self) -> CompiledGrammar:
        """Recompile it, with a separate lexer; `GrammarError` if that may delay a step for too long."""
        if self._seconds > _MAX_ANEW_SECONDS:
            raise GrammarError(
                "the lexer shared by requests with this grammar became too large, and recompiling takes too long "
                "within a step; retry, or simplify the grammar"
            )
        return self._anew()


class GrammarCompiler:
    """Compiled grammars of one model. Thread-safe."""

    def __init__(self, vocabulary: Callable[[], LLTokenizer], limits: LLParserLimits = LIMITS) -> None:
        """`vocabulary` is called once, on first use, because it takes some time."""
        self._make_vocabulary = vocabulary
        self._limits = limits
        self._vocabulary: LLTokenizer | None = None
        self._making = threading.Lock()
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, CompiledGrammar | GrammarError] = OrderedDict()
        self._cached_bytes = 0
        self._stats = CompilerStats()

    def warm_up(self) -> None:
        """Create the vocabulary, so that the first grammar does not wait for it. Raises the errors of `vocabulary`."""
        self._ready_vocabulary()

    def is_cached(self, grammar: str) -> bool:
        """Return True if `compiled` returns at once."""
        return _usable(self._cache.get(grammar))

    def compiled(self, grammar: str) -> CompiledGrammar:
        """Return a grammar, recompiled if its lexer is exhausted; `GrammarError` if that exceeds the bounds."""
        with self._lock:
            found = self._cache.get(grammar)
            if found is not None:
                self._cache.move_to_end(grammar)
                if _usable(found):
                    self._stats.cache_hits += 1
                    return _required(found)
        compiled = self._compile(grammar)
        with self._lock:
            if grammar not in self._cache:
                self._cached_bytes += len(grammar)
            self._cache[grammar] = compiled
            while len(self._cache) > _MAX_CACHED or (self._cached_bytes > _MAX_CACHED_BYTES and len(self._cache) > 1):
                self._cached_bytes -= len(self._cache.popitem(last=False)[0])
        return _required(compiled)

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a matcher at the beginning of its text; see `compiled`."""
        return self.compiled(grammar).matcher()

    def refusal(self, grammar: str) -> str | None:
        """Return the reason why a grammar cannot be compiled, None if it can; nothing is cached or counted."""
        vocabulary = self._ready_vocabulary()
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=self._limits)
        fault, _ = _begin(matcher, vocabulary.eos_tokens)
        return fault

    def stats(self) -> CompilerStats:
        """Return counters and gauges."""
        return msgspec.structs.replace(self._stats, cached=len(self._cache))

    def _compile(self, grammar: str) -> CompiledGrammar | GrammarError:
        vocabulary = self._ready_vocabulary()
        began, worked = time.perf_counter(), time.thread_time()
        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=self._limits)
        fault, first = _begin(matcher, vocabulary.eos_tokens)
        worked = time.thread_time() - worked
        with self._lock:
            self._stats.compile_seconds += time.perf_counter() - began
            self._stats.compiled += 1
            self._stats.refused += fault is not None
        if fault is None:
            return CompiledGrammar(matcher, first, worked, anew=lambda: _required(self._compile(grammar)))
        return GrammarError(fault)

    def _ready_vocabulary(self) -> LLTokenizer:
        with self._making:
            if self._vocabulary is None:
                try:
                    self._vocabulary = self._make_vocabulary()
                except ValueError as error:
                    raise GrammarError(str(error)) from error
            return self._vocabulary


def _usable(found: CompiledGrammar | GrammarError | None) -> bool:
    return found is not None and (isinstance(found, GrammarError) or not found.exhausted)


def _required(found: CompiledGrammar | GrammarError) -> CompiledGrammar:
    if isinstance(found, GrammarError):
        raise GrammarError(str(found))
    return found


def _begin(matcher: LLMatcher, ends: Sequence[int]) -> tuple[str | None, int | None]:
    """Return the reason why a new matcher's grammar allows no text, or None, and a token that begins a text.

    The first mask and the text forced at the beginning are computed for it: a grammar with infinite recursion compiles,
    and fails only there.
    """
    if matcher.is_error():
        return for_people(matcher.get_error()), None
    mask = matcher.compute_bitmask()
    if not any(mask) and not matcher.is_error():
        return _IN_WORDS["NoExtensionBias"], None
    if not matcher.is_error() and (forced := matcher.compute_ff_tokens()):
        probe = matcher.deep_copy()
        probe.consume_tokens(forced[:1])
        if probe.is_error():
            return for_people(probe.get_error()), None
    if matcher.is_error():
        return for_people(matcher.get_error()), None
    tokens = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
    ordinary = tokens[~np.isin(tokens, ends)]
    return None, int(ordinary[0]) if len(ordinary) else None


def for_people(error: str) -> str:
    """Return the reason without the state of the library, which may contain generated text."""
    error_lines = error.partition("\n<state>")[0].replace("<non-verbose/>", "").splitlines()
    reason = " ".join(" ".join(line for line in error_lines if not _LISTING.match(line)).split())
    reason = _IN_WORDS.get(reason, reason)
    return reason if len(reason) <= _MAX_WORDS else reason[:_MAX_WORDS] + " ..."


_MAX_IDS: Final = 2**22
"""Limit of token ids, far above that of any model; memory is proportional to it."""


class VocabularyTable(msgspec.Struct, frozen=True):
    """The tokens of a model as data, for a process without its tokenizer."""

    tokens: list[bytes]
    """Bytes of the tokens, by id."""
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
        raise ValueError(f"the model has {vocab_size:,} token ids; structured output supports at most {_MAX_IDS:,}")
    if not ends:
        raise ValueError("the model has no end-of-sequence token, so structured output could not end")
    tokens = (tokenizer.byte_table + [b""] * vocab_size)[:vocab_size]
    special = sorted({each for each in (*tokenizer.special_ids, *ends) if each < vocab_size})
    return VocabularyTable(tokens, special, list(ends))


def grammar_vocabulary(tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> LLTokenizer:
    """Return the vocabulary of a model, see `vocabulary_table`, which writes texts as the tokenizer does."""
    return vocabulary_table(tokenizer, vocab_size, ends).vocabulary(tokenizer)


class _Vocabulary:
    """Interface that `LLTokenizer` reads."""

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
        """Return ordinary tokens whose bytes are exactly those of `text`; bytes without a token are omitted.

        The tokenizer's encoding is used unless it changes the text: by a leading space, by normalization, or by parsing
        the text of a control token as one.
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
        location = 0
        while location < len(text):
            for length in range(min(self._longest, len(text) - location), 0, -1):
                found = self._ids.get(text[location : location + length])
                if found is not None:
                    ids.append(found)
                    location += length
                    break
            else:
                return ids
        return ids
