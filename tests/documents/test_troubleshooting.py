"""Each message quoted on the troubleshooting page is raised or logged by the code, and asserted by a test."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from fd_core.errors import BadRequest
from fd_core.http.errors import invalid, to_api_error, unavailable, unsupported
from tests.documents.blocks import ROOT

PAGE = ROOT / "docs" / "operate" / "trouble.md"
CODE = (ROOT / "fd_core", *sorted(ROOT.glob("plugins/*/fd_*")))
TESTS = (ROOT / "tests", *sorted(ROOT.glob("plugins/*/tests")))
VALUE = "\0"
"""Placeholder of a value in a message: `...` on the page, a field of an f-string or a `%s` in the code."""
STATUSES = {
    "invalid": invalid("", None).status,
    "unsupported": unsupported("", "").status,
    "unavailable": unavailable("", "", 1).status,
    "BadRequest": to_api_error(BadRequest("")).status,
}
"""HTTP status that each of these functions and exceptions results in; `ApiError` has it as an argument."""


@dataclass(frozen=True, slots=True)
class Literal:
    """A string of the code outside docstrings."""

    text: str
    owner: ast.AST
    """Its function; the module outside of functions."""


def literals(file: Path) -> Iterator[Literal]:
    """Return the strings of a module, without docstrings and other strings that are statements."""
    tree: ast.AST = ast.parse(file.read_text())
    pending = [(tree, tree)]
    while pending:
        node, owner = pending.pop()
        text = _text(node)
        if text is not None:
            yield Literal(text, owner)
        if isinstance(node, ast.JoinedStr):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            owner = node
        for child in ast.iter_child_nodes(node):
            if not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):
                pending.append((child, owner))


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%(?:\.\d+)?[sdrfg]", VALUE, node.value)
    return None


def _statuses(function: ast.AST) -> Iterator[int]:
    """Return the HTTP statuses of the errors that a function creates."""
    for call in ast.walk(function):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            if call.func.id == "ApiError" and call.args and isinstance(call.args[0], ast.Constant):
                yield int(str(call.args[0].value))
            elif call.func.id in STATUSES:
                yield STATUSES[call.func.id]


@cache
def sources(tops: tuple[Path, ...], pattern: str) -> dict[Path, str]:
    """Return the sources in some folders, without these tests."""
    files = (file for top in tops for file in sorted(top.rglob(pattern)) if file != Path(__file__))
    return {file: file.read_text() for file in files}


@cache
def parsed(file: Path) -> tuple[Literal, ...]:
    return tuple(literals(file))


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """Keep syntax trees for the tests of this file alone: every collection of garbage visits their million objects."""
    yield
    parsed.cache_clear()


def literals_with(words: str, tops: tuple[Path, ...], pattern: str) -> list[Literal]:
    """Return the strings with these words; only files that have the longest of them are parsed."""
    word = max(words.replace(VALUE, " ").split(), key=len)
    files = (file for file, source in sources(tops, pattern).items() if word in source)
    return [each for file in files for each in parsed(file) if words in each.text]


def symptoms(page: str) -> list[tuple[int | None, str]]:
    """Return the quotes in the first column of the page's tables, each with the status before it."""
    cells = re.findall(r"^\| (?!you see|-)(.*?) \| .* \| .* \|$", page, re.MULTILINE)
    found = (re.search(r"^(?:(\d{3}) )?`([^`]+)`", cell) for cell in cells)
    return [(int(each[1]) if each[1] else None, each[2].replace("...", VALUE).strip()) for each in found if each]


def faults(status: int | None, quoted: str) -> list[str]:
    """Return the reason that the code has no message with this status."""
    found = literals_with(quoted, CODE, "*.py") if quoted.strip(VALUE + " ") else []
    if not found:
        return [f"no string of the code has {quoted!r}"]
    if status is not None and all(status not in _statuses(each.owner) for each in found):
        return [f"no function with {quoted!r} answers {status}"]
    longest = max(quoted.split(VALUE), key=len).strip()
    return [] if literals_with(longest, TESTS, "test_*.py") else [f"no test asserts {longest!r}"]


SYMPTOMS = symptoms(PAGE.read_text())


@pytest.mark.parametrize(("status", "quoted"), SYMPTOMS, ids=[each.replace(VALUE, "...") for _, each in SYMPTOMS])
def test_quoted_message_exists_in_the_code(status: int | None, quoted: str) -> None:
    assert faults(status, quoted) == []


def test_every_code_span_of_a_symptom_is_checked() -> None:
    rows = re.findall(r"^\| (?:\d{3} )?`", PAGE.read_text(), re.MULTILINE)
    assert len(SYMPTOMS) == len(rows) >= 10


@pytest.mark.parametrize(
    ("status", "quoted"),
    [
        (None, "kernels are compiling"),
        (None, VALUE),
        (None, f"native {VALUE} are off"),
        (409, "model_not_found"),
        (None, "Return a 400 that names the field at fault"),
    ],
    ids=["reworded", "only a value", "a value where the code has a word", "another status", "a docstring"],
)
def test_stale_quote_is_reported(status: int | None, quoted: str) -> None:
    assert faults(status, quoted)
