"""Checkpoints with only a small tokenizer, as GGUF files and as folders."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fd_core.models.loading.tokenizer_source import GgmlTokenizerSource, JsonTokenizerSource, TokenizerSource

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
ORIGIN = Path("model.gguf")


@dataclass(frozen=True)
class OnlyTokenizer:
    """Checkpoint stub that has only a tokenizer."""

    tokenizer: TokenizerSource


def byte_characters() -> list[str]:
    """Return GPT-2's stand-in for each byte."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = {byte: chr(byte) for byte in visible}
    for byte in range(256):
        characters.setdefault(byte, chr(256 + len(characters) - len(visible)))
    return [characters[byte] for byte in range(256)]


def byte_level_metadata(merges: list[str], pre: str | None = "smollm", **changes: Any) -> dict[str, Any]:
    """Return a vocabulary of two control tokens, all bytes and the results of the merges."""
    tokens = ["<|end|>", "<|start|>", *byte_characters()]
    tokens += [merge.replace(" ", "") for merge in merges]
    metadata = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [CONTROL, CONTROL] + [NORMAL] * (len(tokens) - 2),
        "merges": merges,
        "bos_token_id": 1,
        "eos_token_id": 0,
        **changes,
    }
    return {key: value for key, value in metadata.items() if value is not None}


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """A small SentencePiece-style vocabulary with byte tokens."""
    pieces = ["▁", "h", "e", "l", "o", "w", "r", "d", "he", "ll", "hell", "hello", "▁hello", "▁w", "or", "▁wor"]
    special = ["<unk>", "<s>", "</s>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<turn>", "<mask>"]
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + [-float(index) for index in range(len(pieces))] + [0.0, 0.0],
        "token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces) + [CONTROL, USER_DEFINED],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **changes,
    }
    return {key: value for key, value in metadata.items() if value is not None}


def ggml(metadata: dict[str, Any], chat_template: str | None = None) -> OnlyTokenizer:
    """A GGUF file with this tokenizer."""
    return OnlyTokenizer(GgmlTokenizerSource(ORIGIN, metadata, chat_template))


def folder(content: str | dict[str, Any], settings: dict[str, Any] | None = None) -> OnlyTokenizer:
    """A folder with this tokenizer.json."""
    text = content if isinstance(content, str) else json.dumps(content)
    return OnlyTokenizer(JsonTokenizerSource(Path("m/tokenizer.json"), text.encode(), settings or {}, None))
