"""Bounds of plans: no simulation may beat the bound."""

from __future__ import annotations

import math

import pytest

from fd_core.plugins import installed_plugins
from fd_core.simulation.costs.naming import profile_named
from fd_core.simulation.planning.bounds import demand_of, fewest_workers, least_possible
from fd_core.simulation.planning.limiting import slo_margin
from fd_core.simulation.planning.shapes import DeploymentShape, PlanJob, do_job
from fd_core.simulation.results.slo import parse_slo
from fd_core.simulation.workloads.workload import read_workload

PROFILE = "h100:llama-8b"
SHAPE = DeploymentShape(profile=PROFILE, ranks=1, prefill=0, decode=0, max_num_seqs=64, max_num_batched_tokens=2048)
SLO = parse_slo("ttft_p99=0.3,tpot_p99=0.02,e2e_mean=9")


def job(workload: str, units: int = 1) -> PlanJob:
    return PlanJob(
        shape=SHAPE, units=units, engine={}, workload=workload, seed=3, requests=None, load=1, rate=1, slo=SLO, price=1
    )


@pytest.mark.parametrize(
    "workload",
    ["constant:rate=0.5,requests=6,output=8", "poisson:rate=9,requests=30,prompt=exponential:900,output=8,turns=2"],
)
def test_simulation_is_not_faster_than_requests_run_alone(workload: str) -> None:
    run = do_job(job(workload), installed_plugins())
    demand = demand_of(read_workload(workload, 3))
    assert run.summary.slo is not None
    for check, each in zip(run.summary.slo.checks, SLO.objectives, strict=True):
        least = least_possible(each, profile_named(PROFILE), demand, 2048, 1.0)
        assert check.value is not None
        assert 0 < least <= check.value
        if "constant" in workload:
            assert least > check.value / 1.3


def test_fewer_workers_than_bound_break_the_slo() -> None:
    workload = "constant:rate=80,requests=120,prompt=2000,output=2"
    demand = demand_of(read_workload(workload, 3))
    mixed, prefill, decode = fewest_workers(profile_named(PROFILE), demand, SLO, 64, 2048)
    assert mixed >= prefill > 1
    assert decode == 1
    assert slo_margin(do_job(job(workload, mixed - 1), installed_plugins())) < 0


def test_cacheable_tokens_count_once() -> None:
    demand = demand_of(read_workload("poisson:requests=50,prefixes=1x1000,prompt=10,output=7,turns=2", 0))
    assert demand.new_tokens.sum() == 1000 + 50 * 10
    assert demand.first_turn.sum() == 25
    assert set(demand.output_tokens) == {7.0}


def test_unservable_requests_exceed_any_limit() -> None:
    demand = demand_of(read_workload("poisson:requests=100,turns=2,prompt=400,output=100", 0))
    assert sorted(set(demand.prompt_tokens)) == [400, 900]
    profile = profile_named(PROFILE)
    for slo, longest, possible in (
        ("ttft_p99=1", 901, True),
        ("ttft_p99=1", 900, False),
        ("tpot_p99=1", 900, False),
        ("ttft_p40=1", 900, True),
        ("e2e_mean=9", 900, False),
    ):
        [each] = parse_slo(slo).objectives
        assert (least_possible(each, profile, demand, 2048, 1.0, longest) < math.inf) is possible


def test_single_token_outputs_have_no_tpot() -> None:
    [each] = parse_slo("tpot_p99=0.0001").objectives
    for output, least in ((1, 0.0), (2, 0.001)):
        demand = demand_of(read_workload(f"poisson:requests=9,output={output}", 0))
        assert least_possible(each, profile_named(PROFILE), demand, 2048, 1.0) >= least
        assert (least_possible(each, profile_named(PROFILE), demand, 2048, 1.0) == 0) is (output == 1)


def test_requests_without_time_limit_do_not_bound() -> None:
    demand = demand_of(read_workload("poisson:rate=1000,requests=500", 0))
    assert fewest_workers(profile_named(PROFILE), demand, parse_slo("ttft_mean=1"), 64, 2048) == (1, 1, 1)
