"""A vendor installs `fd-core[conformance]` and needs no other package for the kit."""

import ast
import gc
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fd_core.errors import PluginError
from fd_core.kv.stores.location import parse_location
from fd_core.kv.stores.memory import MemoryStore
from fd_core.plugins import STORE
from fd_core.testing.kit import requirements
from fd_core.testing.kit.law import InvariantViolated

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
KIT = sorted((ROOT / "fd_core" / "testing").rglob("*.py"))


MODULES = {"pillow": "PIL"}
"""Modules that are not named like their distributions."""


def names(wanted):
    """Return the modules of requirements."""
    found = (re.match(r"[\w-]+", requirement)[0] for requirement in wanted)
    return {MODULES.get(name, name.replace("-", "_")) for name in found}


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def test_kit_imports_nothing_beyond_its_extra():
    extras = PROJECT["optional-dependencies"]
    known = names([*PROJECT["dependencies"], *extras["conformance"]])
    of_families = names([*extras["families"], *extras["transformers"], *extras["torch"]]) - known
    found = {name for path in KIT for name in imported(path)} - set(sys.stdlib_module_names) - {"fd_core"} - of_families
    assert found <= known
    assert {*requirements.PACKAGES, "coverage"} == found - names(PROJECT["dependencies"]), "--coverage asks for it"


def test_kit_runs_without_the_other_test_packages():
    modules = [path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in KIT]
    code = f"""
import importlib, sys
for name in ("transformers", "schemathesis", "openai", "xdist", "torch", "paddle", "onnxruntime"):
    sys.modules[name] = None
for name in {[name for name in modules if not name.endswith("__main__")]!r}:
    importlib.import_module(name)
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)


def test_missing_package_is_reported_with_the_extra(monkeypatch):
    monkeypatch.setattr(requirements, "find_spec", lambda name: None)
    with pytest.raises(PluginError) as raised:
        requirements.require_packages()
    assert "fd-core[conformance]" in str(raised.value.hint)


def test_project_and_plugins_use_the_extra_for_tests():
    written = [
        *ROOT.glob("plugins/*/pyproject.toml"),
        ROOT / "fd_core" / "cli" / "plugins" / "scaffold" / "templates" / "pyproject.toml.tmpl",
    ]
    assert len(written) > 5
    for path in [*written, ROOT / "pyproject.toml"]:
        extra = r"(conformance(,otel)?|\$extra)"  # of the template: `conformance`, or `families`, which has it
        assert re.search(rf"^test = \[\s*\"fd-core\[{extra}\]\"", path.read_text(), re.MULTILINE), path


def test_plugin_that_changes_the_process_once_fails_when_it_is_constructed():
    """Also before the first test, in a fixture, as after that nothing changes any more."""

    def make():
        gc.disable()
        return MemoryStore(parse_location("memory:"))

    try:
        with pytest.raises(InvariantViolated, match="law 8: it changes the garbage collection"):
            requirements.constructed(STORE, "memory", make)
    finally:
        gc.enable()
