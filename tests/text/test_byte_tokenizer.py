"""Every text is its bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fd_core.text.tokenizer import END_ID, byte_tokenizer

TOKENIZER = byte_tokenizer()


@given(st.text())
def test_any_text_becomes_its_bytes_and_comes_back(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert len(ids) == len(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_the_end_token_is_silent() -> None:
    assert TOKENIZER.encode("<|end|>") == [END_ID]
    assert TOKENIZER.decode([END_ID]) == ""
    assert TOKENIZER.vocab_size == END_ID + 1
