"""The real model under pressure: 200 requests through a pool that holds about eight, with random aborts.

Minutes long, so it runs only in its own session: `nox -s soak`. A failure prints the seed.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from fd_core.config import EngineConfig, SpeculativeConfig
from fd_core.engine.building.builder import load_engine
from fd_core.engine.core import Engine
from fd_core.models.catalog import resolve_model
from fd_core.types import FinishReason, RequestSpec, SamplingParams
from tests.engine.helpers import Texts

pytestmark = pytest.mark.soak

SEED = int(os.environ.get("FD_SOAK_SEED", "20261121"))
REQUESTS = 200
BLOCK_SIZE = 16
BUDGET = 256


@pytest.fixture(scope="module")
def model() -> Path:
    return resolve_model("smollm2").path


def requests() -> list[RequestSpec]:
    """Return prompts of repeated phrases, for n-gram drafts."""
    rng = np.random.default_rng(SEED)
    specs = []
    for index in range(REQUESTS):
        phrase = rng.integers(1000, 20000, int(rng.integers(3, 12))).tolist()
        prompt = (phrase * 20)[: int(rng.integers(4, 60))]
        specs.append(
            RequestSpec(
                request_id=f"r{index}",
                prompt=tuple(prompt),
                params=SamplingParams(
                    max_tokens=int(rng.integers(8, 64)),
                    temperature=[0.0, 0.7, 1.2][index % 3],
                    top_p=0.9 if index % 4 == 0 else 1.0,
                    frequency_penalty=0.3 if index % 5 == 0 else 0.0,
                    logprobs=2 if index % 6 == 0 else None,
                    seed=index,
                ),
                eos_token_ids=(2,),
            )
        )
    return specs


def engine(path: Path, **settings: object) -> Engine:
    values: dict[str, object] = {
        "model": "smollm2",
        "backend": "cpu",
        "block_size": BLOCK_SIZE,
        "max_num_batched_tokens": BUDGET,
        "max_model_len": 256,
    }
    loaded = load_engine(EngineConfig(**(values | settings)), path, progress=lambda *_: None)  # type: ignore[arg-type]
    assert "native" in loaded.info.device, "only the native kernels give the same bits in any batch"
    return loaded


@pytest.fixture(scope="module")
def unpressed(model: Path) -> dict[str, list[int]]:
    loaded = engine(model, max_num_seqs=4)
    texts = Texts()
    for spec in requests():
        texts.take(loaded.submit(spec))
    while loaded.has_work:
        texts.take(loaded.step())
    assert loaded.stats().scheduler.counters.preemptions == 0
    loaded.close()
    return texts.tokens


@pytest.mark.parametrize("transport", ["memory", "zmq"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("k", [0, 1, 3, 5])
def test_texts_under_pressure_equal_those_without_pressure(
    model: Path, unpressed: dict[str, list[int]], k: int, depth: int, transport: str
) -> None:
    print(f"seed {SEED}")
    loaded = engine(
        model,
        max_num_seqs=16,
        num_kv_blocks=40,
        pipeline_depth=depth,
        output_transport=transport,
        speculative=SpeculativeConfig(method="ngram", num_speculative_tokens=k) if k else None,
    )
    start = loaded.stats()
    # Without the sample-ahead, more requests are admitted than fit, which causes the pressure.
    loaded._scheduler.probe().control.growth = lambda *_: 0  # type: ignore[method-assign]  # no admission control
    rng = np.random.default_rng(SEED + k)
    texts, step = Texts(), 0
    for spec in requests():
        texts.take(loaded.submit(spec))
    while loaded.has_work:
        if rng.random() < 0.03:
            texts.take(loaded.abort([f"r{rng.integers(REQUESTS)}"]))
        texts.take(loaded.step())
        step += 1
        if step % 50 == 0:
            loaded.check_integrity()
    stats = loaded.stats()
    assert len(texts.ends) == REQUESTS
    for request_id, reason in texts.ends.items():
        delivered, whole = texts.tokens[request_id], unpressed[request_id]
        assert delivered == (whole[: len(delivered)] if reason is FinishReason.ABORT else whole), request_id
    assert stats.scheduler.counters.preemptions > 20
    assert stats.scheduler.outputs.stale_outputs == 0
    for each in (start, stats):
        slots, blocks = each.scheduler.slots, each.scheduler.blocks
        assert (slots.running, slots.loading, slots.draining, slots.waiting) == (0, 0, 0, 0)
        assert (blocks.used, blocks.fenced) == (0, 0)
    if k:
        assert stats.scheduler.drafts.accepted > 0
    loaded.close()
