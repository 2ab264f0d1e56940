"""Tokens that are accepted in place of the token that the oracle draws."""

from __future__ import annotations

import numpy as np
import pytest

from fd_core.ops.contract import SampleInput
from fd_core.testing.kit.judging import _RecordingOps

VOCAB = 20_000
MARGIN = 1e-3


def rows(seed: int, **changes: float) -> SampleInput:
    settings = {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | changes
    columns = {name: np.array([value], np.int32 if name == "top_k" else np.float32) for name, value in settings.items()}
    place = {"seeds": np.array([seed], np.uint64), "positions": np.array([5], np.int32)}
    return SampleInput(**columns, **place, all_greedy=False, any_filter=bool(changes))


@pytest.mark.parametrize("filters", [{}, {"top_k": 5000}, {"min_p": 1e-6}])
@pytest.mark.parametrize("tilt", [-1.0, 1.0])
def test_draws_from_logits_within_the_margin_are_accepted(filters: dict[str, float], tilt: float) -> None:
    """Errors in one direction shift the draw by many tokens if many are nearly as likely."""
    ops, draw = _RecordingOps(), np.random.default_rng(7)
    moved = 0
    for seed in range(40):
        logits = draw.normal(0.0, 1.0, (1, VOCAB)).astype(np.float32)
        wrong = (logits + np.linspace(-tilt * MARGIN, tilt * MARGIN, VOCAB)).astype(np.float32)
        token = int(ops.sample(wrong, rows(seed, **filters))[0][0])
        moved += token != int(ops.sample(logits, rows(seed, **filters))[0][0])
        if ops.weights(logits, ops.rows, logits.max(axis=1))[0, token]:
            assert ops.may_draw(token, MARGIN)
    assert moved > 10


def test_draw_of_another_random_number_is_rejected() -> None:
    ops, draw = _RecordingOps(), np.random.default_rng(7)
    passed = 0
    for seed in range(100):
        logits = draw.normal(0.0, 1.0, (1, VOCAB)).astype(np.float32)
        token = int(ops.sample(logits, rows(seed + 1000))[0][0])
        ops.sample(logits, rows(seed))
        passed += ops.may_draw(token, MARGIN)
    assert passed <= 2


def test_filtered_token_is_rejected() -> None:
    ops, logits = _RecordingOps(), np.zeros((1, 10), np.float32)
    logits[0, :3] = 5.0
    ops.sample(logits, rows(1, top_k=3))
    assert not any(ops.may_draw(token, MARGIN) for token in range(3, 10))
