"""Every text is encoded as its bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fd_core.text.tokenizer import END_ID, byte_tokenizer

TOKENIZER = byte_tokenizer()


@given(st.text())
def test_any_text_round_trips_as_bytes(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert len(ids) == len(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_end_token_decodes_to_nothing() -> None:
    assert TOKENIZER.encode("<|end|>") == [END_ID]
    assert TOKENIZER.decode([END_ID]) == ""
    assert TOKENIZER.vocab_size == END_ID + 1
