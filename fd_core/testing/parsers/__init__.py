"""The parser kit: feeds answers in pieces to any parser of tool calls or reasoning, and compares with the law.

    @pytest.mark.parametrize("case", kit_cases(TOOL_PARSER), ids=str)
    def test_it_keeps_the_law(case):
        case.run(target=find_parser("mine", TOOL_PARSER))

`fdcore conformance --tool-parser NAME` and `--reasoning-parser NAME` run the same cases;
`docs/extend/write-a-parser.md` shows a whole plugin.
"""

from __future__ import annotations

from typing import Any

from fd_core.plugins import REASONING_PARSER, TOOL_PARSER, Kind
from fd_core.testing.models.cases import KitCase, cases_of
from fd_core.testing.parsers.suite import (
    test_calls,
    test_characters,
    test_cuts,
    test_ends,
    test_markup,
    test_reasoning,
    test_time,
    test_waiting,
)
from fd_core.testing.parsers.target import ParserTarget, find_parser

__all__ = ["REASONING_PARSER", "TOOL_PARSER", "ParserTarget", "find_parser", "kit_cases"]


def kit_cases(kind: Kind[Any]) -> list[KitCase]:
    """Return all cases for parsers of a kind, section by section."""
    own = test_calls if kind is TOOL_PARSER else test_reasoning
    return list(cases_of((test_cuts, test_waiting, test_characters, test_ends, test_markup, test_time, own)))
