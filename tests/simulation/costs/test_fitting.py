"""Fitting cost terms to measured steps."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from fd_core.config import Limits
from fd_core.simulation.costs.fitting import (
    MeasuredStep,
    cases_of,
    errors_of,
    first_plan,
    fit_steps,
    nonnegative_least_squares,
    predict,
)
from fd_core.simulation.costs.naming import profile_named
from fd_core.simulation.costs.profile import CostCurve, Costs, StepTerms, step_features
from tests.simulation.costs.plans import Row, plan_of

LIMITS = Limits(
    max_num_seqs=32,
    max_num_batched_tokens=512,
    max_model_len=8192,
    block_size=32,
    num_kv_blocks=4096,
    vocab_size=1000,
    max_drafts=3,
)
TRUE = StepTerms(
    constant=4e-3,
    by_tokens=CostCurve(counts=(1.0, 4.0, 16.0, 512.0), seconds=(0.0, 1e-4, 6e-3, 0.3)),
    by_sampled_rows=CostCurve(counts=(0.0, 1.0, 2.0), seconds=(0.0, 1e-3, 1.2e-3)),
    per_row=5e-5,
    per_context_token=6e-7,
    per_query_key=3e-7,
    per_draft=1e-4,
)


def measured(noise: float, *, disturbed: float = 0.0) -> tuple[list[MeasuredStep], list[MeasuredStep]]:
    """Return the steps of a calibration according to `TRUE`: fitted ones and held-out ones."""
    draw = np.random.default_rng(3)
    fitted, held = [], []
    for case in cases_of(LIMITS, draw):
        features = step_features(first_plan(case, 1, 0, LIMITS.vocab_size, LIMITS.block_size))
        seconds = float(predict(TRUE, features)[0]) * (1 + noise * draw.standard_normal())
        if not case.held_out and draw.random() < disturbed:
            seconds *= 3
        (held if case.held_out else fitted).append(MeasuredStep(case.kind, features, seconds))
    return fitted, held


def test_terms_are_recovered_from_noisy_steps() -> None:
    fitted, held = measured(0.03)
    terms = fit_steps(fitted)
    assert terms.constant == pytest.approx(TRUE.constant, rel=0.2)
    assert terms.per_context_token == pytest.approx(TRUE.per_context_token, rel=0.1)
    assert terms.per_query_key == pytest.approx(TRUE.per_query_key, rel=0.1)
    assert terms.per_draft == pytest.approx(TRUE.per_draft, rel=0.5)
    assert terms.by_tokens.seconds[-1] == pytest.approx(0.3, rel=0.05)
    errors = errors_of(terms, held)
    assert [error.kind for error in errors] == ["decode", "prefill", "mixed", "drafts"]
    assert all(error.mean < 0.05 and error.p99 < 0.15 for error in errors)


def test_outlier_steps_hardly_affect_the_fit() -> None:
    fitted, held = measured(0.01, disturbed=0.1)
    assert all(error.mean < 0.08 for error in errors_of(fit_steps(fitted), held))


def test_exact_fits_keep_their_weight() -> None:
    """Terms that fit most of a few steps have zero residuals there, which must not discard the other steps."""
    draw = np.random.default_rng(5)
    features = [(1, 1, 1, 33, 33, 0), (2, 2, 2, 66, 66, 0), (16, 1, 1, 16, 136, 0), (8, 1, 1, 8, 36, 0)]
    for _ in range(500):
        steps = [MeasuredStep("decode", each, 1e-4 * float(np.exp(0.5 * draw.standard_normal()))) for each in features]
        terms = fit_steps(steps)
        assert min(predict(terms, step.features)[0] for step in steps) > 0


def test_predictions_equal_simulated_costs() -> None:
    rows = (Row(30), Row(4, tokens=3, drafts=2), Row(10, tokens=700, samples=False))
    costs = Costs(msgspec.structs.replace(profile_named("h100:llama-8b"), step=TRUE))
    for plan in (plan_of(*rows), plan_of(rows[0]), plan_of(rows[2])):
        assert predict(TRUE, step_features(plan))[0] == pytest.approx(costs.step(plan))


def test_fitted_terms_are_non_negative() -> None:
    # Steps get faster with context here: pure noise, which must not become a term.
    steps = [MeasuredStep("decode", (n, n, n, n * 100, n * 100.0, 0), 1.0 / n) for n in (1, 2, 4, 8)]
    terms = fit_steps(steps)
    assert min(terms.constant, *terms.by_tokens.seconds, terms.per_row, terms.per_context_token) >= 0


def test_fitting_without_steps_is_rejected() -> None:
    with pytest.raises(ValueError, match="no steps"):
        fit_steps([])


def test_unconstrained_solution_equals_least_squares() -> None:
    draw = np.random.default_rng(5)
    a, x = draw.random((40, 6)), draw.random(6)
    assert np.allclose(nonnegative_least_squares(a, a @ x), x)


def test_negative_components_are_clamped_to_zero() -> None:
    draw = np.random.default_rng(6)
    a = draw.random((40, 5))
    b = a @ np.array([1.0, -2.0, 0.5, 3.0, -0.1])
    x = nonnegative_least_squares(a, b)
    gradient = a.T @ (b - a @ x)
    assert (x >= 0).all()
    assert np.allclose(gradient[x > 0], 0, atol=1e-8)
    assert (gradient[x == 0] <= 1e-8).all()


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_num_seqs": 1, "max_num_batched_tokens": 8, "max_model_len": 64, "num_kv_blocks": 4, "max_drafts": 0},
        {"max_num_seqs": 64, "max_num_batched_tokens": 8192, "max_model_len": 131072, "num_kv_blocks": 30000},
    ],
)
def test_every_calibration_case_is_plannable(limits: dict[str, int]) -> None:

    bound = msgspec.structs.replace(LIMITS, **limits)
    cases = cases_of(bound, np.random.default_rng(1))
    assert {case.kind for case in cases} >= {"decode", "prefill"}
    for case in cases:
        plan = first_plan(case, 1, 0, bound.vocab_size, bound.block_size)
        granted = np.concatenate([grant.blocks for grant in plan.grants])
        again = case.shared // bound.block_size * (len(case.rows) - 1)
        assert len(set(granted.tolist())) == len(granted) - again <= bound.num_kv_blocks
        assert 0 < plan.total_tokens <= bound.max_num_batched_tokens
        assert (plan.num_tokens > plan.num_drafts).all()
        assert len(plan.slots) <= bound.max_num_seqs
        for grant, start, tokens in zip(plan.grants, plan.starts, plan.num_tokens, strict=True):
            assert len(grant.blocks) * bound.block_size >= start + tokens
            assert start + tokens < bound.max_model_len
