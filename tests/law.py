"""Generate docs/understand/law.md, the invariants, and the index of the tests and mutants that verify them.

python -m tests.law            # writes the page
python -m tests.law --index    # prints the index, which the docs build publishes as a page
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from fd_core.testing.kit.law import INVARIANT_SECTIONS, RULES
from tests.mutants.catalog import MUTANTS

__all__ = ["DOCUMENT", "index", "marked_tests", "mutants_by_rule", "page"]

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "understand" / "law.md"
FOLDERS = ("fd_core/testing", "tests", "plugins")


@cache
def marked_tests() -> dict[str, list[str]]:
    """Return the tests that carry `@pytest.mark.law(...)`, as file and name, by rule."""
    found = defaultdict(list)
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            source = path.read_text()
            if "mark.law(" not in source:  # parsing every file takes ten seconds
                continue
            for name, rules in _marks(ast.parse(source)):
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
    lines = [
        "# The invariants",
        "",
        "Every backend, scheduler and store must satisfy these rules. Two kinds of checks enforce them:",
        "",
        "- **Tests** carry the rule's number in a marker.",
        "- **Mutants** are faults that `nox -s mutants` injects into the code one at a time. A test fails for each.",
        "",
        "[The index](law-index.md) lists both by rule; `python -m tests.law --index` prints it. The suite fails if a",
        "rule has no test or no mutant. `python -m tests.law` generates this page.",
    ]
    for title, rules in _sections():
        lines += ["", f"## {title}", "", *(f"- **{rule}** {text}" for rule, text in rules.items())]
    return "\n".join(lines) + "\n"


def index() -> str:
    """Return the generated page understand/law-index.md: tests and mutants by rule, one a line."""
    tests, mutants = marked_tests(), mutants_by_rule()
    lines = ["# Tests and mutants by invariant", "", "[The invariants](law.md) explains the rules."]
    for title, rules in _sections():
        lines += ["", f"## {title}"]
        for rule, text in rules.items():
            lines += ["", f"### {rule}", "", text, "", "Tests:", "", *(f"- `{name}`" for name in tests.get(rule, ()))]
            lines += ["", "Mutants:", "", *(f"- `{name}`" for name in mutants.get(rule, ()))]
    return "\n".join(lines) + "\n"


def _sections() -> Iterator[tuple[str, dict[str, str]]]:
    for section, title in INVARIANT_SECTIONS.items():
        rules = {rule: text for rule, text in RULES.items() if rule.partition(".")[0] == section}
        if rules:
            yield f"{section}. {title}", rules


if __name__ == "__main__":
    if "--index" in sys.argv[1:]:
        print(index(), end="")
    else:
        DOCUMENT.write_text(page())
