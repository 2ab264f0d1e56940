"""Plans and steps for a runner without an engine, and the engine that kits and tests drive otherwise."""

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
"""Room for one request of the largest size."""
