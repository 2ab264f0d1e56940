"""Assembles the page at `/docs`."""

from __future__ import annotations

from functools import cache

from fd_core.http.pages.assembling import assemble


@cache
def api_docs_page() -> str:
    """Return the page as HTML text; its script reads /openapi.json."""
    return assemble(__package__, "fd_core API", own=("page.css", "schemas.js", "docs.js"), served=True)
