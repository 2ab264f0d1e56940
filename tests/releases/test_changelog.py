"""CHANGELOG.md has the form of Keep a Changelog 1.1.0."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

import fd_core
from fd_core.deprecations import OLD_NAMES

ROOT = Path(__file__).parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]


def faults(text: str, version: str) -> list[str]:
    """Return the faults of a changelog of a project at `version`."""
    found = []
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    if titles[:1] != ["[Unreleased]"]:
        found.append("the first section is [Unreleased]")
    released = [re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - \d{4}-\d\d-\d\d( \[YANKED\])?", title) for title in titles[1:]]
    if not all(released):
        found.append("a release is written [1.2.3] - 2026-01-31")
    else:
        numbers = [tuple(map(int, each.groups()[:3])) for each in released if each]
        if any(older >= newer for newer, older in pairwise(numbers)):
            found.append("the newest release is first")
        if any(number > tuple(map(int, version.split("."))) for number in numbers):
            found.append("no release is newer than the version")
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        kinds = re.findall(r"^### (.*)$", section, re.MULTILINE)
        if not set(kinds) <= set(KINDS) or kinds != sorted(set(kinds), key=KINDS.index):
            found.append(f"kinds are {', '.join(KINDS)}, once each and in this order: {kinds}")
        for part in re.split(r"^### ", section, flags=re.MULTILINE)[1:]:
            title, _, lines = part.partition("\n")
            wrong = [line for line in lines.splitlines() if line and not re.match(r"(- |  )\S", line)]
            if wrong or "- " not in lines:
                found.append(f"{title} is a list of changes: {wrong}")
    return found


def test_changelog_follows_keep_a_changelog():
    assert "keepachangelog.com/en/1.1.0" in CHANGELOG
    assert faults(CHANGELOG, fd_core.__version__) == []


def test_each_release_fits_80_lines_and_has_release_notes_in_the_menu():
    sections = re.findall(r"^## \[(\d+\.\d+\.\d+)\].*\n((?:(?!## ).*\n)*)", CHANGELOG, re.MULTILINE)
    assert fd_core.__version__ in [version for version, _ in sections]
    menu = (ROOT / "mkdocs.yml").read_text()
    for version, text in sections:
        assert len(text.splitlines()) <= 80, version
        notes = ROOT / "docs" / "releases" / f"{version}.md"
        assert f"# Release notes for {version}\n" in notes.read_text()
        assert f"{version}: releases/{version}.md" in menu
        kinds = re.findall(r"^### (.*)$", text, re.MULTILINE)
        assert re.findall(f"^## ({'|'.join(KINDS)})$", notes.read_text(), re.MULTILINE) == kinds


def test_deprecated_names_are_listed():
    listed = "".join(re.findall(r"^### Deprecated\n((?:(?!##).*\n)*)", CHANGELOG, re.MULTILINE))
    names = {old.name.rpartition(".")[2].partition("{")[0] for old in OLD_NAMES}
    assert sorted(name for name in names if name not in listed) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("## 0.1.0 (unreleased)\n", "the first section"),
        ("## [Unreleased]\n## 0.1.0\n", "a release is written"),
        ("## [Unreleased]\n## [0.1.0] - 2026-01-01\n## [0.2.0] - 2026-01-02\n", "the newest release is first"),
        ("## [Unreleased]\n## [9.1.0] - 2026-01-01\n", "no release is newer"),
        ("## [Unreleased]\n### New\n- a\n", "kinds are"),
        ("## [Unreleased]\n### Fixed\n- a\n### Added\n- b\n", "kinds are"),
        ("## [Unreleased]\n### Added\nprose\n", "Added is a list"),
    ],
)
def test_malformed_changelog_is_detected(text, fault):
    assert any(each.startswith(fault) for each in faults(text, "0.2.0"))
