"""Puts a page together from its template, its styles and its scripts, and says what a browser may do with it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Final

__all__ = ["PAGE_POLICY", "assemble"]

PAGE_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
"""Content-Security-Policy of a page that a server sends: everything is in the page, and it asks only its own server."""

_MARK: Final = re.compile(r"/\* (style|script) \*/|\{(\w+)\}")


def assemble(
    package: str,
    *,
    shared: Sequence[str] = ("theme.css",),
    own: Sequence[str] = ("page.css",),
    values: Mapping[str, str] | None = None,
) -> str:
    """Return `page.html` of a package with styles and scripts in it.

    `shared` names files of this folder, `own` files of the package; both are put in their order where the template says
    `/* style */` or `/* script */`, by their suffix. `values` are put where the template says `{name}`.
    """
    parts: dict[str, list[str]] = {"style": [], "script": []}
    for folder, names in ((__package__, shared), (package, own)):
        for name in names:
            kind = "style" if name.endswith(".css") else "script"
            parts[kind].append(files(folder).joinpath(name).read_text("utf-8"))
    given = values or {}

    def filled(mark: re.Match[str]) -> str:
        if mark[1]:
            return "\n".join(parts[mark[1]])
        return given.get(mark[2], mark[0])

    # One pass: what a value says may look like a mark.
    return _MARK.sub(filled, files(package).joinpath("page.html").read_text("utf-8"))
