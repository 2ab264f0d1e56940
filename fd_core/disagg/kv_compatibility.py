"""Properties in which two workers must agree before one can use the other's KV."""

from __future__ import annotations

from typing import Final

import msgspec

from fd_core.config.layer_groups import ONE_GROUP, LayerGroups

FORMAT_VERSION: Final = 4


class KVCompatibility(msgspec.Struct, frozen=True, kw_only=True):
    """KV properties of one worker that its peer checks. Every field must be equal on both sides."""

    version: int = FORMAT_VERSION
    """Format of messages and pieces."""
    model: str
    """Digest of everything but the weights that determines the KV of given tokens: tokenizer, dtype, layout."""
    weights: str = ""
    """Digest of the weights, which an update changes."""
    dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    groups: LayerGroups = ONE_GROUP
    latent: int = 0
    state_ranks: int = 0
    """Ranks that divide the states of recurrent layers; 0 without such layers."""


_NAMES: Final = {
    "version": "the format of transfers",
    "dtype": "the dtype of the KV",
    "block_size": "--block-size",
    "num_layers": "the number of layers",
    "num_kv_heads": "the number of KV heads",
    "head_dim": "the size of a head",
    "groups": "the division of layers by window",
    "latent": "the width of latent values",
    "state_ranks": "the number of ranks that divide recurrent states",
    "model": "the model (tokenizer, dtype or layout of the KV)",
    "weights": "the version of the weights",
}
"""Every field with its display name, in the order in which differences are searched. The digests are last because
they differ whenever most of the others do."""
_MAX_SHOWN: Final = 20
"""Characters: longer values are not displayed."""


def difference(prefill: KVCompatibility, decode: KVCompatibility) -> str | None:
    """Return the first difference as text, with both values if they are short; None if the workers are compatible."""
    for field, name in _NAMES.items():
        at_prefill, at_decode = str(getattr(prefill, field)), str(getattr(decode, field))
        if at_prefill == at_decode:
            continue
        if max(len(at_prefill), len(at_decode)) <= _MAX_SHOWN and (at_prefill + at_decode).isprintable():
            return f"{name} is {at_prefill} at the prefill worker and {at_decode} at the decode worker"
        return f"{name} differs between the prefill and the decode worker"
    return None
