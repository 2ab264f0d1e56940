"""Plugins that cannot be used, of every kind that `fdcore conformance` tests."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path

import pytest

from fd_core.errors import PluginError
from fd_core.models.families.installed import installed_families
from fd_core.plugins import (
    BACKEND,
    KINDS,
    MODEL,
    POSTPROCESS,
    REASONING_PARSER,
    SCHEDULER,
    TOOL_PARSER,
    installed_plugins,
)
from fd_core.testing.kit.target import parse_target
from fd_core.testing.models.families.target import find_family
from fd_core.testing.parsers.target import find_parser
from fd_core.testing.postprocessors.matrices import find_postprocessor
from fd_core.testing.report.runs import KITS, RunOptions, run_suite
from fd_core.testing.schedulers.driver import find_scheduler
from tests.plugin_sites import Site

FINDERS = {
    BACKEND: lambda name: parse_target(name, Path()).backend,
    SCHEDULER: find_scheduler,
    POSTPROCESS: find_postprocessor,
    TOOL_PARSER: partial(find_parser, kind=TOOL_PARSER),
    REASONING_PARSER: partial(find_parser, kind=REASONING_PARSER),
    MODEL: find_family,
}
"""Functions by which the suites find a plugin, in the order of the kits."""
SOURCE = """
import importlib
from fd_core.hookspecs import Entry, hookimpl
from fd_core.plugins import KINDS
FD_CONTRACT = 1

def hook_of(kind):
    def register():
        faults = "unimportable", "absent", "unrelated", "abstract", "failing"
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
    globals()[kind.plural] = type(kind.plural, (base,), BODY)
"""
CAUSES = {
    "unimportable": "RuntimeError: broken at import",
    "absent": "has no",
    "unrelated": "is not a subclass of",
    "abstract": "does not implement",
    "failing": "RuntimeError: no device in the box",
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
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        importlib.invalidate_caches()
        caches = installed_plugins, installed_families
        for each in caches:
            each.cache_clear()
        yield
    for each in caches:
        each.cache_clear()


@pytest.mark.parametrize("fault", CAUSES)
@pytest.mark.parametrize("kind", FINDERS, ids=lambda kind: kind.plural)
def test_plugin_that_cannot_be_used_is_reported_in_one_line(broken, kind, fault):
    if fault == "failing" and kind not in (BACKEND, MODEL):
        pytest.skip("its tests construct it")
    if kind is MODEL:
        pytest.importorskip("transformers")
    assert not installed_plugins().problems
    with pytest.raises(PluginError) as caught:
        FINDERS[kind](f"{fault}_{kind.plural}")
    message = str(caught.value)
    assert f"{fault}_{kind.plural}" in message
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


def test_there_is_a_finder_for_each_kit():
    assert len(FINDERS) == len(KITS)
    assert FINDERS.keys() <= {*KINDS}
