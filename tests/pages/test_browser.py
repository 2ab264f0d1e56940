"""Live pages in a real browser: their own policy blocks nothing that they need."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.hostile.endpoints import KINDS, endpoint


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.skipif(shutil.which("chromium") is None, reason="draws the page in chromium, and there is none")
def test_live_page_renders_under_its_policy(kind: str, tmp_path: Path) -> None:
    with endpoint(kind) as opened:
        words = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
        words += [f"--user-data-dir={tmp_path}", "--virtual-time-budget=3000", "--dump-dom"]
        done = subprocess.run(
            [*words, f"http://127.0.0.1:{opened.port}/"], capture_output=True, text=True, timeout=120, check=True
        )
    assert "CONSOLE" not in done.stderr
    assert ">Ready.</span>" in done.stdout and "<canvas" in done.stdout
