from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import byte_level_metadata, folder, ggml, sentencepiece_metadata
from tokenizers import decoders, models, normalizers, pre_tokenizers

from fd_core.errors import BadRequest, ModelError
from fd_core.models.families.installed import installed_families
from fd_core.text.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer

MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "1 2", "12 3", "Ġ 1"]


def tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.backend.id_to_token(token_id) for token_id in tokenizer.encode(text)]


def byte_level(**changes: Any) -> Tokenizer:
    return load_tokenizer(ggml(byte_level_metadata(MERGES, **changes)))


def sentencepiece(**changes: Any) -> Tokenizer:
    return load_tokenizer(ggml(sentencepiece_metadata(**changes)))


BOTH = pytest.mark.parametrize("tokenizer", [byte_level(), sentencepiece()], ids=["byte-level", "sentencepiece"])


# without control tokens and SentencePiece's marker for a space
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<▁"))


@BOTH
@given(text=TEXT)
def test_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@BOTH
@given(text=st.text())
def test_decoding_matches_the_library(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == tokenizer.backend.decode(ids)


def test_merges_apply_in_their_order() -> None:
    assert tokens(byte_level(), "hello world") == ["hello", "Ġwor", "l", "d"]
    assert tokens(sentencepiece(add_bos_token=False), "hello wor") == ["▁hello", "▁wor"]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["1", "2", "3", "4", "Ġ", "1"]),
        ("qwen2", ["1", "2", "3", "4", "Ġ", "1"]),
        ("gpt-2", ["123", "4", "Ġ1"]),
        ("llama-bpe", ["123", "4", "Ġ", "1"]),
        ("default", ["123", "4", "Ġ", "1"]),
        ("command-r", ["1", "2", "3", "4", "Ġ", "1"]),
        ("exaone4", ["123", "4", "Ġ1"]),
        ("hunyuan", ["1", "2", "3", "4", "Ġ", "1"]),
        ("dbrx", ["123", "4", "Ġ", "1"]),
        ("gpt-4o", ["123", "4", "Ġ", "1"]),
        ("llama4", ["123", "4", "Ġ", "1"]),
        ("deepseek-v3", ["123", "4", "Ġ", "1"]),
        ("hunyuan-dense", ["123", "4", "Ġ", "1"]),
        ("seed-coder", ["1", "2", "3", "4", "Ġ", "1"]),
        ("qwen35", ["1", "2", "3", "4", "Ġ", "1"]),
        ("lfm2", ["123", "4", "Ġ", "1"]),
        ("deepseek-llm", ["123", "4", "Ġ", "1"]),
        ("deepseek-coder", ["1", "2", "3", "4", "Ġ", "1"]),
        ("kimi-k2", ["123", "4", "Ġ", "1"]),
    ],
)
def test_pre_tokenizer_name_selects_digit_splitting(pre: str, expected: list[str]) -> None:
    assert tokens(byte_level(pre=pre, add_bos_token=False), "1234 1") == expected


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("deepseek-llm", ["é", " Ελ", "नु中文「", "x", "」", "\r", "\n", " ", " a", "\u3000", "  "]),
        ("deepseek-coder", ["é", " Ελ", "न", "ु", "中文", "「", "x", "」", "\r", "\n", " ", " a", "\u3000", "  "]),
        ("qwen35", ["é", " Ελनु中文", "「x", "」\r\n", " ", " a", "\u3000  "]),
        ("kimi-k2", ["é", " Ελनु", "中文", "「x", "」\r\n", " ", " a", "\u3000  "]),
    ],
)
def test_pre_tokenizer_splits_scripts_and_spaces(pre: str, expected: list[str]) -> None:
    """As the original tokenizers do; llama.cpp takes other white space than ASCII for a control character, and marks
    for signs in `kimi-k2`."""
    text = "é Ελनु中文「x」\r\n  a\u3000  "
    pieces = byte_level(pre=pre).backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in pieces] == expected


WRITTEN: dict[str, str] = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "minicpm3", "nemotron", "ernie4_5", "ernie4_5-moe"), ""),
    **dict.fromkeys(("qwen2", "qwen2moe", "qwen3", "qwen3moe", "qwen3next"), "qwen2 deepseek-r1-qwen"),
    **dict.fromkeys(("qwen35", "qwen35moe"), "qwen35"),
    **dict.fromkeys(("granite", "granitemoe"), "refact"),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), "tekken pixtral"),
    **dict.fromkeys(("glm4", "glm4moe"), "glm4"),
    "chatglm": "chatglm-bpe glm4",
    "cohere2": "command-r",
    "deepseek2": "deepseek-llm deepseek-coder deepseek-v3 kimi-k2 glm4",
    "exaone4": "exaone4",
    "gpt-oss": "gpt-4o",
    "granitehybrid": "dbrx",
    "hunyuan-dense": "hunyuan-dense",
    "hunyuan-moe": "hunyuan",
    "lfm2": "lfm2",
    "llama": "llama-bpe falcon3 smollm tekken pixtral deepseek-llm deepseek-coder",
    "llama4": "llama4",
    "minimax-m2": "minimax-m2",
    "olmo2": "dbrx",
    "olmoe": "olmo",
    "phi3": "dbrx gpt-4o",
    "seed_oss": "seed-coder",
    "smollm3": "smaug-bpe",
    "stablelm": "stablelm2",
    "starcoder2": "starcoder",
}
"""Pre-tokenizers that llama.cpp's converter writes for models of an architecture; SentencePiece has none."""


