"""The connector that the document writes passes the kit, found through its entry point as a user's would be."""

import os
import re
import subprocess
import sys
from pathlib import Path

DOCUMENT = (Path(__file__).parents[2] / "docs" / "write-a-connector.md").read_text()


def test_the_plugin_of_the_document_passes_the_kit(tmp_path):
    files = dict(re.findall(r"`([\w./]+)`:\n\n```\w+\n(.*?)```\n", DOCUMENT, re.DOTALL))
    assert len(files) == 4
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    info = tmp_path / "fd_folder-0.1.0.dist-info"  # as pip would make it from pyproject.toml
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fd-folder\nVersion: 0.1.0\n")
    [entry] = re.findall(r"\[project.entry-points.(\w+)\]\n(.*)\n", files["pyproject.toml"])
    (info / "entry_points.txt").write_text("[{}]\n{}\n".format(*entry).replace('"', ""))
    (tmp_path / "temporary").mkdir()
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", "test_folder.py"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}",
            "TMPDIR": str(tmp_path / "temporary"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    passed = int(re.search(r"(\d+) passed", ended.stdout)[1])
    assert passed >= 30
