"""Texts of a given form, prompts' log-probabilities and vectors in prefill/decode pairs: those of one worker."""

from __future__ import annotations

import numpy as np
import pytest

from fd_core.config import SpeculativeConfig
from fd_core.testing.stepping.stepper import parts_of
from fd_core.testing.stepping.texts import Texts
from fd_core.types import Pooling, RequestSpec, SamplingParams
from tests.engine.building.test_kv_transfer import Pair, at_rest, pair, secret
from tests.engine.helpers import null_engine, run
from tests.engine.structured import structured_specs

__all__ = ["secret"]

SPECS = structured_specs(24)
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=4, cheap_tokens=1000)
PROMPTS = [tuple((index * 37 + place * 11) % 256 for place in range(20 + 9 * index)) for index in range(6)]


@pytest.fixture(scope="module")
def mixed() -> Texts:
    """What one worker that computes everything says, one request at a time and without forced drafts."""
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
    two.until(lambda: at_rest(two), 5)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("speculative", [None, NGRAM], ids=["forced", "ngram"])
@pytest.mark.law("4", "6.2")
def test_texts_have_their_form_behind_a_transferred_prompt(
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
def test_a_decode_side_that_preempts_goes_on_in_the_middle_of_a_form(
    secret: str, mixed: Texts, depth: int, keep: bool
) -> None:
    decode = {"pipeline_depth": depth, "num_kv_blocks": 25, "save_preempted_kv": keep}
    with pair(secret, decode=decode) as two:
        parts_of(two.decode).control.growth = lambda *_: 0  # type: ignore[method-assign]  # admits all requests at once
        two.run(*SPECS)
        same(two, mixed)
        stats = two.decode.stats().scheduler
        assert stats.counters.preemptions > 0, "the pool was meant to run out"
        assert (stats.offload.saved_tokens > 0) is keep
        assert (stats.offload.loads + stats.offload.declined > 0) is keep


@pytest.mark.parametrize("outcome", ["lost", "refused"])
@pytest.mark.law("6.3")
def test_a_form_is_kept_though_no_prompt_is_transferred(secret: str, mixed: Texts, outcome: str) -> None:
    prefill = {"max_model_len": 2} if outcome == "refused" else {}
    with pair(secret, prefill=prefill) as two:
        if outcome == "lost":
            two.prefill.close()
        two.run(*SPECS[:8])
        assert set(two.outcomes.values()) == {outcome, "held"}, "of the shortest prompt nothing is wanted"
        assert two.texts.tokens == {spec.request_id: mixed.tokens[spec.request_id] for spec in SPECS[:8]}


@pytest.mark.law("4", "6.2")
def test_log_probabilities_of_prompts_are_those_of_one_worker(secret: str) -> None:
    """The decode side computes such a prompt itself; what the other one would send holds no log-probabilities."""
    params = SamplingParams(max_tokens=5, temperature=0.0, prompt_logprobs=3)
    specs = [RequestSpec(request_id=f"r{index}", prompt=prompt, params=params) for index, prompt in enumerate(PROMPTS)]
    expected = alone(specs)
    with pair(secret) as two:
        two.run(*specs)
        same(two, expected)
        assert two.texts.prompt_scores == expected.prompt_scores
        assert set(two.outcomes.values()) == {None}


@pytest.mark.law("4", "6.2")
def test_vectors_are_those_of_one_worker(secret: str) -> None:
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
        two.until(lambda: at_rest(two), 5)