def test_pre_tokenizers_of_all_families_are_known() -> None:
    assert installed_families().gguf.keys() == WRITTEN.keys()
    for pre in {name for names in WRITTEN.values() for name in names.split()}:
        byte_level(pre=pre)


def test_whole_word_tokens_are_used_where_the_original_does() -> None:
    metadata = byte_level_metadata(["a b"], pre="llama-bpe", add_bos_token=False)
    metadata["tokens"].append("xyz")
    metadata["token_type"].append(1)
    assert tokens(load_tokenizer(ggml(metadata)), "xyz") == ["xyz"]
    assert tokens(load_tokenizer(ggml({**metadata, "pre": "gpt-2"})), "xyz") == ["x", "y", "z"]


def test_control_tokens_are_one_id_and_decode_to_nothing() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("<|start|>hello<|end|>")
    assert (ids[0], ids[-1], len(ids)) == (1, 0, 3)
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, skip_special=False) == "<|start|>hello<|end|>"
    assert tokenizer.special_ids == {0, 1}
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|start|>", "<|end|>")


def test_user_defined_tokens_match_whole_and_are_decoded() -> None:
    tokenizer = sentencepiece()
    assert tokenizer.decode(tokenizer.encode("hello<mask>")) == "hello<mask>"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["<s>", "▁hello"]),
        ({"add_bos_token": False}, ["▁hello"]),
        ({"add_eos_token": True}, ["<s>", "▁hello", "</s>"]),
        ({"add_space_prefix": False}, ["<s>", "hello"]),
    ],
)
def test_special_tokens_around_text_follow_the_metadata(changes: dict[str, Any], expected: list[str]) -> None:
    tokenizer = sentencepiece(**changes)
    assert tokens(tokenizer, "hello") == expected
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    assert tokenizer.encode("hello", add_special=False) == [
        token_id for token_id in tokenizer.encode("hello") if token_id not in (1, 2)
    ]


def test_characters_without_a_token_become_bytes() -> None:
    tokenizer = sentencepiece(add_bos_token=False)
    ids = tokenizer.encode("é")
    assert tokens(tokenizer, "é") == ["▁", "<0xC3>", "<0xA9>"]
    assert [tokenizer.token_bytes(token_id) for token_id in ids] == [b" ", b"\xc3", b"\xa9"]
    assert tokenizer.token_text(ids[1]) == "\ufffd"


def test_ids_outside_the_vocabulary() -> None:
    tokenizer = byte_level()
    assert tokenizer.decode([tokenizer.vocab_size, *tokenizer.encode("hello"), 10**9]) == "hello"
    with pytest.raises(BadRequest, match="-1 is negative"):
        tokenizer.decode([5, -1])


def test_text_that_is_not_unicode_is_a_bad_request() -> None:
    with pytest.raises(BadRequest, match="surrogate"):
        byte_level().encode("a\ud800")


def test_unknown_pre_tokenizer_is_rejected_and_missing_warned(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ModelError, match=r"pre is 'esperanto'.*smollm"):
        byte_level(pre="esperanto")
    with caplog.at_level(logging.WARNING):
        byte_level(pre=None)
    assert "does not name its pre-tokenizer" in caplog.text


@pytest.mark.parametrize(
    ("metadata", "pattern"),
    [
        (byte_level_metadata([], model="bert"), "model is 'bert'"),
        (byte_level_metadata([], tokens=[]), "tokens is missing"),
        (byte_level_metadata([], tokens=None), "tokens is missing"),
        (byte_level_metadata([], tokens="abc"), "tokens must be a list"),
        (byte_level_metadata([], tokens=["a", "a"], token_type=[1, 1]), "duplicates"),
        (byte_level_metadata([], token_type=[1]), "token_type has 1 entries"),
        ({**byte_level_metadata([]), "merges": ["ab"]}, "entry 'ab'"),
        ({**byte_level_metadata([]), "merges": ["a b"]}, "entry 'a b'"),
        ({**byte_level_metadata([]), "merges": [""]}, "entry ''"),
        (byte_level_metadata([], add_bos_token=3), "add_bos_token must be true or false"),
        (sentencepiece_metadata(scores=[1.0]), "scores has 1 entries"),
        (sentencepiece_metadata(scores=None), "scores has 0 entries"),
    ],
)
def test_inconsistent_metadata_is_named(metadata: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ModelError, match=pattern):
        load_tokenizer(ggml(metadata))


