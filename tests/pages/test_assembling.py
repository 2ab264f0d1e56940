"""Pages are one file each: nothing is loaded from elsewhere, and no value can pass for a part of the page."""

from __future__ import annotations

import re

import pytest

from fd_core.pages.assembling import PAGE_POLICY, assemble

PAGES = {
    "fd_core.server.live_page": ("page.css", "live.js", "playground.js"),
    "fd_core.router.gateway.live_page": ("page.css", "live.js"),
}


@pytest.mark.parametrize("package", PAGES)
def test_a_live_page_holds_its_styles_and_scripts_and_names_no_other_host(package):
    page = assemble(package, shared=("theme.css", "curves.js"), own=PAGES[package])
    assert "/* style */" not in page and "/* script */" not in page
    assert "--back:" in page and "function drawCurve(" in page and "followTheme(" in page
    assert not re.search(r"https?://|<link|<img|\bsrc=|@import|url\(", page)


@pytest.mark.parametrize("package", PAGES)
def test_every_place_that_a_script_fills_is_in_the_page(package):
    page = assemble(package, shared=("theme.css", "curves.js"), own=PAGES[package])
    asked = set(re.findall(r'byId\("(\w+)"\)', page))
    assert asked and asked <= set(re.findall(r'id="(\w+)"', page))


def test_a_value_that_looks_like_a_mark_stays_text():
    page = assemble("fd_core.cli.trace_page", values={"facts": "{data} /* script */", "data": "{facts}"})
    assert "{data} /* script */" in page and ">{facts}<" in page


def test_a_page_may_ask_its_own_server_and_nobody_else():
    rules = dict(rule.strip().split(" ", 1) for rule in PAGE_POLICY.split(";"))
    assert rules["default-src"] == "'none'" and rules["connect-src"] == "'self'"
    assert "unsafe-eval" not in PAGE_POLICY
