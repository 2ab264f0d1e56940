"""Small engine on the null backend, and helpers that run it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from fd_core.config import EngineConfig
from fd_core.engine.building.builder import load_engine
from fd_core.engine.core import Engine
from fd_core.testing.models.texts import Texts, run
from fd_core.types import RequestSpec, SamplingParams

__all__ = ["EOS", "Texts", "golden", "null_engine", "random_specs", "run"]

EOS = (256,)


def null_engine(*, wake: Callable[[], None] = lambda: None, **settings: object) -> Engine:
    values: dict[str, object] = {
        "model": "null",
        "backend": "null",
        "max_num_seqs": 8,
        "num_kv_blocks": 40,
        "block_size": 16,
        "max_model_len": 400,
        "max_num_batched_tokens": 64,
        "pipeline_depth": 1,
        "kv_store_timeout": 60.0,  # a quarter of the default ends a lookup while a busy machine runs other processes
    }
    return load_engine(EngineConfig(**(values | settings)), None, progress=lambda *_: None, wake=wake)  # type: ignore[arg-type]


def random_specs(count: int, seed: int, *, max_prompt: int = 120, max_tokens: int = 60) -> list[RequestSpec]:
    rng = np.random.default_rng(seed)
    return [
        RequestSpec(
            request_id=f"r{index}",
            prompt=tuple(rng.integers(0, 256, int(rng.integers(1, max_prompt))).tolist()),
            params=SamplingParams(
                max_tokens=max_tokens,
                temperature=float(index % 2),
                seed=index,
                logprobs=2 if index % 3 == 0 else None,
                top_k=20 if index % 5 == 0 else 0,
                presence_penalty=0.5 if index % 7 == 0 else 0.0,
            ),
            eos_token_ids=EOS,
        )
        for index in range(count)
    ]


_GOLDEN: dict[bytes, list[int]] = {}


def golden(specs: list[RequestSpec]) -> dict[str, list[int]]:
    """Return the texts of requests run one at a time with an ample cache."""
    texts: dict[str, list[int]] = {}
    for spec in specs:
        key = msgspec.json.encode(spec)
        if key not in _GOLDEN:
            engine = null_engine(
                max_num_seqs=1, num_kv_blocks=200, max_num_batched_tokens=1024, save_preempted_kv=False
            )
            _GOLDEN[key] = run(engine, [spec]).tokens[spec.request_id]
        texts[spec.request_id] = _GOLDEN[key]
    return texts
