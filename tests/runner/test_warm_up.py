"""Warm-up steps before the first request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fd_core.config import Limits
from fd_core.ops.warm_up import WarmUpRow, WarmUpStep
from fd_core.runner.warm_up import warm_up_plans
from fd_core.types import SamplingParams
from tests.engine.helpers import null_engine

LIMITS = Limits(
    max_num_seqs=4,
    max_num_batched_tokens=20,
    max_model_len=12,
    block_size=4,
    num_kv_blocks=3,
    vocab_size=50,
    max_drafts=2,
)


@pytest.mark.parametrize(("most", "length"), [(None, 64), (5, 5), (1000, 64)])
def test_warm_up_prefill_has_maximum_or_pack_length(monkeypatch, most, length):
    engine = null_engine(max_num_batched_tokens=64)
    runner, computed = engine.probe().runner, []
    monkeypatch.setattr(
        runner, "execute", lambda plan: computed.append((plan.num_tokens.tolist(), plan.starts.tolist()))
    )
    monkeypatch.setattr(runner.ops, "warm_up_tokens", most)
    calls = []
    assert runner.warm_up(lambda *progress: calls.append(progress)) > 0
    engine.close()
    assert computed == [([length], [0]), ([1], [length])]
    assert calls == [(0, 2), (1, 2), (2, 2)]


def test_pack_warm_up_steps_follow_with_separate_draft_steps() -> None:
    params = SamplingParams(top_k=3)
    drafting = (WarmUpRow(5, 2), WarmUpRow(1, 2))
    plans = warm_up_plans(LIMITS, 7, [(WarmUpRow(9, params=params), WarmUpRow()), drafting])
    assert [plan.step for plan in plans] == [0, 1, 2, 3, 4]
    assert plans[2].num_tokens.tolist() == [9, 1]
    assert [each.params for each in plans[2].admissions] == [params, WarmUpRow().params]
    verified = plans[4]
    assert (verified.starts.tolist(), verified.num_tokens.tolist(), verified.num_drafts.tolist()) == (
        [5, 1],
        [3, 3],
        [2, 2],
    )
    for plan in plans:  # each within existing blocks, with room for sampled tokens
        assert all(grant.blocks.max() < LIMITS.num_kv_blocks for grant in plan.grants)
        assert int(plan.num_tokens.sum()) <= LIMITS.max_num_batched_tokens


@pytest.mark.parametrize(
    "beyond",
    [
        (WarmUpRow(),) * 5,
        (WarmUpRow(11), WarmUpRow(10)),
        (WarmUpRow(12),),
        (WarmUpRow(10, 2),),
        (WarmUpRow(1, 3),),
        (WarmUpRow(1, 1), WarmUpRow(1)),
        (),
    ],
)
def test_warm_up_steps_beyond_limits_are_skipped(beyond: WarmUpStep) -> None:
    assert len(warm_up_plans(LIMITS, 7, [beyond])) == 2


def test_warm_up_leaves_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are really verified, and neither tokens nor penalties are kept."""
    engine = null_engine(max_num_batched_tokens=64, max_num_seqs=4, max_forced_tokens=2)
    runner = engine.probe().runner
    assert runner.limits.max_drafts == 2
    seen: list[Any] = []
    wanted: Sequence[WarmUpStep] = [(WarmUpRow(3, 2, SamplingParams(presence_penalty=1.0, logprobs=1)),) * 2]
    monkeypatch.setattr(type(runner.ops), "warm_up_steps", lambda ops, limits: wanted)
    monkeypatch.setattr(type(runner.ops), "warmed_up", lambda ops: seen.append("warmed up"))
    execute = type(runner).execute

    def watched(plan: Any) -> Any:
        output = execute(runner, plan)
        seen.append((output.tokens >= 0).sum().item())
        return output

    monkeypatch.setattr(runner, "execute", watched)
    computed: list[int] = []
    runner.watch_forward(lambda step: computed.append(len(step.token_ids)))
    runner.warm_up(lambda done, total: None)
    assert computed == [64, 1, 6, 6]
    assert seen[-1] == "warmed up"
    assert (runner.batch.length == 0).all()
    assert not runner._sampler.penalties.num_rows
    engine.close()
