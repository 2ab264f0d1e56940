"""The glossary is sorted and complete, and the names in it exist."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from typer.main import get_command

from fd_core.cli.app import app
from tests.releases.public_names import RECORD

ROOT: Final = Path(__file__).parents[1]
GLOSSARY: Final = (ROOT / "docs" / "understand" / "glossary.md").read_text(encoding="utf-8")


class Entry(NamedTuple):
    """One row of the glossary."""

    term: str
    meaning: str
    names: str
    origin: str


ENTRIES: Final = [
    Entry(*(cell.strip() for cell in row.strip("|").split("|")))
    for row in re.findall(r"^\|.*\|$", GLOSSARY, re.MULTILINE)[2:]
]


@cache
def names_of_the_code() -> frozenset[str]:
    """Return classes and their members, functions and constants of fd_core and its plugins."""
    found = set[str]()
    for folder in ("fd_core", "plugins"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    members = {name for each in node.body for name in _defined(each)}
                    found |= {node.name, *members, *(f"{node.name}.{member}" for member in members)}
                elif isinstance(node, ast.Module):
                    found |= {name for each in node.body for name in _defined(each)}
    return frozenset(found)


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [each.id for each in targets if isinstance(each, ast.Name)]


@cache
def names_of_the_interface() -> frozenset[str]:
    """Return commands, flags, metrics, environment variables and nox sessions."""
    records = [line.split(maxsplit=1)[1] for line in RECORD.read_text(encoding="utf-8").splitlines()]
    found = {*records, *(record.split()[0] for record in records)}
    commands = [get_command(app)]
    for command in commands:
        commands += getattr(command, "commands", {}).values()
        found |= {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    sessions = re.findall(r"^@nox\.session.*\ndef (\w+)", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    return frozenset({*found, *(f"nox -s {session}" for session in sessions)})


def test_glossary_has_about_sixty_terms_in_order() -> None:
    terms = [entry.term for entry in ENTRIES]
    assert len(terms) >= 60
    assert terms == sorted(set(terms), key=str.casefold)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.term)
def test_glossary_entry_is_complete(entry: Entry) -> None:
    assert re.findall(r"`[^`]+`", entry.names), "no name of this code base"
    assert entry.origin, "no origin"
    assert entry.meaning.endswith(".") and entry.meaning.count(". ") <= 1, "one or two sentences"


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.term)
def test_glossary_names_exist(entry: Entry) -> None:
    spans = re.findall(r"`([^`]+)`", f"{entry.meaning} {entry.names}")
    assert [span for span in spans if span not in names_of_the_code() | names_of_the_interface()] == []


def test_glossary_check_rejects_invented_names() -> None:
    for invented in ("BlockPools", "BlockPool.fly", "--max-num-slots", "fdcore_block_pools", "nox -s poems"):
        assert invented not in names_of_the_code() | names_of_the_interface()
