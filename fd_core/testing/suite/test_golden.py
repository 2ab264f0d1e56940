"""Golden stream: a text depends only on model, prompt, parameters and seed; protocol 4."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from fd_core.testing.kit.judging import Golden
from fd_core.testing.kit.requirements import thorough_but
from fd_core.testing.kit.target import Target
from fd_core.testing.models.stepper import parts_of
from fd_core.testing.models.texts import Texts, greedy, run
from fd_core.types import Pooling, Reasoning, RequestSpec, SamplingParams, TokenLogprobs

PROMPTS = [[(11 * index + 3 * place) % 90 for place in range(length)] for index, length in enumerate((1, 2, 13, 31))]
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
ROOM: dict[str, Any] = {"num_kv_blocks": 200, "max_num_batched_tokens": 256, "max_num_seqs": 8}


def line(index: int, length: int) -> list[int]:
    return [(7 * index + 3 * place) % 90 for place in range(length)]


def spec_of(target: Target, index: int, **params: Any) -> RequestSpec:
    """Return one of several requests of different lengths; with exact dtypes, half are random."""
    heat = float(target.exact and index % 2)
    return greedy(f"r{index}", line(index, 3 + 5 * index), 18, temperature=heat, seed=index, **params)


def specs_of(target: Target, count: int = 6) -> list[RequestSpec]:
    return [spec_of(target, index, **limits_of(index) if target.exact else {}) for index in range(count)]


def limits_of(index: int) -> dict[str, Any]:
    """Return banned tokens: every third request bans pairs, every third most of the vocabulary."""
    if index % 3 == 1:
        return {"bad_words_token_ids": tuple((one, (7 * one + step) % 90) for one in range(90) for step in range(9))}
    return {"allowed_token_ids": tuple(range(0, 90, 2))} if index % 3 == 2 else {}


def check(target: Target, golden: Golden, specs: Sequence[RequestSpec], **changes: Any) -> None:
    """Run requests together and compare their texts with the expected ones."""
    with target.engine(**ROOM | changes) as engine:
        golden.check(specs, run(engine, specs).tokens)


def one_by_one(target: Target, specs: Sequence[RequestSpec]) -> Texts:
    """Return the oracle's texts of isolated requests."""
    with target.oracle.engine(**ROOM | {"max_num_seqs": 1, "enable_prefix_caching": False}) as engine:
        return run(engine, specs)


@pytest.mark.parametrize("slots", thorough_but([1, 8], 8))
@pytest.mark.law("4")
def test_batching_changes_no_text(target: Target, golden: Golden, slots: int) -> None:
    check(target, golden, specs_of(target), max_num_seqs=slots)


@pytest.mark.parametrize("budget", thorough_but([1, 7, 24], 7))
@pytest.mark.law("4")
def test_chunking_changes_no_text(target: Target, golden: Golden, budget: int) -> None:
    check(target, golden, specs_of(target), max_num_batched_tokens=budget)


@pytest.mark.parametrize("size", thorough_but([1, 8, 32], 8))
def test_the_size_of_blocks_changes_no_text(target: Target, golden: Golden, size: int) -> None:
    check(target, golden, specs_of(target, 4), block_size=size)


@pytest.mark.law("4")
def test_a_shared_prefix_changes_no_text(target: Target, golden: Golden) -> None:
    prefix = [(5 * place) % 90 for place in range(24)]
    specs = [greedy(f"r{index}", [*prefix, index], 12) for index in range(5)]
    with target.engine(**ROOM) as engine:
        golden.check(specs, run(engine, specs).tokens)
        assert engine.stats().scheduler.counters.prefix_hits == 4 * 24


