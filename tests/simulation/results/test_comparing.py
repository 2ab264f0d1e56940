"""Comparisons: real differences are found, noise is not reported, and one seed gives no confidence."""

from __future__ import annotations

import numpy as np
import pytest

from fd_core.errors import ConfigError
from fd_core.simulation.results.comparing import FIGURES, compare, figure_named, interval
from fd_core.simulation.results.slo import parse_slo
from fd_core.simulation.results.summary import RunSummary, summarize
from tests.simulation.results.made_up import outcome, queued, run_of

SLO = parse_slo("ttft_p99=0.5,tpot_p99=0.05")


def runs(seeds: int, *, slower: float = 1.0, noise: int = 0) -> list[RunSummary]:
    return [summarize(queued(150, seed=seed, slower=slower, noise=noise), SLO) for seed in range(seeds)]


def test_slower_setting_loses_significantly() -> None:
    found = compare({"plain": runs(5), "slower": runs(5, slower=1.1, noise=1)}, FIGURES["e2e_mean"])
    assert (found.best, found.wins) == ("plain", True)
    verdicts = {each.figure: each.verdict for each in found.differences}
    assert verdicts["e2e_mean"] == verdicts["tpot_mean"] == "worse"
    assert found.words.startswith("plain wins by End to end mean (e2e_mean): -") and "5 seeds" in found.words


def test_noise_alone_is_no_difference() -> None:
    found = compare({"plain": runs(5), "lucky": runs(5, noise=1)}, FIGURES["e2e_mean"])
    assert not found.wins and found.words.startswith("No winner by")
    assert {each.figure: each.verdict for each in found.differences}["e2e_mean"] == "noise"
    assert all(each.more.low is not None and each.more.low <= 0 <= (each.more.high or 0) for each in found.lead)


def test_single_seed_has_no_confidence() -> None:
    found = compare({"plain": runs(1), "slower": runs(1, slower=1.5)}, FIGURES["e2e_mean"])
    assert (found.best, found.wins) == ("plain", False)
    assert "with one seed, which may be noise" in found.words
    assert {each.verdict for each in found.differences} == {"one seed"}
    assert all(each.more.low is None for each in found.differences)


def test_seeds_are_paired() -> None:
    """Lengths differ far more between seeds than between settings."""

    def made(extra: float) -> list[RunSummary]:
        ends = {seed: 1.0 + 10.0 * seed + extra * (1 + seed / 100) for seed in range(4)}
        return [summarize(run_of(outcome(ended=end), seed=seed)) for seed, end in ends.items()]

    found = compare({"plain": made(0.0), "slower": made(0.1)}, FIGURES["e2e_mean"])
    lead = found.lead[0].more
    assert found.wins and lead.mean == pytest.approx(-0.1015)
    apart = [found.figures[setting]["e2e_mean"] for setting in found.settings]
    assert all(each.low is not None and each.high is not None and each.high - each.low > 10 for each in apart)


def test_interval_is_students_t() -> None:
    found = interval([1.0, 2.0, 4.0])
    wide = 4.302652729911275 * np.std([1, 2, 4], ddof=1) / 3**0.5  # from a table of t, two degrees of freedom
    assert found.mean == pytest.approx(7 / 3)
    assert (found.low, found.high) == pytest.approx((7 / 3 - wide, 7 / 3 + wide))
    ninety = interval([0.0, 1.0, 2.0, 3.0, 4.0], 0.9)
    assert ninety.high == pytest.approx(2 + 2.13184678 * (2.5 / 5) ** 0.5)


def test_interval_has_its_nominal_coverage() -> None:
    draw = np.random.default_rng(7)
    found = [interval(draw.normal(3.0, 2.0, 4).tolist()) for _ in range(1000)]
    held = sum((each.low or 0) <= 3.0 <= (each.high or 0) for each in found)
    assert 925 <= held <= 975


def test_best_of_many_is_corrected_for_multiple_comparisons() -> None:
    """Eight settings that differ by noise alone: of 28 uncorrected pairs, one would often seem significant."""
    draw, wins = np.random.default_rng(11), 0
    for _ in range(20):
        by_luck = {
            str(index): [
                summarize(run_of(outcome(ended=float(end)), seed=seed))
                for seed, end in enumerate(draw.normal(10, 1, 4))
            ]
            for index in range(8)
        }
        wins += compare(by_luck, FIGURES["e2e_mean"]).wins
    assert wins <= 1


def test_equal_settings_are_reported_as_equal() -> None:
    found = compare({"one": runs(3), "same": runs(3)})
    assert found.by == "goodput" and not found.wins
    assert found.words == "one and same are equal by Goodput (goodput) in each of 3 seeds."


def test_equal_settings_with_one_seed_are_reported_as_equal() -> None:
    assert (
        compare({"one": runs(1), "same": runs(1)}).words == "one and same are equal by Goodput (goodput) with one seed."
    )


def test_comparison_uses_common_seeds_only() -> None:
    def made(**ends: float) -> list[RunSummary]:
        return [summarize(run_of(outcome(ended=end), seed=int(seed[1:]))) for seed, end in ends.items()]

    found = compare({"a": made(s0=1.0, s1=1.1, s2=9.0), "b": made(s0=2.0, s1=2.1, s2=1.0), "c": made(s0=3.0, s1=3.1)})
    assert found.best == "a" and [each.more.seeds for each in found.lead] == [2, 2]
    assert [each.more.mean for each in found.lead] == pytest.approx([-1.0, -2.0])


@pytest.mark.parametrize(("degrees", "wide"), [(1, 12.7062047), (2, 4.30265273), (9, 2.26215716), (29, 2.04522964)])
def test_interval_width_matches_t_tables(degrees: int, wide: float) -> None:
    values = [float(index % 2) for index in range(degrees + 1)]
    found = interval(values)
    assert found.high is not None
    assert (found.high - found.mean) / (np.std(values, ddof=1) / len(values) ** 0.5) == pytest.approx(wide)


def test_dropping_requests_does_not_win_by_latency() -> None:
    quick = [run_of(outcome("a", ended=1.0), outcome("b", end="refused", first=None), seed=seed) for seed in range(3)]
    slow = [run_of(outcome("a", ended=2.0 + seed / 99), outcome("b", ended=9.0), seed=seed) for seed in range(3)]
    found = compare({"drops": list(map(summarize, quick)), "serves": list(map(summarize, slow))})
    assert (found.by, found.best, found.wins) == ("e2e_mean", "drops", False)
    assert found.words.endswith("drops is ahead, but completes fewer of them than serves.")
    assert {each.figure: each.verdict for each in found.differences}["lost"] == "better"
    wins = compare({"drops": list(map(summarize, quick)), "serves": list(map(summarize, slow))}, FIGURES["completed"])
    assert (wins.best, wins.wins) == ("serves", True)


def test_settings_without_common_seed_or_metric_not_compared() -> None:
    found = compare({"one": runs(2), "none": [summarize(run_of())]}, FIGURES["e2e_mean"])
    assert (found.best, found.wins, found.lead) == (None, False, ())
    assert "there is no comparison" in found.words


def test_unknown_metric_lists_alternatives() -> None:
    assert figure_named("tpot_p99").title == "TPOT p99"
    with pytest.raises(ConfigError, match="--by: unknown figure 'speed': use one of goodput, attainment") as caught:
        figure_named("speed")
    assert caught.value.field == "--by"
    for name, missing in (("goodput", "slo"), ("attainment", "slo"), ("price", "price")):
        with pytest.raises(ConfigError, match="requires"):
            figure_named(name, **{missing: False})
