"""Every kind of plugin has a kit, a template whose test uses the kit, and a guide that a test follows."""

import importlib
import inspect
import re
import sys
from importlib import resources
from pathlib import Path

import pytest

from fd_core.cli.plugins.scaffold import Framework, project
from fd_core.cluster.scaling import ScalingPolicy
from fd_core.kv.stores.contract import KVStore
from fd_core.kv.stores.location import parse_location
from fd_core.kv.stores.memory import MemoryStore
from fd_core.plugins import KINDS
from fd_core.router.policies import RouterPolicy
from fd_core.runner.drafting import Drafter
from fd_core.scheduling.policies import SchedulingPolicy
from fd_core.scheduling.victims import VictimPolicy
from fd_core.testing.hooks.drafters import DrafterSuite
from fd_core.testing.hooks.scaling import ScalingPolicySuite
from fd_core.testing.hooks.scheduling import SchedulingPolicySuite
from fd_core.testing.hooks.victims import VictimPolicySuite
from fd_core.testing.router_policies import RouterPolicySuite
from fd_core.testing.stores import StoreSuite

ROOT = Path(__file__).parents[2]
TEMPLATES = resources.files(project.__package__).joinpath("templates", "tests")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.word)
def test_kind_has_a_kit_a_template_and_a_followed_guide(kind):
    recipes = {name: recipe for name, recipe in project.RECIPES.items() if recipe.kind is kind}
    assert recipes, f"`fdcore plugins new --kind` has no template for a {kind.word}"
    for name, recipe in recipes.items():
        text = TEMPLATES.joinpath(f"test_{project.test_of(name)}.py.tmpl").read_text()
        text = project._filled(text, project._words("some", name, Framework.NUMPY))
        kits = re.findall(r"fd_core\.testing[\w.]*", text)
        assert kits or recipe.prove.startswith("fdcore conformance"), f"the test of the template runs no kit:\n{text}"
        for kit in kits:
            importlib.import_module(kit)
        assert (ROOT / "docs" / "extend" / recipe.guide).is_file()
        followed = [path.name for path in (ROOT / "tests" / "testing").glob("test_write_a*.py")
                    if f'"{recipe.guide}"' in path.read_text()]  # fmt: skip
        assert followed, f"no test follows docs/extend/{recipe.guide}"


@pytest.mark.parametrize(
    ("suite", "contract", "plugin"),
    [
        (DrafterSuite, Drafter, "ngram"),
        (SchedulingPolicySuite, SchedulingPolicy, "fair"),
        (VictimPolicySuite, VictimPolicy, "youngest"),
        (ScalingPolicySuite, ScalingPolicy, "load"),
        (RouterPolicySuite, RouterPolicy, "cache_aware"),
        (StoreSuite, KVStore, ""),
    ],
)
def test_the_memory_test_of_a_kit_calls_every_method_of_the_contract(suite, contract, plugin, monkeypatch):
    """A method that it leaves out may keep everything that it is given."""
    called = set()

    def see(frame, event, _):
        if event == "call" and isinstance(frame.f_locals.get("self"), contract):
            called.add(frame.f_code.co_name)

    def use_some(use, *_, **__):
        sys.setprofile(see)
        try:
            for number in range(8):
                use(number)
        finally:
            sys.setprofile(None)

    functions = filter(inspect.isfunction, vars(suite).values())
    test, *_ = [each for each in functions if "require_bounded" in each.__code__.co_names]
    monkeypatch.setitem(test.__globals__, "require_bounded", use_some)
    needed = inspect.signature(test).parameters.keys() - {"self"}
    tested = type("Tested", (suite,), {"policy": plugin, "drafter": plugin})()
    test(tested, **({"store": MemoryStore(parse_location("memory:"))} if plugin == "" else dict.fromkeys(needed, True)))
    methods = {name for name, each in vars(contract).items() if inspect.isfunction(each) and name[0] != "_"}
    assert methods - called <= {"allocate", "close", "read"}  # scripted models have no draft head