@pytest.mark.parametrize("depth", thorough_but([1, 2, 3], 2))
@pytest.mark.parametrize("keep", [True, False], ids=["kept", "recomputed"])
@pytest.mark.law("4")
def test_preemption_changes_no_text(target: Target, golden: Golden, keep: bool, depth: int) -> None:
    limits = [limits_of(index) if target.exact else {} for index in range(6)]
    specs = [greedy(f"r{index}", line(index, min(3 + 5 * index, 20)), 38, **each) for index, each in enumerate(limits)]
    with target.engine(pipeline_depth=depth, save_preempted_kv=keep) as engine:
        probe = parts_of(engine)
        probe.control.growth = lambda *_: 0  # type: ignore[method-assign]  # admits all requests at once
        golden.check(specs, run(engine, specs).tokens)
        assert engine.stats().scheduler.counters.preemptions > 0


@pytest.mark.parametrize("wrong", thorough_but([0.0, 0.3, 1.0], 0.3))
@pytest.mark.parametrize("k", thorough_but([1, 3, 5], 3))
@pytest.mark.law("4")
def test_speculation_changes_no_text(target: Target, golden: Golden, k: int, wrong: float) -> None:
    specs = specs_of(target)
    with target.engine(k, golden.whole(specs), wrong, **ROOM) as engine:
        golden.check(specs, run(engine, specs).tokens)
        stats = engine.stats()
    if wrong == 1.0:
        assert stats.scheduler.drafts.accepted == 0
    elif wrong == 0.0 and target.exact:
        assert stats.scheduler.drafts.accepted > 0.8 * stats.scheduler.drafts.proposed


@pytest.mark.parametrize("k", thorough_but([0, 3], 3))
def test_banned_tokens_are_never_generated(target: Target, golden: Golden, k: int) -> None:
    specs = [greedy(f"r{index}", [index, 5], 24, **limits_of(index)) for index in range(6)]
    free = [greedy(spec.request_id, spec.prompt, 24) for spec in specs]
    with target.engine(k, golden.whole(free), 0.0, **ROOM) as engine:
        texts = run(engine, specs).tokens
    for spec in specs:
        text, params = texts[spec.request_id], spec.params
        assert not {*itertools.pairwise(text)} & {*params.bad_words_token_ids}
        assert params.allowed_token_ids is None or {*text} <= {*params.allowed_token_ids}


@pytest.mark.parametrize("k", thorough_but([0, 3], 0))
@pytest.mark.law("4")
def test_forced_tokens_appear_in_place_and_change_no_others(target: Target, golden: Golden, k: int) -> None:
    """Combine masks with filters, penalties and log-probabilities, also in rows with drafts, by forcing the end of
    reasoning."""
    end = (11, 12, 11, 13)
    specs = [
        spec_of(
            target,
            index,
            top_k=20 * (index % 2),
            presence_penalty=0.5 * (index % 3 == 2),
            logprobs=2 if index % 3 == 0 else None,
            reasoning=Reasoning(end=end, max_tokens=index),
        )
        for index in range(6)
    ]
    with target.engine(k, golden.whole(specs), 0.3, structured_output=True, **ROOM) as engine:
        texts = run(engine, specs).tokens
        masks = engine.stats().masks
    assert masks is not None and 0 < masks.forced_accepted == masks.forced_drafted
    for index, spec in enumerate(specs):
        text = texts[spec.request_id]
        assert any(tuple(text[place : place + len(end)]) == end for place in range(index + 1)), text
    if target.exact:
        golden.check(specs, texts)


@pytest.mark.parametrize("k", thorough_but([0, 3], 3))
def test_log_probabilities_are_those_of_a_run_alone(target: Target, golden: Golden, k: int) -> None:
    specs = [greedy(spec.request_id, spec.prompt, 12, logprobs=3) for spec in specs_of(target, 4)]
    alone = one_by_one(target, specs)
    with target.engine(k, golden.whole(specs), 0.3, **ROOM) as engine:
        texts = run(engine, specs)
    for spec in specs:
        mine, theirs = texts.scores[spec.request_id], alone.scores[spec.request_id]
        assert len(mine) == len(theirs) == 12
        if target.exact:
            assert [score.top_ids for score in mine] == [score.top_ids for score in theirs]
            for ours, right in zip(mine, theirs, strict=True):
                assert (ours.logprob, *ours.top) == pytest.approx((right.logprob, *right.top), abs=1e-4)


