"""What is computed before the first request."""

from __future__ import annotations

import pytest

from tests.engine.helpers import null_engine


@pytest.mark.parametrize(("most", "length"), [(None, 64), (5, 5), (1000, 64)])
def test_a_warm_up_is_the_longest_prefill_or_as_long_as_the_pack_says(monkeypatch, most, length):
    engine = null_engine(max_num_batched_tokens=64)
    runner, computed = engine.probe().runner, []
    monkeypatch.setattr(
        runner, "execute", lambda plan: computed.append((plan.num_tokens.tolist(), plan.starts.tolist()))
    )
    monkeypatch.setattr(runner.ops, "warm_up_tokens", most)
    told = []
    assert runner.warm_up(lambda *progress: told.append(progress)) > 0
    engine.close()
    assert computed == [([length], [0]), ([1], [length])]
    assert told == [(0, 2), (1, 2), (2, 2)]
