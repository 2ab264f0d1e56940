"""Golden stream: a text depends only on model, prompt, parameters and seed; protocol 4."""

from __future__ import annotations

from typing import Any

import pytest

from fd_core.testing.kit.judging import Golden
from fd_core.testing.kit.requirements import thorough_but
from fd_core.testing.kit.target import Target
from fd_core.testing.models.stepper import parts_of
from fd_core.testing.models.texts import greedy, run
from fd_core.types import Reasoning, RequestSpec

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
