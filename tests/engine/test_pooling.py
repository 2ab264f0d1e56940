"""Embeddings equal the pooled states of the model under caching, chunking and preemption."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from fd_core import LLM
from fd_core.backends.null import NullCache, NullModel
from fd_core.engine.core import Engine
from fd_core.engine.vectors import ONE_TOKEN
from fd_core.errors import BadRequest
from fd_core.ops.contract import StepInput
from fd_core.testing.models.arrays import step_input
from fd_core.testing.models.stepper import parts_of
from fd_core.types import Pooling, RequestSpec
from tests.engine.helpers import null_engine, random_specs
from tests.engine.test_prompt_logprobs import PROMPTS, right
from tests.models.loading.tiny_gguf import LLAMA, write_gguf

KINDS = {"last": Pooling("last"), "mean": Pooling("mean"), "tokens": Pooling("tokens", (7, 3, 250))}


def exact(prompt: tuple[int, ...], pooling: Pooling) -> np.ndarray:
    """Return the embedding straight from the model, without an engine."""
    if pooling.kind == "tokens":
        return right(prompt)[-1, list(pooling.token_ids)]
    model, blocks = NullModel(), -(-len(prompt) // 16)
    step = step_input([(len(prompt), len(prompt))], 16, np.arange(blocks, dtype=np.int32)[None])
    given = {name: getattr(step, name) for name in StepInput.__slots__} | {"token_ids": np.array(prompt, np.int32)}
    states = model.states(StepInput(**given), NullCache(model.kv_shape(16), blocks)).astype(np.float64)
    return states[-1] if pooling.kind == "last" else states.mean(axis=0)


def pooled(engine: Engine, prompts: Sequence[tuple[int, ...]], pooling: Pooling) -> list[np.ndarray]:
    found = {}
    for index, prompt in enumerate(prompts):
        engine.submit(RequestSpec(request_id=f"v{index}", prompt=prompt, params=ONE_TOKEN, pooling=pooling))
    while engine.has_work:
        for delta in engine.step():
            if delta.pooled is not None:
                found[delta.request_id] = np.frombuffer(delta.pooled, "<f4")
        engine.check_integrity()
    return [found[f"v{index}"] for index in range(len(prompts))]


def check(found: Sequence[np.ndarray], prompts: Sequence[tuple[int, ...]], pooling: Pooling) -> None:
    for vector, prompt in zip(found, prompts, strict=True):
        np.testing.assert_allclose(vector, exact(prompt, pooling), rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [1, 7, 64])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("transport", ["memory", "zmq"])
def test_embeddings_are_exact_for_any_chunking(kind: str, budget: int, depth: int, transport: str) -> None:
    engine = null_engine(
        max_num_batched_tokens=budget, pipeline_depth=depth, num_kv_blocks=60, output_transport=transport
    )
    check(pooled(engine, PROMPTS, KINDS[kind]), PROMPTS, KINDS[kind])
    engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_embedding_and_text_requests_share_steps_and_prefixes(kind: str) -> None:
    engine = null_engine(num_kv_blocks=200, max_num_batched_tokens=40)
    for spec in random_specs(6, seed=3):
        engine.submit(spec)
    check(pooled(engine, PROMPTS, KINDS[kind]), PROMPTS, KINDS[kind])
    before = engine.stats().scheduler.counters.prefix_hits
    check(pooled(engine, PROMPTS, KINDS[kind]), PROMPTS, KINDS[kind])
    hits = engine.stats().scheduler.counters.prefix_hits - before
    assert hits == (0 if kind == "mean" else 16 + 80 + 192), (
        "mean pooling reads every position, the others only the last"
    )
    engine.close()


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_survive_preemption(kind: str) -> None:
    engine = null_engine(num_kv_blocks=30, pipeline_depth=2, max_num_batched_tokens=40)
    parts_of(engine).control.growth = lambda *_: 0  # type: ignore[method-assign]  # admits all requests at once
    for spec in random_specs(8, seed=5, max_tokens=200):
        engine.submit(spec)
    prompts = [PROMPTS[-1][: 150 - index] for index in range(8)]
    check(pooled(engine, prompts, KINDS[kind]), prompts, KINDS[kind])
    assert engine.stats().scheduler.counters.preemptions > 0
    engine.close()


def test_embed_in_python() -> None:
    llm = LLM("null", backend="null", pooling="mean", num_kv_blocks=40)
    try:
        assert llm.embed([[1, 2], [3]]).tolist() == [[1.0], [1.0]]
        assert llm.embed([]).shape == (0, 1)
        with pytest.raises(BadRequest, match="vectors have 1 elements"):
            llm.embed("a", dimensions=2)
        with pytest.raises(BadRequest, match="no tokens"):
            llm.embed([[]])
    finally:
        llm.close()


def test_pooling_of_a_gguf_file_is_followed(tmp_path: Path) -> None:
    extra = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [f"t{index}" for index in range(48)]}
    vectors = {}
    for name, kind, pooling in (("file", 1, "auto"), ("flag", 1, "last"), ("mean", 0, "mean"), ("none", 0, "auto")):
        path = write_gguf(tmp_path / f"{name}.gguf", values=LLAMA | {"pooling_type": kind}, extra=extra)
        with LLM(str(path), backend="reference", pooling=pooling, num_kv_blocks=8) as llm:
            vectors[name] = llm.embed([[3, 5, 7]]).tolist()
    assert vectors["file"] == vectors["mean"] != vectors["flag"] == vectors["none"]
