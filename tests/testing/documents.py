"""Plugins that documents write: their files as installed, and what the kit says of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_document(name: str, folder: Path) -> str:
    """Write the four files of `docs/NAME` as pip would install them, run its test file and return what it printed.

    Raises AssertionError unless everything passed, at least 30 cases.
    """
    document = (ROOT / "docs" / name).read_text()
    files = dict(re.findall(r"`([\w./]+)`:\n\n```\w+\n(.*?)```\n", document, re.DOTALL))
    assert len(files) == 4
    for path, text in files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    [distribution] = re.findall(r'^name = "(.*)"', files["pyproject.toml"], re.MULTILINE)
    info = folder / f"{distribution.replace('-', '_')}-0.1.0.dist-info"  # as pip would make it from pyproject.toml
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0.1.0\n")
    [entry] = re.findall(r"\[project.entry-points.(\w+)\]\n(.*)\n", files["pyproject.toml"])
    (info / "entry_points.txt").write_text("[{}]\n{}\n".format(*entry).replace('"', ""))
    [test] = [path for path in files if path.startswith("test_")]
    temporary = folder / "temporary"
    temporary.mkdir()
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", test],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    assert int(re.search(r"(\d+) passed", ended.stdout)[1]) >= 30
    return ended.stdout
