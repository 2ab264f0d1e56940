"""Tokens allowed next: with drafts, after reasoning, and at the end of the text."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits

from fd_core.structured import grammar
from fd_core.structured.compiler import CompiledGrammar, GrammarCompiler, GrammarError, grammar_vocabulary
from fd_core.structured.matcher import TokenMatcher
from fd_core.types import Reasoning
from tests.structured.bytewise import (
    END_ID,
    VOCABULARY,
    allowed,
    bytes_compiler,
    ids,
    matcher,
    text_of,
    wordy_tokenizer,
)

AB = grammar.regex("a[bc]{1,2}")
THINK = (280, 281, 280, 282)
"""Ids of an end sequence with a repeated prefix."""


def test_eos_is_allowed_exactly_where_the_grammar_accepts() -> None:
    follow = matcher(AB)
    a, b, c = ids("abc")
    assert allowed(follow, [a, b, c, END_ID]) == [{a}, {b, c}, {b, c, END_ID}, {END_ID}, None]
    assert allowed(follow, [a]) == [{a}, {b, c}], "checking drafts must not advance the matcher"


def test_stop_tokens_are_allowed_only_at_the_end() -> None:
    a, b, c = ids("abc")
    follow = matcher(AB, (END_ID, b))
    assert allowed(follow, [a, c]) == [{a}, {c}, {b, c, END_ID}]
    assert allowed(follow, [a, c, c])[3] == {END_ID}, "the first end token is forced"


@pytest.mark.law("4")
def test_forbidden_draft_and_later_ones_are_dropped() -> None:
    follow = matcher(AB)
    assert follow.allowed(ids("abxbc")) == 2
    assert follow.allowed([*ids("abc"), END_ID, *ids("a")]) == 4
    assert follow.allowed([END_ID]) == 0
    assert follow.allowed(ids("ab")) == 2, "the drafts were not consumed"


def test_consuming_a_forbidden_token_raises() -> None:
    with pytest.raises(GrammarError, match="does not allow"):
        matcher(AB).consume(ids("ax"))


def test_tokens_after_the_end_are_unconstrained() -> None:
    follow = matcher(AB)
    follow.consume([*ids("ab"), END_ID, *ids("xyz")])
    assert allowed(follow) == [None]
    assert follow.forced(5) == []


def test_grammar_without_continuation_allows_nothing() -> None:
    nothing = matcher(grammar.context_free("start: /a/ nothing\nnothing: nothing"))
    nothing.consume(ids("a"))
    assert allowed(nothing) == [set()]
    assert nothing.error == "the grammar allows no further token"


def test_failed_matcher_is_rebuilt() -> None:
    follow = matcher(AB)
    follow.consume(ids("a"))
    before = allowed(follow)
    assert follow._grammar is not None
    follow._grammar.rollback(99)  # a permanent error of the library
    assert allowed(follow) == before and not follow.error
    assert follow.allowed([*ids("bc"), END_ID]) == 3


# A lexer that is exhausted ------------------------------------------------------------------------------------

HEAVY = grammar.regex("([ab]{0,30}a[ab]{0,30}b){3}")
FEW = LLParserLimits(max_lexer_states=400, verbose_errors=False)


def heavy(compiler: GrammarCompiler) -> TokenMatcher:
    return TokenMatcher(compiler.compiled(HEAVY), (END_ID,), VOCABULARY)


def exhaust(compiler: GrammarCompiler) -> TokenMatcher:
    """Advance texts until their shared lexer has reached its limit."""
    shared, random = compiler.compiled(HEAVY), Random(1)
    follow = TokenMatcher(shared, (END_ID,), VOCABULARY)
    for _ in range(100):
        if shared.exhausted:
            return follow
        follow = TokenMatcher(shared, (END_ID,), VOCABULARY)
        for token in ids("".join(random.choices("ab", k=60))):
            if shared.exhausted or not follow.allowed([token]):
                break
            allowed(follow)
            follow.consume([token])
    raise AssertionError("nothing exhausts this lexer")


@pytest.mark.law("4")
@pytest.mark.parametrize("text", ["", "a", "abbaab", "ab" * 5])
def test_exhausted_shared_lexer_does_not_affect_other_texts(text: str) -> None:
    compiler, drafts = bytes_compiler(FEW), ids("abab")
    follow, unharmed = heavy(compiler), heavy(bytes_compiler())
    for each in (follow, unharmed):
        each.consume(ids(text))
    exhaust(compiler)
    assert follow.forced(4) == unharmed.forced(4)
    assert follow.allowed(drafts) == unharmed.allowed(drafts)
    assert allowed(follow, drafts) == allowed(unharmed, drafts)
    for each in (follow, unharmed):
        each.consume(drafts)
    assert allowed(follow) == allowed(unharmed) and follow.error is None


@pytest.mark.law("4")
def test_text_that_exhausts_the_shared_lexer_gets_its_own() -> None:
    compiler = bytes_compiler(FEW)
    follow, unharmed = exhaust(compiler), heavy(bytes_compiler())
    unharmed.consume(follow._tokens)
    assert allowed(follow) == allowed(unharmed) and follow.error is None


def test_text_that_exhausts_its_own_lexer_fails_with_the_reason() -> None:
    compiler = bytes_compiler(LLParserLimits(max_lexer_states=40, verbose_errors=False))
    follow = heavy(compiler)
    for token in ids("ab" * 20):
        if allowed(follow) == [set()]:
            break
        follow.consume([token])
    assert "too many states" in (follow.error or "")


def test_slow_grammar_is_not_recompiled_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fd_core.structured.compiler._MAX_ANEW_SECONDS", 0)
    compiler = bytes_compiler(FEW)
    follow = heavy(compiler)
    exhaust(compiler)
    assert allowed(follow) == [set()] and "retry" in (follow.error or "")
    with pytest.raises(GrammarError, match="retry"):
        follow.consume(ids("a"))
    assert not compiler.is_cached(HEAVY)
    assert allowed(heavy(compiler)) == allowed(heavy(bytes_compiler())), "a new request gets a new lexer"


def test_grammar_requires_a_stop_token() -> None:
    with pytest.raises(GrammarError, match="no end-of-sequence token"):
        matcher(AB, ())


# Reasoning ----------------------------------------------------------------------------------------------------


@pytest.mark.law("4")
def test_grammar_starts_right_after_reasoning_also_in_drafts() -> None:
    follow = matcher(AB, reasoning=Reasoning(end=THINK))
    a, b, c = ids("abc")
    drafts = [5, 280, 281, 280, 281, 280, 282, a, b]
    *thinking, at_start, after_a, after_b = allowed(follow, drafts)
    assert all(
        mask == set(range(VOCABULARY + 20)) - {END_ID} or mask == set(range(VOCABULARY)) - {END_ID} for mask in thinking
    )
    assert (at_start, after_a, after_b) == ({a}, {b, c}, {b, c, END_ID})
    assert follow.allowed([*drafts, ids("x")[0]]) == len(drafts)
    assert follow.allowed([7, END_ID]) == 1, "the text cannot end during reasoning"
    follow.consume(drafts[:-1])
    assert allowed(follow) == [{b, c}]


def test_reasoning_over_budget_is_ended_by_force() -> None:
    follow = matcher(AB, reasoning=Reasoning(end=THINK, max_tokens=3))
    assert follow.forced(10) == []
    follow.consume([1, 2, 280])
    assert follow.forced(10) == [281, 280, 282, *ids("a")]
    assert allowed(follow) == [{281}]
    assert follow.allowed([280]) == 0
    follow.consume(THINK[1:])
    assert allowed(follow) == [{ids("a")[0]}]


def test_reasoning_may_be_forbidden() -> None:
    follow = matcher(AB, reasoning=Reasoning(end=THINK, max_tokens=0))
    assert follow.forced(3) == [280, 281, 280]


def test_reasoning_without_a_grammar_is_limited_only_in_length() -> None:
    follow = matcher(None, reasoning=Reasoning(end=THINK, max_tokens=2))
    assert allowed(follow, [1, 2]) == [None, None, {280}]
    follow.consume([1, *THINK])
    assert allowed(follow, [END_ID]) == [None, None]


@given(st.lists(st.sampled_from(sorted(set(THINK))), max_size=30))
def test_first_end_sequence_ends_reasoning(tokens: list[int]) -> None:
    at = next((i for i in range(len(tokens)) if tuple(tokens[i : i + len(THINK)]) == THINK), None)
    follow = matcher(AB, reasoning=Reasoning(end=THINK))
    kept = follow.allowed(tokens)
    assert kept == (len(tokens) if at is None else at + len(THINK))


# The same tokens, the same masks -----------------------------------------------------------------------------

SCHEMA = grammar.json_schema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "kind": {"enum": ["cat", "car", "dog"]},
            "ages": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        },
        "required": ["name", "kind"],
        "additionalProperties": False,
    }
)
WORDY = wordy_tokenizer("name", "kind", "kin", "cat", "car", "dog", "ages", "age")
WORDS = len(WORDY.byte_table) + 7
ENDS = (WORDY.eos_id or 0,)
WORDY_COMPILER = GrammarCompiler(lambda: grammar_vocabulary(WORDY, WORDS, ENDS))


def compiled() -> CompiledGrammar:
    return WORDY_COMPILER.compiled(SCHEMA)


def wordy() -> TokenMatcher:
    return TokenMatcher(compiled(), ENDS, WORDS, Reasoning(end=(WORDS - 1, WORDS - 2), max_tokens=4))


def masks_after(follow: TokenMatcher, drafts: list[int]) -> list[bytes | None]:
    rows = np.zeros((len(drafts) + 1, -(-WORDS // 32)), np.int32)
    return [row.tobytes() if has else None for row, has in zip(rows, follow.write_masks(drafts, rows), strict=True)]


@settings(max_examples=60, deadline=None)
@given(st.data())
@pytest.mark.law("4")
def test_masks_depend_on_tokens_alone(data: st.DataObject) -> None:
    """Drafted, rolled back, forced or consumed at once: the same tokens give the same masks."""
    follow, tokens, seen = wordy(), [], []
    for _ in range(data.draw(st.integers(1, 40))):
        (mask,) = masks_after(follow, [])
        seen.append(mask)
        if mask is None:
            break
        choices = [i for i in range(WORDS) if mask[i // 8] >> i % 8 & 1]
        assert choices, "a schema always allows a continuation"
        forced = follow.forced(8)
        if forced:
            assert choices == forced[:1]
        guesses = data.draw(st.lists(st.integers(0, WORDS - 1), max_size=4))
        follow.allowed(guesses)
        token = data.draw(st.sampled_from(choices))
        assert follow.allowed([token]) == 1
        follow.consume([token])
        tokens.append(token)
    fresh = wordy()
    assert masks_after(fresh, tokens)[: len(seen)] == seen
    fresh.consume(tokens)
    assert masks_after(fresh, []) == masks_after(follow, [])


@pytest.mark.law("4")
def test_forced_tokens_match_the_tokenizer_and_are_all_accepted() -> None:
    follow = TokenMatcher(compiled(), ENDS, WORDS)
    forced = follow.forced(20)
    assert WORDY.decode(forced) == '{"name": "'
    assert forced == WORDY.encode('{"name": "', add_special=False)
    assert follow.allowed(forced) == len(forced)


def test_finished_text_forces_its_end() -> None:
    follow = matcher(grammar.choice(["yes", "no"]))
    follow.consume(ids("y"))
    assert follow.forced(8) == [*ids("es"), END_ID]
    assert text_of(follow.forced(2)) == "es"
