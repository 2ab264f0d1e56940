"""`python -m tests.hostile.count [ARGUMENT OF PYTEST ...]` runs what is hostile at length and counts it by kind.

A kind is a file of tests, or what a test says (`record_property("kind", ...)`). A test that passes has tried one input
or as many as it says (`record_property("inputs", ...)`), and all of them held; one that fails counts once, as not held.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import pytest

from tests.hostile.page import PAGE, replace

__all__ = ["Kind", "Tally", "read", "table"]

ROOT: Final = Path(__file__).parents[2]
TRIED: Final = ("tests/hostile", "tests/faults/test_rolling_restart.py")
_HEAD: Final = "| kind | tests | inputs and faults | held | not held |\n|---|--:|--:|--:|--:|"
_ALL: Final = "**all**"


class Kind(msgspec.Struct, frozen=True):
    """What became of the inputs of one kind."""

    tests: int = 0
    held: int = 0
    not_held: int = 0

    def __add__(self, other: Kind) -> Kind:
        return Kind(self.tests + other.tests, self.held + other.held, self.not_held + other.not_held)


class Tally:
    """A plugin of pytest that counts by kind."""

    def __init__(self) -> None:
        self.kinds: dict[str, Kind] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test that ended, or a failure before or after it."""
        if report.skipped or (report.when != "call" and not report.failed):
            return
        told = dict(report.user_properties)
        kind = str(told.get("kind", Path(report.location[0]).stem.removeprefix("test_").replace("_", " ")))
        inputs = int(str(told.get("inputs", 1)))
        found = Kind(int(report.when == "call"), *((0, 1) if report.failed else (inputs, 0)))
        self.kinds[kind] = self.kinds.get(kind, Kind()) + found


def table(kinds: Mapping[str, Kind]) -> str:
    """Return the Markdown table, with the sums in its last row."""
    rows = [*sorted(kinds.items()), (_ALL, sum(kinds.values(), Kind()))]
    lines = (
        f"| {name} | {each.tests:,} | {each.held + each.not_held:,} | {each.held:,} | {each.not_held:,} |"
        for name, each in rows
    )
    return "\n".join((_HEAD, *lines))


def read(text: str) -> dict[str, Kind]:
    """Return the kinds of a page with a table."""
    _, _, rest = text.partition(_HEAD)
    kinds = {}
    for line in rest.strip().splitlines():
        if not line.startswith("| "):
            break
        name, tests, _, held, not_held = (cell.strip() for cell in line.strip("|").split("|"))
        if name != _ALL:
            kinds[name] = Kind(*(int(cell.replace(",", "")) for cell in (tests, held, not_held)))
    return kinds


def main() -> int:
    """Run the tests, show the table, and return what pytest returned."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--write", action="store_true", help="put the kinds that were tried into docs/operate/reliability.md"
    )
    given, arguments = parser.parse_known_args()
    os.environ["FD_HOSTILE"] = "1"

    if not any((ROOT / each.partition("::")[0]).exists() for each in arguments if not each.startswith("-")):
        arguments = [*TRIED, *arguments]
    tally = Tally()
    ended = pytest.main(arguments, plugins=[tally])
    print(table(tally.kinds))
    if given.write:
        text = PAGE.read_text()
        PAGE.write_text(replace(text, "count", table(read(text) | tally.kinds))[0])
    return int(ended)


if __name__ == "__main__":
    sys.exit(main())
