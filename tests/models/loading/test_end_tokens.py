"""End-of-sequence tokens are equal for a folder and a GGUF file, regardless of the file that defines them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from fd_core.errors import ModelError
from fd_core.models.loading.checkpoint import Checkpoint
from fd_core.models.opening import open_checkpoint
from tests.models.loading.tiny_gguf import write_gguf

VOCABULARY = ["a", "b", "<eos>", "</s>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>"]
ROWS = 48
CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": ROWS}


def folder(path: Path, special: dict[str, bool] | None = None, **files: Any) -> Checkpoint:
    """Write a folder whose tokenizer has the tokens in `special`, each special or not."""
    added = [{"id": VOCABULARY.index(text), "content": text, "special": flag} for text, flag in (special or {}).items()]
    vocabulary = {text: index for index, text in enumerate(VOCABULARY) if not text.startswith("<")}
    tokenizer = {"added_tokens": added, "model": {"type": "BPE", "vocab": vocabulary}}
    for name, values in {"config": {}, "tokenizer": tokenizer, **files}.items():
        values = CONFIG | values if name == "config" else values
        (path / f"{name}.json").write_text(json.dumps(values))
    save_file({"w": np.zeros(1, "f4")}, path / "model.safetensors")
    return open_checkpoint(path)


def gguf(path: Path, special: dict[str, bool] | None = None, **metadata: Any) -> Checkpoint:
    """Write a GGUF file with the same tokens."""
    tokens = [text if text in (special or {}) or not text.startswith("<") else f"#{text}" for text in VOCABULARY]
    extra = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if (special or {}).get(text) else 1 for text in VOCABULARY],
    }
    return open_checkpoint(write_gguf(path / "m.gguf", extra=extra | metadata))


BOTH = pytest.mark.parametrize("write", [folder, gguf])


@BOTH
@pytest.mark.parametrize(
    ("special", "ends"),
    [
        ({}, ()),
        ({"<|im_end|>": True}, (4,)),
        ({"<end_of_turn>": True, "</s>": True}, (8, 3)),
        ({"<|im_end|>": False, "</s>": False}, ()),
        ({"<|end|>": True}, (5,)),
        ({"<|end|>": True, "<|return|>": True, "<|call|>": True}, (6, 7)),
        ({"<eos>": True}, ()),
    ],
)
def test_special_end_of_turn_tokens_end_a_text(
    write: Any, special: dict[str, bool], ends: tuple[int, ...], tmp_path: Path
) -> None:
    assert write(tmp_path, special).eos_token_ids == ends


@pytest.mark.parametrize("name", ["chat_template", "tool_use"])
def test_end_of_turn_tokens_of_templates_end_a_text(name: str, tmp_path: Path) -> None:
    source = "{{ messages[0].content }}<|im_end|>"
    template = source if name == "chat_template" else [{"name": name, "template": source}]
    plain = {"<|im_end|>": False, "<end_of_turn>": False}
    assert folder(tmp_path, plain, tokenizer_config={"chat_template": template}).eos_token_ids == (4,)
    key = "tokenizer.chat_template" + ("" if name == "chat_template" else f".{name}")
    assert gguf(tmp_path, plain, **{key: source}).eos_token_ids == (4,)


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"eos_token": "<eos>"}},
        {"tokenizer_config": {"eos_token": {"__type": "AddedToken", "content": "<eos>"}}},
        {"tokenizer_config": {"eos_token": "b"}},
        {"special_tokens_map": {"eos_token": {"content": "<eos>"}}},
        {"tokenizer_config": {"eos_token": "<new>", "added_tokens_decoder": {"2": {"content": "<new>"}}}},
        {"config": {"eos_token_id": 2}},
        {"config": {"eos_token_id": [None, 2, 2]}, "tokenizer_config": {"eos_token": None}},
        {"config": {"eos_token_id": "2"}},
        {"config": {"eos_token_id": 2.0}},
        {"config": {"eos_token_id": ["<eos>"]}},
        {"generation_config": {"eos_token_id": [2, ROWS, -1, 2**40]}, "config": {"eos_token_id": -1}},
        {"generation_config": {"eos_token_id": 2}, "tokenizer_config": {"eos_token": "<absent>"}},
    ],
)
def test_any_file_may_define_eos_tokens(files: dict[str, Any], tmp_path: Path) -> None:
    ends = folder(tmp_path, {"<eos>": True}, **files).eos_token_ids
    assert ends == ((1,) if files.get("tokenizer_config", {}).get("eos_token") == "b" else (2,))


def test_eos_tokens_of_all_files_are_merged(tmp_path: Path) -> None:
    checkpoint = folder(
        tmp_path,
        {"<eos>": True, "<|im_end|>": True},
        generation_config={"eos_token_id": [4, 1]},
        config={"eos_token_id": 0},
        tokenizer_config={"eos_token": "<eos>"},
    )
    assert checkpoint.eos_token_ids == (4, 1, 0, 2)


@pytest.mark.parametrize("value", ["x", {"id": 2}, [[2]], True, 2.5])
def test_eos_of_wrong_type_is_named(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id must be"):
        _ = folder(tmp_path, generation_config={"eos_token_id": value}).eos_token_ids


def test_metadata_ids_without_rows_are_skipped(tmp_path: Path) -> None:
    checkpoint = gguf(
        tmp_path, {"<eos>": True}, **{"tokenizer.ggml.eos_token_id": ROWS, "tokenizer.ggml.eot_token_id": 2}
    )
    assert checkpoint.eos_token_ids == (2,)
