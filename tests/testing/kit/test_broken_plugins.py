"""Plugins that cannot be used, of every kind."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections import Counter
from functools import partial
from importlib import resources
from pathlib import Path

import pytest

from fd_core.cli.plugins.scaffold import Framework, PluginKind, project
from fd_core.errors import PluginError
from fd_core.models.families.installed import installed_families
from fd_core.plugins import (
    BACKEND,
    CONNECTOR,
    DRAFTER,
    KINDS,
    LAUNCHER,
    MODEL,
    OBSERVER,
    POSTPROCESS,
    REASONING_PARSER,
    ROUTER_POLICY,
    SCALING_POLICY,
    SCHEDULER,
    SCHEDULING_POLICY,
    STORE,
    TOOL_PARSER,
    VICTIMS,
    installed_plugins,
)
from fd_core.testing.hooks.drafters import DrafterSuite
from fd_core.testing.hooks.observers import ObserverSuite
from fd_core.testing.hooks.readers import ReadingDrafterSuite
from fd_core.testing.hooks.scaling import ScalingPolicySuite
from fd_core.testing.hooks.scheduling import SchedulingPolicySuite
from fd_core.testing.hooks.victims import VictimPolicySuite
from fd_core.testing.kit.target import parse_target
from fd_core.testing.launchers import LauncherSuite
from fd_core.testing.models.families.target import find_family
from fd_core.testing.parsers.target import find_parser
from fd_core.testing.postprocessors.matrices import find_postprocessor
from fd_core.testing.report.runs import KITS, RunOptions, run_suite
from fd_core.testing.router_policies import RouterPolicySuite
from fd_core.testing.schedulers.driver import find_scheduler
from tests.plugin_sites import Site


def constructing(suite, field):
    """Return a function that constructs a plugin as the first test of a class does."""
    return lambda name: type("Tested", (suite,), {field: name})().construct()


FINDERS = {
    BACKEND: lambda name: parse_target(name, Path()).ops,
    SCHEDULER: find_scheduler,
    POSTPROCESS: find_postprocessor,
    TOOL_PARSER: partial(find_parser, kind=TOOL_PARSER),
    REASONING_PARSER: partial(find_parser, kind=REASONING_PARSER),
    MODEL: find_family,
    DRAFTER: constructing(DrafterSuite, "drafter"),
    SCHEDULING_POLICY: constructing(SchedulingPolicySuite, "policy"),
    VICTIMS: constructing(VictimPolicySuite, "policy"),
    OBSERVER: constructing(ObserverSuite, "observer"),
    LAUNCHER: constructing(LauncherSuite, "launcher"),
    SCALING_POLICY: constructing(ScalingPolicySuite, "policy"),
    ROUTER_POLICY: constructing(RouterPolicySuite, "policy"),
}
"""Functions by which the suites find a plugin, first those of the kits in their order."""
OF_FIXTURES = {STORE, CONNECTOR}
"""Kinds whose suites construct a plugin by fixtures."""
SCAFFOLDS = (PluginKind.STORE, PluginKind.CONNECTOR, PluginKind.SCALING_POLICY, PluginKind.TOOL_PARSER)
"""Projects with tests of each form: of fixtures, of a class, and of a function."""
SOURCE = """
import importlib
from fd_core.hookspecs import Entry, hookimpl
from fd_core.plugins import KINDS
FD_CONTRACT = 1

def hook_of(kind):
    def register():
        faults = "unimportable", "absent", "unrelated", "abstract", "failing", "mistyped"
        return [Entry(f"{fault}_{kind.plural}", f"fd_broken_{fault}:{kind.plural}", "broken") for fault in faults]
    register.__name__ = kind.hook
    return hookimpl(register)

globals().update({kind.hook: hook_of(kind) for kind in KINDS})
"""
CLASSES = """
import importlib
from fd_core.backends.contract import Availability
from fd_core.plugins import KINDS

def fail(*_, **named):
    raise RuntimeError("no device\\nin the box")

for kind in KINDS:
    module, _, name = kind.base.partition(":")
    base = getattr(importlib.import_module(module), name)
    body = {each: fail for each in base.__abstractmethods__} | {"__init__": fail, "__module__": __name__}
    body["probe"] = classmethod(lambda cls: Availability(True, "it is here"))
    body["serves"] = ("numpy",)
    globals()[kind.plural] = type(kind.plural, (base,), BODY)
