"""Files, classes and members that the documents name exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.documents.blocks import DOCUMENTS, ROOT

_PATH = re.compile(r"`((?:fd_core|tests/[a-z_]+|benchmarks|plugins|examples|deploy|docs)/[a-z0-9_./-]+)`")
_MEMBER = re.compile(r"`(?:self\.)?([A-Z]\w+)\.([a-z_]\w*)[`(]")


@cache
def classes() -> dict[str, tuple[set[str], set[str]]]:
    """Return the members and the bases of each class of the sources, by name."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for path in (*(ROOT / "fd_core").rglob("*.py"), *(ROOT / "plugins").glob("*/fd_*/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                members, bases = found.setdefault(node.name, (set(), set()))
                bases |= {ast.unparse(base).rpartition(".")[2].partition("[")[0] for base in node.bases}
                for part in ast.walk(node):
                    if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                        members.add(part.name)
                    elif isinstance(part, ast.Name | ast.Attribute) and isinstance(part.ctx, ast.Store):
                        members.add(part.id if isinstance(part, ast.Name) else part.attr)
    return found


def has(name: str, member: str) -> bool:
    members, bases = classes()[name]
    return member in members or any(has(base, member) for base in bases if base in classes() and base != name)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_members_named_in_a_document_exist(document: Path) -> None:
    text = document.read_text()
    assert [path for path in _PATH.findall(text) if not (ROOT / path).exists()] == []
    if document.name == "CHANGELOG.md" or document.parent.name == "releases":
        return  # these name members that are gone
    named = [(name, member) for name, member in _MEMBER.findall(text) if name in classes()]
    assert [f"{name}.{member}" for name, member in named if not has(name, member)] == []


def test_missing_member_is_found() -> None:
    assert has("Sampler", "sample") and not has("Sampler", "fly")
