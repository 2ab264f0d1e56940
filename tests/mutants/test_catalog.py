"""Mutants follow the code: a fault that no longer applies would be an empty test."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.catalog import MUTANTS
from tests.mutants.groups import LEFT_OUT, LONG, ROOT, groups
from tests.mutants.kernel_faults import KERNEL_FAULTS
from tests.mutants.mutant import DoesNotApply, Edit, Mutant
from tests.mutants.unseen import UNSEEN


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_applies_once_and_still_compiles(mutant: Mutant, tmp_path: Path) -> None:
    for edit in mutant.edits:
        copy = tmp_path / edit.file
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text((ROOT / "fd_core" / edit.file).read_text())
    mutant.apply(tmp_path)
    for edit in mutant.edits:
        changed = (tmp_path / edit.file).read_text()
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse((ROOT / "fd_core" / edit.file).read_text()))


@pytest.mark.parametrize("fault", KERNEL_FAULTS, ids=lambda fault: fault.name)
def test_kernel_fault_applies_once(fault: Mutant, tmp_path: Path) -> None:
    """The session `mutants` judges their compiled code."""
    for edit in fault.edits:
        copy = tmp_path / edit.file
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text((ROOT / "fd_core" / edit.file).read_text())
    fault.apply(tmp_path)


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
