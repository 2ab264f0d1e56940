"""The tokenizer that the workers use, found on this machine."""

from __future__ import annotations

from typing import Final, NamedTuple

from fd_core.models.catalog import resolve_model
from fd_core.models.fetching.cache import ProgressSink
from fd_core.models.loading.checkpoint import open_checkpoint
from fd_core.text.byte_tokenizer import byte_tokenizer
from fd_core.text.chat_template import ChatTemplate
from fd_core.text.tokenizer import Tokenizer, load_tokenizer

BYTES: Final = "bytes"
"""Name of the tokenizer of workers on the null backend."""


class ModelText(NamedTuple):
    """The tokenizer and the chat template of a model."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None


def find_text(name: str, *, offline: bool, progress: ProgressSink | None = None) -> ModelText:
    """Return the tokenizer and the chat template of a model; with `offline` only of one that is on this machine.

    Raises `ModelError`, also for a chat template that is not valid.
    """
    if name == BYTES:
        tokenizer = byte_tokenizer()
    else:
        checkpoint = open_checkpoint(resolve_model(name, offline=offline, progress=progress).path)
        try:
            tokenizer = load_tokenizer(checkpoint)
        finally:
            checkpoint.close()
    return ModelText(name, tokenizer, ChatTemplate.of(tokenizer))
