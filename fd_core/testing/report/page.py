"""The support table as one self-contained HTML page, or as Markdown for documents."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from typing import NamedTuple

import jinja2

from fd_core.http.pages.assembling import assemble
from fd_core.testing.report.model import Card, ConformanceReport


class Cell(NamedTuple):
    """The outcome of one backend in one row of the table."""

    kind: str
    """`pass`, `fail`, `expected`, `limit`, or `none` if no test ran."""
    words: str
    details: str = ""


class Line(NamedTuple):
    """A row of the table: a section, or a test of the section with all its parameters."""

    name: str
    is_section: bool
    cells: list[Cell]


def html_of(report: ConformanceReport) -> str:
    """Return the page."""
    source = resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    content = environment.from_string(source).render(report=report, lines=list(_lines(report)))
    return assemble(__package__, "fd_core conformance", own=("page.css", "view.js"), values={"report": content})


def markdown_of(report: ConformanceReport) -> str:
    """Return the table of backends by sections, then failures, limits, emulated backends and coverage."""
    sections = [line for line in _lines(report) if line.is_section]
    heads = ["backend", "result", "computes in", "on", *(line.name for line in sections)]
    lines = [_markdown_row(heads), "|---" * len(heads) + "|"]
    for place, card in enumerate(report.cards):
        about = [f"`{card.target}`", _verdict(card), card.dtype or "?", card.device or "?"]
        lines.append(_markdown_row([*about, *(line.cells[place].words for line in sections)]))
    noted: dict[tuple[str, ...], list[str]] = {}
    for card in report.cards:
        notes = [f"did not finish: {card.error}"] if card.error else []
        notes += [f"fails {result.section}: `{result.test}`: {result.reason}" for result in card.failures]
        limited = {result.reason for result in card.results if result.outcome == "limit"}
        notes += [f"expected to fail: `{line}`" for line in card.expected]
        notes += [f"passes now: `{line}`" for line in card.unneeded]
        notes += [f"limit: {reason}" for reason in sorted(limited)]
        if card.envelope:
            notes.append(f"envelope: {', '.join(f'{name}={limit}' for name, limit in card.envelope.items())}")
        notes += [f"rule {rule} is enforced elsewhere: {keeper}" for rule, keeper in card.others.items()]
        if card.unseen:
            notes.insert(0, f"**not tested**: {', '.join(card.unseen)}")
        if card.emulated:
            notes.insert(0, "**emulated**: not run on its hardware")
        noted.setdefault(tuple(map(_one_line, notes)), []).append(f"`{card.target}`")
    for alike, targets in noted.items():
        if alike:
            lines += ["", f"{', '.join(targets)}:", "", *(f"- {note}" for note in alike)]
    for each in report.coverage:
        lines += ["", f"{each.plugins}:", "", *(f"- {_one_line(note)}" for note in each.notes())]
    return "\n".join(lines) + "\n"


def _markdown_row(cells: list[str]) -> str:
    return "| " + " | ".join(_one_line(cell).replace("|", "\\|") for cell in cells) + " |"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _verdict(card: Card) -> str:
    return f"{card.verdict}, EMULATED, not run on hardware" if card.emulated else card.verdict


def _lines(report: ConformanceReport) -> Iterator[Line]:
    for section in report.sections():
        yield Line(section, True, [_cell(card, section) for card in report.cards])
        for function in report.functions(section):
            name = function.removeprefix("test_").replace("_", " ")
            yield Line(name, False, [_cell(card, section, function) for card in report.cards])


def _cell(card: Card, section: str, function: str | None = None) -> Cell:
    counts = card.counts(section, function)
    total = sum(counts.values())
    shown = [result for result in card.of(section, function) if result.outcome != "pass"]
    details = "; ".join(
        dict.fromkeys(f"{result.test}: {result.reason}" for result in shown if result.outcome == "fail")
    )
    reasons = "; ".join(dict.fromkeys(result.reason for result in shown if result.outcome == "limit"))
    if not total:
        return Cell("none", "not run")
    if counts["fail"]:
        return Cell("fail", f"{counts['fail']} of {total} fail", details)
    if counts["expected"]:
        expected = "; ".join(dict.fromkeys(result.expected for result in shown if result.outcome == "expected"))
        return Cell("expected", f"{counts['expected']} of {total} expected to fail", expected)
    if counts["limit"] == total:
        return Cell("limit", "limit", reasons)
    some = f", {counts['limit']} excluded by a limit" if counts["limit"] else ""
    return Cell("pass", f"{counts['pass']} pass{some}", reasons)
