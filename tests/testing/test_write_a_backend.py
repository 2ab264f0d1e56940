"""The commands of the guide to backends run on its files, and its port works."""

import re
import shutil
import sys

import pytest

from tests.testing.documents import ROOT, follow, run_line

DOCUMENT = (ROOT / "docs" / "extend" / "write-a-backend.md").read_text()

pytestmark = [pytest.mark.guide, pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")]


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    """The folder after all steps, and the output of each command."""
    return follow("write-a-backend.md", tmp_path_factory.mktemp("port"))


def test_every_command_of_the_guide_succeeds(port):
    folder, outputs = port
    assert [line.split()[0] for line, _ in outputs].count("fdcore") == 7
    assert (folder / "fd_mychip" / "kernels.so").is_file()
    for line, words in outputs:
        if "conformance" in line:
            assert "emulated" in words, line
        if "doctor" in line:
            assert "all operations are present and correct" in words
        if "check" in line:
            assert "no problems found" in words


def test_card_shows_the_limits_with_their_reasons(port):
    _, outputs = port
    *_, (line, card) = outputs
    assert line == "fdcore conformance mychip --quick"
    assert "mychip's attention unit has no tanh" in card
    assert "mychip computes in float32" in card
    assert "envelope, nothing beyond it was tested: max_num_seqs=512, top_k=16" in card


def test_port_passes_ruff_and_mypy(port):
    folder, _ = port
    pytest.importorskip("ruff")
    pytest.importorskip("mypy")
    run_line(folder, f"{sys.executable} -m ruff check .")
    run_line(folder, f"{sys.executable} -m ruff format --check .")
    run_line(folder, f"{sys.executable} -m mypy")


def test_wrong_kernel_fails_the_tests_named_by_the_guide(port, tmp_path):
    folder = tmp_path / "wrong"
    shutil.copytree(port[0], folder)
    kernel = folder / "fd_mychip" / "kernels.c"
    right = kernel.read_text()
    assert right.count("width + eps") == 1
    kernel.write_text(right.replace("width + eps", "width"))
    compiler, loop = (next(line for line, _ in port[1] if words in line) for words in ("cc ", "-k rms_norm"))
    run_line(folder, compiler)
    output = run_line(folder, loop, code=1)
    assert "`test_operation` fails" in DOCUMENT
    assert re.search("rms_norm:(eps|odd=zeros)", output)
