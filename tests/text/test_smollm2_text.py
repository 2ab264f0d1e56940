"""Known facts about SmolLM2's tokenizer and chat template, checked on the model itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fd_core.errors import ModelError
from fd_core.models.catalog import resolve_model
from fd_core.models.loading.checkpoint import Checkpoint
from fd_core.models.opening import open_checkpoint
from fd_core.text.chat_template import ChatTemplate
from fd_core.text.detokenizer import IncrementalDetokenizer
from fd_core.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    try:
        return open_checkpoint(resolve_model("smollm2").path)
    except ModelError as error:
        pytest.skip(f"SmolLM2 is not available: {error}")


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    return load_tokenizer(checkpoint)


def test_ids_match_the_original_tokenizer(tokenizer: Tokenizer) -> None:
    """The expected ids are those of transformers' tokenizer for the same file."""
    text = "<|im_start|>Hello 2024, it's été 👩‍👩‍👧 日本語\n\n  x=1;<|im_end|>"
    hello = [1, 19556, 216, 34, 32, 34, 36, 28, 357, 506, 216, 19380, 2756]
    family = [15107, 235, 119, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117]
    japanese = [17097, 241, 115, 40993, 179, 120, 248]
    assert tokenizer.encode(text) == [*hello, *family, *japanese, 8866, 1792, 45, 33, 43, 2]
    assert tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]


def test_digits_are_split_one_by_one(tokenizer: Tokenizer) -> None:
    assert [tokenizer.token_text(token_id) for token_id in tokenizer.encode("12345")] == list("12345")


def test_control_tokens_are_one_id(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|im_start|>") == [1]
    assert tokenizer.encode("<|im_end|>") == [2] == [tokenizer.eos_id]
    assert tokenizer.vocab_size == 49152
    assert tokenizer.special_ids == frozenset(range(17))


# Above U+3FFFF, and for six control characters, the vocabulary lacks bytes.
WRITABLE = st.characters(
    max_codepoint=0x3FFFF, exclude_categories=["Cs"], exclude_characters="<\x04\x06\x13\x14\x16\x1d"
)
TEXT = st.one_of(
    st.text(WRITABLE),
    st.from_regex(r"[0-9 .,]{0,20}", fullmatch=True),
    st.lists(st.sampled_from(["👩‍👩‍👧", "🦆", "é", "日本", "\n\n", "  ", "don't", " 3.14"])).map("".join),
)


@given(text=TEXT)
def test_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text == tokenizer.backend.decode(ids)


def test_bytes_missing_in_the_vocabulary_are_dropped(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\x04b\x1d")) == "ab"


@given(text=TEXT)
def test_streamed_text_stops_at_stop_string(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer, stop=["\n\n\n", "User:"])
    ids = tokenizer.encode(text)
    streamed = "".join(detokenizer.push([token_id]).text for token_id in ids) + detokenizer.flush().text
    assert streamed == text.split("\n\n\n")[0]


def test_chat_has_one_id_per_control_token(tokenizer: Tokenizer) -> None:
    prompt = ChatTemplate.of(tokenizer).render([{"role": "user", "content": "What is the capital of France?"}])
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(prompt, add_special=False)
    assert (ids.count(1), ids.count(2)) == (3, 2)


def test_eos_token_ends_the_turn(checkpoint: Checkpoint) -> None:
    assert checkpoint.eos_token_ids == (2,)


def test_weights_are_complete(checkpoint: Checkpoint) -> None:
    assert len(checkpoint.names()) == 272
    assert checkpoint.shape("model.embed_tokens.weight") == (49152, 576)
    assert checkpoint.config["rope_theta"] == 100000.0
    norm = checkpoint.read("model.norm.weight").to_float32()
    assert norm.shape == (576,) and (abs(norm) < 100).all()
