"""Assembles a page from its template, styles and scripts, and sets its content security policy."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Final

_INLINE: Final = re.compile(r"<(style|script)>(.*?)</\1>", re.DOTALL)
_PAGE: Final = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{{policy}}<title>{title}</title>
<style>
/* style */
</style>
{body}<script>
"use strict";
/* script */
</script>
</html>
"""
_SAVED: Final = '<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
_MARK: Final = re.compile(r"/\* (style|script) \*/|\{(\w+)\}")


def assemble(
    package: str,
    title: str,
    *,
    shared: Sequence[str] = ("theme.css", "curves.js"),
    own: Sequence[str],
    values: Mapping[str, str] | None = None,
    served: bool = False,
) -> str:
    """Return the page around `page.html` of a package, with styles, scripts and `{name}` filled in.

    A page that is not served with `page_headers` carries its policy itself.
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

    # One pass: a value may contain text that looks like a mark.
    body = files(package).joinpath("page.html").read_text("utf-8")
    page = _MARK.sub(filled, _PAGE.format(title=title, body=body))
    return page.replace("{policy}", "" if served else _SAVED.format(policy=_policy(page)), 1)


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
