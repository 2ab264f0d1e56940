"""Each page is one self-contained file: it loads nothing from elsewhere, and no value is parsed as markup."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest

import fd_core
from fd_core.http.pages.assembling import assemble, page_headers

PAGES = {
    "fd_core.server.live_page": ("page.css", "live.js", "playground.js"),
    "fd_core.router.gateway.live_page": ("page.css", "live.js"),
    "fd_core.http.pages.api_docs": ("page.css", "schemas.js", "docs.js"),
}


@pytest.mark.parametrize("package", PAGES)
def test_live_page_embeds_its_assets_and_names_no_other_host(package):
    page = assemble(package, "page", own=PAGES[package], served=True)
    assert "/* style */" not in page and "/* script */" not in page
    assert "--back:" in page and "function drawCurve(" in page and "followTheme(" in page
    assert not re.search(r"https?://|<link|<img|\bsrc=|@import|url\(", page)


@pytest.mark.parametrize("package", PAGES)
def test_every_element_id_used_by_scripts_exists(package):
    page = assemble(package, "page", own=PAGES[package], served=True)
    ids = set(re.findall(r'byId\("(\w+)"\)', page))
    assert ids and ids <= set(re.findall(r'id="(\w+)"', page))


def test_placeholder_in_a_value_stays_text():
    values = {"facts": "{data} /* script */", "data": "{facts}"}
    page = assemble("fd_core.cli.trace_page", "trace", own=("page.css",), values=values)
    assert "{data} /* script */" in page and ">{facts}<" in page


@pytest.mark.parametrize("package", PAGES)
def test_policy_allows_only_embedded_styles_and_scripts(package):
    page = assemble(package, "page", own=PAGES[package], served=True)
    headers = page_headers(page)
    rules = dict(rule.strip().split(" ", 1) for rule in headers["Content-Security-Policy"].split(";"))
    for rule in ("default-src", "base-uri", "form-action", "frame-ancestors"):
        assert rules[rule] == "'none'"
    assert rules["connect-src"] == "'self'" and "unsafe" not in headers["Content-Security-Policy"]
    for kind in ("style", "script"):
        inside = [text for found, text in re.findall(r"<(style|script)>(.*?)</", page, re.DOTALL) if found == kind]
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inside]
        assert rules[f"{kind}-src"] == " ".join(f"'sha256-{digest}'" for digest in digests)
    assert (headers["X-Content-Type-Options"], headers["Referrer-Policy"]) == ("nosniff", "no-referrer")


def test_no_page_uses_attributes_that_its_policy_blocks():
    for page in Path(fd_core.__file__).parent.rglob("page.html"):
        assert not re.search(r"\s(style|on\w+)=", page.read_text("utf-8")), page
    for script in Path(fd_core.__file__).parent.rglob("*.js"):
        assert not re.search(
            r"setAttribute\(.(style|on)|innerHTML|outerHTML|insertAdjacentHTML", script.read_text("utf-8")
        ), script


def test_saved_page_carries_its_policy():
    page = assemble("fd_core.cli.trace_page", "trace", own=("page.css",), values={"facts": "{policy}", "data": ""})
    assert re.search(r"""content="default-src 'none'; [^"]*script-src 'sha256-""", page)
    assert ">{policy}<" in page and "unsafe-inline" not in page
