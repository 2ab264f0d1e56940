"""Runs a page's scripts in node, in a small document of the tests: there is no browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="runs the scripts in node, and there is none")


def play(folder: Path, page: str | bytes, scenario: str, origin: str = "") -> Any:
    """Return the result of a scenario: an object, in a file of `scenarios`, whose `play(page)` returns it; see dom.js.

    The data comes from the server at `origin`, if there is one.
    """
    written, here = folder / "page.html", Path(__file__).parent
    written.write_bytes(page if isinstance(page, bytes) else page.encode())
    done = subprocess.run(
        ["node", here / "dom.js", written, here / "scenarios" / f"{scenario}.js", origin],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
