"""The simulator makes no decisions itself: planning, routing and counting use the serving code."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

import fd_core
import fd_core.simulation
from fd_core.config import EngineConfig
from fd_core.disagg.lease import DecodeEnd, PrefillEnd
from fd_core.engine.clients.request_ledger import RequestLedger
from fd_core.engine.core import Engine
from fd_core.engine.process.service import EngineService
from fd_core.kv.blocks import BlockPool
from fd_core.kv.prefix import PrefixHasher
from fd_core.router.attempts import Attempts, Unreached
from fd_core.router.config import RouterConfig
from fd_core.router.placement import Placer
from fd_core.router.policies import RouterPolicy
from fd_core.router.router import Router
from fd_core.router.workers import Registry
from fd_core.scheduling.contract import Scheduler
from fd_core.scheduling.policies import SchedulingPolicy
from fd_core.scheduling.scheduler import ContinuousBatchingScheduler
from fd_core.scheduling.victims import VictimPolicy
from tests.engine.helpers import null_engine
from tests.simulation.helpers import conversations, group, world
from tests.simulation.same_plans import computed_plans, messages, simulated_plans

DECIDERS = (
    *(Scheduler, SchedulingPolicy, VictimPolicy, RouterPolicy, Router, Registry, Placer, Attempts, Unreached),
    *(BlockPool, PrefixHasher, RequestLedger, Engine, EngineService, DecodeEnd, PrefillEnd),
)
ROOT = Path(fd_core.__file__).parent


def modules() -> list[ModuleType]:
    """Return every module of the simulator."""
    found = pkgutil.walk_packages(fd_core.simulation.__path__, "fd_core.simulation.")
    return [importlib.import_module(one.name) for one in found]


def executed(run: Callable[[], Any]) -> set[str]:
    """Yield the files of fd_core whose code runs in the block."""
    found: set[str] = set()

    def trace(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            found.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(trace)
    try:
        run()
    finally:
        sys.setprofile(before)
    return {str(Path(name).relative_to(ROOT)) for name in found if name.startswith(f"{ROOT}/")}


def count_calls(monkeypatch: pytest.MonkeyPatch, counted: Counter[str], one: type, name: str) -> None:
    inside = getattr(one, name)

    def outside(*args: Any, **kwargs: Any) -> Any:
        counted[name] += 1
        return inside(*args, **kwargs)

    monkeypatch.setattr(one, name, outside)


def test_decision_modules_have_no_simulated_variant() -> None:
    own = [
        thing
        for module in modules()
        for _, thing in inspect.getmembers(module, inspect.isclass)
        if thing.__module__ == module.__name__
    ]
    assert len(own) > 50
    assert [thing.__name__ for thing in own if issubclass(thing, DECIDERS)] == []


def test_simulator_does_not_patch_decision_functions() -> None:
    before = {(one, name): value for one in DECIDERS for name, value in vars(one).items()}
    modules()
    world(group(count=2)).run(conversations(4))
    assert {(one, name): value for one in DECIDERS for name, value in vars(one).items()}.keys() == before.keys()
    assert all(vars(one)[name] is value for (one, name), value in before.items() if callable(value))


def test_simulation_executes_the_engine_modules() -> None:
    real = null_engine(num_kv_blocks=14, save_preempted_kv=False, max_num_seqs=6, max_model_len=200)
    config = EngineConfig(model="null", save_preempted_kv=False)
    due = messages(12, 17, vocab=256, longest=60)
    try:
        found = executed(lambda: computed_plans(real, due))
        made = executed(lambda: simulated_plans(real, config, due))
    finally:
        real.close()
    decided = {name for name in found if name.startswith("scheduling/") or name in {"kv/blocks.py", "kv/prefix.py"}}
    assert len(decided) > 12
    assert decided - made == set()
    assert "engine/core.py" in found & made


def test_plans_and_routes_are_made_by_production_code(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: Counter[str] = Counter()
    count_calls(monkeypatch, counted, ContinuousBatchingScheduler, "add")
    count_calls(monkeypatch, counted, ContinuousBatchingScheduler, "commit")
    count_calls(monkeypatch, counted, Placer, "place")
    count_calls(monkeypatch, counted, EngineService, "send")
    one = world(group(count=2), router=RouterConfig(policy="round_robin"))
    run = one.run(conversations(10))
    assert counted["add"] == counted["place"] == len(run.outcomes) == 10
    assert counted["commit"] == run.counters["steps"]


@pytest.mark.parametrize("gateway", ["router/gateway", "simulation/gateway.py"])
def test_gateways_delegate_every_request_decision(gateway: str) -> None:
    decisions = {"select", "retry", "prefilled", "served", "declined", "failed"}
    path = ROOT / gateway
    trees = [ast.parse(file.read_text()) for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))]
    called = {
        node.func.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and "router" in ast.unparse(node.func.value)
    }
    assert not called & decisions, "only `Attempts` calls the router for requests"
    assert called, "workers are registered with the router there"


def test_request_decisions_share_the_production_code(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: Counter[str] = Counter()
    for name in ("first", "next", "refused", "began", "ended"):
        count_calls(monkeypatch, counted, Attempts, name)
    run = world(group(count=2, max_queued_requests=0)).run(conversations(60, rate=400.0))
    assert counted["first"] == len(run.outcomes) == 60
    assert counted["refused"] == counted["next"] > 0 and counted["began"] == counted["ended"]
