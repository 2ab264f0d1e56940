"""Edits are small, legal and where a plugin decides something."""

from __future__ import annotations

import ast

import pytest

from fd_core.cli.plugins.scaffold.project import RECIPES
from tests.testing.mutation.edits import edits_of
from tests.testing.mutation.finder import path_of
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
