"""The port that the document leads through works: its commands are run on its files, in its order."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugin_sites import installed

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "write-a-backend.md").read_text()
STEPS = re.findall(r"(?:`([\w./]+)`:\n\n)?```(\w+)\n(.*?)```\n", DOCUMENT, re.DOTALL)
"""File or nothing, language and text of each block."""

ELSEWHERE = ("hatch build", "fdcore serve")
"""Commands that need a package index, or a model and for ever."""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")]


def run(folder, line, code=0):
    program, *arguments = shlex.split(line, comments=True)
    command = [sys.executable, "-m", "fd_core.cli"] if program == "fdcore" else [program]
    ended = subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == code, f"{line}\n{ended.stdout}{ended.stderr}"
    return ended.stdout


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    """The folder after all steps, and what each command said."""
    folder, said = tmp_path_factory.mktemp("port"), []
    for file, language, text in STEPS:
        if file:
            assert (folder / file).parent.is_dir()
            (folder / file).write_text(text)
            continue
        assert language == "sh"
        for line in text.splitlines():
            if line.startswith("cd "):
                folder /= line.removeprefix("cd ")
            elif line.startswith("pip install -e"):
                installed(folder)
            elif not line.startswith(ELSEWHERE):
                said.append((line, run(folder, line)))
    return folder, said


def test_every_command_of_the_document_succeeds(port):
    folder, said = port
    assert [line.split()[0] for line, _ in said].count("fdcore") == 7
    assert (folder / "fd_mychip" / "kernels.so").is_file()
    for line, words in said:
        if "conformance" in line:
            assert "emulated" in words, line
        if "doctor" in line:
            assert "all operations are there and right" in words
        if "check" in line:
            assert "nothing is wrong" in words


def test_the_card_has_the_limits_with_their_reasons(port):
    _, said = port
    *_, (line, card) = said
    assert line == "fdcore conformance mychip --quick"
    assert "mychip's attention unit has no tanh" in card
    assert "mychip computes in float32" in card


def test_the_port_is_clean_and_typed(port):
    folder, _ = port
    pytest.importorskip("ruff")
    pytest.importorskip("mypy")
    run(folder, f"{sys.executable} -m ruff check .")
    run(folder, f"{sys.executable} -m ruff format --check .")
    run(folder, f"{sys.executable} -m mypy")


def test_a_wrong_kernel_fails_the_tests_that_the_document_names(port, tmp_path):
    folder = tmp_path / "wrong"
    shutil.copytree(port[0], folder)
    kernel = folder / "fd_mychip" / "kernels.c"
    right = kernel.read_text()
    assert right.count("width + eps") == 1
    kernel.write_text(right.replace("width + eps", "width"))
    compiler, loop = (next(line for line, _ in port[1] if words in line) for words in ("cc ", "-k rms_norm"))
    run(folder, compiler)
    said = run(folder, loop, code=1)
    for name in ("test_rms_norm_of_rows", "test_rms_norm_of_heads"):
        assert name in DOCUMENT
        assert name in said
