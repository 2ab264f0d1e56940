"""What two workers must have in common before KV of one is of any use to the other."""

from __future__ import annotations

from typing import Final

import msgspec

__all__ = ["FORMAT_VERSION", "Terms", "difference"]

FORMAT_VERSION: Final = 2


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """The KV of one worker, as far as another has to know it. Every field has to be equal on both sides."""

    version: int = FORMAT_VERSION
    """Of messages and pieces."""
    model: str
    """Digest of everything that decides the KV of given tokens: weights, tokenizer, dtype, layout."""
    dtype: str
    block_size: int
    """Tokens in a KV block."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1


_WORDS: Final = {
    "version": "the format of transfers",
    "dtype": "the dtype of the KV",
    "block_size": "--block-size",
    "num_layers": "the number of layers",
    "num_kv_heads": "the number of KV heads",
    "head_dim": "the size of a head",
    "tensor_parallel_size": "the tensor parallel size",
    "pipeline_parallel_size": "the pipeline parallel size",
    "model": "the model (weights, tokenizer, dtype or layout of the KV)",
}
"""Every field in the order in which they are told of; the digest of the model last, which differs with most of them."""
_SHORT: Final = 20
"""Characters of a value that people are shown."""


def difference(prefill: Terms, decode: Terms) -> str | None:
    """Say for people what differs, with both values where they are short; None if the two fit together."""
    for name, words in _WORDS.items():
        here, there = str(getattr(prefill, name)), str(getattr(decode, name))
        if here == there:
            continue
        if max(len(here), len(there)) <= _SHORT and (here + there).isprintable():
            return f"{words} is {here} at the prefill worker and {there} at the decode worker"
        return f"{words} differs between the prefill and the decode worker"
    return None
