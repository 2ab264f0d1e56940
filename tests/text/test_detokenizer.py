from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import byte_level_metadata, ggml, sentencepiece_metadata

from fd_core.errors import BadRequest
from fd_core.text.detokenizer import IncrementalDetokenizer
from fd_core.text.tokenizer import Tokenizer, load_tokenizer

BYTES = load_tokenizer(ggml(byte_level_metadata(["a b", "ab c", "b c"])))
PIECES = load_tokenizer(ggml(sentencepiece_metadata()))
TOKENIZERS = st.sampled_from([BYTES, PIECES])


def ids_of(text: str) -> list[int]:
    return BYTES.encode(text)


@st.composite
def streams(draw: st.DrawFn) -> tuple[Tokenizer, list[list[int]]]:
    """Any tokens, valid text or not, split into any chunks."""
    tokenizer = draw(TOKENIZERS)
    some_ids = st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=12)
    some_text = st.text(max_size=12).map(lambda text: tokenizer.encode(text))
    return tokenizer, draw(st.lists(st.one_of(some_ids, some_text), max_size=8))


@given(streams(), st.booleans())
def test_streamed_text_equals_the_whole(stream: tuple[Tokenizer, list[list[int]]], skip_special: bool) -> None:
    tokenizer, pushes = stream
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special=skip_special)
    text = "".join(detokenizer.push(ids).text for ids in pushes) + detokenizer.flush().text
    whole = tokenizer.bytes_of([token_id for ids in pushes for token_id in ids], skip_special)
    assert text == whole.decode(errors="replace")


@given(st.text(), st.lists(st.text(min_size=1, max_size=3), max_size=3))
def test_chunk_never_ends_within_a_character(text: str, stop: list[str]) -> None:
    detokenizer = IncrementalDetokenizer(BYTES, stop=stop)
    streamed = "".join(detokenizer.push([token_id]).text for token_id in ids_of(text))
    assert text.startswith(streamed)


def expected_cut(text: str, stops: list[str], include: bool, after: int = 0) -> str:
    """Cut at the first character beyond `after` that completes a stop string; the longest match counts."""
    for end in range(after + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[:end] if include else text[: end - max(map(len, found))]
    return text


@given(
    st.text(alphabet="abcé", max_size=30),
    st.lists(st.text(alphabet="abcé", min_size=1, max_size=5), min_size=1, max_size=4),
    st.integers(1, 5),
    st.booleans(),
)
def test_stop_string_ends_text_for_any_chunking(text: str, stops: list[str], size: int, include: bool) -> None:
    detokenizer = IncrementalDetokenizer(BYTES, stop=stops, include_stop=include)
    ids = ids_of(text)
    streamed = ""
    for begin in range(0, len(ids), size):
        streamed += detokenizer.push(ids[begin : begin + size]).text
        whole = expected_cut(text, stops, include)
        assert whole.startswith(streamed)
        if detokenizer.stopped_by is None:
            seen = BYTES.decode(ids[: begin + size])
            held = len(seen.rstrip("\ufffd")) - len(streamed)
            assert held < max(map(len, stops)), "only a prefix of a stop string is held"
    assert streamed + detokenizer.flush().text == expected_cut(text, stops, include)
    assert (detokenizer.stopped_by is not None) == any(stop in text for stop in stops)


@given(
    st.text(alphabet="abc", max_size=30),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4),
    st.integers(1, 5),
    st.booleans(),
    st.integers(0, 12),
)
def test_stop_string_ends_no_text_before_min_tokens(
    text: str, stops: list[str], size: int, include: bool, least: int
) -> None:
    detokenizer = IncrementalDetokenizer(BYTES, stop=stops, include_stop=include, min_tokens=least)
    ids, streamed, consumed = [token for character in text for token in ids_of(character)], "", 0
    for begin in range(0, len(ids), size):
        delta = detokenizer.push(ids[begin : begin + size])
        streamed, consumed = streamed + delta.text, consumed + delta.consumed
    assert consumed > least or detokenizer.stopped_by is None
    assert streamed + detokenizer.flush().text == expected_cut(text, stops, include, after=least)


def test_text_is_held_only_while_it_may_begin_a_stop_string() -> None:
    detokenizer = IncrementalDetokenizer(BYTES, stop=["###"])
    assert detokenizer.push(ids_of("one #")).text == "one "
    assert detokenizer.push(ids_of("# two")).text == "## two"
    assert detokenizer.push(ids_of("##")).text == ""
    assert detokenizer.flush() == ("##", None, 0)


def test_stop_reports_its_string_and_token_count() -> None:
    detokenizer = IncrementalDetokenizer(BYTES, stop=["bc", "x"])
    assert detokenizer.push(ids_of("a bc d")) == ("a ", "bc", 3)
    assert detokenizer.stopped_by == "bc"
    assert detokenizer.push(ids_of("more")) == ("", "bc", 0)
    assert detokenizer.flush() == ("", "bc", 0)


def test_stop_string_may_end_within_a_token() -> None:
    detokenizer = IncrementalDetokenizer(BYTES, stop=["b"])
    assert detokenizer.push(ids_of("abc")) == ("a", "b", 1)
    assert IncrementalDetokenizer(BYTES, stop=["b"], include_stop=True).push(ids_of("abc")).text == "ab"


def test_bytes_of_unfinished_character_are_flushed() -> None:
    detokenizer = IncrementalDetokenizer(BYTES)
    assert detokenizer.push(ids_of("🦆")[:3]).text == ""
    assert detokenizer.flush().text == "\ufffd"


def test_leading_space_is_kept_when_continuing_a_prompt() -> None:
    ids = PIECES.encode("hello", add_special=False)
    assert IncrementalDetokenizer(PIECES).push(ids).text == " hello"
    assert PIECES.decode(ids) == "hello"


def test_bad_values_are_rejected() -> None:
    with pytest.raises(BadRequest, match="empty"):
        IncrementalDetokenizer(BYTES, stop=["a", ""])
    with pytest.raises(BadRequest, match="negative"):
        IncrementalDetokenizer(BYTES).push([-9])
