"""Structured output, prompt logprobs and embeddings in prefill/decode pairs equal those of a single worker."""

from __future__ import annotations

import numpy as np
import pytest

from fd_core.config import SpeculativeConfig
from fd_core.testing.models.stepper import parts_of
from fd_core.testing.models.texts import Texts
from fd_core.types import Pooling, RequestSpec, SamplingParams
from tests.engine.building.test_kv_transfer import Pair, at_rest, pair, secret
from tests.engine.helpers import null_engine, run
from tests.engine.structured import structured_specs

__all__ = ["secret"]

SPECS = structured_specs(24)
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=4, cheap_tokens=1000)
PROMPTS = [tuple((index * 37 + position * 11) % 256 for position in range(20 + 9 * index)) for index in range(6)]


@pytest.fixture(scope="module")
def mixed() -> Texts:
    """Return the outputs of a single worker, one request at a time and without forced drafts."""
    return alone(SPECS, max_forced_tokens=0)


def alone(specs: list[RequestSpec], **settings: object) -> Texts:
    engine = null_engine(max_num_seqs=1, num_kv_blocks=200, max_num_batched_tokens=1024, **settings)
    texts = run(engine, specs)
    engine.close()
    return texts


def same(two: Pair, expected: Texts) -> None:
    for name, tokens in expected.tokens.items():
        assert two.texts.tokens[name] == tokens, name
        assert two.texts.scores[name] == expected.scores[name], name
        assert two.texts.ends[name] == expected.ends[name], name
    two.until(lambda: at_rest(two))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("speculative", [None, NGRAM], ids=["forced", "ngram"])
@pytest.mark.law("4", "6.2")
def test_structured_texts_are_valid_after_kv_transfer(
    secret: str, mixed: Texts, depth: int, speculative: SpeculativeConfig | None
) -> None:
    decode = {"pipeline_depth": depth, "num_kv_blocks": 100, "speculative": speculative}
    with pair(secret, {"pipeline_depth": depth}, decode) as two:
        two.run(*SPECS)
        same(two, mixed)
        assert "transferred" in two.outcomes.values()
        stats = two.decode.stats()
        assert stats.masks is not None and 0 < stats.masks.forced_accepted == stats.masks.forced_drafted
        assert two.prefill.stats().grammars is None or two.prefill.stats().grammars.compiled == 0


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "recomputed"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.law("4", "6.3")
def test_preempted_decode_resumes_within_grammar(secret: str, mixed: Texts, depth: int, keep: bool) -> None:
    decode = {"pipeline_depth": depth, "num_kv_blocks": 25, "save_preempted_kv": keep}
    with pair(secret, decode=decode) as two:
        parts_of(two.decode).control.growth = lambda *_: 0  # type: ignore[method-assign]  # admits all requests at once
        two.run(*SPECS)
        same(two, mixed)
        stats = two.decode.stats().scheduler
        assert stats.counters.preemptions > 0, "the pool should run out"
        assert (stats.offload.saved_tokens > 0) is keep
        assert (stats.offload.loads + stats.offload.declined > 0) is keep


@pytest.mark.parametrize("outcome", ["lost", "refused"])
@pytest.mark.law("6.3")
def test_structured_texts_are_valid_after_failed_transfer(secret: str, mixed: Texts, outcome: str) -> None:
    prefill = {"max_model_len": 2} if outcome == "refused" else {}
    with pair(secret, prefill=prefill) as two:
        if outcome == "lost":
            two.prefill.close()
        two.run(*SPECS[:8])
        assert set(two.outcomes.values()) == {outcome, "held"}, "the shortest prompt needs no transfer"
        assert two.texts.tokens == {spec.request_id: mixed.tokens[spec.request_id] for spec in SPECS[:8]}


@pytest.mark.law("4", "6.2")
def test_prompt_logprobs_equal_those_of_single_worker(secret: str) -> None:
    """The decode worker computes such a prompt itself, because transferred KV has no logprobs."""
    params = SamplingParams(max_tokens=5, temperature=0.0, prompt_logprobs=3)
    specs = [RequestSpec(request_id=f"r{index}", prompt=prompt, params=params) for index, prompt in enumerate(PROMPTS)]
    expected = alone(specs)
    with pair(secret) as two:
        two.run(*specs)
        same(two, expected)
        assert two.texts.prompt_scores == expected.prompt_scores
        assert set(two.outcomes.values()) == {None}


@pytest.mark.law("4", "6.2")
def test_embeddings_equal_those_of_single_worker(secret: str) -> None:
    one = SamplingParams(max_tokens=1, temperature=0.0)
    specs = [
        RequestSpec(request_id=f"{pooling.kind}{index}", prompt=prompt, params=one, pooling=pooling)
        for pooling in (Pooling("last"), Pooling("mean"), Pooling("tokens", (5, 88)))
        for index, prompt in enumerate(PROMPTS)
    ]
    expected = alone(specs).vectors
    with pair(secret) as two:
        two.run(*specs)
        assert two.texts.vectors.keys() == expected.keys()
        for name, vector in expected.items():
            found = np.frombuffer(two.texts.vectors[name], "<f4")
            assert found == pytest.approx(np.frombuffer(vector, "<f4"), rel=1e-5, abs=1e-5), name
        two.until(lambda: at_rest(two))