"""
CAUSES = {
    "unimportable": "RuntimeError: broken at import",
    "absent": "has no",
    "unrelated": "is not a subclass of",
    "abstract": "does not implement",
    "failing": "RuntimeError: no device in the box",
    "mistyped": "str",
}


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken")
    Site(folder).install(
        "fd-broken",
        SOURCE,
        unimportable="raise RuntimeError('broken at import')",
        absent="",
        unrelated="from fd_core.plugins import KINDS\nglobals().update({kind.plural: int for kind in KINDS})",
        abstract=CLASSES.replace("BODY", "{'probe': body['probe']}"),
        failing=CLASSES.replace("BODY", "body"),
        mistyped=CLASSES.replace("BODY", "{**body, '__new__': lambda *_, **__: 'plugin'}"),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        importlib.invalidate_caches()
        caches = installed_plugins, installed_families
        for each in caches:
            each.cache_clear()
        yield folder
    for each in caches:
        each.cache_clear()


@pytest.mark.parametrize("fault", CAUSES)
@pytest.mark.parametrize("kind", FINDERS, ids=lambda kind: kind.plural)
def test_plugin_that_cannot_be_used_is_reported_in_one_line(broken, kind, fault):
    if kind is MODEL:
        pytest.importorskip("transformers")
    assert not installed_plugins().problems
    with pytest.raises(PluginError) as caught:
        FINDERS[kind](f"{fault}_{kind.plural}")
    message = str(caught.value)
    assert kind.word in message
    assert f"{fault}_{kind.plural}" in message or f"fd_broken_{fault}:{kind.plural}" in message
    assert CAUSES[fault] in message
    assert "\n" not in message
    assert caught.value.exit_code == 4


def test_broken_model_families_do_not_hide_the_others(broken):
    families = installed_families()
    assert "Qwen3ForCausalLM" in families.architectures
    assert sum("fd-broken" in problem for problem in families.problems) == len(CAUSES)


@pytest.mark.parametrize("kit", KITS, ids=lambda kit: kit.option)
def test_unknown_plugin_gets_a_card_with_the_names_that_exist(kit):
    [card] = run_suite(["unheard_of"], RunOptions(), "", lambda *_: None, kit).cards
    assert "unknown" in card.error
    assert "available: " in card.error
    assert not card.passed


def test_there_is_a_finder_for_each_kind():
    assert len(KITS) <= len(FINDERS)
    assert FINDERS.keys() | OF_FIXTURES == {*KINDS}


def test_reading_drafter_is_constructed_once():
    with pytest.raises(PluginError, match="unknown"):
        constructing(ReadingDrafterSuite, "drafter")("unheard_of")


SKIPPED = """
import pytest
from fd_core.testing.launchers import LauncherSuite

@pytest.mark.skip("there is no cluster")
class TestOfACluster(LauncherSuite):
    launcher = "failing_launchers"
"""


@pytest.mark.slow
def test_tests_of_a_project_report_a_plugin_that_cannot_be_used_once(broken, tmp_path):
    """Run those of several kinds, whose constructors raise, as their authors would."""
    templates = resources.files(project.__package__).joinpath("templates", "tests")
    for kind in SCAFFOLDS:
        words = project._words(f"failing_{project.RECIPES[kind].kind.plural}", kind, Framework.NUMPY)
        text = templates.joinpath(f"test_{project.test_of(kind)}.py.tmpl").read_text()
        (tmp_path / f"test_{kind.replace('-', '_')}.py").write_text(project._filled(text, words))
    (tmp_path / "test_skipped.py").write_text(SKIPPED)
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", "-c", os.devnull]
    ended = subprocess.run(
        [*command, f"--rootdir={tmp_path}", "--fd-quick", "-rsfE", tmp_path],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(broken), *sys.path]), "COLUMNS": "1000"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    failed = re.findall(r"^(?:FAILED|ERROR) \S*test_(\w+)\.py\S* - (.*)$", ended.stdout, re.MULTILINE)
    assert Counter(name for name, _ in failed) == Counter(kind.replace("-", "_") for kind in SCAFFOLDS), ended.stdout
    for name, reason in failed:
        assert "cannot be used: RuntimeError: no device in the box" in reason, name
    assert " passed" not in ended.stdout.splitlines()[-1]
    assert "not constructed: " in ended.stdout
    assert "there is no cluster" in ended.stdout
