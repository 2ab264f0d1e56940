"""Links between documents lead to headings that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.documents.blocks import DOCUMENTS, name_of

LINK = re.compile(r"\]\((?P<page>[^)#\s:]*)#(?P<anchor>[^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Return the anchors that mkdocs and GitHub give to the headings of a page."""
    written = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#{1,6} (.+)$", written, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_anchor_of_a_link_is_a_heading(document: Path) -> None:
    for found in LINK.finditer(document.read_text()):
        page = (document.parent / found["page"]).resolve() if found["page"] else document
        if page.is_file():  # others are generated when the site is built
            assert found["anchor"] in anchors(page), f"{document}: {found[0]}"