def scored(name: str, prompt: Sequence[int], top_n: int = 3, **params: Any) -> RequestSpec:
    return greedy(name, prompt, params.pop("max_tokens", 4), prompt_logprobs=top_n, **params)


def assert_scores(
    target: Target, found: Mapping[str, Sequence[TokenLogprobs]], right: Mapping[str, Sequence[TokenLogprobs]]
) -> None:
    exact = target.exact
    for name, theirs in right.items():
        mine = found[name]
        assert len(mine) == len(theirs)
        for place, (ours, best) in enumerate(zip(mine, theirs, strict=True), 1):
            assert ours.logprob == pytest.approx(best.logprob, abs=1e-4 if exact else 0.5), f"token {place} of {name}"
            assert ours.top == pytest.approx(best.top, abs=1e-4 if exact else 0.5), f"token {place} of {name}"
            assert not exact or (ours.top_ids, ours.rank) == (best.top_ids, best.rank)


@pytest.mark.parametrize("budget", thorough_but([1, 7, 256], 7))
@pytest.mark.law("4")
def test_log_probabilities_of_prompts_are_the_oracles(target: Target, budget: int) -> None:
    """Score prompts in chunks and in one step, along with other requests, and again with a cached prefix."""
    specs = [scored(f"p{index}", prompt) for index, prompt in enumerate(PROMPTS)]
    alone = one_by_one(target, specs)
    others = [greedy("plain", [5, 6, 7], 20), scored("least", PROMPTS[3], 0)]
    with target.engine(**ROOM | {"max_num_batched_tokens": budget}) as engine:
        texts = run(engine, [*specs, *others])
        again = run(engine, specs)
        assert again.tokens.keys() == alone.tokens.keys()
    assert [len(alone.prompt_scores[spec.request_id]) for spec in specs] == [0, 1, 12, 30]
    assert_scores(target, texts.prompt_scores, alone.prompt_scores)
    assert_scores(target, again.prompt_scores, alone.prompt_scores)
    assert "plain" not in texts.prompt_scores
    assert {score.top for score in texts.prompt_scores["least"]} == {()}


@pytest.mark.law("4")
def test_log_probabilities_of_prompts_survive_preemption(target: Target) -> None:
    specs = [scored(f"p{index}", line(index, 20), max_tokens=38) for index in range(6)]
    alone = one_by_one(target, specs)
    with target.engine(pipeline_depth=2) as engine:
        parts_of(engine).control.growth = lambda *_: 0  # type: ignore[method-assign]  # admits all requests at once
        texts = run(engine, specs)
        assert engine.stats().scheduler.counters.preemptions > 0
    assert_scores(target, texts.prompt_scores, alone.prompt_scores)


@pytest.mark.parametrize("budget", thorough_but([1, 7, 256], 7))
@pytest.mark.law("4")
def test_vectors_of_prompts_are_the_oracles(target: Target, budget: int) -> None:
    """Embed prompts in chunks and in one step, along with texts, and again with a cached prefix."""
    wanted = (Pooling("last"), Pooling("mean"), Pooling("tokens", (5, 88)))
    specs = [
        RequestSpec(request_id=f"{pooling.kind}{index}", prompt=tuple(prompt), params=ONE_TOKEN, pooling=pooling)
        for pooling in wanted
        for index, prompt in enumerate(PROMPTS)
    ]
    alone = one_by_one(target, specs).vectors
    with target.engine(**ROOM | {"max_num_batched_tokens": budget}) as engine:
        texts = run(engine, [greedy("plain", [5, 6, 7], 20), *specs]).vectors
        again = run(engine, specs).vectors
    for spec in specs:
        right = np.frombuffer(alone[spec.request_id], "<f4")
        margin = (1e-4 if target.exact else 0.1) * max(float(np.abs(right).max()), 1.0)
        for found in (texts, again):
            vector = np.frombuffer(found[spec.request_id], "<f4")
            assert vector == pytest.approx(right, abs=margin), spec.request_id
