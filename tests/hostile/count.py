"""`python -m tests.hostile.count [PYTEST_ARGUMENT ...]` runs all hostile tests and counts inputs by kind.

A kind is a test file or the value of `record_property("kind", ...)`. A test that passes counts as one held input, or as
the number in `record_property("inputs", ...)`; a test that fails counts once, as not held.
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
    """Results of the inputs of one kind."""

    tests: int = 0
    held: int = 0
    not_held: int = 0

    def __add__(self, other: Kind) -> Kind:
        return Kind(self.tests + other.tests, self.held + other.held, self.not_held + other.not_held)


class Tally:
    """Pytest plugin that counts inputs by kind."""

    def __init__(self) -> None:
        self.kinds: dict[str, Kind] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a finished test, or a failure in its set-up or tear-down."""
        if report.skipped or (report.when != "call" and not report.failed):
            return
        properties = dict(report.user_properties)
        kind = str(properties.get("kind", Path(report.location[0]).stem.removeprefix("test_").replace("_", " ")))
        inputs = int(str(properties.get("inputs", 1)))
        found = Kind(int(report.when == "call"), *((0, 1) if report.failed else (inputs, 0)))
        self.kinds[kind] = self.kinds.get(kind, Kind()) + found


def table(kinds: Mapping[str, Kind]) -> str:
    """Return the Markdown table; its last row holds the sums."""
    rows = [*sorted(kinds.items()), (_ALL, sum(kinds.values(), Kind()))]
    lines = (
        f"| {name} | {each.tests:,} | {each.held + each.not_held:,} | {each.held:,} | {each.not_held:,} |"
        for name, each in rows
    )
    return "\n".join((_HEAD, *lines))


def read(text: str) -> dict[str, Kind]:
    """Return the kinds in the table of a page."""
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
    """Run the tests, print the table and return pytest's exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the kinds that ran to docs/operate/reliability.md")
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
