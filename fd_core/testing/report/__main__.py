"""Merge reports, of environments that cannot be one, into a support table.

python -m fd_core.testing.report A.json B.json --json ALL.json --html TABLE.html --markdown TABLE.md
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from fd_core.testing.report.model import read_report
from fd_core.testing.report.page import html_of, markdown_of


def main() -> None:
    """Read, merge, write."""
    parser = argparse.ArgumentParser(prog="python -m fd_core.testing.report", description="Merge conformance reports.")
    parser.add_argument("reports", nargs="+", type=Path, help="what `fdcore conformance --json` wrote")
    parser.add_argument("--json", type=Path, help="where the merged report goes")
    parser.add_argument("--html", type=Path, help="where the page goes")
    parser.add_argument("--markdown", type=Path, help="where the table for a document goes")
    parser.add_argument("--heading", type=Path, help="file whose text comes before the table of --markdown")
    chosen = parser.parse_args()
    first, *others = (read_report(path.read_bytes()) for path in chosen.reports)
    report = first.with_cards(card for other in others for card in other.cards)
    if chosen.json is not None:
        chosen.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    if chosen.html is not None:
        chosen.html.write_text(html_of(report), encoding="utf-8")
    if chosen.markdown is not None:
        heading = chosen.heading.read_text(encoding="utf-8") if chosen.heading is not None else ""
        chosen.markdown.write_text(heading + markdown_of(report), encoding="utf-8")


if __name__ == "__main__":
    main()
