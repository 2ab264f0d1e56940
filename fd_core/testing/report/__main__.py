"""Merge reports, of environments that cannot be one, into a support table.

python -m fd_core.testing.report A.json B.json --json ALL.json --html TABLE.html --markdown TABLE.md
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from fd_core.testing.report.model import read_report
from fd_core.testing.report.page import html_of, markdown_of

_HEADING = """# Conformance

What each backend was found to do, against numpy as the oracle. Numbers count tests. A limit is something that a backend
says it cannot do, with its reason; preempted-slot signalling and the step token budget know none. A backend that is
*emulated* was not run on the hardware it is for, and its line says nothing about that.

Made by

    {}

`nox -s conformance` makes it anew, with every line from one environment.

"""


def main() -> None:
    """Read, merge, write."""
    parser = argparse.ArgumentParser(prog="python -m fd_core.testing.report", description="Merge conformance reports.")
    parser.add_argument("reports", nargs="+", type=Path, help="what `fdcore conformance --json` wrote")
    parser.add_argument("--json", type=Path, help="where the merged report goes")
    parser.add_argument("--html", type=Path, help="where the page goes")
    parser.add_argument("--markdown", type=Path, help="where the table for a document goes")
    parser.add_argument("--require-pass", action="store_true", help="end with 1 unless every backend passes")
    chosen = parser.parse_args()
    first, *others = (read_report(path.read_bytes()) for path in chosen.reports)
    report = first.beside(others)
    if chosen.json is not None:
        chosen.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    if chosen.html is not None:
        chosen.html.write_text(html_of(report), encoding="utf-8")
    if chosen.markdown is not None:
        chosen.markdown.write_text(
            _HEADING.format(report.command.replace("\n", "\n    ")) + markdown_of(report), encoding="utf-8"
        )
    if chosen.require_pass and not all(card.passed for card in report.cards):
        sys.exit(1)


if __name__ == "__main__":
    main()
