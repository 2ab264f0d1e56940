"""The commands of docs/study/study-a-policy.md work, at a smaller size; its examples satisfy the invariants."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fd_core.cli.app import app
from fd_core.plugins import SCHEDULING_POLICY, installed_plugins
from fd_core.scheduling.contract import Scheduler, SchedulerSetup
from fd_core.scheduling.policies import SchedulingPolicy
from fd_core.scheduling.requests import QueuedRequest
from fd_core.testing.schedulers import SchedulerCase, SchedulerTarget, find_scheduler, kit_cases

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "policies"
PAGE = (ROOT / "docs" / "study" / "study-a-policy.md").read_text()
COMMANDS = [
    " ".join(line.split())
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
]
POLICIES = {
    name: f"{EXAMPLES / file}.py:{name}"
    for file, name in (
        ("shortest_remaining_first", "ShortestRemainingFirst"),
        ("virtual_token_counter", "VirtualTokenCounter"),
        ("deadline_first", "DeadlineFirst"),
    )
}
HELD = (
    "blocks:test_equal_blocks_after_other_tokens_share_nothing",
    "signals:test_a_row_of_another_gen_is_dropped[False]",
)
CASES = [case for case in kit_cases() if str(case) in HELD]


def policy(name: str) -> type[SchedulingPolicy]:
    return installed_plugins().load(SCHEDULING_POLICY, POLICIES[name])


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("fdcore simulate")])
def test_every_simulation_of_the_page_runs(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    short = re.sub(r"requests=\d+", "requests=6", line)
    short = re.sub(r"--seeds \d+", "--seeds 1", short)
    [written] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "mine.py").write_text(written)
    short = short.replace(",mine.py:", f",{tmp_path}/mine.py:")
    short = re.sub(r"(--page|--json) \S+", lambda flag: f"{flag[1]} {tmp_path / 'out'}{flag[1][1:]}", short)
    result = CliRunner().invoke(app, [*shlex.split(short)[1:], "--json", str(tmp_path / "figures.json")])
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert all(run["figures"]["completed"] == 6 for case in figures["cases"] for run in case["runs"])
    assert any(".py:" in case["setting"] for case in figures["cases"])


def test_page_serves_with_a_file_that_it_simulates() -> None:
    served = [line.split()[-1] for line in COMMANDS if line.startswith("fdcore serve")]
    assert served
    assert all(any(name in line for line in COMMANDS if "simulate" in line) for name in served)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_scheduler_satisfies_the_invariants_with_each_policy(case: SchedulerCase, name: str) -> None:
    continuous = find_scheduler("continuous")

    def make(setup: SchedulerSetup) -> Scheduler:
        return continuous.make(dataclasses.replace(setup, policy=policy(name)()))

    case.check(SchedulerTarget("continuous", make, continuous.lacks))


def waiting(arrival: int, tokens: int = 10, most: int = 10, priority: int = 0, tenant: str = "") -> QueuedRequest:
    return QueuedRequest(arrival, tokens, most, priority, tenant, False)


def test_shortest_remaining_first_does_not_starve_long_requests() -> None:
    ranks = policy("ShortestRemainingFirst")()
    long = ranks.rank(waiting(0, most=100))
    assert ranks.rank(waiting(1)) < long < ranks.rank(waiting(1000))


def test_tenant_with_long_answers_is_served_later() -> None:
    counters = policy("VirtualTokenCounter")()
    for arrival, tenant in enumerate(("long", "long", "short", "short")):
        counters.arrived(waiting(arrival, tenant=tenant))
    for arrival, tenant, computed in ((0, "long", 60), (2, "short", 20)):
        counters.admitted(waiting(arrival, tenant=tenant))
        counters.ended(waiting(arrival, computed, tenant=tenant), computed)
    assert counters.turn("long") - counters.turn("short") == 2 * 40


def test_deadline_class_is_overtaken_by_a_limited_number() -> None:
    deadlines = policy("DeadlineFirst")()
    patient = deadlines.rank(waiting(0, priority=1))
    assert deadlines.rank(waiting(3)) < patient < deadlines.rank(waiting(5))


def test_kit_accepts_a_scheduler_in_a_file(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from fd_core.scheduling.scheduler import ContinuousBatchingScheduler\n"
        "class Mine(ContinuousBatchingScheduler):\n"
        "    pass\n"
    )
    words = ["conformance", "--scheduler", f"{mine}:Mine", "--quick", "-k", "another_gen"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
