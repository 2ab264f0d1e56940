"""Merge the reports of incompatible environments into a support table.

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

Results of each backend, compared with numpy as the oracle. Numbers count tests. A limit is a feature that a backend
declares as unsupported, with its reason; preempted-slot signalling and the step token budget have no limits. A backend
that is *emulated* did not run on its hardware, and its line is no evidence for it.

Made by

    {}

`nox -s conformance` regenerates it, with all lines from one environment.

"""


def main() -> None:
    """Read, merge and write reports."""
    parser = argparse.ArgumentParser(prog="python -m fd_core.testing.report", description="Merge conformance reports.")
    parser.add_argument("reports", nargs="+", type=Path, help="report of `fdcore conformance --json`")
    parser.add_argument("--json", type=Path, help="path of the merged report")
    parser.add_argument("--html", type=Path, help="path of the HTML page")
    parser.add_argument("--markdown", type=Path, help="path of the Markdown table")
    parser.add_argument("--require-pass", action="store_true", help="exit with status 1 unless every backend passes")
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
