"""Class names are unique, private ones too: a search for a name finds one class."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1] / "fd_core"


def shared_names() -> dict[str, list[str]]:
    by_name = defaultdict(list)
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                by_name[node.name].append(path.relative_to(ROOT).as_posix())
    return {name: files for name, files in by_name.items() if len(files) > 1}


def test_no_two_classes_share_a_name() -> None:
    assert shared_names() == {}
