"""Limits of small engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fd_core.config import Limits
from fd_core.config.envelope import OperatingEnvelope

SMALL: Final[Mapping[str, Any]] = {
    "max_num_seqs": 4,
    "num_kv_blocks": 16,
    "block_size": 4,
    "max_model_len": 64,
    "max_num_batched_tokens": 24,
}
"""Limits for one request of maximum size."""


def small_limits(**sizes: Any) -> Limits:
    """Return the limits of `SMALL`, with other `sizes`."""
    return Limits(**{**SMALL, "vocab_size": 257, **sizes})


def limits_within(envelope: OperatingEnvelope) -> Limits:
    """Return limits inside an envelope, for one request of maximum size even if a block has one token."""
    sizes = {**SMALL, **envelope.exceeded(SMALL)}
    return small_limits(**{**sizes, "num_kv_blocks": sizes["max_model_len"]})
