"""The files and sessions that CONTRIBUTING.md names exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()


def section(title: str) -> str:
    return TEXT.partition(f"## {title}")[2].partition("\n## ")[0]


def test_ten_changes_name_files_that_exist():
    rows = re.findall(r"^\| (?!change )([a-z].*?) \| (.*) \|$", section("Ten changes"), re.MULTILINE)
    assert len(rows) == 10
    for change, files in rows:
        near = None
        named = re.findall(r"`([\w./]+)`|\]\(([^)#]+)\)", files)
        assert named, change
        for code, link in named:
            path = ROOT / (code or link)
            if code and near and "/" not in code:
                path = near.parent / code
            elif path.stem == "NAME":
                path = path.parent
            assert path.exists(), f"{change}: {path.relative_to(ROOT)}"
            near = path


def test_sessions_exist():
    sessions = set(re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE))
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", section("Check a change"), re.MULTILINE)
    named = {word for row in rows for word in re.findall(r"\w+", row)}
    assert "build" in named and named <= sessions, named - sessions
