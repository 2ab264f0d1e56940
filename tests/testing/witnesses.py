"""The check that a wrong plugin is a witness of: the default run has a witness of each, see the mark `in_turn`."""

from __future__ import annotations

import re


def check_of(noticed_by: str) -> str:
    """Return the name of a test, or the part and the first axis of a case, without the values that show a fault."""
    return re.split(r"[\[=]", noticed_by)[0]
