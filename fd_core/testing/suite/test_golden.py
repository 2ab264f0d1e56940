"""Golden stream with forced tokens: a text depends only on model, prompt, parameters and seed; protocol 4."""

from __future__ import annotations

from typing import Any

import pytest

from fd_core.testing.kit.judging import Golden
from fd_core.testing.kit.requirements import thorough_but
from fd_core.testing.kit.target import Target
from fd_core.testing.models.texts import greedy, run
from fd_core.types import Reasoning


@pytest.mark.parametrize("k", thorough_but([0, 3], 0))
@pytest.mark.law("4")
def test_forced_tokens_appear_in_place_and_change_no_others(target: Target, golden: Golden, k: int) -> None:
    """Combine masks with filters, penalties and log-probabilities, also in rows with drafts, by forcing the end of
    reasoning."""
    end = (11, 12, 11, 13)
    specs = [
        greedy(
            f"r{index}",
            [(7 * index + 3 * place) % 90 for place in range(3 + 5 * index)],
            18,
            temperature=float(target.exact and index % 2),
            seed=index,
            top_k=20 * (index % 2),
            presence_penalty=0.5 * (index % 3 == 2),
            logprobs=2 if index % 3 == 0 else None,
            reasoning=Reasoning(end=end, max_tokens=index),
        )
        for index in range(6)
    ]
    room: dict[str, Any] = {"num_kv_blocks": 200, "max_num_batched_tokens": 256, "max_num_seqs": 8}
    with target.engine(k, golden.whole(specs), 0.3, structured_output=True, **room) as engine:
        texts = run(engine, specs).tokens
        masks = engine.stats().masks
    assert masks is not None and 0 < masks.forced_accepted == masks.forced_drafted
    for index, spec in enumerate(specs):
        text = texts[spec.request_id]
        assert any(tuple(text[place : place + len(end)]) == end for place in range(index + 1)), text
    if target.exact:
        golden.check(specs, texts)
