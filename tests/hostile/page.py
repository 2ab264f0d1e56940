"""Tables that scripts write to docs/operate/reliability.md, each between two markers."""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["PAGE", "replace"]

PAGE: Final = Path(__file__).parents[2] / "docs" / "operate" / "reliability.md"


def replace(text: str, mark: str, table: str) -> tuple[str, str]:
    """Return a page with a new table between its markers, and the previous table."""
    begin, end = f"<!-- {mark} -->\n", f"\n<!-- end of {mark} -->"
    before, _, rest = text.partition(begin)
    old, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"the page has no marks for {mark!r}")
    return before + begin + table + end + after, old
