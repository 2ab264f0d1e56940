"""Edits are small, legal and where a plugin decides something."""

from __future__ import annotations

import ast
import os
import subprocess
import sys

import pytest

from fd_core.cli.plugins.scaffold import PluginKind
from fd_core.cli.plugins.scaffold.project import RECIPES
from tests.testing.mutation.__main__ import prepare
from tests.testing.mutation.edits import Edit, edits_of
from tests.testing.mutation.finder import ROOT, EditedModules, path_of
from tests.testing.mutation.subjects import SUBJECTS, offered


def edited(source: str) -> set[str]:
    return {edit.applied(source).strip() for edit in edits_of(source)}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a = 8", {"a = 9", "a = 7"}),
        ("a = 0", {"a = 1"}),
        ("a = True", {"a = False"}),
        ("a = (b) < c", {"a = (b) <= c"}),
        ("a = b in c", {"a = b not in c"}),
        ("a = b and c or d", {"a = b or c or d", "a = b and c and d"}),
        ("a = not b", {"a = bool((b))"}),
        ("a = b if c else d", {"a = (b)", "a = (d)"}),
        ("a = b.copy()", {"a = b"}),
        ("a = np.int32", {"a = np.int16"}),
        ("a += b", {"a -= b"}),
        ("f(a)", {"pass"}),
        ("a = b * c", {"a = b + c"}),
    ],
)
def test_edits_of_a_statement(source, expected):
    assert edited(source) == expected


@pytest.mark.parametrize("source", ["a: Literal[8]", "raise E(8)", "def f(a=8): ...", "import a", '"""8"""'])
def test_nothing_else_is_edited(source):
    assert edited(source) == set()


def test_every_kind_with_built_in_plugins_is_tried():
    assert SUBJECTS.keys() == {kind for kind in RECIPES if offered(kind)}


@pytest.mark.parametrize("kind", SUBJECTS)
def test_edits_of_a_subject_are_legal(kind):
    for module in SUBJECTS[kind].modules:
        source = path_of(module).read_text()
        edits = edits_of(source)
        assert edits
        for edit in edits[::9]:
            ast.parse(edit.applied(source))


@pytest.mark.parametrize("command", ["import fd_core.launching.spawn", ""], ids=["imported", "run"])
def test_processes_of_a_trial_import_the_edit(command, tmp_path):
    prepare(tmp_path, PluginKind.LAUNCHER)
    module = "fd_core.launching.spawn"
    end = len(path_of(module).read_text())
    encoded = EditedModules(module, Edit(end, end, "print('edited')", 0)).encoded()
    variables = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "FD_EDIT": encoded}
    arguments = ["-c", command] if command else ["-m", module]
    shown = subprocess.check_output([sys.executable, "-P", *arguments], env=variables, text=True)
    assert shown == "edited\n"
