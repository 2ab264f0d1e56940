"""Prompt logprobs equal those of the model under caching, chunking and preemption."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from fd_core.backends.null import NullCache, NullModel
from fd_core.engine.clients.client import _merged
from fd_core.ops.contract import StepInput
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.runner.sampling import prompt_scores
from fd_core.testing.models.arrays import step_input
from fd_core.testing.models.stepper import parts_of
from fd_core.testing.models.texts import Texts
from fd_core.types import Delta, RequestSpec, SamplingParams
from tests.engine.helpers import null_engine, run

RNG = np.random.default_rng(4)
PROMPTS = [tuple(RNG.integers(0, 256, length).tolist()) for length in (1, 2, 16, 17, 90, 200)]


def specs(prompts: Sequence[tuple[int, ...]] = PROMPTS, top_n: int = 3, **params: object) -> list[RequestSpec]:
    given = SamplingParams(**{"temperature": 0.0, "max_tokens": 5, "ignore_eos": True, **params}, prompt_logprobs=top_n)  # type: ignore[arg-type]
    return [RequestSpec(request_id=f"r{index}", prompt=prompt, params=given) for index, prompt in enumerate(prompts)]


def right(prompt: tuple[int, ...]) -> np.ndarray:
    """Return logprobs [len(prompt), V] straight from the logits of the model, without an engine."""
    model = NullModel()
    blocks = -(-len(prompt) // 16)
    step = step_input([(len(prompt), len(prompt))], 16, np.arange(blocks, dtype=np.int32)[None])
    given = {"token_ids": np.array(prompt, np.int32), "logits_rows": np.arange(len(prompt), dtype=np.int32)}
    values = {name: getattr(step, name) for name in StepInput.__slots__} | given
    logits = model.forward(StepInput(**values), NullCache(model.kv_shape(16), blocks)).astype(np.float64)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def check(texts: Texts, wanted: Sequence[RequestSpec]) -> None:
    for spec in wanted:
        exact, found = right(spec.prompt), texts.prompt_scores[spec.request_id]
        assert len(found) == len(spec.prompt) - 1
        for position, score in enumerate(found):
            assert score.logprob == pytest.approx(exact[position, spec.prompt[position + 1]], abs=1e-4)
            best = np.argsort(-exact[position], kind="stable")[: spec.params.prompt_logprobs]
            assert score.top_ids == tuple(best.tolist())
            assert score.top == pytest.approx(exact[position, best], abs=1e-4)
            order = np.argsort(-exact[position], kind="stable").tolist()
            assert score.rank == order.index(spec.prompt[position + 1]) + 1


@pytest.mark.parametrize("budget", [1, 7, 64])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.law("4")
def test_prompt_logprobs_are_exact_for_any_chunking(budget: int, depth: int) -> None:
    engine = null_engine(max_num_batched_tokens=budget, pipeline_depth=depth, num_kv_blocks=60)
    check(run(engine, specs()), specs())
    engine.close()


def test_cached_prompt_is_recomputed_for_prompt_logprobs() -> None:
    engine = null_engine(num_kv_blocks=100)
    plain = [RequestSpec(request_id="plain", prompt=PROMPTS[-1], params=SamplingParams(max_tokens=2))]
    run(engine, plain)
    hits = engine.stats().scheduler.counters.prefix_hits
    check(run(engine, specs()), specs())
    assert engine.stats().scheduler.counters.prefix_hits == hits
    run(engine, plain)
    assert engine.stats().scheduler.counters.prefix_hits == hits + 192, "recomputed blocks enter the cache"
    engine.close()


@pytest.mark.law("4")
@pytest.mark.parametrize("keep", [True, False])
def test_prompt_logprobs_survive_preemption(keep: bool) -> None:
    wanted = specs([PROMPTS[-1][: 100 - index] for index in range(8)], max_tokens=80)
    engine = null_engine(num_kv_blocks=30, pipeline_depth=2, max_num_batched_tokens=40, save_preempted_kv=keep)
    parts_of(engine).control.growth = lambda *_: 0  # type: ignore[method-assign]  # admits all requests at once
    texts = run(engine, wanted)
    check(texts, wanted)
    assert engine.stats().scheduler.counters.preemptions > 0
    assert all(len(text) == 80 for text in texts.tokens.values())
    engine.close()


def test_prompt_logprobs_are_delivered_once_with_first_token() -> None:
    engine, deltas = null_engine(), []
    engine.submit(specs([PROMPTS[-1]])[0])
    while engine.has_work:
        deltas += engine.step()
    present = [delta.prompt_logprobs is not None for delta in deltas if delta.token_ids]
    assert present == [True, *[False] * 4]
    engine.close()


def test_resumed_request_does_not_repeat_prompt_logprobs() -> None:
    """A restart resumes the request with tokens that an earlier engine delivered."""
    engine = null_engine()
    (spec,) = specs([PROMPTS[4]])
    text = run(engine, [spec]).tokens["r0"]
    texts = run(engine, [msgspec.structs.replace(spec, delivered=tuple(text[:2]))])
    assert texts.tokens["r0"] == text[2:]
    assert texts.prompt_scores == {}
    assert engine.stats().scheduler.counters.prefix_hits > 0
    engine.close()


def test_prompt_logits_are_computed_within_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_scores, "SCORED_CELLS", 20 * 257)
    seen: list[int] = []
    logprobs = NumpyOps.logprobs
    monkeypatch.setattr(NumpyOps, "logprobs", lambda ops, x, *rest: (seen.append(len(x)), logprobs(ops, x, *rest))[1])
    engine = null_engine(max_num_batched_tokens=400)
    check(run(engine, specs()), specs())
    assert max(seen) == 20
    assert sum(seen) == sum(len(prompt) - 1 for prompt in PROMPTS)
    engine.close()


def test_merged_deltas_keep_prompt_logprobs() -> None:
    first, then = Delta("a", (1,), prompt_logprobs=()), Delta("a", (2,))
    assert _merged([first, then]).prompt_logprobs == ()
