"""Structured output: identical in any batch, with and without drafts, and always valid."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fd_core.config import SpeculativeConfig
from fd_core.engine.core import Engine
from fd_core.structured import grammar
from fd_core.text.tokenizer import byte_tokenizer
from fd_core.types import FinishReason, RequestSpec, SamplingParams
from tests.engine.helpers import EOS, null_engine, run
from tests.engine.structured import GRAMMARS, THINK, matches, structured_specs

SPECS = structured_specs(24)
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=4, cheap_tokens=1000)
TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """Return the texts of requests run one at a time, without drafts."""
    texts = {}
    for spec in SPECS:
        engine = null_engine(max_num_seqs=1, num_kv_blocks=200, max_num_batched_tokens=1024, max_forced_tokens=0)
        texts |= run(engine, [spec]).tokens
        assert engine.stats().scheduler.counters.steps == len(texts[spec.request_id]), "drafts should be off"
        engine.close()
    return texts


def answer_of(spec: RequestSpec, tokens: list[int]) -> str:
    """Return the text after the reasoning."""
    if spec.params.reasoning is not None:
        position = next(i for i in range(len(tokens)) if tuple(tokens[i : i + len(THINK)]) == THINK)
        assert position <= (spec.params.reasoning.max_tokens or 0)
        tokens = tokens[position + len(THINK) :]
    return TOKENIZER.decode(tokens)


def test_finished_texts_satisfy_their_constraints(expected: dict[str, list[int]]) -> None:
    ended = [spec for spec in SPECS if expected[spec.request_id][-1] in EOS and spec.params.grammar is not None]
    assert len(ended) > 10
    for spec in ended:
        assert matches(spec.request_id.partition("-")[0], answer_of(spec, expected[spec.request_id]))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("speculative", [None, NGRAM], ids=["forced", "ngram"])
@pytest.mark.law("4")
def test_preemption_does_not_change_structured_texts(
    expected: dict[str, list[int]], depth: int, speculative: SpeculativeConfig | None
) -> None:
    engine = null_engine(num_kv_blocks=25, pipeline_depth=depth, speculative=speculative)
    assert run(engine, SPECS).tokens == expected
    stats = engine.stats()
    assert stats.scheduler.counters.preemptions > 0, "the pool should run out"
    assert stats.masks is not None and stats.grammars is not None
    assert 0 < stats.masks.forced_accepted == stats.masks.forced_drafted, "forced tokens are always kept"
    assert stats.grammars.compiled == len(GRAMMARS)
    assert stats.scheduler.outputs.stale_outputs == 0
    engine.close()


@settings(max_examples=20, deadline=None)
@given(
    slots=st.integers(1, 9),
    budget=st.integers(1, 80),
    blocks=st.integers(25, 60),
    depth=st.integers(1, 3),
    forced=st.integers(0, 9),
    caching=st.booleans(),
)
@pytest.mark.law("4")
def test_limits_do_not_change_structured_texts(
    expected: dict[str, list[int]], slots: int, budget: int, blocks: int, depth: int, forced: int, caching: bool
) -> None:
    engine = null_engine(
        max_num_seqs=slots,
        max_num_batched_tokens=budget,
        num_kv_blocks=blocks,
        pipeline_depth=depth,
        max_forced_tokens=forced,
        enable_prefix_caching=caching,
    )
    specs = SPECS[:8]
    assert run(engine, specs).tokens == {spec.request_id: expected[spec.request_id] for spec in specs}
    engine.close()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.law("1.1", "4")
def test_structured_text_resumes_in_next_epoch(expected: dict[str, list[int]], depth: int) -> None:
    for spec in SPECS[:8]:
        text = expected[spec.request_id]
        for cut in sorted({1, 2, len(text) // 2, len(text) - 1}):
            if not 0 < cut < len(text):
                continue
            engine = null_engine(pipeline_depth=depth)
            resumed = msgspec.structs.replace(spec, delivered=tuple(text[:cut]))
            assert run(engine, [resumed]).tokens[spec.request_id] == text[cut:]
            engine.close()


def test_logprobs_are_exact_with_and_without_forced_drafts() -> None:
    asking = [spec for spec in SPECS if spec.params.logprobs is not None]
    plain = run(null_engine(num_kv_blocks=200, max_forced_tokens=0), asking)
    forced = run(null_engine(num_kv_blocks=200), asking)
    assert forced.scores == plain.scores
    assert all(len(forced.scores[spec.request_id]) == len(forced.tokens[spec.request_id]) > 0 for spec in asking)


def test_forced_tokens_reduce_steps() -> None:
    schema = [spec for spec in SPECS if spec.request_id.startswith("schema")][:1]
    plain, forced = null_engine(max_forced_tokens=0), null_engine()
    assert run(plain, schema).tokens == run(forced, schema).tokens
    assert forced.stats().scheduler.counters.steps * 2 < plain.stats().scheduler.counters.steps


def asking(**params: object) -> RequestSpec:
    return RequestSpec(
        request_id="it",
        prompt=(1, 2, 3),
        params=SamplingParams(max_tokens=40, **params),  # type: ignore[arg-type]
        eos_token_ids=EOS,
    )


def outcome(engine: Engine, spec: RequestSpec) -> tuple[FinishReason | None, str | None]:
    deltas = engine.submit(spec)
    while engine.has_work:
        deltas += engine.step()
    assert engine.stats().scheduler.slots.running == engine.stats().scheduler.slots.waiting == 0
    return deltas[-1].finish_reason, deltas[-1].error


@pytest.mark.parametrize("depth", [1, 2])
def test_invalid_grammar_ends_request_with_reason(depth: int) -> None:
    engine = null_engine(pipeline_depth=depth)
    reason, error = outcome(engine, asking(grammar=grammar.context_free("start: foo")))
    assert reason is FinishReason.ERROR
    assert error is not None and 'unknown name: "foo"' in error
    assert outcome(engine, asking(grammar=GRAMMARS["choice"]))[0] is FinishReason.STOP
    engine.close()


def test_dead_end_of_grammar_ends_request_with_reason() -> None:
    engine = null_engine()
    reason, error = outcome(engine, asking(grammar=grammar.context_free("start: /a/ nothing\nnothing: nothing")))
    assert (reason, error) == (
        FinishReason.ERROR,
        "no token can be chosen: the grammar allows no further token",
    )
    engine.close()


def test_engine_without_structured_output_rejects_grammars() -> None:
    engine = null_engine(structured_output=False)
    reason, error = outcome(engine, asking(grammar=GRAMMARS["choice"]))
    assert reason is FinishReason.ERROR and error is not None and "disabled" in error
    assert engine.probe().runner.limits.max_drafts == 0
    engine.close()


def test_truncated_structured_text_reports_length() -> None:
    engine = null_engine()
    spec = asking(grammar=GRAMMARS["schema"])
    short = msgspec.structs.replace(spec, params=msgspec.structs.replace(spec.params, max_tokens=5))
    assert outcome(engine, short)[0] is FinishReason.LENGTH
    engine.close()


def test_logit_bias_does_not_override_grammar() -> None:
    engine = null_engine()
    (forbidden,) = TOKENIZER.encode("Q", add_special=False)
    texts = run(engine, [asking(grammar=GRAMMARS["regex"], logit_bias={forbidden: 100.0})])
    assert forbidden not in texts.tokens["it"]
    assert np.isin(EOS, texts.tokens["it"][-1:]).all()
    engine.close()
