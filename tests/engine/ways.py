"""Settings that change no text. Each kind of model has them all, so that a new one is tested with every kind."""

from __future__ import annotations

from typing import Any, Final

from fd_core.config import SpeculativeConfig
from tests.engine.test_layer_groups import PACKS

WAYS: Final[dict[str, dict[str, Any]]] = {
    **{name: {**PACKS[name], "num_kv_blocks": 45} for name in ("reference", "cpu", "cpu, torch")},
    "small budget": {"max_num_batched_tokens": 4, "pipeline_depth": 1, "backend": "cpu"},
    "deep pipeline": {"pipeline_depth": 3, "backend": "cpu"},
    "two ranks": {"tensor_parallel_size": 2, "backend": "cpu"},
    "two stages": {"pipeline_parallel_size": 2, "backend": "reference"},
    "no prefixes": {"enable_prefix_caching": False, "backend": "cpu"},
    "forced tokens": {"structured_output": True, "max_num_batched_tokens": 50, "block_size": 16},
    "drafts": {
        "speculative": SpeculativeConfig(method="ngram", num_speculative_tokens=3, cheap_tokens=1000),
        "max_num_batched_tokens": 50,
        "block_size": 16,
    },
}
