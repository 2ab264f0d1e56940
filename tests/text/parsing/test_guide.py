"""The parser that docs/tools.md shows keeps the laws."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from recorded import parsed

from fd_core.text.parsing.events import ArgumentsDelta, CallBegun, CallEnded, Content

GUIDE = (Path(__file__).parents[3] / "docs" / "tools.md").read_text()
CODE = next(each for each in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if "PlainTools(" in each)


def test_the_parser_of_the_guide_reads_calls_whatever_the_cuts() -> None:
    names: dict[str, Any] = {}
    exec(CODE, names)  # the code of our own guide
    text = 'I look.\nCALL now {"zone": 1}\nDone'
    whole = parsed(names["PlainTools"]({}), [text])
    assert whole == [
        Content("I look."),
        CallBegun(0, "now"),
        ArgumentsDelta(0, '{"zone": 1}'),
        CallEnded(0),
        Content("Done"),
    ]
    for cut in range(len(text)):
        assert parsed(names["PlainTools"]({}), [text[:cut], text[cut:]]) == whole
