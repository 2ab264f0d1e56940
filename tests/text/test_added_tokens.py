"""Tokens defined outside tokenizer.json are read as `transformers` reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from small_tokenizers import OnlyTokenizer, byte_level_metadata, ggml

from fd_core.models.loading.tokenizer_source import read_tokenizer_folder
from fd_core.text.tokenizer import Tokenizer, load_tokenizer

TEXT = "a <one> b<two>c <three>, x<one>y <|end|><|im_end|> [PAD] <four><|start|>two"


def entry(content: str, **flags: Any) -> dict[str, Any]:
    common = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": False}
    return {"content": content, **common, **flags}


def write_folder(folder: Path, **files: Any) -> Path:
    """Write a tokenizer of 258 tokens, whose `<|end|>` and `<|start|>` are added tokens, and other files."""
    content = load_tokenizer(ggml(byte_level_metadata([], add_bos_token=False))).backend.to_str()
    (folder / "tokenizer.json").write_text(content)
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


def read(folder: Path) -> Tokenizer:
    return load_tokenizer(OnlyTokenizer(read_tokenizer_folder(folder)))


DECODER = {
    "258": entry("<one>", lstrip=True, special=True),
    "259": entry("<two>", rstrip=True, normalized=True),
    "260": entry("<three>", single_word=True),
    "261": entry("<four>", special=True),
}
FOLDERS: dict[str, dict[str, Any]] = {
    "decoder": {"tokenizer_config": {"added_tokens_decoder": DECODER}},
    "decoder with flags of known tokens": {
        "tokenizer_config": {"added_tokens_decoder": {"0": entry("<|end|>", lstrip=True, special=True)}}
    },
    "decoder out of order": {"tokenizer_config": {"added_tokens_decoder": dict(reversed(DECODER.items()))}},
    "decoder and named": {"tokenizer_config": {"added_tokens_decoder": DECODER, "pad_token": "<two>"}},
    "named": {"tokenizer_config": {"pad_token": "[PAD]", "eos_token": "<|im_end|>", "image_token": "<one>"}},
    "named as objects": {
        "tokenizer_config": {"eos_token": {"__type": "AddedToken", **entry("<|im_end|>", lstrip=True)}}
    },
    "known in the vocabulary": {"tokenizer_config": {"eos_token": "x", "bos_token": "<|start|>"}},
    "additional": {"tokenizer_config": {"additional_special_tokens": ["<one>", "<two>"], "pad_token": "[PAD]"}},
    "extra": {"tokenizer_config": {"extra_special_tokens": ["<one>", {"__type": "AddedToken", **DECODER["260"]}]}},
    "extra by name": {"tokenizer_config": {"extra_special_tokens": {"image_token": "<one>"}}},
    "special tokens map": {
        "special_tokens_map": {
            "eos_token": {"content": "<|im_end|>", "lstrip": True, "normalized": False, "rstrip": False},
            "pad_token": "[PAD]",
            "additional_special_tokens": ["<one>", "<two>"],
        }
    },
    "special tokens map over the settings": {
        "tokenizer_config": {"eos_token": "<|end|>", "extra_special_tokens": ["<four>"]},
        "special_tokens_map": {"eos_token": "<|im_end|>", "extra_special_tokens": ["<one>"]},
    },
    "added tokens": {
        "added_tokens": {"<two>": 259, "<one>": 258, "[PAD]": 260},
        "special_tokens_map": {"pad_token": "[PAD]"},
    },
    "all of them": {
        "tokenizer_config": {"added_tokens_decoder": DECODER, "additional_special_tokens": ["<five>", "<four>"]},
        "special_tokens_map": {"pad_token": "[NOT READ]"},
        "added_tokens": {"<not read>": 300},
    },
}


@pytest.mark.parametrize("files", FOLDERS.values(), ids=list(FOLDERS))
def test_added_tokens_match_transformers(files: dict[str, Any], tmp_path: Path) -> None:
    folder = write_folder(tmp_path, **files)
    ours, theirs = read(folder), transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    found = {index: repr(token) for index, token in ours.backend.get_added_tokens_decoder().items()}
    assert found == {index: repr(token) for index, token in theirs.added_tokens_decoder.items()}
    assert ours.encode(TEXT, add_special=False) == theirs.encode(TEXT, add_special_tokens=False)
    assert ours.eos_token == theirs.eos_token


@pytest.mark.parametrize(
    "settings",
    [
        {"added_tokens_decoder": {"x": entry("<one>"), "258": {"content": 3}, "259": None, "260": entry("")}},
        {"added_tokens_decoder": [1], "additional_special_tokens": "<one>", "pad_token": 7, "eos_token": {}},
        {"extra_special_tokens": [None, 3, {}], "add_bos_token": True},
    ],
)
def test_invalid_entries_are_ignored(settings: dict[str, Any], tmp_path: Path) -> None:
    assert read(write_folder(tmp_path, tokenizer_config=settings)).vocab_size == 258


def test_digest_covers_tokens_outside_tokenizer_json(tmp_path: Path) -> None:
    plain = read_tokenizer_folder(write_folder(tmp_path)).digest
    write_folder(tmp_path, tokenizer_config={"pad_token": "[PAD]"})
    assert read_tokenizer_folder(tmp_path).digest != plain
