"""A small engine on the null backend, and ways to run it."""

from __future__ import annotations

import msgspec
import numpy as np

from fd_core.config import EngineConfig
from fd_core.engine.core import Engine, load_engine
from fd_core.types import FinishReason, RequestSpec, SamplingParams, TokenLogprobs

EOS = (256,)


def null_engine(**settings: object) -> Engine:
    values: dict[str, object] = {
        "model": "null",
        "backend": "null",
        "max_num_seqs": 8,
        "num_kv_blocks": 40,
        "block_size": 16,
        "max_model_len": 400,
        "max_num_batched_tokens": 64,
        "pipeline_depth": 1,
    }
    return load_engine(EngineConfig(**(values | settings)), None, progress=lambda *_: None)  # type: ignore[arg-type]


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


class Texts:
    """Collects what an engine delivers, and checks the shape of every stream."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}
        self.scores: dict[str, list[TokenLogprobs]] = {}

    def take(self, deltas: list) -> None:
        for delta in deltas:
            assert delta.request_id not in self.ends, "a delta after the end"
            assert all(token >= 0 for token in delta.token_ids)
            assert delta.logprobs is None or len(delta.logprobs) == len(delta.token_ids)
            self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            self.scores.setdefault(delta.request_id, []).extend(delta.logprobs or ())
            if delta.finish_reason is not None:
                self.ends[delta.request_id] = delta.finish_reason


def run(engine: Engine, specs: list[RequestSpec], max_steps: int = 20_000) -> Texts:
    texts = Texts()
    for spec in specs:
        texts.take(engine.submit(spec))
    for _ in range(max_steps):
        if not engine.has_work:
            break
        texts.take(engine.step())
        engine.check_integrity()
    assert not engine.has_work, "the engine did not come to rest"
    return texts


_GOLDEN: dict[bytes, list[int]] = {}


def golden(specs: list[RequestSpec]) -> dict[str, list[int]]:
    """The texts of requests run one at a time with room for everything."""
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
