"""Text in and out: tokenizer, streaming detokenizer with stop strings, sandboxed chat templates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fd_core.text.chat_template import ChatTemplate
    from fd_core.text.detokenizer import IncrementalDetokenizer, TextDelta
    from fd_core.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["ChatTemplate", "IncrementalDetokenizer", "TextDelta", "Tokenizer", "load_tokenizer"]

_HOMES = {
    "ChatTemplate": "chat_template",
    "IncrementalDetokenizer": "detokenizer",
    "TextDelta": "detokenizer",
    "Tokenizer": "tokenizer",
    "load_tokenizer": "tokenizer",
}


def __getattr__(name: str) -> Any:
    """Import a public name's module on first use: jinja2 and tokenizers are not free to import."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
