import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fd_core.cli.bench.compare.stats import PeerRun, RequestResult, agreement, paired_ratio, summarise, wrong_counts


def run(engine="a", round_number=1, wall=1.0, tokens=((1, 2, 3),), ttft=0.1, workload="w1"):
    requests = tuple(RequestResult(tuple(t), ttft, wall) for t in tokens)
    return PeerRun(engine, workload, round_number, wall, requests)


def test_figures_of_one_run():
    one = run(wall=2.0, tokens=[(1, 2, 3, 4, 5)] * 4, ttft=0.4)
    assert one.output_tps == 10
    assert one.ttft_s == 0.4
    assert one.tpot_s == pytest.approx(1.6 / 4)


def test_single_token_has_no_time_per_further_token():
    assert math.isnan(run(tokens=[(1,)]).tpot_s)


def test_ratios_are_taken_inside_rounds_so_drift_cancels():
    # The machine halves its speed from round to round; the engine is always twice as fast as the reference.
    mine = [run("a", i, wall=1.0 * 2**i) for i in range(3)]
    reference = [run("b", i, wall=2.0 * 2**i) for i in range(3)]
    assert paired_ratio(mine, reference) == pytest.approx(2)
    assert paired_ratio(mine, []) is None
    assert paired_ratio(mine[:1], reference[1:]) is None


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=9), st.floats(0.1, 10))
def test_engine_that_is_always_k_times_as_fast_has_ratio_k(walls, k):
    mine = [run("a", i, wall=w / k) for i, w in enumerate(walls)]
    reference = [run("b", i, wall=w) for i, w in enumerate(walls)]
    assert paired_ratio(mine, reference) == pytest.approx(k)


def test_wrong_counts_list_missing_requests_and_tokens():
    assert wrong_counts(run(tokens=[(1, 2, 3), (1, 2)]), [3, 2]) == []
    problems = " / ".join(wrong_counts(run(tokens=[(1, 2), (1, 2, 3)]), [3, 3, 3]))
    assert "2 of 3 requests" in problems
    assert "returned 2 tokens instead of 3" in problems


def test_agreement_ends_at_the_first_difference_of_each_request():
    one = run(tokens=[(1, 2, 3, 4), (5, 6, 7, 8)])
    other = run(tokens=[(1, 2, 9, 4), (5, 6, 7, 8)])
    assert agreement(one, one) == 1
    assert agreement(one, other) == (2 + 4) / 8
    assert agreement(one, other, tokens=2) == 1


def test_summary_has_medians_ratio_floor_and_the_first_other_judge():
    runs = [run("a", i, wall=w, tokens=[(1, 2)]) for i, w in enumerate((1.0, 4.0, 2.0))]
    runs += [run("b", i, wall=2.0, tokens=[(1, 3)]) for i in range(3)]
    a, b = summarise(runs, reference="b", judge=("a", "b"), floor_s=0.19)
    assert (a.engine, a.rounds, a.output_tps, a.output_tps_range) == ("a", 3, 1.0, (0.5, 2.0))
    assert a.ratio == 1.0
    assert a.floor_share == pytest.approx(0.19 / 1.9)
    assert a.agreement == b.agreement == 0.5
    assert b.ratio == 1.0


def test_engine_with_other_results_gets_no_ratio():
    runs = [run("good", tokens=[(1, 2)] * 4), run("trusted", tokens=[(1, 2)] * 4), run("wrong", tokens=[(9, 9)] * 4)]
    ratios = {s.engine: s.ratio for s in summarise(runs, reference="good", judge=("trusted", "good"))}
    assert ratios == {"good": 1.0, "trusted": 1.0, "wrong": None}


def test_summary_without_reference_floor_or_judge_leaves_them_out():
    (alone,) = summarise([run()], reference="missing")
    assert (alone.ratio, alone.floor_share, alone.agreement) == (None, None, None)
