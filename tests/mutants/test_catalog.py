"""Mutants follow the code: a fault that no longer applies would be an empty test."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from tests.mutants.catalog import MUTANTS
from tests.mutants.groups import LEFT_OUT, LONG, ROOT, groups
from tests.mutants.kernel_faults import KERNEL_FAULTS
from tests.mutants.mutant import DoesNotApply, Edit, Mutant
from tests.mutants.unseen import UNSEEN


@cache
def original(file: str) -> str:
    return (ROOT / "fd_core" / file).read_text()


@cache
def original_tree(file: str) -> str:
    return ast.dump(ast.parse(original(file)))


def apply_each(mutants: Iterable[Mutant], package: Path) -> Iterable[tuple[str, str, str]]:
    """Apply each fault to a copy of its files; yield its name, and each file with the changed text."""
    for mutant in mutants:
        for file in {edit.file for edit in mutant.edits}:
            (package / file).parent.mkdir(parents=True, exist_ok=True)
            (package / file).write_text(original(file))
        try:
            mutant.apply(package)
        except DoesNotApply as error:
            raise AssertionError(f"{mutant.name} does not apply") from error
        for file in {edit.file for edit in mutant.edits}:
            yield mutant.name, file, (package / file).read_text()


def test_mutants_apply_once_and_still_compile(tmp_path: Path) -> None:
    for name, file, changed in apply_each(MUTANTS, tmp_path):
        assert ast.dump(ast.parse(changed, name)) != original_tree(file), f"{name} changes nothing"


def test_kernel_faults_apply_once(tmp_path: Path) -> None:
    """The session `mutants` judges their compiled code."""
    for name, file, changed in apply_each(KERNEL_FAULTS, tmp_path):
        assert changed != original(file), f"{name} changes nothing"


def test_unseen_entries_are_mutants() -> None:
    assert UNSEEN.keys() <= {mutant.name for mutant in MUTANTS}


def test_names_are_unique() -> None:
    counts = Counter(mutant.name for mutant in (*MUTANTS, *KERNEL_FAULTS))
    assert [name for name, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("source", ["x = 1\n", "x = 2\nx = 2\n"])
def test_text_that_does_not_occur_once_raises(source: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(source)
    with pytest.raises(DoesNotApply, match="expected once"):
        Edit("a.py", "x = 2", "x = 3").apply(tmp_path)


def test_every_core_test_file_is_in_exactly_one_group() -> None:
    files = Counter(file for group in groups() for file in group.files)
    assert set(files.values()) == {1}
    folders = ("disagg", "engine", "kv", "router", "runner", "scheduling", "text/parsing")
    found = {
        file.relative_to(ROOT).as_posix() for name in folders for file in (ROOT / "tests" / name).rglob("test_*.py")
    }
    connectors = {name for name in found if name.startswith("tests/disagg/connectors/")}
    assert found - connectors - set(files) == set(LEFT_OUT)


@pytest.mark.parametrize("file", [*LEFT_OUT, *LONG])
def test_listed_files_exist(file: str) -> None:
    assert (ROOT / file).is_file()