@pytest.mark.parametrize("build", [byte_level, sentencepiece])
def test_tokenizer_json_equals_the_metadata(build: Any) -> None:
    """The metadata, written as tokenizer.json, loads as the same tokenizer."""
    first = build()
    settings = {"bos_token": {"content": first.bos_token}, "eos_token": first.eos_token}
    second = load_tokenizer(folder(first.backend.to_str(), settings))
    text = "hello wor <|start|></s> 123 é 🦆"
    assert second.encode(text) == first.encode(text)
    assert second.decode(second.encode(text), False) == first.decode(first.encode(text), False)
    assert (second.bos_id, second.eos_id) == (first.bos_id, first.eos_id)
    assert second.special_ids == first.special_ids
    assert second.decoding == first.decoding


def _unigram(space: str) -> tokenizers.Tokenizer:
    known = [("<unk>", 0.0), *((token, -1.0) for token in (space, "a", "b")), (f"{space}ab", -1.5)]
    backend = tokenizers.Tokenizer(models.Unigram(known, 0))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(space), decoders.Metaspace(space)
    return backend


def _fallback(space: str) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE({space: 0, "a": 1, "b": 2, f"{space}a": 3}, [(space, "a")]))
    backend.normalizer = normalizers.Replace(" ", space)
    backend.decoder = decoders.Sequence([decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _pieces(prefix: str) -> tokenizers.Tokenizer:
    known = {"[UNK]": 0, "a": 1, f"{prefix}b": 2, "b": 3}
    backend = tokenizers.Tokenizer(models.WordPiece(known, unk_token="[UNK]", continuing_subword_prefix=prefix))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(prefix)
    return backend


@pytest.mark.parametrize(
    "backend",
    [*map(_unigram, "▁_"), *map(_fallback, "▁Ġ"), *map(_pieces, ("##", "@@"))],
    ids=["metaspace", "metaspace-other", "fallback", "fallback-other", "pieces", "pieces-other"],
)
def test_marks_of_spaces_and_words_are_those_of_the_file(backend: tokenizers.Tokenizer) -> None:
    tokenizer = load_tokenizer(folder(backend.to_str()))
    ids = tokenizer.encode("ab ab a b")
    assert tokenizer.decode(ids) == backend.decode(ids) == "ab ab a b"


@pytest.mark.parametrize("space", ["ab", None])
def test_decoder_that_replaces_more_than_spaces_is_refused(space: str | None) -> None:
    more = decoders.Replace("a", "b") if space is None else decoders.Replace("▁", space)
    backend = _fallback("▁")
    backend.decoder = decoders.Sequence([more, decoders.Replace("▁", " "), decoders.ByteFallback()])
    with pytest.raises(ModelError, match="replaces more than spaces"):
        load_tokenizer(folder(backend.to_str()))


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        ("", "not a JSON object"),
        ("[]", "not a JSON object"),
        ({"decoder": None}, "neither byte-level nor"),
        ({"decoder": {"type": "WordPiece"}}, "neither byte-level nor"),
        ({"decoder": {"type": "ByteLevel"}, "model": {"type": "Nonsense"}}, "not a valid tokenizer"),
    ],
)
def test_damaged_tokenizer_json_is_an_error(content: Any, pattern: str) -> None:
    with pytest.raises(ModelError, match=pattern):
        load_tokenizer(folder(content))


def test_length_limit_in_the_file_is_ignored() -> None:
    backend = byte_level().backend
    backend.enable_truncation(2)
    tokenizer = load_tokenizer(folder(backend.to_str()))
    assert len(tokenizer.encode("abcdefg")) == 7


def test_digest_follows_the_vocabulary() -> None:
    first, again = (ggml(byte_level_metadata(MERGES)).tokenizer.digest for _ in range(2))
    assert first == again
    others = [byte_level_metadata(MERGES, pre="gpt-2"), sentencepiece_metadata()]
    assert len({first, *(ggml(metadata).tokenizer.digest for metadata in others)}) == 3


def test_long_text_encodes_correctly_without_blocking_threads() -> None:
    tokenizer = byte_tokenizer()
    counted, done = 0, threading.Event()

    def count() -> None:
        nonlocal counted
        while not done.is_set():
            counted += 1
            time.sleep(0)

    other = threading.Thread(target=count)
    other.start()
    before = counted
    ids = tokenizer.encode("ab" * 200_000, add_special=False)
    after = counted
    done.set()
    other.join()
    assert ids == tokenizer.encode("ab", add_special=False) * 200_000
    assert after - before > 100, "the GIL was held"
    with pytest.raises(BadRequest):
        tokenizer.encode("\ud800" * 1000)
