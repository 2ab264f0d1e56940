"""The parser kit: responses in pieces, checked against the invariants, see docs/extend/write-a-parser.md."""

from __future__ import annotations

from typing import Any

from fd_core.plugins import REASONING_PARSER, TOOL_PARSER, Kind
from fd_core.testing.models.cases import SuiteCase, cases_of
from fd_core.testing.parsers.suite import (
    test_calls,
    test_cuts,
    test_day,
    test_ends,
    test_markup,
    test_reasoning,
    test_time,
    test_waiting,
)
from fd_core.testing.parsers.target import ParserTarget, find_parser

__all__ = ["REASONING_PARSER", "TOOL_PARSER", "ParserTarget", "find_parser", "kit_cases"]


def kit_cases(kind: Kind[Any]) -> list[SuiteCase]:
    """Return all cases for parsers of a kind, section by section."""
    own = test_calls if kind is TOOL_PARSER else test_reasoning
    return list(cases_of((test_cuts, test_waiting, test_ends, test_markup, test_time, test_day, own)))
