"""Step times computed from the terms of a profile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fd_core.simulation.costs.naming import profile_named
from fd_core.simulation.costs.profile import CostCurve, CostProfile, Costs, KVLink, StepTerms, step_features
from tests.simulation.costs.plans import Row, decodes, plan_of
from tests.speed import slowdown

H100 = profile_named("h100:llama-8b")
FEW = CostCurve(counts=(0.0, 10.0, 20.0), seconds=(0.0, 1.0, 5.0))
TERMS = StepTerms(
    constant=100.0,
    by_tokens=FEW,
    by_sampled_rows=CostCurve(counts=(0.0, 1.0), seconds=(0.0, 7.0)),
    per_row=0.5,
    per_context_token=0.001,
    per_query_key=0.01,
    per_draft=0.25,
)


def made_of(terms: StepTerms) -> CostProfile:
    return msgspec.structs.replace(H100, step=terms)


def test_step_cost_is_sum_of_terms() -> None:
    plan = plan_of(Row(30), Row(4, tokens=3, drafts=2), Row(10, tokens=11, samples=False))
    # 15 tokens, two rows that sample, three rows; contexts 31, 7 and 21; pairs 31, 5 + 6 + 7 and 11 + ... + 21.
    expected = 100 + 3 + 14 + 1.5 + 0.059 + 0.01 * (31 + 18 + 176) + 0.5
    assert Costs(made_of(TERMS)).step(plan) == pytest.approx(expected)


def test_features_do_not_overflow() -> None:
    plan = plan_of(*[Row(1 << 20, tokens=1 << 14)] * 64)
    assert step_features(plan)[4] == 64 * (2.0**34 + 2**27 + 2**13)


def test_curve_extrapolates_with_last_slope() -> None:
    costs = Costs(made_of(msgspec.structs.replace(TERMS, constant=0.0, per_row=0.0)))
    assert costs.step(plan_of(Row(0, tokens=30, samples=False))) == pytest.approx(9 + 0.03 + 0.01 * 465)


def test_curve_is_flat_before_first_point() -> None:
    only = msgspec.structs.replace(TERMS, by_tokens=CostCurve(counts=(8.0,), seconds=(3.0,)))
    rest = 100 + 7 + 0.5 + 0.006 + 0.06
    assert Costs(made_of(only)).step(decodes(1, 5)) == pytest.approx(rest + 3)


def test_preemption_only_plan_costs_nothing() -> None:
    assert Costs(H100).step(plan_of()) == 0.0


ROWS = st.lists(
    st.tuples(st.integers(0, 4000), st.integers(1, 600), st.booleans()).map(lambda row: Row(row[0], row[1], 0, row[2])),
    min_size=1,
    max_size=40,
)


@pytest.mark.parametrize("name", ["h100:llama-8b", "h100:qwen3-30b-a3b", "zen4-2c:smollm2", "smollm2-cpu"])
@settings(max_examples=25, deadline=None)
@given(rows=ROWS, more=st.integers(1, 500), at=st.integers(0, 39))
def test_cost_is_monotonic(name: str, rows: list[Row], more: int, at: int) -> None:
    costs = Costs(profile_named(name))
    base = costs.step(plan_of(*rows))
    index = at % len(rows)
    row = rows[index]
    for longer in (row._replace(tokens=row.tokens + more), row._replace(start=row.start + more)):
        assert costs.step(plan_of(*rows[:index], longer, *rows[index + 1 :])) >= base
    assert costs.step(plan_of(*rows, Row(more))) >= base


def test_non_step_costs_follow_their_terms() -> None:
    costs, terms = Costs(H100), H100.request
    assert costs.turn(decodes(10, 5)) == pytest.approx(terms.turn + 10 * terms.turn_per_row)
    assert costs.request(1000) == pytest.approx(terms.receive + 1000 * terms.receive_per_token)
    assert costs.delivery() == terms.delivery


def test_transfer_time_follows_link_bandwidth() -> None:
    link = KVLink(latency=0.5, bandwidth=100.0 * H100.bytes_per_block, source="a test")
    linked = msgspec.structs.replace(H100, host_copy=link, store_read=link, store_write=link, transfer=link)
    costs = Costs(linked)
    for ask in (costs.host_copy, costs.store_read, costs.store_write, costs.transfer):
        assert ask(200) == pytest.approx(2.5)
    assert Costs(linked, block_size=2 * H100.limits.block_size).host_copy(200) == pytest.approx(4.5)


@pytest.mark.parametrize("chunk", [0, 512])
@pytest.mark.timing
def test_cost_lookup_is_fast(chunk: int) -> None:
    # One lookup per simulated step: 5 us measured for 64 rows; the limit leaves room for slow and shared machines.
    costs, plan = Costs(H100), plan_of(*[Row(1000)] * 63, Row(0, tokens=max(chunk, 1)))

    def timed() -> Iterator[float]:
        for _ in range(10):
            begun = time.process_time()
            for _ in range(500):
                costs.step(plan)
            yield (time.process_time() - begun) / 500

    assert min(timed()) < 25e-6 * slowdown()


def test_cost_lookup_does_not_modify_plan() -> None:
    plan = decodes(3, 7)
    frozen = replace(plan, starts=plan.starts.copy())
    Costs(H100).step(plan)
    assert np.array_equal(plan.starts, frozen.starts)
    assert plan.starts.dtype == np.int32
