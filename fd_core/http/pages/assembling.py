"""Assembles a page from its template, styles and scripts, and sets its content security policy."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Final

_INLINE: Final = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)
_MARK: Final = re.compile(r"/\* (style|script) \*/|\{(\w+)\}")


def assemble(
    package: str,
    *,
    shared: Sequence[str] = ("theme.css",),
    own: Sequence[str] = ("page.css",),
    values: Mapping[str, str] | None = None,
) -> str:
    """Return `page.html` of a package with styles, scripts and `{name}` filled in, and a matching policy."""
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

    # One pass: a value may contain text that looks like a mark.
    page = _MARK.sub(filled, files(package).joinpath("page.html").read_text("utf-8"))
    return page.replace("{policy}", _policy(page), 1)


def page_headers(page: str) -> dict[str, str]:
    """Return headers of a page: it may call only its own server, and no other page may embed it."""
    return {
        "Content-Security-Policy": f"{_policy(page)}; connect-src 'self'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }


def _policy(page: str) -> str:
    """Return a Content-Security-Policy that allows only the styles and scripts in the page, by digest."""
    rules = {"default-src": ["'none'"], "base-uri": ["'none'"], "form-action": ["'none'"]}
    for kind, text in _INLINE.findall(page):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        rules.setdefault(f"{kind}-src", []).append(f"'sha256-{digest}'")
    return "; ".join(" ".join((name, *sources)) for name, sources in rules.items())
