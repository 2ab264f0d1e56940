"""The report for a terminal."""

from __future__ import annotations

from collections import Counter
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fd_core.testing.report.model import Card, CaseOutcome, ConformanceReport

_RULES: Final[tuple[tuple[CaseOutcome, str, str], ...]] = (
    ("pass", "held", "green"),
    ("fail", "broken", "bold red"),
    ("limit", "not tested", "yellow"),
)


def print_report(report: ConformanceReport, console: Console) -> None:
    """Print the table of sections, then failed tests, then excluded tests with their reasons."""
    tested = [card for card in report.cards if card.results]
    if tested:
        table = Table("", title="Conformance", title_justify="left")
        for card in tested:
            about = Text(card.target).append(f"\n{card.dtype}" if card.dtype else "", "dim")
            about.append("\nEMULATED\nnot run on hardware" if card.emulated else "", "bold yellow")
            table.add_column(about, overflow="fold")
        for section in report.sections():
            table.add_row(section, *(_cell(card.counts(section)) for card in tested))
        console.print(table)
    for card in report.cards:
        _print_card(card, console)
    for each in report.coverage:
        style = "bold yellow" if each.unexcused else "green"
        console.print(Text("\n" + "\n  ".join(each.notes()), style), soft_wrap=True)


def _cell(counts: Counter[CaseOutcome]) -> Text:
    if counts["fail"]:
        return Text(f"{counts['fail']} failed, {counts['pass']} passed", "bold red")
    parts = [f"{counts['pass']} passed"] if counts["pass"] else []
    parts += [f"{counts['expected']} expected to fail"] if counts["expected"] else []
    parts += [f"{counts['limit']} excluded"] if counts["limit"] else []
    return Text(", ".join(parts) or "not run", "green" if counts["pass"] else "yellow")


def _print_card(card: Card, console: Console) -> None:
    if card.error is not None and not card.results:
        reason = card.error.removeprefix(f"{card.target}: ")
        console.print(Text(f"\n{card.target} ").append("WAS NOT TESTED", "bold red").append(f": {reason}"))
        return
    verdict = Text("passes", "bold green") if card.passed else Text(card.verdict.upper(), "bold red")
    line = Text(f"\n{card.target} ").append(verdict)
    done = ", ".join(f"{count} {outcome}" for outcome, count in card.totals().items())
    line.append(f": {done}, {card.seconds:.0f} s")
    console.print(line.append(f" ({card.device})" if card.device else ""))
    if card.emulated:
        console.print(Text("  emulated: it did not run on its hardware", "bold yellow"))
    if card.error is not None:
        console.print(Text(f"  {card.error}", "red"))
    if card.unseen:
        console.print(Text(f"  not tested: {', '.join(card.unseen)}", "bold yellow"))
    if any(card.seeds):
        console.print(Text(f"  seeds: {', '.join(map(str, card.seeds))}"), soft_wrap=True)
    for result in card.failures:
        console.print(Text(f"  failed {result.section}: {result.test}: {result.reason}", "red"), soft_wrap=True)
    expected = Counter(result.expected for result in card.results if result.outcome == "expected")
    for listed, count in expected.items():
        console.print(Text(f"  expected to fail, tests: {count}: {listed}", "yellow"), soft_wrap=True)
    for unneeded in card.unneeded:
        console.print(Text(f"  passes now: remove the line: {unneeded}", "bold yellow"), soft_wrap=True)
    for outcome, words, style in _RULES if any(result.rules for result in card.results) else ():
        if rules := card.rules(outcome):
            console.print(Text(f"  rules {words}: {', '.join(rules)}", style))
    for rule, keeper in card.others.items():
        console.print(Text(f"  rule {rule} is enforced elsewhere: {keeper}"))
    if card.envelope:
        limits = ", ".join(f"{name}={limit}" for name, limit in card.envelope.items())
        console.print(Text(f"  envelope, nothing beyond it was tested: {limits}"), soft_wrap=True)
    for part, axes in card.held.items():
        tested = ", ".join(f"{axis} {values}" for axis, values in axes.items())
        console.print(Text(f"  held where tested, {part}: {tested}"), soft_wrap=True)
    reasons = Counter(result.reason for result in card.results if result.outcome == "limit")
    for reason, count in reasons.items():
        console.print(Text(f"  limit, tests excluded: {count}: {reason}", "yellow"))
