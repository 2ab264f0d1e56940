"""The conformance report as data: the JSON of `fdcore conformance --json`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Literal

import msgspec

from fd_core.testing.kit.law import RULES
from fd_core.testing.report.coverage import PluginCoverage

SCHEMA: Final = 1
"""Version of the JSON, incremented on incompatible changes."""
SECTIONS: Final = ("cases", "attention", "costs", "models", "signals", "budget", "kv", "ranks", "lifetime", "scale")
"""Sections in order; each is a file or a folder of `fd_core.testing.suite`."""
OF_OTHERS_THAN_SCHEDULERS: Final[Mapping[str, str]] = {
    "1": "the postprocessor builds the matrix: fdcore conformance --postprocess",
    "6": "connectors seal and pace transfers between workers: fd_core.testing.connectors",
}
"""Rules that no scheduler can break, with the component that enforces them."""
PARSER_SECTIONS: Final = ("cuts", "waiting", "ends", "markup", "time", "day")
"""Sections of the parser kit common to all kinds; each is a file of `fd_core.testing.parsers.suite`."""
_DTYPES: Final = ("float32", "bfloat16")
"""Dtypes of every backend, unless its limits exclude one."""
_BLAMED: Final = re.compile(r"(?:\w+:\S+: )?law ([\d., ]+): ")
"""The rules at the beginning of a failure, after the case if it has one."""

INTERRUPTED: Final = "interrupted; later tests were not run"
"""`Card.error` of a run that the user ended."""

CaseOutcome = Literal["pass", "fail", "expected", "limit"]
"""`expected`: failed, and a line of the file of expected failures names it."""
AxisValue = int | float | str | bool | None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One test of one backend."""

    section: str
    test: str
    """Name, with parameters in brackets."""
    outcome: CaseOutcome
    reason: str = ""
    """One-line reason of the failure, or the limit that excludes it."""
    seconds: float = 0.0
    rules: tuple[str, ...] = ()
    expected: str = ""
    """Line that lists it as an expected failure; empty if there is none."""

    @property
    def blamed(self) -> tuple[str, ...]:
        found = _BLAMED.match(self.reason) if self.outcome in ("fail", "expected") else None
        return tuple(found[1].split(", ")) if found else ()

    @property
    def function(self) -> str:
        """The test without its parameters."""
        return self.test.partition("[")[0]


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one backend."""

    target: str
    """The backend or other plugin under test, as the user wrote it: name and settings."""
    device: str = ""
    dtype: str = ""
    distribution: str = ""
    emulated: bool = False
    """True if the backend was emulated; the results then do not apply to its device."""
    limits: dict[str, str] = {}
    envelope: dict[str, int] = {}
    """Declared limits; see `OperatingEnvelope`."""
    held: dict[str, dict[str, str]] = {}
    """Values of each axis of each part at which it held."""
    seeds: tuple[int, ...] = ()
    """Seeds of the covering cases other than 0."""
    error: str | None = None
    """Reason why the run did not complete; None if it did."""
    seconds: float = 0.0
    results: list[Result] = []
    sections: tuple[str, ...] = SECTIONS
    deselected: dict[str, int] = {}
    """Number of tests per section that the user excluded."""
    others: dict[str, str] = {}
    """Rules that this kind of plugin cannot break, with the component that enforces them."""

    def rules(self, outcome: CaseOutcome) -> list[str]:
        """Return the rule numbers that were broken (`fail`), satisfied (`pass`), and not tested (`limit`)."""
        broken = {rule for result in self.results for rule in result.blamed}
        held = {rule for result in self.results if result.outcome == "pass" for rule in result.rules} - broken
        if PARSER_SECTIONS[0] in self.sections:
            concerned = {rule for rule in RULES if rule.startswith("8.")}
        else:  # connectors and the router have suites without a card
            elsewhere = ("7", "8.") if "pairs" in self.sections else ("6", "7", "8.")
            concerned = {rule for rule in RULES if not rule.startswith(elsewhere)}
        left = concerned - broken - held - self.others.keys()
        found = {"fail": broken, "pass": held, "limit": left}[outcome]
        return [rule for rule in RULES if rule in found]

    @property
    def unseen(self) -> list[str]:
        """Untested parts: sections without any test run, partially run ones with the numbers, and dtypes that no
        limit excludes, unless the user named one."""
        ran = Counter(result.section for result in self.results)
        whole = [section for section in self.sections if not ran[section]]
        parts = [
            f"{section} ({count} of {count + ran[section]} tests)"
            for section, count in self.deselected.items()
            if ran[section]
        ]
        separator = "," if ":" in self.target else ":"
        is_auto = self.dtype and not re.search("[:,]dtype=", self.target)
        others = [dtype for dtype in _DTYPES if is_auto and dtype not in (self.dtype, *self.limits)]
        return whole + parts + [f"{dtype} ({self.target}{separator}dtype={dtype})" for dtype in others]

    @property
    def passed(self) -> bool:
        """True if every test passed, except those that a limit excludes."""
        return self.error is None and bool(self.results) and not any(self.failures)

    @property
    def verdict(self) -> str:
        """`passes`, `does not pass`, or `interrupted` if no test failed before the user ended the run."""
        if self.error == INTERRUPTED and not self.failures:
            return "interrupted"
        return "passes" if self.passed else "does not pass"

    @property
    def expected(self) -> list[str]:
        """Lines of expected failures of which a test fails."""
        return list(dict.fromkeys(result.expected for result in self.results if result.outcome == "expected"))

    @property
    def unneeded(self) -> list[str]:
        """Lines of expected failures of which every test passes now."""
        listed = [result for result in self.results if result.expected and result.outcome != "limit"]
        failing = {result.expected for result in listed if result.outcome != "pass"}
        return [line for line in dict.fromkeys(result.expected for result in listed) if line not in failing]

    @property
    def failures(self) -> list[Result]:
        return [result for result in self.results if result.outcome == "fail"]

    def totals(self) -> dict[str, int]:
        """Return the number of tests by outcome, in words; expected failures only if there are some."""
        counts = Counter(result.outcome for result in self.results)
        words: dict[CaseOutcome, str] = {"pass": "passed", "fail": "failed", "limit": "excluded"}
        found = {words[outcome]: counts[outcome] for outcome in words}
        return found | ({"expected to fail": counts["expected"]} if counts["expected"] else {})

    def of(self, section: str, function: str | None = None) -> list[Result]:
        """Return the results of a section, or of one test with all its parameters."""
        return [result for result in self.results if result.section == section and function in (None, result.function)]

    def counts(self, section: str, function: str | None = None) -> Counter[CaseOutcome]:
        return Counter(result.outcome for result in self.of(section, function))


class ConformanceReport(msgspec.Struct, frozen=True, kw_only=True):
    """The cards of one or more backends."""

    schema: int = SCHEMA
    fd_core: str
    python: str
    machine: str
    command: str
    cards: list[Card]
    coverage: list[PluginCoverage] = []
    """Code that the tests of all cards executed, if it was measured."""

    def functions(self, section: str) -> list[str]:
        """Return the tests of a section in the order in which they ran."""
        names = (result.function for card in self.cards for result in card.of(section))
        return list(dict.fromkeys(names))

    def sections(self) -> Iterator[str]:
        """Yield the sections that some card has results of."""
        found = {result.section for card in self.cards for result in card.results}
        yield from (section for section in SECTIONS if section in found)
        yield from sorted(found - set(SECTIONS))

    def beside(self, others: Iterable[ConformanceReport]) -> ConformanceReport:
        """Return a report with the cards, coverage and commands of this report and of `others`."""
        every = [self, *others]
        commands = "\n".join(dict.fromkeys(report.command for report in every))
        return msgspec.structs.replace(
            self,
            command=commands,
            cards=[card for report in every for card in report.cards],
            coverage=[each for report in every for each in report.coverage],
        )


def values_text(values: Iterable[AxisValue]) -> str:
    """Return values of an axis in short: numbers as a range with their count, then the others."""
    every = list(dict.fromkeys(values))
    numbers = sorted(value for value in every if isinstance(value, int | float) and not isinstance(value, bool))
    others = sorted(str(value).lower() for value in every if value not in numbers or isinstance(value, bool))
    if len(numbers) > 2:
        return "; ".join([f"{numbers[0]:,} to {numbers[-1]:,} ({len(numbers)} values)", *others])
    return "; ".join([*(f"{number:,}" for number in numbers), *others])


def read_report(content: bytes) -> ConformanceReport:
    """Parse the JSON. Raises `ValueError` if it is invalid or of another version."""
    report = msgspec.json.decode(content, type=ConformanceReport)
    if report.schema != SCHEMA:
        raise ValueError(f"expected a report of schema {SCHEMA}, got {report.schema}")
    return report
