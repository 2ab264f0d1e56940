"""Plans and steps for a runner without an engine, and an engine that kits and tests drive step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

SMALL: Final[Mapping[str, Any]] = {
    "max_num_seqs": 4,
    "num_kv_blocks": 16,
    "block_size": 4,
    "max_model_len": 64,
    "max_num_batched_tokens": 24,
}
"""Limits for one request of maximum size."""
