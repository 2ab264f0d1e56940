"""Workloads in a world: requests follow the specification of their client."""

from __future__ import annotations

import itertools

import pytest

from fd_core.simulation.workloads.workload import read_workload
from tests.simulation.helpers import world


def test_requests_inherit_conversation_attributes() -> None:
    text = "poisson:rate=4,requests=60,turns=3,think=uniform:0.5:2,prompt=20,output=4,tenants=a/b,priorities=0/7"
    wanted = list(read_workload(text, 2))
    outcomes = {each.request_id: each for each in world(routers=0).run(read_workload(text, 2)).outcomes}
    assert len(outcomes) == 60
    for one in wanted:
        played = [outcomes[f"{one.name}/{at}"] for at in range(len(one.turns))]
        assert {(each.tenant, each.priority) for each in played} == {(one.tenant, one.priority)}
        assert played[0].arrived == pytest.approx(one.at, abs=1e-6)
        pauses = [later.arrived - each.ended for each, later in itertools.pairwise(played)]
        assert pauses == pytest.approx([turn.think for turn in one.turns[1:]], abs=1e-6)
    assert len({each.tenant for each in outcomes.values()} | {each.priority for each in outcomes.values()}) == 4


def test_impatient_client_disconnects_and_sends_no_more() -> None:
    text = "poisson:rate=4,requests=80,turns=2,prompt=20,output=60,leave=0.5,patience=uniform:0.1:2"
    wanted = {f"{one.name}/{at}": turn for one in read_workload(text, 2) for at, turn in enumerate(one.turns)}
    outcomes = {each.request_id: each for each in world(routers=0).run(read_workload(text, 2)).outcomes}
    left = {name: each for name, each in outcomes.items() if each.end == "left"}
    assert len(left) > 5
    for name, each in left.items():
        assert each.ended - each.arrived == pytest.approx(wanted[name].patience, abs=1e-6)
    for name, each in outcomes.items():
        patience = wanted[name].patience
        assert patience is None or each.ended - each.arrived <= patience + 1e-6
    assert wanted.keys() - outcomes.keys() == {f"{name[:-1]}1" for name in left if name.endswith("/0")}
