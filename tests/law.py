"""Writes docs/understand/law.md: each rule of the law, the tests that hold it and the mutants that break it.

python -m tests.law
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from fd_core.testing.kit.law import RULES, SECTIONS_OF_THE_LAW
from tests.mutants.catalog import MUTANTS

__all__ = ["DOCUMENT", "marked_tests", "mutants_by_rule", "page"]

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "understand" / "law.md"
FOLDERS = ("fd_core/testing", "tests", "plugins")


@cache
def marked_tests() -> dict[str, list[str]]:
    """Return the tests that carry `@pytest.mark.law(...)`, as file and name, by rule."""
    found = defaultdict(list)
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for name, rules in _marks(ast.parse(path.read_text())):
                for rule in rules:
                    found[rule].append(f"{path.relative_to(ROOT)}::{name}")
    return dict(found)


def _marks(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.law":
                    yield node.name, [ast.literal_eval(argument) for argument in decorator.args]


def mutants_by_rule() -> dict[str, list[str]]:
    """Return the names of the mutants by the rules that their law begins with; some break no rule by number."""
    found = defaultdict(list)
    for mutant in MUTANTS:
        for rule in re.findall(r"\d(?:\.\d)?", mutant.law.partition(":")[0]):
            found[rule].append(mutant.name)
    return dict(found)


def page() -> str:
    """Return docs/understand/law.md."""
    tests, mutants = marked_tests(), mutants_by_rule()
    lines = [
        "# The law",
        "",
        "Every backend, scheduler and store keeps these rules. A rule is held by tests, and by mutants: faults that",
        "are put into the code one at a time (`nox -s mutants`), each of which a test has to notice. This page is",
        "written by `python -m tests.law`; a rule without a test or without a mutant fails the suite.",
    ]
    for section, title in SECTIONS_OF_THE_LAW.items():
        rules = {rule: text for rule, text in RULES.items() if rule.partition(".")[0] == section}
        if not rules:
            continue
        lines += ["", f"## {section}. {title}", "", "| rule | tests | mutants |", "|---|---|---|"]
        for rule, text in rules.items():
            held = "<br>".join(f"`{name}`" for name in tests.get(rule, ()))
            broken = "<br>".join(f"`{name}`" for name in mutants.get(rule, ()))
            lines.append(f"| **{rule}** {text} | {held} | {broken} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(page())
